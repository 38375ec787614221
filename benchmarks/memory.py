"""Peak memory of a whole run, with validation and translation, beside that of its steps alone, in
every layout. The largest of the ranks counts; memory is resident, as the system counts it.

The vocabulary is GPT-2's: its logits are the largest tensor, and evaluation must not hold more of
them than a step does.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import DATASET, Row, summarize, write_rows

ROOT = Path(__file__).parents[1]
ROUNDS = 3
SIZES = (
    "--model gpt2-mini --vocab_size 50257 --n_train 128 --n_validation 128 --n_test 32 "
    f"--batch_size 32 --dataset {DATASET}"
)
LAYOUTS = {  # as project/train.py takes them, each with two processes
    "one process": "single", "ddp": "ddp", "fsdp": "fsdp", "pipeline": "pipeline",
    "tensor": "tensor", "context": "context", "ddp, recomputation": "ddp --recompute always",
}  # fmt: skip


def peak(options: str) -> float:
    """MiB of the run's largest rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "project/train.py", *options.split(), "--workdir", folder]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        peaks = json.loads((Path(folder) / "summary.json").read_text())["peak_rss_bytes"]
    return float(max(peaks) / 2**20)


def run(rounds: int = ROUNDS) -> list[Row]:
    """Runs both of every layout in turns, and prints their table. The goal is at most 1.05 times
    as much, which is steps / run of 0.95."""
    rows = []
    for name, layout in LAYOUTS.items():
        steps, whole = list[float](), list[float]()
        for _ in range(rounds):
            steps.append(peak(f"{layout} {SIZES} --benchmark_only"))
            whole.append(peak(f"{layout} {SIZES}"))
        ratio = statistics.median(a / b for a, b in zip(steps, whole, strict=True))
        rows.append(Row(f"{name}: steps", *summarize(steps), "MiB"))
        rows.append(Row(name, *summarize(whole), "MiB", ratio, "steps / run", 1 / 1.05))
    write_rows("memory", "Peak memory of a whole run and of its steps alone", rows)
    return rows


if __name__ == "__main__":
    run()
