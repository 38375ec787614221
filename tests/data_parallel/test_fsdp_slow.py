"""A rank that is slow somewhere: nobody reads what is not there yet, or writes to what is read.

What is right does not depend on time here; that a wait is missing shows because one rank takes its
time where the other does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from data_parallel import exchange, shards
from data_parallel.exchange import SharedExchange
from data_parallel.fsdp import FullyShardedDataParallel
from tests.data_parallel.sharded_models import batch, loss_of, one_process, same, sharded, whole
from tests.ranks import Ranks

DELAY = 0.02  # seconds: the whole step takes less
HALVES = (slice(0, 5), slice(5, 12))


def _slow(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        time.sleep(DELAY)
        return function(*args, **options)

    return call


def _place(fsdp: FullyShardedDataParallel, name: str) -> tuple[Any, str]:
    """Where a rank takes its time."""
    assert isinstance(fsdp.exchange, SharedExchange)
    return {
        "updates": (fsdp.optimizer, "step"),
        "reads": (fsdp.exchange.memory, "read"),
        "sums": (exchange, "sum_into"),
        "fills": (shards, "_lay_out"),
    }[name]


def _steps(
    rank: int, _: int, where: str, slow_rank: int, zero: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Each step: a backward, of which nothing is wanted; another; an evaluation; the update."""
    fsdp = sharded(zero=zero)
    target, name = _place(fsdp, where)
    function = getattr(target, name)
    outputs = []
    with patch.object(target, name, _slow(function) if rank == slow_rank else function):
        for step in range(2):
            x, y = batch(step, HALVES[rank])
            for factor in (7.0, 1.0):
                fsdp.zero_grad()
                fsdp.backward(loss_of(fsdp.forward(x), y) * factor)
            with torch.no_grad():
                outputs.append(fsdp.forward(batch(step)[0]))
            fsdp.optimizer_step()
    return outputs, whole(fsdp, "parameters")


@pytest.mark.parametrize("zero", [1, 3])  # what 2 does both do
@pytest.mark.parametrize("where", ["updates", "reads", "sums", "fills"])
def test_a_slow_rank_changes_nothing(ranks: Ranks, where: str, zero: int) -> None:
    want = one_process(2)
    for slow_rank in range(2):
        got = ranks.run(_steps, where, slow_rank, zero)
        for outputs, _ in got:
            for output, wanted in zip(outputs, want.outputs, strict=True):
                assert torch.allclose(output, wanted, rtol=1e-10, atol=1e-12)
        same(got[0][1], want.weights, 1e-10)
