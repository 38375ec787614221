"""Ranks that are not in step: one is slow somewhere, or does something alone.

No rank reads data that is not there yet, or overwrites data that is being read. If a rank does
something alone, it changes nothing, or all end with an error. Numbers are never wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from data_parallel.fsdp import FullyShardedDataParallel
from runtime import communicator
from tests.data_parallel.sharded_models import HALVES, batch, loss_of, one_process, sharded, whole
from tests.pipeline.pipeline_models import assert_close
from tests.ranks import Ranks, sharing
from tests.remote import on_ranks

DELAY = 0.02  # seconds: the whole step takes less


def _slow(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        time.sleep(DELAY)
        return function(*args, **options)

    return call


@pytest.mark.parametrize("slow_rank", [0, 1])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("where", ["updates", "reads", "sums", "fills"])
@on_ranks(2)
def test_a_slow_rank_changes_nothing(
    rank: int, _: int, where: str, zero: int, slow_rank: int
) -> None:
    """Each step: a backward, of which nothing is wanted; another; an evaluation; the update."""
    fsdp = sharded(zero=zero)
    assert not fsdp.communicator.overlaps(fsdp.device)
    place, name = {
        "updates": (fsdp.optimizer, "step"),
        "reads": (fsdp.communicator._memory, "copy_from"),
        "sums": (communicator, "sum_into"),
        "fills": (torch, "_foreach_copy_"),
    }[where]
    slow, outputs = _slow(getattr(place, name)), []
    with patch.object(place, name, slow) if rank == slow_rank else nullcontext():
        for step in range(2):
            x, y = batch(step, HALVES[rank])
            for factor in (7.0, 1.0):
                fsdp.zero_grad()
                fsdp.backward(loss_of(fsdp.forward(x), y) * factor)
            with torch.no_grad():
                outputs.append(fsdp.forward(batch(step)[0]))
            fsdp.optimizer_step()
    want_outputs, _gradients, want_weights = one_process(steps=2)
    torch.testing.assert_close(outputs, want_outputs, rtol=1e-10, atol=1e-12)
    assert_close(whole(fsdp, "parameters"), want_weights)


def _backward(fsdp: FullyShardedDataParallel) -> None:
    x, target = batch(0)
    fsdp.backward(loss_of(fsdp.forward(x), target))


ALONE: dict[str, Callable[[FullyShardedDataParallel], object]] = {
    "evaluate": lambda fsdp: torch.no_grad()(fsdp.forward)(batch(0)[0]),
    "backward": _backward,
    "zero_grad": lambda fsdp: fsdp.zero_grad(),
    "step": lambda fsdp: fsdp.optimizer_step(),
    "load": lambda fsdp: fsdp.parameters_changed(),
}


def _alone(rank: int, _: int, alone: str, when: str, share: bool) -> tuple[str, list[list[float]]]:
    """Three steps; in the second the first rank does more. A group of their own: an error leaves
    what they have sent each other unread."""
    with sharing(share):
        fsdp = sharded(group=dist.new_group())

    def at(step: int, place: str) -> None:
        if (rank, step, place) == (0, 1, when):
            ALONE[alone](fsdp)

    try:
        for step in range(3):
            _backward(fsdp)
            at(step, "between two backwards")
            _backward(fsdp)
            at(step, "before the update")
            fsdp.optimizer_step()
            at(step, "after it")
    except RuntimeError as raised:
        return str(raised), []
    return "", [u.shard.tolist() for u in fsdp.units]


def test_a_rank_may_evaluate_by_itself_in_shared_memory(ranks: Ranks) -> None:
    want = ranks.run(_alone, "", "", True)
    for when in ("between two backwards", "before the update", "after it"):
        assert ranks.run(_alone, "evaluate", when, True) == want


@pytest.mark.parametrize(
    ("alone", "when", "share"),
    [
        ("backward", "before the update", True),
        ("zero_grad", "between two backwards", True),
        ("step", "between two backwards", True),
        ("load", "after it", True),
        ("zero_grad", "between two backwards", False),  # it makes the same collectives
    ],
)
def test_ranks_that_come_apart(ranks: Ranks, alone: str, when: str, share: bool) -> None:
    """No rank sees from what it reads that another is elsewhere."""
    for error, _ in ranks.run(_alone, alone, when, share):
        assert error.startswith("the ranks diverged: all must make the same calls")
