"""What one rank does alone: it changes nothing, or all end with an error. Never wrong numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from data_parallel.fsdp import FullyShardedDataParallel
from tests.data_parallel.sharded_models import batch, loss_of, sharded
from tests.ranks import Ranks


def _backward(fsdp: FullyShardedDataParallel) -> None:
    x, target = batch(0)
    fsdp.backward(loss_of(fsdp.forward(x), target))


def _evaluate(fsdp: FullyShardedDataParallel) -> None:
    with torch.no_grad():
        fsdp.forward(batch(0)[0])


ALONE: dict[str, Callable[[FullyShardedDataParallel], object]] = {
    "evaluate": _evaluate,
    "backward": _backward,
    "zero_grad": lambda fsdp: fsdp.zero_grad(),
    "step": lambda fsdp: fsdp.optimizer_step(),
    "load": lambda fsdp: fsdp.parameters_changed(),
}


def _alone(rank: int, _: int, alone: str, when: str) -> tuple[str, list[list[float]]]:
    """Three steps; in the second the first rank does more. A group of their own: an error leaves
    what they have sent each other unread."""
    fsdp = sharded(group=dist.new_group())
    try:
        for step in range(3):
            extra = ALONE[alone] if (rank, step) == (0, 1) and alone else None
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
        return str(raised), []
    return "", [u.shard.tolist() for u in fsdp.units]


def test_a_rank_may_evaluate_by_itself_in_shared_memory(ranks: Ranks) -> None:
    want = ranks.run(_alone, "", "")
    for when in ("between two backwards", "before the update", "after it"):
        assert ranks.run(_alone, "evaluate", when) == want


@pytest.mark.parametrize(
    ("alone", "when"),
    [
        ("backward", "before the update"),
        ("zero_grad", "between two backwards"),
        ("step", "between two backwards"),
        ("load", "after it"),
    ],
)
def test_ranks_that_come_apart(ranks: Ranks, alone: str, when: str) -> None:
    """Over shared memory, where no rank sees from the reading that another is elsewhere."""
    for error, _ in ranks.run(_alone, alone, when):
        assert error.startswith("the ranks diverged: all must make the same calls")
