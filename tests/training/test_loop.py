"""What the loop does between steps and epochs. (What it trains: tests/equivalence.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.project.programs import TINY, run
from tests.ranks import Ranks
from tests.step_trace import counts_of
from training import loop
from training.launch.world import World
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


def test_a_step_can_be_followed(ranks: Ranks, tmp_path: Path) -> None:
    """What has to be read of it under data parallelism; see tests/step_trace.py."""
    counts = counts_of("train ddp", ranks, tmp_path)
    assert {"training/loop.py", "training/tasks/gpt2.py"} < {*counts["files"]}
    assert counts["lines"] <= 700 and counts["depth"] <= 11, counts
    assert len(counts["files"]) <= 24 and len(counts["stored"]) <= 6, counts
