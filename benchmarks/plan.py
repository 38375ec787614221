"""This computer's runs beside the planner's predictions: seconds, bubble and memory of a step.

Measures the computer (`benchmarks.calibrate`), and again after some rows, since its speed drifts.
Trains a few steps under every strategy on 1 to 4 ranks, a core each, and predicts the same steps.
Pairs are of a word and a long text, so that nearly all positions have a target. A row's ratio is
the smaller of predicted and measured over the larger; for a bubble, 1 less their difference. Ranks
that share a core are predicted with their part of it. The time of a step is the lower quartile of
eight: other work on the machine only makes steps longer, which looks like an error of the
prediction.

Stages in threads share one process, in which malloc keeps some freed memory of every thread.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, quantiles

from benchmarks.calibrate import calibrate
from benchmarks.harness import Row, summarize, write_rows
from planning.cost import GIB, PricedStep
from planning.describe import Layout, machine, model_of
from project.figures.compared import compare_step
from project.figures.runs import Run

ROOT = Path(__file__).resolve().parents[1]
LAYERS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 4, 256, 4, 128, 32, 10
MICRO = 4  # sequences per micro-batch; in a pipeline, 8
AGAIN = 6  # rows after which the computer is measured again: its speed drifts
COMMON = (
    f"--model gpt2-mini --n_layer {LAYERS} --n_embd {WIDTH} --n_head {HEADS} --batch_size {BATCH} "
    f"--model_max_length {LENGTH} --num_batches {STEPS} --dropout 0 --keep 0 --benchmark_only "
    "--padding max_length --device cpu"
)
KEPT = 64 / 1024  # GiB of a thread's heap that glibc keeps: M_TRIM_THRESHOLD, once it has grown
READER = """
import project.run_pipeline, transformers.models.gpt2.modeling_gpt2
print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""  # prints the KiB of a process that has imported what it needs, and not trained
TEXT = ROOT / "training" / "tasks" / "corpus" / "english.txt"
PIPELINES = ("gpipe", "1f1b", "zb", "interleaved", "zbv", "vhalf", "vmin")


def runs() -> dict[str, tuple[str, Layout]]:
    """The command of each row, and the layout that is predicted."""
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


def write_pairs(path: Path) -> None:
    """400 texts of 200 words, each the translation of a word."""
    words = TEXT.read_text("utf-8").split()
    texts = (" ".join(words[start : start + 200]) for start in range(400))
    lines = (json.dumps({"de": "Text", "en": text}) for text in texts)
    path.write_text("\n".join(lines), "utf-8")


def measure(command: str, pairs: Path, folder: Path) -> tuple[list[float], float, float, int]:
    """Seconds of the steps but the first two, the bubble of the median step, GiB of rank 0, and the
    size of the vocabulary."""
    given = f"project/{command} {COMMON} --dataset {pairs} --workdir {folder}"
    words = [sys.executable, *given.split()]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    steps = [line for line in lines if "seconds" in line]
    vocabulary = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    memory = max(step["peak_rss_bytes"] for step in steps) / 2**30
    bubble = compare_step(Run(folder)).bubble
    return [step["seconds"] for step in steps[2:]], bubble, memory, vocabulary


def imported() -> float:
    """GiB of a process that has imported what it needs, and has not trained."""
    read = subprocess.run(
        [sys.executable, "-c", READER], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return int(read.stdout) / 2**20


def of_threads(found: PricedStep) -> float:
    """GiB of one process whose threads have all stages."""
    own = found.machine.reserve_gb
    return imported() + sum(sum(m) / GIB - own + KEPT for m in found.memory)


def say_errors(rows: Sequence[Row]) -> None:
    """Prints the mean and the worst error of the rows of each unit."""
    errors: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        errors[row.unit][row.name] = 1 - (row.ratio or 0.0)
    for unit, each in errors.items():
        worst = max(each, key=each.__getitem__)
        print(f"{unit}: mean error {fmean(each.values()):.3f}, worst {each[worst]:.3f}, {worst}")


def run() -> list[Row]:
    """The rows of each run: seconds, GiB and, of a pipeline, the bubble."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        pairs = Path(folder) / "pairs.jsonl"
        write_pairs(pairs)
        for k, (name, (command, layout)) in enumerate(runs().items()):
            if k % AGAIN == 0:
                cores = machine("this", own=calibrate())
            seconds, bubble, memory, vocabulary = measure(command, pairs, Path(folder) / str(k))
            model = model_of(
                None, layers=LAYERS, hidden=WIDTH, heads=HEADS, vocab=vocabulary, seq=LENGTH
            )
            layout = replace(layout, precision="fp32")
            found = PricedStep(model, layout, cores.shared(layout.gpus))
            held = of_threads(found) if "threads" in name else found.memory_gb
            for what, measured, predicted, spread, goal in (
                ("s", quantiles(seconds)[0], found.seconds, summarize(seconds)[1], 0.9),
                ("GiB", memory, held, (memory, memory), 0.95),
                ("bubble", bubble, found.bubble, (bubble, bubble), 0.97),
            ):
                if what == "bubble":
                    ratio = 1 - abs(measured - predicted)
                else:
                    ratio = min(measured, predicted) / max(measured, predicted)
                against = f"of the prediction, {predicted:.3g} {what}"
                if layout.pp > 1 or what != "bubble":
                    rows.append(Row(name, measured, spread, what, ratio, against, goal))
    write_rows("plan", "A step, measured and predicted on this computer", rows)
    say_errors(rows)
    return rows
