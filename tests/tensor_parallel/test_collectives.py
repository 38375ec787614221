"""Sums, through shared memory and through the process group, and ranks that diverge. That each
collective and its gradient is right: tests/equivalence leaves them out, one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.ranks import Ranks
from tests import ranks as processes


def sums(_rank: int, _world_size: int, share: bool) -> list[Tensor]:
    """Of many sizes, the later ones larger than the first memory; and of 16-bit numbers."""
    mine = Ranks(torch.distributed.group.WORLD, share_memory=share)
    sizes = (1, 1000, 5 << 20, 3)
    x = torch.full((3,), 256.0 if mine.rank == 0 else 1.0, dtype=torch.bfloat16)
    return [
        *(mine.all_reduce(torch.full((n,), 0.1 * (mine.rank + 1)))[-2:] for n in sizes),
        mine.all_reduce(x),
        mine.reduce_scatter(x, 0),
    ]


@pytest.mark.parametrize("share", [True, False])
def test_every_rank_has_the_same_bits_of_tensors_of_any_size(
    three_ranks: processes.Ranks, share: bool
) -> None:
    """16-bit numbers are rounded once. Next to 256 comes 258 in bf16: 256 + 1, rounded, and + 1,
    rounded, is 256."""
    first, *others = three_ranks.run(sums, share)
    *wide, total, part = first
    torch.testing.assert_close(torch.cat(wide), torch.full((7,), 0.6))
    assert total.dtype == part.dtype == torch.bfloat16
    assert (total.tolist(), part.tolist()) == ([258.0] * 3, [258.0])
    for found in others:
        assert all(a.equal(b) for a, b in zip(found, first, strict=True))


def apart(rank: int, _world_size: int) -> None:
    mine, x = Ranks(torch.distributed.group.WORLD), torch.ones(2)
    mine.all_reduce(x)
    with pytest.raises(RuntimeError, match="the ranks diverged: they make different calls"):
        _ = mine.all_reduce(x) if rank else mine.all_gather(x, 0)


def test_ranks_that_make_other_calls_are_told(three_ranks: processes.Ranks) -> None:
    three_ranks.run(apart)
