"""The programs have the losses on file, step by step; what changes them is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.equivalence import golden
from tests.ranks import Ranks
from training.world import World


def data_parallel(rank: int, world_size: int, workdir: Path) -> list[float]:
    return golden.losses(World(rank, world_size), "data_parallel", workdir)


def on_file(program: str) -> list[float]:
    losses: list[float] = json.loads(golden.path(program).read_text("utf-8"))["losses"]
    return losses


def test_data_parallel_has_the_losses_on_file(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(data_parallel, tmp_path)[0]
    assert golden.deviation("data_parallel", found) == ""


def test_the_pipeline_has_the_losses_on_file(tmp_path: Path) -> None:
    assert golden.deviation("pipeline", golden.losses(World(), "pipeline", tmp_path)) == ""


@pytest.mark.parametrize("program", golden.PROGRAMS)
def test_both_files_are_of_one_training(program: str) -> None:
    """Ranks and stages change nothing but the order of sums."""
    assert len(on_file(program)) == golden.STEPS
    assert golden.deviation(program, on_file("data_parallel")) == ""
    assert golden.deviation(program, on_file("pipeline")) == ""


def test_another_order_of_the_data_is_seen() -> None:
    losses = on_file("pipeline")
    losses[3], losses[4] = losses[4], losses[3]
    assert golden.deviation("pipeline", losses).startswith("pipeline: the loss of step 3 is")


def test_another_batching_is_seen(tmp_path: Path) -> None:
    found = golden.losses(World(), "pipeline", tmp_path, "--batch_size=7", "--n_epochs=1")
    off = [abs(a / b - 1) for a, b in zip(found[:3], on_file("pipeline"), strict=False)]
    assert len(off) == 3
    assert max(off) > 100 * golden.tolerance(2)
