"""The programs have the losses on file, step by step; what changes them is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from project import golden
from tests.ranks import Ranks
from training.launch import World


def data_parallel(rank: int, world_size: int, workdir: Path) -> list[float]:
    return golden.data_parallel(World(rank, world_size), workdir)


def on_file(program: str) -> list[float]:
    losses: list[float] = json.loads(golden.path(program).read_text(encoding="utf-8"))["losses"]
    return losses


def test_data_parallel_has_the_losses_on_file(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(data_parallel, tmp_path)
    assert first == second
    assert golden.deviation("data_parallel", first) == ""


def test_the_pipeline_has_the_losses_on_file(tmp_path: Path) -> None:
    assert golden.deviation("pipeline", golden.pipeline(World(), tmp_path)) == ""


@pytest.mark.parametrize("program", ["data_parallel", "pipeline"])
def test_both_files_are_of_one_training(program: str) -> None:
    """Ranks and stages change nothing but the order of sums."""
    assert len(on_file(program)) == golden.STEPS
    assert golden.deviation(program, on_file("data_parallel")) == ""
    assert golden.deviation(program, on_file("pipeline")) == ""


def test_another_order_of_the_data_is_seen() -> None:
    losses = on_file("pipeline")
    losses[3], losses[4] = losses[4], losses[3]
    assert golden.deviation("pipeline", losses).startswith("pipeline: the loss of step 3 is")


def test_other_weights_or_another_batching_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = golden.OPTIONS
    for change in ("--seed=1", "--batch_size=7"):
        monkeypatch.setattr(golden, "OPTIONS", (*options, change, "--n_epochs=1"))
        losses = golden.pipeline(World(), tmp_path)
        wanted = on_file("pipeline")[: len(losses)]
        off = [
            abs(a - b) / b > golden.tolerance(k)
            for k, (a, b) in enumerate(zip(losses, wanted, strict=True))
        ]
        assert any(off), change
