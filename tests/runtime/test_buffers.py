"""Memory that ranks exchange in place: sums by a group that adds up itself, as NCCL, by gloo, whose
ranks do, and in memory that ranks share; and the pool."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.buffers import Pool, Sum
from runtime.communicator import Communicator
from tests.ranks import Ranks, sharing


def _sums(rank: int, size: int, way: str) -> list[Tensor]:
    """The sum in the place of what was there, added to it, of no number; and along a dimension in
    the middle."""
    found = []
    backend = "nccl" if way == "nccl" else "gloo"
    with sharing(way == "memory"), patch("runtime.buffers.dist.get_backend", lambda _: backend):
        communicator = Communicator(dist.group.WORLD)
        buffers = communicator.lend(1 << 16, torch.device("cpu"))
        for n, accumulate in ((2, False), (2, True), (0, False), (0, True)):
            lent = buffers.terms.take(max(1, n * size * 4))
            whole = lent[: n * size * 4].view(torch.float32)
            whole.copy_(torch.arange(float(n * size)) * 10**rank)
            found.append(torch.full((n,), 5.0))
            buffers.start_sums([Sum(whole, found[-1], accumulate, lent)])()
        buffers.barrier()
        ramp = torch.arange(36.0).view(2, 6, 3) * 10**rank
        return [*found, communicator.reduce_scatter(ramp, 1)]


def test_a_group_that_sums_finds_what_ranks_find_that_add_up(three_ranks: Ranks) -> None:
    found = [three_ranks.run(_sums, way) for way in ("gloo", "nccl", "memory")]
    for rank, ways in enumerate(zip(*found, strict=True)):
        part = [222.0 * rank, 222.0 * rank + 111]
        for sums in ways:
            assert [x.tolist() for x in sums[:4]] == [part, [x + 5 for x in part], [], []]
            assert sums[4].equal(ways[0][4])


def test_the_pool_lends_what_was_given_back() -> None:
    pool = Pool(lambda n: torch.empty(n, dtype=torch.uint8))
    large, small = pool.take(1 << 20), pool.take(3 << 10)
    pool.give(large)
    pool.give(small)
    assert pool.take(1 << 10) is not large  # or every buffer would become large
    assert pool.take((1 << 19) + 1) is large and pool.take(4 << 10) is small
