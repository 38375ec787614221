"""What the loop does between steps and epochs. (What it trains: tests/equivalence.)"""

from __future__ import annotations

from typing import Any

import pytest

from tests.project.programs import TINY, run
from training import loop
from training.layouts.layout import LaidOutModel
from training.resume import Saving

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_only_steps_have_the_short_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save, the comparison of replicas and an evaluation may take as long as --timeout."""
    done: list[object] = []

    def noted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            done.append(args[1] if name == "set_timeouts" else name)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (LaidOutModel, "set_timeouts"), (Saving, "save"), (loop, "evaluate_loss"),
    ):  # fmt: skip
        noted(owner, name)
    line = f"train single {TINY} --n_train 16 --n_epochs 2 --timeout 50 --step_timeout 3"
    assert run(line)[1] is None
    epoch = [3.0, 3.0, 3.0, 50.0, "save", "evaluate_loss"]
    assert done == ["evaluate_loss", *epoch, *epoch]
