"""Checkpoints of project/train.py: any strategy goes on from any other, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.project.trained import GPT, ON_TWO, VGG, read_json, saved, trained
from tests.ranks import Ranks
from training.checkpoint import names, newest
from training.optimization import Recipe

pytestmark = pytest.mark.usefixtures("elsewhere")

# Runs that another strategy goes on from, in the middle of an epoch.
RESUMED = list(zip(ON_TWO, [*ON_TWO[1:], ON_TWO[0]], [VGG, GPT] * 2, strict=True))


@pytest.mark.parametrize(
    ("first", "second", "model"), RESUMED, ids=[f"{a} to {b}" for a, b, _ in RESUMED]
)
def test_any_strategy_goes_on_from_any_other(
    ranks: Ranks, first: str, second: str, model: str
) -> None:
    """With momentum; what comes out is what one process trains in one go."""
    line = model + "--precision fp64 --max_grad_norm 1 "
    trained(ranks, f"{first} {line} --num_batches 3")
    printed, error, summary = trained(ranks, f"{second} {line} --num_batches 6 --resume")
    assert "3 steps done" in printed
    assert error is None, printed
    assert len(summary["loss"]) == len(summary["step_seconds"]) == 6


def test_going_on_at_the_same_layout_is_bit_for_bit(ranks: Ranks) -> None:
    line = VGG.replace("--check_weights --check_output", "--optimizer adamw")
    whole = saved(ranks, f"ddp {line} --num_batches 6")
    assert sum(name.startswith("optimizer.exp_avg_sq.") for name in whole) == 32
    saved(ranks, f"ddp {line} --num_batches 4")
    again = saved(ranks, f"ddp {line} --num_batches 6 --resume")
    assert list(again) == list(whole)
    assert [name for name in whole if not torch.equal(again[name], whole[name])] == []


SKIP = "--learning_rate 1e30 --on_nan skip --keep 1 "


def test_steps_that_are_left_out_are_null_and_counted_through_a_resume(ranks: Ranks) -> None:
    """The first step moves every weight by 1e30. After 20 in a row the run ends, though some of
    them were before the resume."""
    line = "ddp " + VGG.replace("--check_weights --check_output", SKIP)
    printed, error, summary = trained(ranks, f"{line} --num_batches 12")
    assert error is None
    assert summary["loss"][0] is not None and summary["loss"][1:] == [None] * 11
    assert summary["test_loss"] is None
    rows = [row.split() for row in printed.split("\n") if "step" in row or "nan" in row]
    assert any(row[:2] == ["12", "nan"] for row in rows), printed
    checkpoint, _ = newest(Path("work/checkpoints"))
    assert checkpoint is not None
    state = read_json(checkpoint.folder / "state.json")
    assert (state["steps"], state["left_out"], state["in_a_row"]) == (12, 11, 11)
    printed, error, _ = trained(ranks, f"{line} --num_batches 25 --resume")
    assert error is not None and "step 21 of 25" in error and "as were 19 before it" in error


def _ruin(_: int, patches: pytest.MonkeyPatch) -> None:
    patches.setattr(Recipe, "learning_rate_at", lambda _, step: 1e30 if step == 2 else 0.02)


def test_ruined_weights_leave_the_last_good_ones(ranks: Ranks) -> None:
    """The third step is finite, and what it has made of the weights is saved; the fourth is not."""
    line = VGG.replace("--check_weights --check_output", "--keep 1 --save_every 1")
    _, error, _ = trained(ranks, f"ddp {line} --num_batches 6", _ruin)
    assert error is not None and "step 4 of 6" in error
    assert names(Path("work/checkpoints")) == ["000002-step2", "000003-step3"]


def test_a_finished_run_goes_on_with_nothing(ranks: Ranks) -> None:
    before = trained(ranks, "fsdp " + VGG)[2]
    printed, error, summary = trained(ranks, f"fsdp {VGG} --resume")
    assert error is None and "2 steps done" in printed
    for key in ("loss", "step_seconds", "test_loss"):
        assert summary[key] == before[key]


def test_what_a_killed_run_has_left_is_removed(ranks: Ranks) -> None:
    half = Path("work/checkpoints/.000007-step5.part")
    half.mkdir(parents=True)
    (half / "model.safetensors").touch()
    names = set(saved(ranks, "fsdp " + VGG))
    assert "random.1.cpu" in names
    assert [path.name for path in half.parent.iterdir()] == ["000001-step2"]


def test_workers_do_not_draw_alike_after_a_pipeline(ranks: Ranks) -> None:
    """A pipeline's ranks have the same generator. Ranks that have other examples must not."""
    line = GPT.replace("--check_weights --check_output", "--dropout 0.1 --keep 1")
    one = saved(ranks, f"pipeline {line}")
    assert torch.equal(one["random.0.cpu"], one["random.1.cpu"])
    for second in ("ddp", "fsdp"):
        two = saved(ranks, f"{second} {line} --num_batches 3 --resume")
        assert not torch.equal(two["random.0.cpu"], two["random.1.cpu"])
