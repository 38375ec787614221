"""The gradients of all ranks are the mean over ranks, by name, however they are averaged."""

from __future__ import annotations

import time
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.buckets import GradientBuckets, SummedBucket, in_backward_order
from data_parallel.gradients import (
    DistributedDataParallel,
    average_gradients,
    average_gradients_flat,
)
from runtime.communicator import Communicator
from tests.pipeline.pipeline_models import Operators, gradients
from tests.ranks import Ranks, sharing
from tests.remote import on_ranks

# How far from the mean, relative to the largest of a tensor: roundings to 53 bits, or to 8.
WAYS = {
    "per_parameter": 1e-12, "flat": 1e-12, "overlap": 1e-12, "through gloo": 1e-12,
    "in bf16": 2**-6,
}  # fmt: skip
BY_HAND = {"per_parameter": average_gradients, "flat": average_gradients_flat}
Gradients = dict[str, Tensor | None]


class Net(nn.Module):
    """Layers of several sizes, a tied weight, one with a sparse gradient, one never used, one
    frozen, and one of another type whose gradient is put there by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.sparse = nn.Embedding(11, 6, sparse=True)
        self.wide = nn.Linear(6, 37)
        self.narrow = nn.Linear(37, 6)
        self.odd = nn.Linear(6, 6)  # used where asked for
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.never = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.double()
        self.by_hand = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))

    def forward(self, ids: Tensor, odd: bool) -> Tensor:
        x = self.narrow(torch.tanh(self.wide(self.embed(ids) + self.sparse(ids))))
        return self.head(self.odd(x) if odd else x)


def _loss(net: Net, seed: int, odd: bool = True) -> Tensor:
    ids = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(seed))
    return net(ids, odd).square().mean()


def _furthest(got: Gradients, want: Gradients) -> float:
    """The largest difference, relative to the largest value of its tensor."""
    assert {n for n, g in got.items() if g is None} == {n for n, g in want.items() if g is None}
    pairs: list[Any] = [(got[n], w) for n, w in want.items() if w is not None]
    return max(float((g - w).abs().max() / w.abs().max()) for g, w in pairs)


def _seeds(step: int, rank: int) -> list[int]:
    """The seeds of a rank's two backwards in a step. Rank 0 has examples in step 0 alone."""
    return [] if rank == 0 < step else [10 * step + rank, 10 * step + rank + 3]


def _averaging(way: str, module: nn.Module, group: Any = None) -> tuple[Any, Any]:
    """What makes a backward local, and what averages after the last one."""
    if way in BY_HAND:
        return nullcontext, partial(BY_HAND[way], module, group)
    comm_dtype = torch.bfloat16 if way == "in bf16" else None
    with sharing(way == "overlap"):
        ranks = Communicator(group or dist.group.WORLD, comm_dtype=comm_dtype)
        groups = in_backward_order(module.parameters())
        buckets = GradientBuckets([SummedBucket(group, ranks, ranks.size) for group in groups])
    buckets.watch()
    return buckets.no_sync, buckets.finish


def _averaged(rank: int, _: int, way: str) -> list[Gradients]:
    """Gradients of three steps; the later ones find buckets in use, the second zeros in them."""
    net, found = Net(), []
    local, average = _averaging(way, net)
    for step in range(3):
        net.zero_grad(set_to_none=step != 1)
        for k, seed in enumerate(_seeds(step, rank)):
            with local() if k == 0 else nullcontext():
                _loss(net, seed, odd=rank == 1).backward()
        net.by_hand.grad = torch.full_like(net.by_hand, rank)
        average()
        found.append(deepcopy(gradients(net)))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_mean_on_every_rank(three_ranks: Ranks, way: str) -> None:
    """Parts that are not halves, and 1/3, which is not exact in binary. What one rank does not use
    counts as zero there; what nobody uses has no gradient. Of two backwards the first is local."""
    found = three_ranks.run(_averaged, way)
    for step, first in enumerate(found[0]):
        net = Net()
        for rank in range(3):
            for seed in _seeds(step, rank):
                (_loss(net, seed, odd=rank == 1) / 3).backward()
        net.by_hand.grad = torch.ones_like(net.by_hand)  # of 0, 1, 2
        want = gradients(net)
        assert want["never"] is None and want["odd.weight"] is not None
        assert _furthest(first, want) < WAYS[way]
        assert _furthest(first, want) > 1e-4 or way != "in bf16"
        for other in found[1:]:
            assert all(torch.equal(other[step][n], g) for n, g in first.items() if g is not None)


@on_ranks(2)
def test_a_local_backward_leaves_its_gradients_in_the_buckets(_rank: int, _world: int) -> None:
    """They would take memory twice until the next exchange. Later ones are added in place."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    ddp = DistributedDataParallel(model)
    (bucket,) = ddp.buckets.buckets
    for copies in (1, 0):
        with ddp.no_sync(), Operators() as operators:
            ddp(torch.ones(5, 3)).sum().backward()
        assert [id(p.grad) for p in bucket.parameters] == [*map(id, bucket.views)]
        assert operators.counts[torch.ops.aten._foreach_copy_] == copies
    ddp.average_gradients()


def test_a_local_backward_after_an_unfinished_one_is_refused() -> None:
    """Also one that leaves out the first layer, whose gradient is the last to come."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = in_backward_order([*first.parameters(), *second.parameters()])
    buckets = GradientBuckets([SummedBucket(group, Communicator()) for group in groups])
    buckets.watch()
    second(first(torch.ones(1, 2))).sum().backward()
    with pytest.raises(RuntimeError, match=r"^call finish\(\) after each"), buckets.no_sync():
        second(torch.ones(1, 2)).sum().backward()
    buckets.finish()


@on_ranks(3)
def test_a_group_may_be_smaller_than_the_world(rank: int, _: int) -> None:
    group = dist.new_group([1, 2])  # all ranks make it
    for way in WAYS if rank > 0 else ():
        layer = nn.Linear(2, 3)
        for p in layer.parameters():
            p.grad = torch.full_like(p, rank)
        _averaging(way, layer, group)[1]()
        assert all(p.grad is not None and p.grad.eq(1.5).all() for p in layer.parameters()), way


def test_how_parameters_are_grouped() -> None:
    """In 8 bytes each, from the last: odd, narrow, wide, sparse, embed, never; and, before that,
    one of another type. Buckets are small, a byte too small for two, exactly two; and one parameter
    is of another kind. A bucket comes when its last gradient does."""
    net = Net()
    made = [in_backward_order(net.parameters(), n) for n in (1, 335, 336)]
    made.append(in_backward_order(net.parameters(), kind=lambda p: p is net.wide.bias))
    found = [[sum(p.numel() for p in group) for group in groups] for groups in made]
    each = [6, 36, 6, 222, 37, 222, 66, 66, 4, 3]
    want = [each, each, [6 + 36, *each[2:]], [37, 4, sum(each) - 37 - 4]]
    assert found == want


@pytest.mark.parametrize("share", [True, False])
@on_ranks(2)
def test_buckets_leave_while_backward_runs(rank: int, _: int, share: bool) -> None:
    """A recorder is told of each, in their order: of one that travels, from then on; of one that
    others read, when it is averaged. The last have parameters without a gradient. Gradients are
    views of them, so a second backward must not begin before the first is over."""
    net, told = Net(), []
    with sharing(share):
        ranks = Communicator(dist.group.WORLD)
        made = [SummedBucket(group, ranks) for group in in_backward_order(net.parameters(), 1)]
        buckets = GradientBuckets(made, recorder=lambda *e: told.append(e))
    buckets.watch()
    _loss(net, seed=rank).backward()
    with pytest.raises(RuntimeError, match=r"^call finish\(\) after each backward, also one"):
        _loss(net, seed=rank).backward()
    middle = time.perf_counter()
    buckets.finish()
    memory = {bucket.flat.untyped_storage().data_ptr() for bucket in buckets.buckets}
    used = {p.grad.untyped_storage().data_ptr() for p in net.parameters() if p.grad is not None}
    early = [start < middle for kind, _, _, start, _ in told if kind == "all_reduce"]
    events = [("all_reduce", i, -1) for i in range(10)] + [("barrier", -1, -1)]
    assert used <= memory
    assert [event[:3] for event in told] == events
    assert early == [not share] * 8 + [False] * 2
