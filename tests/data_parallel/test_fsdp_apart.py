"""What one rank does alone: it changes nothing, or all end with an error. Never wrong numbers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.fsdp import FullyShardedDataParallel
from tests.data_parallel.sharded_models import DTYPE, SGD, filled
from tests.ranks import Ranks

WIDTHS = (3, 40, 7, 25, 4, 60, 2)
Alone = Callable[[FullyShardedDataParallel], object]


def _make(**options: Any) -> FullyShardedDataParallel:
    layers = nn.Sequential(*(nn.Linear(n, m) for n, m in pairwise(WIDTHS)))
    return FullyShardedDataParallel(filled(layers), SGD, **options)


def _input(fsdp: FullyShardedDataParallel) -> Tensor:
    return torch.full((2, WIDTHS[0]), 0.1 + fsdp.rank, dtype=DTYPE)


def _backward(fsdp: FullyShardedDataParallel, last: bool = True) -> None:
    fsdp.backward(torch.tanh(fsdp.forward(_input(fsdp))).sum(), last)


def _evaluate(fsdp: FullyShardedDataParallel) -> Tensor:
    with torch.no_grad():
        output: Tensor = fsdp.forward(_input(fsdp))
        return output


ALONE: dict[str, Alone] = {
    "evaluate": _evaluate,
    "backward": _backward,
    "zero_grad": lambda fsdp: fsdp.zero_grad(),
    "step": lambda fsdp: fsdp.optimizer_step(),
    "load": lambda fsdp: fsdp.parameters_changed(),
}


def _alone(rank: int, _: int, alone: str, when: str, share: bool) -> tuple[str, list[list[float]]]:
    """Three steps; in the second the first rank does more. A group of their own: an error leaves
    what they have sent each other unread."""
    group = dist.new_group(timeout=timedelta(seconds=10))
    fsdp = _make(share_memory=share, group=group)
    error = ""
    for step in range(3):
        extra = ALONE[alone] if (rank, step) == (0, 1) and alone else None
        try:
            _backward(fsdp)
            if extra and when == "between two backwards":
                extra(fsdp)
            _backward(fsdp)
            if extra and when == "before the update":
                extra(fsdp)
            fsdp.optimizer_step()
            if extra and when == "after it":
                extra(fsdp)
        except RuntimeError as raised:
            error = str(raised)  # a rank that goes on regardless hears it again
    return error, [u.shard.tolist() for u in fsdp.units]


def test_a_rank_may_evaluate_by_itself_in_shared_memory(ranks: Ranks) -> None:
    want = ranks.run(_alone, "", "", True)
    for when in ("between two backwards", "after it"):
        assert ranks.run(_alone, "evaluate", when, True) == want


READ = "is about to update parameters that it has gathered since its backward"
UPDATED, ONCE, TWICE = (
    f"has updated its parameters by the gradients of {n} backwards" for n in range(3)
)
FIRST, MORE = (f"adds up {which} gradients of 5.weight" for which in ("the first", "more"))


@pytest.mark.parametrize(
    ("alone", "when", "first", "other"),
    [
        ("evaluate", "before the update", READ, TWICE),
        ("backward", "before the update", MORE, TWICE),
        ("zero_grad", "between two backwards", FIRST, MORE),
        ("step", "between two backwards", ONCE, MORE),
        ("load", "after it", UPDATED, FIRST),
    ],
)
def test_ranks_that_come_apart(ranks: Ranks, alone: str, when: str, first: str, other: str) -> None:
    """Over shared memory, where no rank sees from the reading that another is elsewhere."""
    for error, _ in ranks.run(_alone, alone, when, True):
        assert error == (
            f"the ranks diverged: rank 0 {first}, rank 1 {other}; all must make the same "
            "calls, with forward(None) and backward(None) where they have no examples"
        )


def test_gradients_that_one_rank_forgets(ranks: Ranks) -> None:
    """It makes the same collectives as the others. They hear of it when they next update."""
    for error, _ in ranks.run(_alone, "zero_grad", "between two backwards", False):
        assert f" rank 0 {ONCE}, rank 1 {TWICE};" in error
