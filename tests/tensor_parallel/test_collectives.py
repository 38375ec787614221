"""The four functions and their gradients, through shared memory and through the process group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from runtime.ranks import Ranks
from tensor_parallel.collectives import add_up, gather, replicate, scatter
from tests import ranks as processes

SHAPE = (3, 6, 5)


def tensors(world_size: int) -> list[Tensor]:
    """What each rank has."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator).double() for _ in range(world_size)]


def both_ways(rank: int, world_size: int, share: bool) -> list[tuple[Tensor, Tensor]]:
    """Of each function the value, and the gradient of x where rank r weights the value by r + 1."""
    group = torch.distributed.group.WORLD
    mine = Ranks(group, share_memory=share)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: replicate(x, mine),
        lambda x: add_up(x, mine),
        lambda x: gather(x, mine, 1),
        lambda x: scatter(x, mine, 1),
    ]
    found = []
    for call in calls:
        x = tensors(world_size)[rank].requires_grad_()
        y = call(x)
        weights = torch.arange(y.numel(), dtype=torch.float64).view(y.shape) * (rank + 1)
        (y * weights).sum().backward()
        assert x.grad is not None
        found.append((y.detach().clone(), x.grad))
    return found


@pytest.mark.parametrize("share", [True, False])
def test_values_and_gradients(three_ranks: processes.Ranks, share: bool) -> None:
    W = three_ranks.world_size
    every, total = tensors(W), sum(tensors(W))
    assert isinstance(total, Tensor)
    ramp = torch.arange(total.numel(), dtype=torch.float64).view(SHAPE)
    size = SHAPE[1] // W
    part = torch.arange(total.numel() // W, dtype=torch.float64).view(3, size, 5)
    whole = torch.arange(W * total.numel(), dtype=torch.float64).view(3, 6 * W, 5)
    factor = sum(range(1, W + 1))  # of what all ranks' weights have in common
    for rank, found in enumerate(three_ranks.run(both_ways, share)):
        mine = slice(rank * size, (rank + 1) * size)
        expected = [
            (every[rank], ramp * factor),
            (total, ramp * (rank + 1)),
            (torch.cat(every, 1), whole[:, rank * 6 : rank * 6 + 6] * factor),
            (total[:, mine], torch.cat([part * (r + 1) for r in range(W)], 1)),
        ]
        for (y, dx), (wanted, gradient) in zip(found, expected, strict=True):
            torch.testing.assert_close(y, wanted)
            torch.testing.assert_close(dx, gradient)


def sums(rank: int, world_size: int, share: bool) -> list[Tensor]:  # noqa: ARG001
    """Of many sizes, the later ones larger than the first memory; and of 16-bit numbers."""
    mine = Ranks(torch.distributed.group.WORLD, share_memory=share)
    sizes = (1, 1000, 5 << 20, 3)
    x = torch.full((3,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    return [
        *(mine.all_reduce(torch.full((n,), 0.1 * (rank + 1)))[-2:] for n in sizes),
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


def apart(rank: int, world_size: int) -> str:  # noqa: ARG001
    mine, x = Ranks(torch.distributed.group.WORLD), torch.ones(2)
    mine.all_reduce(x)
    try:
        if rank:
            mine.all_reduce(x)
        else:
            mine.all_gather(x, 0)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_ranks_that_make_other_calls_are_told(three_ranks: processes.Ranks) -> None:
    told = "the ranks diverged: they make different calls"
    assert three_ranks.run(apart) == [told] * 3
