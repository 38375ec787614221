"""Every strategy of project/train.py on VGG16 and GPT-2, with one worker and with two.

These are complete runs of the program: own processes, a core per worker, the same global batch for
all. Rates are per step, without the first step of a run, which includes one-time costs. Most of the
time is start-up, so there is one round; with several rounds the runs take turns.

Expectations for two workers on two cores: DDP and FSDP halve each worker's part of the batch; a
pipeline of M micro-batches is at best 2M/(M+1) times as fast as one worker that runs the stages in
turn; `model` is that worker, spread over two cores that wait for each other.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Row, summarize, write_rows
from training.files import SUMMARY

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, STEPS, BATCH = 1, 5, 32
MODELS = {
    "VGG16": "--model vgg16 --n_train 256 --n_validation 16",
    # Every sentence is padded to one length, so a step is the same work for all.
    "GPT-2": "--model gpt2-mini --n_embd 512 --n_head 8 --n_train 256 --n_validation 16 --n_test 2 "
    "--padding max_length --model_max_length 64",
}
UNIT = {"VGG16": "pictures/s", "GPT-2": "sentences/s"}
STRATEGIES = ("ddp", "fsdp", "model", "pipeline")
WORKERS = (1, 2)


@dataclass(frozen=True)
class _Run:
    model: str
    strategy: str
    workers: int

    def command(self, workdir: Path) -> list[str]:
        """The command line."""
        options = (
            f"--num_workers {self.workers} --batch_size {BATCH} --num_batches {STEPS} "
            f"--device cpu {MODELS[self.model]}"
        )
        if self.strategy == "pipeline":
            options += " --num_microbatches 8 --schedule zb"
        program = [sys.executable, str(ROOT / "project" / "train.py"), self.strategy]
        return [*program, *options.split(), "--workdir", str(workdir)]

    def rates_and_loss(self, workdir: Path) -> tuple[list[float], float]:
        """Examples per second of each step but the first, and the last step's loss."""
        done = subprocess.run(
            self.command(workdir), capture_output=True, text=True, check=False, cwd=workdir
        )
        if done.returncode:
            raise RuntimeError(f"{self}: status {done.returncode}\n{done.stderr[-2000:]}")
        summary = json.loads((workdir / SUMMARY).read_text(encoding="utf-8"))
        return [BATCH / s for s in summary["step_seconds"][1:]], summary["loss"][-1]


def run() -> list[Row]:
    """Times all of them and prints their table."""
    rows = []
    for model in MODELS:
        runs = [_Run(model, strategy, n) for strategy in STRATEGIES for n in WORKERS]
        rates: dict[_Run, list[list[float]]] = {r: [] for r in runs}
        losses: dict[str, float] = {}
        for round_ in range(ROUNDS):
            for r in runs[:: -1 if round_ % 2 else 1]:
                with tempfile.TemporaryDirectory() as folder:
                    found, loss = r.rates_and_loss(Path(folder))
                rates[r].append(found)
                losses[f"{r.strategy}, {r.workers}"] = loss
        _agree(losses)
        for r in runs:
            value, spread = summarize([rate for found in rates[r] for rate in found])
            one = rates[_Run(model, r.strategy, 1)]
            ratio = statistics.median(
                statistics.median(mine) / statistics.median(alone)
                for mine, alone in zip(rates[r], one, strict=True)
            )
            name = f"{model}: {r.strategy}, {r.workers} worker{'s' * (r.workers > 1)}"
            against = "one worker"
            rows.append(
                Row(name, value, spread, UNIT[model], ratio if r.workers > 1 else None, against)
            )
    write_rows("throughput", f"project/train.py, batches of {BATCH}, a core per worker", rows)
    return rows


def _agree(losses: dict[str, float]) -> None:
    """Raises AssertionError if losses differ by over 1 %. AdamW turns rounding of small gradients
    into whole steps, so after a few steps losses differ by more than rounding."""
    reference = next(iter(losses.values()))
    off = {name: loss for name, loss in losses.items() if abs(loss - reference) > 0.01 * reference}
    if off:
        raise AssertionError(f"the strategies train differently: {losses}")


if __name__ == "__main__":
    run()
