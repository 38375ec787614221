"""What the loop does between steps and epochs. (What it trains: tests/equivalence.)"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from tests.project.programs import ROOT, TINY, run
from tests.ranks import Ranks
from training import loop
from training.launch.world import World
from training.layouts.layout import LaidOutModel
from training.loop import step_timeout
from training.options import Options
from training.resume import Saving

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_only_steps_have_the_short_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save, the comparison of replicas and an evaluation may take as long as --timeout."""
    done: list[object] = []

    def noted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            done.append(args[0] if name == "set_timeouts" else name)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (loop, "set_timeouts"), (Saving, "save"), (loop, "evaluate_loss"),
    ):  # fmt: skip
        noted(owner, name)
    line = f"train single {TINY} --n_train 16 --n_epochs 2 --timeout 50 --step_timeout 3"
    assert run(line)[1] is None
    epoch = [3.0, 3.0, 3.0, 50.0, "save", "evaluate_loss"]
    assert done == ["evaluate_loss", *epoch, *epoch]


@pytest.mark.parametrize(
    ("options", "device", "seconds", "expected"),
    [
        ({}, "cpu", 0.5, 60.0),  # a minute at least
        ({}, "cpu", 9.0, 90.0),  # ten times the step before
        ({}, "cpu", 50.0, 300.0),  # and never longer than elsewhere
        ({"compile": True}, "cpu", 0.5, 300.0),  # a step may compile again
        ({}, "cuda", 0.5, 300.0),
        ({"compile": True, "step_timeout": 5.0}, "cuda", 50.0, 5.0),  # as typed
    ],
)
def test_the_time_out_of_a_step(
    options: dict[str, Any], device: str, seconds: float, expected: float
) -> None:
    world = World(device=torch.device(device))
    assert step_timeout(Options(timeout=300.0, **options), world, seconds) == expected


def trace_second_step(rank: int, patches: pytest.MonkeyPatch, result: Path) -> None:
    """Rank 0 writes the files of the packages that it enters between its second step and its
    third."""
    seeded, entered = loop.seed_step, set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    def seed_step(model: LaidOutModel, seed: int, number: int) -> None:
        if rank == 0 and number == 2:
            sys.setprofile(None)
            files = (Path(file) for file in entered if file.startswith(str(ROOT)))
            names = {str(file.relative_to(ROOT)) for file in files}
            libraries = {name for name in names if "site-packages" in name}  # of .venv
            names = {name for name in names - libraries if not name.startswith("tests")}
            result.write_text("\n".join(names))
        seeded(model, seed, number)
        if rank == 0 and number == 1:
            sys.setprofile(note)

    patches.setattr(loop, "seed_step", seed_step)


def test_a_step_enters_few_files(ranks: Ranks, tmp_path: Path) -> None:
    """What has to be read to follow a step under data parallelism. The goal: 14 files."""
    entered = tmp_path / "entered"
    tamper = partial(trace_second_step, result=entered)
    assert run(f"train ddp {TINY} --num_batches 3 --dropout 0.1", ranks, tamper)[1] is None
    files = entered.read_text().split()
    assert {"training/loop.py", "training/tasks/gpt2.py"} < {*files}
    assert len(files) <= 22, sorted(files)
