"""Peak memory of a whole run, with validation and translation, beside that of its steps alone and
beside the planner's prediction, in every layout.

    python -m benchmarks.memory                     all, some five minutes on two cores
    python -m benchmarks.memory ddp pipeline        some

Memory is resident memory, as the system counts it, of the rank that has most. It hardly differs
from run to run, so each figure is of one run. The vocabulary is GPT-2's: logits are the largest
tensor, and evaluation must hold no more of them than a step does. All sequences are full, and the
translation in each pair is long, so the cache of a translation is as long as it can be.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import Row, format_table, write_rows
from benchmarks.plan import HEADS, LAYERS, ROOT, WIDTH, imported, write_pairs
from planning.cost import PricedStep
from planning.describe import Layout, machine, model_of

LENGTH, BATCH, MICRO, VOCABULARY, EXPERTS = 64, 16, 4, 50257, 4
SIZES = (
    f"--model gpt2-mini --n_layer {LAYERS} --n_embd {WIDTH} --n_head {HEADS} --dropout 0 --keep 0 "
    f"--vocab_size {VOCABULARY} --model_max_length {LENGTH} --padding max_length --device cpu "
    f"--batch_size {BATCH} --n_train {2 * BATCH} --n_validation 64 --n_test 16 --cores_per_rank 1"
)
WHOLE = Layout(1, micro_batch=MICRO, batch_size=BATCH, precision="fp32")
TWO = replace(WHOLE, gpus=2)
LAYOUTS = {
    "single": ("single -m 4", WHOLE),
    "ddp": ("ddp -m 2", replace(TWO, dp=2)),
    "ZeRO-1": ("fsdp --zero 1 -m 2", replace(TWO, dp=2, zero=1)),
    "ZeRO-3": ("fsdp -m 2", replace(TWO, dp=2, zero=3)),
    "pipeline": ("pipeline --schedule 1f1b -m 4", replace(TWO, pp=2, schedule="1f1b")),
    "tensor": ("tensor -m 4", replace(TWO, tp=2)),
    "context": ("context -m 4", replace(TWO, cp=2)),
    "recomputation": ("ddp -m 2 --recompute always", replace(TWO, dp=2, recompute="always")),
    "experts": (f"ddp -m 2 --experts {EXPERTS} --ep 2", replace(TWO, dp=2, ep=2)),
    "cp x pp x dp": ("3d --dp 2 --cp 2 --pp 2 -m 2", replace(WHOLE, gpus=8, dp=2, cp=2, pp=2)),
}


def peak(options: str) -> float:
    """MiB of the run's largest rank."""
    with tempfile.TemporaryDirectory() as folder:
        write_pairs(Path(folder) / "pairs.jsonl")
        words = f"{options} {SIZES} --dataset {folder}/pairs.jsonl --workdir {folder}/run"
        command = [sys.executable, "project/train.py", *words.split()]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        found = json.loads((Path(folder) / "run" / "summary.json").read_text("utf-8"))
    return float(max(found["peak_rss_bytes"]) / 2**20)


def run(names: Sequence[str] = ()) -> list[Row]:
    """The goal is at most 1.05 times the memory of the steps: steps / run of 0.95."""
    rows = []
    # Memory depends on no other figures of a machine; `benchmarks.calibrate` sets them to these.
    here = replace(machine("h100"), overlap="nothing", gathered="again", reserve_gb=imported())
    dense = model_of(None, layers=LAYERS, hidden=WIDTH, heads=HEADS, vocab=VOCABULARY, seq=LENGTH)
    for name in names or LAYOUTS:
        options, layout = LAYOUTS[name]
        model = replace(dense, experts=EXPERTS, top_k=2) if layout.ep > 1 else dense
        steps, whole = peak(f"{options} --benchmark_only"), peak(options)
        planned = 1024 * PricedStep(model, layout, here).memory_gb
        ratio = min(planned, whole) / max(planned, whole)
        of_layout = [
            Row(f"{name}, whole run", whole, (whole, whole), "MiB", steps / whole,
                f"steps alone, {steps:.0f} MiB", 1 / 1.05),
            Row(f"{name}, whole run", whole, (whole, whole), "MiB", ratio,
                f"of the prediction, {planned:.0f} MiB", 0.9),
        ]  # fmt: skip
        print(format_table(name, of_layout), end="\n\n", flush=True)
        rows += of_layout
    write_rows("memory", "Peak memory of a whole run", rows)
    return rows


if __name__ == "__main__":
    run(sys.argv[1:])
