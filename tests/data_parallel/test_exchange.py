"""Gradients summed by a group that adds them up itself, as NCCL, and by gloo, whose ranks do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from data_parallel.exchange import Exchange, Reduction
from runtime.communicator import Communicator
from tests.ranks import Ranks, sharing


def _sums(rank: int, size: int, backend: str) -> list[Tensor]:
    """The sum in the place of what was there, added to it, of an empty unit; and along a dimension
    in the middle."""
    found = []
    with sharing(False), patch("runtime.communicator.dist.get_backend", lambda _: backend):
        exchange = Exchange(torch.device("cpu"), dist.group.WORLD)
        for n, accumulate in ((2, False), (2, True), (0, False), (0, True)):
            unit: Any = SimpleNamespace(numel=n * size)
            whole, target = torch.arange(float(n * size)) * 10**rank, torch.full((n,), 5.0)
            lent = whole.view(torch.uint8)
            exchange.start_reduce([Reduction(unit, whole, target, accumulate, lent)])()
            found.append(target)
        ramp = torch.arange(36.0).view(2, 6, 3) * 10**rank
        return [*found, Communicator(dist.group.WORLD).reduce_scatter(ramp, 1)]


def test_a_group_that_sums_finds_what_ranks_find_that_add_up(three_ranks: Ranks) -> None:
    by_ranks, by_group = (three_ranks.run(_sums, backend) for backend in ("gloo", "nccl"))
    for rank, (ours, theirs) in enumerate(zip(by_ranks, by_group, strict=True)):
        part = [222.0 * rank, 222.0 * rank + 111]
        wanted = [part, [x + 5 for x in part], [], []]
        assert [x.tolist() for x in ours[:4]] == [x.tolist() for x in theirs[:4]] == wanted
        assert ours[4].equal(theirs[4])
