"""The pipeline through the program: whole models, optimizer included, both modes taking turns.

The classes, options and data of `project/run_pipeline.py`. In the larger model layers outweigh
embedding and head, and --padding max_length makes every step batch x 128 positions. gpt2-mini runs
with the defaults, in micro-batches of similar lengths: of some 200 positions each, so that threads,
Python and small matrix products weigh more.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.harness import Row, agree, alternate, ratio_of, summarize, write_rows
from benchmarks.text import benchmark_texts
from project.run_pipeline import choose_devices, parse_pipeline
from training.launch.world import World
from training.layouts.layout import setup_of
from training.layouts.threads import StagesInThreads
from training.tasks.translation import TranslationTask

ROUNDS = 3
LARGE = "--n_layer 8 --n_embd 512 --n_head 8 --batch_size 32 --padding max_length"
GOALS = {4: 1.45, 8: 1.6}


class _Contestant:
    """A model in stages that takes the same steps as the other contestants."""

    def __init__(self, options: str, mode: str, m: int, schedule: str, folder: Path) -> None:
        args = parse_pipeline(
            None, f"--model gpt2-mini {options} --dropout 0 --device cpu --n_train 640 "
            f"--model_parallel_mode {mode} --num_microbatches {m} {schedule} "
            f"--workdir {folder}/{mode}{m}{schedule[-3:].strip()}".split(),
        )  # fmt: skip
        texts = benchmark_texts(n_train=640, n_validation=10, n_test=10)
        world = World(device=torch.device("cpu"))
        task = TranslationTask(args, world, texts, None)
        self.steps = task.steps(0, 0, 1, m)
        self.model = StagesInThreads(task, world, setup_of(args, world), choose_devices(args))
        self.loss = 0.0

    def step(self) -> None:
        """A step of training."""
        step = next(self.steps)
        assert self.model.run is not None
        for optimizer in self.model.optimizers:
            optimizer.zero_grad()
        loss = self.model.backward(step)
        self.model.run(lambda stage: self.model.optimizers[stage].step())
        self.loss = loss.item() / step.count


def _compare(model: str, options: str, goals: dict[int, float], folder: Path) -> list[Row]:
    contestants = {}
    for m in (4, 8):
        # With equally many micro-batches, since those have less padding than a batch.
        contestants[f"model parallel, M={m}"] = _Contestant(
            options, "model_parallel", m, "", folder
        )
        for schedule in ("1f1b", "zb"):
            contestants[f"{schedule}, M={m}"] = _Contestant(
                options, "pipeline_parallel", m, f"--schedule {schedule}", folder
            )
    turns: dict[str, Callable[[], None]] = {name: c.step for name, c in contestants.items()}
    try:
        seconds = alternate(turns, ROUNDS)
    finally:
        for contestant in contestants.values():
            contestant.model.close()
    agree({name: c.loss for name, c in contestants.items()}, 1e-3)
    rows = []
    for name in contestants:
        value, spread = summarize(seconds[name])
        m = int(name.rpartition("=")[2])
        baseline = f"model parallel, M={m}"
        ratio = None if name == baseline else ratio_of(seconds[baseline], seconds[name])
        goal = goals.get(m) if name.startswith("zb") else None
        rows.append(Row(f"{model}: {name}", value, spread, "s", ratio, "model parallel", goal))
    return rows


def run() -> list[Row]:
    """Times all contestants and prints their table."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        rows = _compare("8 x 512", LARGE, GOALS, Path(folder))
        rows += _compare("gpt2-mini", "--batch_size 64", {}, Path(folder))
    title = "run_pipeline.py, whole model with its optimizer, 2 stages with a core each"
    write_rows("pipeline_program", title, rows)
    return rows


if __name__ == "__main__":
    run()
