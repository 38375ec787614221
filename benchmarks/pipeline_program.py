"""The pipeline through the program: whole models, optimizer included, both modes taking turns.

`project/run_pipeline.py`'s own classes, options and data, with --padding max_length so that every
step is batch x 128 positions. The larger model is one whose layers outweigh embedding and head;
gpt2-mini is run as it is by default, in micro-batches of like lengths: of
some 200 positions each, so that threads, Python and small matrix products weigh more.
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
from project.run_pipeline import WholeModel, choose_devices, parse
from project.session import open_session
from training.launch import World

ROUNDS = 5
LARGE = "--n_layer 8 --n_embd 512 --n_head 8 --batch_size 32 --padding max_length"
GOALS = {4: 1.45, 8: 1.6}


class _Contestant:
    """A model in stages, which takes the same steps as the others."""

    def __init__(self, options: str, mode: str, m: int, schedule: str, folder: Path) -> None:
        args = parse(
            f"--model gpt2-mini {options} --dropout 0 --device cpu --n_train 640 "
            f"--model_parallel_mode {mode} --n_chunk {m} {schedule} --workdir {folder}".split()
        )
        texts = benchmark_texts(n_train=640, n_validation=10, n_test=10)
        session = open_session(args, World(device=torch.device("cpu")), texts)
        session.model.train()
        self.steps = session.loader(1, 0, m).steps(0)
        first = next(session.loader(1, 0, m).steps(0))
        self.strategy = WholeModel(session, choose_devices(args), first)
        self.loss = 0.0

    def step(self) -> None:
        """A step of training."""
        step = next(self.steps)
        self.strategy.optimizer.zero_grad()
        loss = self.strategy.backward(step)
        self.strategy.optimizer.step(loss, step.target_tokens)
        self.loss = loss.item() / step.target_tokens


def _compare(model: str, options: str, goals: dict[int, float], folder: Path) -> list[Row]:
    contestants = {}
    for m in (4, 8):
        # Cut into as many micro-batches: those of like lengths have less padding than a batch.
        contestants[f"model parallel, M={m}"] = _Contestant(
            options, "model_parallel", m, "", folder
        )
        for schedule in ("gpipe", "1f1b", "zb"):
            contestants[f"{schedule}, M={m}"] = _Contestant(
                options, "pipeline_parallel", m, f"--schedule {schedule}", folder
            )
    turns: dict[str, Callable[[], None]] = {name: c.step for name, c in contestants.items()}
    try:
        seconds = alternate(turns, ROUNDS)
    finally:
        for contestant in contestants.values():
            contestant.strategy.close()
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
