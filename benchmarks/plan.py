"""This computer's runs beside the planner's predictions: the seconds and the memory of a step.

Measures the computer (`planning.calibrate`), now and again since its speed drifts, trains a few
steps on plain text, whose positions all have a target, under every strategy on 1 to 4 ranks, a core
each, and predicts the same steps. A
row's ratio is the smaller of predicted and measured by the larger. Ranks that share cores are
predicted with their part of a core. Needs a quiet machine: other work on it looks like an error of
the prediction.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import yaml

from benchmarks.harness import Row, summarize, write_rows
from planning.calibrate import calibrate
from planning.cost import predict
from planning.describe import Layout, machine, model_of

ROOT = Path(__file__).resolve().parents[1]
LAYERS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 4, 256, 4, 128, 32, 10
MICRO = 4  # sequences of a micro-batch; of those of a pipeline, 8
AGAIN = 3  # rows after which the computer is measured again: its speed drifts
COMMON = (
    f"--model gpt2-mini --n_layer {LAYERS} --n_embd {WIDTH} --n_head {HEADS} --batch_size {BATCH} "
    f"--model_max_length {LENGTH} --num_batches {STEPS} --dropout 0 --keep 0 --benchmark_only "
    "--dataset training/tasks/corpus/english.txt --device cpu"
)
PIPELINES = ("gpipe", "1f1b", "zb", "interleaved", "zbv", "vhalf", "vmin")


def runs() -> dict[str, tuple[str, Layout]]:
    """Of each row, the command and what is predicted."""
    whole = Layout(1, micro_batch=MICRO, batch_size=BATCH)
    all_of_it = f"--num_microbatches {BATCH // MICRO}"
    found = {"single": (f"train.py single --cores_per_rank 1 {all_of_it}", whole)}
    for n in (2, 4):
        ranks = f"--world_size {n} --num_microbatches {BATCH // MICRO // n}"
        split = replace(whole, gpus=n, dp=n)
        found[f"ddp, {n} ranks"] = f"train.py ddp {ranks}", split
        for zero in (2, 3):
            command = f"train.py fsdp --zero {zero} {ranks}"
            found[f"ZeRO-{zero}, {n} ranks"] = command, replace(split, zero=zero)
        command = f"train.py tensor --world_size {n} {all_of_it}"
        found[f"tensor, {n} ranks"] = command, replace(whole, gpus=n, tp=n)
    for name in PIPELINES:
        staged = Layout(2, pp=2, micro_batch=2 * MICRO, batch_size=BATCH, schedule=name)
        command = f"--num_microbatches 4 --schedule {name}"
        found[f"{name}, 2 processes"] = f"train.py pipeline --world_size 2 {command}", staged
        threads = "run_pipeline.py --model_parallel_mode pipeline_parallel --num_devices 2"
        found[f"{name}, 2 threads"] = f"{threads} {command}", staged
    return found


def measure(command: str, folder: Path) -> tuple[list[float], float, int]:
    """Seconds of the steps but the first two, GiB of rank 0, and the size of the vocabulary."""
    words = [sys.executable, *f"project/{command} {COMMON} --workdir {folder}".split()]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    steps = [line for line in lines if "seconds" in line]
    vocabulary = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    memory = max(step["peak_rss_bytes"] for step in steps) / 2**30
    return [step["seconds"] for step in steps[2:]], memory, vocabulary


def run() -> list[Row]:
    """Two rows per run: seconds and GiB."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.yaml"
        for k, (name, (command, layout)) in enumerate(runs().items()):
            if k % AGAIN == 0:
                path.write_text(yaml.safe_dump(calibrate()), "utf-8")
                cores = machine(str(path))
            seconds, memory, vocabulary = measure(command, Path(folder) / str(k))
            model = model_of(
                None, layers=LAYERS, hidden=WIDTH, heads=HEADS, vocab=vocabulary, seq=LENGTH
            )
            layout = replace(layout, precision="fp32")
            found = predict(model, layout, cores.shared(layout.gpus))
            held = found.memory_gb
            if "threads" in name:  # one process has all stages
                held = sum(m.gib for m in found.memory) - (len(found.memory) - 1) * cores.reserve_gb
            for what, measured, predicted, spread in (
                ("s", median(seconds), found.seconds, summarize(seconds)[1]),
                ("GiB", memory, held, (memory, memory)),
            ):
                ratio = min(measured, predicted) / max(measured, predicted)
                against = f"of the prediction, {predicted:.3g} {what}"
                goal = 0.9 if what == "s" else 0.95
                rows.append(Row(name, measured, spread, what, ratio, against, goal))
    write_rows("plan", "A step, measured and predicted on this computer", rows)
    return rows
