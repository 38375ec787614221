"""Sharded training is the training of one process, and no rank holds more than it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data_parallel.fsdp import FullyShardedDataParallel
from tests.data_parallel.sharded_models import (
    DTYPE,
    Result,
    build,
    check,
    fill,
    my_part,
    one_process,
    sharded,
    summed_loss,
    train,
)
from tests.ranks import Ranks

STEPS = 10
# A trained weight that no layer uses counts as zero gradients; plain PyTorch has none.
EXTRA = {"tied": frozenset[str](), "conv": frozenset({"body.7.unused"})}


def _train(_: int, _world: int, kind: str, optimizer: str, options: dict[str, Any]) -> list[Result]:
    return train(sharded(kind, optimizer, **options), kind, range(STEPS))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("kind", "optimizer"), [("tied", "adamw"), ("conv", "sgd")])
def test_two_ranks_are_one_process(
    ranks: Ranks, kind: str, optimizer: str, zero: int, share: bool
) -> None:
    """Every gradient and weight by name, after each of ten steps. Shards cut through parameters,
    the first and last layer share one, ranks have 0 to 3 micro-batches of different sizes."""
    got = ranks.run(_train, kind, optimizer, {"zero": zero, "share_memory": share})
    check(got, one_process(kind, optimizer, STEPS), EXTRA[kind])


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_three_ranks_are_one_process(three_ranks: Ranks, zero: int, share: bool) -> None:
    got = three_ranks.run(_train, "tied", "adamw", {"zero": zero, "share_memory": share})
    check(got, one_process("tied", "adamw", STEPS))
