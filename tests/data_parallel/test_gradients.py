"""The gradients of all ranks are the mean over ranks, by name, however they are averaged."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.gradients import GradientBuckets, average_gradients, average_gradients_flat
from runtime.shared_memory import sum_into
from tests.ranks import Ranks

WAYS = ("per_parameter", "flat", "overlap", "overlap through gloo")
BY_HAND = {"per_parameter": average_gradients, "flat": average_gradients_flat}
SHARE = pytest.mark.parametrize("share", [True, False])
Gradients = dict[str, Tensor | None]


class Net(nn.Module):
    """Layers of several sizes, a tied weight, one never used, and one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.wide = nn.Linear(6, 37)
        self.narrow = nn.Linear(37, 6)
        self.odd = nn.Linear(6, 6)  # used where asked for
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.never = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, ids: Tensor, odd: bool) -> Tensor:
        x = self.narrow(torch.tanh(self.wide(self.embed(ids))))
        return self.head(self.odd(x) if odd else x)


def _net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def _loss(net: Net, seed: int, odd: bool = True) -> Tensor:
    ids = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(seed))
    return net(ids, odd).square().mean()


def _gradients(net: nn.Module) -> Gradients:
    return {n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()}


def _mean_of(
    seeds: list[int], dtype: torch.dtype = torch.float64, odd: set[int] | None = None
) -> Gradients:
    """What one process computes: the mean gradient over the seeds; `odd` are those of them that
    use the odd layer, by default all."""
    net = _net(dtype)
    for seed in seeds:
        (_loss(net, seed, odd is None or seed in odd) / len(seeds)).backward()
    return _gradients(net)


def _same(got: Gradients, want: Gradients, rtol: float = 1e-12) -> None:
    """1e-12 is 4 roundings of 2e-16 on sums of like size, with room for cancellation."""
    assert {n for n, g in got.items() if g is None} == {n for n, g in want.items() if g is None}
    for name, gradient in want.items():
        if gradient is not None:
            scale = gradient.abs().max().item()
            assert torch.allclose(got[name], gradient, rtol=rtol, atol=rtol * scale), name  # type: ignore[arg-type]


def _averaged(way: str, net: nn.Module) -> Callable[[], None]:
    if way in BY_HAND:
        return lambda: BY_HAND[way](net)
    return GradientBuckets(net.parameters(), share_memory=way == "overlap").finish


def _two_steps(rank: int, _: int, way: str) -> Gradients:
    """Rank 0 has examples in the first alone, and only rank 1 uses the odd layer."""
    net = _net()
    average = _averaged(way, net)
    for step in range(2):  # the second finds buckets that are in use
        net.zero_grad()
        if rank or not step:
            _loss(net, seed=rank, odd=rank == 1).backward()
        average()
    return _gradients(net)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_mean_on_every_rank(three_ranks: Ranks, way: str) -> None:
    """Parts that are not halves, and 1/3, which is not exact in binary. What one rank does not use
    counts as zero there; what nobody uses has no gradient."""
    want = {n: None if g is None else g * 2 / 3 for n, g in _mean_of([1, 2], odd={1}).items()}
    assert want["never"] is None and want["odd.weight"] is not None
    got = three_ranks.run(_two_steps, way)
    for gradients in got:
        _same(gradients, want)
        assert all(torch.equal(gradients[n], g) for n, g in got[0].items() if g is not None)


def _with_bucket_bytes(rank: int, _: int, nbytes: int, share: bool) -> list[object]:
    net = _net()
    buckets = GradientBuckets(net.parameters(), bucket_bytes=nbytes, share_memory=share)
    _loss(net, seed=rank).backward()
    buckets.finish()
    memory = {b.flat.untyped_storage().data_ptr() for b in buckets.buckets}
    used = [p.grad for p in net.parameters() if p.grad is not None]
    inside = all(gradient.untyped_storage().data_ptr() in memory for gradient in used)
    return [len(buckets.buckets), inside, (buckets.shared is not None), _gradients(net)]


@SHARE
@pytest.mark.parametrize(
    ("nbytes", "count"),
    # 8 trainable parameters; bytes, in the order of the buckets: odd 48, 288, narrow 48, 1776,
    # wide 296, 1776, embed 528, never 24: together 4784.
    [(1, 8), (335, 8), (336, 7), (4784, 1)],
)
def test_bucket_sizes(ranks: Ranks, nbytes: int, count: int, share: bool) -> None:
    """Smaller than a parameter, a byte too small for two, exactly two, everything. Gradients are
    views of the buckets."""
    for n, inside, shared, gradients in ranks.run(_with_bucket_bytes, nbytes, share):
        assert (n, inside, shared) == (count, True, share)
        _same(gradients, _mean_of([0, 1]))


def _mixed(rank: int, _: int, way: str) -> Gradients:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False).bfloat16())
    average = _averaged(way, net)
    for p in net.parameters():
        p.grad = torch.full_like(p, float(rank + 1))
    average()
    return _gradients(net)


@pytest.mark.parametrize("way", WAYS)
def test_mixed_types(ranks: Ranks, way: str) -> None:
    """Also gradients that were put there by hand, without a backward."""
    mean = torch.full((2, 2), 1.5)
    for gradients in ranks.run(_mixed, way):
        assert gradients["0.weight"].equal(mean) and gradients["1.weight"].equal(mean.bfloat16())


def _accumulate(rank: int, _: int, share: bool, keep: bool) -> list[Gradients]:
    net = _net()
    buckets = GradientBuckets(net.parameters(), share_memory=share)
    for step in range(2):
        net.zero_grad(set_to_none=not keep)
        with buckets.no_sync():
            (_loss(net, seed=10 * step + rank) / 2).backward()
        local = _gradients(net)
        (_loss(net, seed=10 * step + rank + 2) / 2).backward()
        buckets.finish()
    return [local, _gradients(net)]


@SHARE
@pytest.mark.parametrize("keep", [True, False])
def test_accumulation(ranks: Ranks, share: bool, keep: bool) -> None:
    """Two backwards, of which the first is local; whether zero_grad keeps the views or not."""
    for rank, (local, gradients) in enumerate(ranks.run(_accumulate, share, keep)):
        mine = _mean_of([10 + rank])
        _same(local, {n: None if g is None else g / 2 for n, g in mine.items()})
        _same(gradients, _mean_of([10, 11, 12, 13]))


def _in_bf16(rank: int, _: int) -> Gradients:
    net = _net(torch.float32)
    buckets = GradientBuckets(net.parameters(), bucket_bytes=1024, comm_dtype=torch.bfloat16)
    _loss(net, seed=rank).backward()
    buckets.finish()
    return _gradients(net)


def test_gradients_may_travel_in_bf16(ranks: Ranks) -> None:
    """bf16 has 8 bits: each rank's gradient is rounded by up to 2^-9 of it, and so is the sum; the
    two ranks' may cancel, so the bound is relative to the largest of the tensor."""
    for gradients in ranks.run(_in_bf16):
        want = _mean_of([0, 1], torch.float32)
        _same(gradients, want, rtol=3 * 2**-8)
        with pytest.raises(AssertionError):
            _same(gradients, want, rtol=1e-6)


def _twice(_: int, _world_size: int) -> str:
    net = _net()
    buckets = GradientBuckets(net.parameters())
    _loss(net, seed=0).backward()
    with pytest.raises(RuntimeError) as error:
        _loss(net, seed=1).backward()
    buckets.finish()
    return str(error.value)


def test_a_second_backward_without_finish_is_an_error(ranks: Ranks) -> None:
    for message in ranks.run(_twice):
        assert "call finish() after each backward, or accumulate inside no_sync()" in message


def _leftovers(_: int, _world_size: int) -> tuple[bool, set[str], int]:
    def names() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir()}

    def memory_files() -> int:
        found = 0
        for path in list(Path("/proc/self/fd").iterdir()):
            with suppress(FileNotFoundError):  # closed since, by another thread
                found += "memfd:ranks" in str(path.readlink())
        return found

    before, files_before = names(), memory_files()
    buckets = GradientBuckets(_net().parameters())
    dist.barrier()
    return buckets.shared is not None, names() - before, memory_files() - files_before


def test_shared_memory_has_no_name(ranks: Ranks) -> None:
    """Nothing that a killed process could leave behind: two files, and their maps'."""
    assert ranks.run(_leftovers) == [(True, set(), 4)] * 2


def _recorded(rank: int, _: int, share: bool) -> tuple[list[tuple[str, int, int]], list[bool]]:
    net, told = _net(), []
    buckets = GradientBuckets(
        net.parameters(), bucket_bytes=1, share_memory=share, recorder=lambda *e: told.append(e)
    )
    _loss(net, seed=rank).backward()
    middle = time.perf_counter()
    buckets.finish()
    return [event[:3] for event in told], [event[3] < middle for event in told[:8]]


@SHARE
def test_buckets_leave_while_backward_runs(ranks: Ranks, share: bool) -> None:
    """A recorder is told of each, in their order. The last has a parameter without a gradient."""
    expected = [("all_reduce", i, -1) for i in range(8)] + [("barrier", -1, -1)] * share
    assert ranks.run(_recorded, share) == [(expected, [True] * 7 + [False])] * 2


def _places(_: int, _world_size: int) -> list[list[int]]:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(3, 4))
    tied = net[1].weight
    assert isinstance(tied, nn.Parameter)
    buckets = GradientBuckets(net.parameters(), apart=[tied])
    return [[p.numel() for p in bucket.parameters] for bucket in buckets.buckets]


def test_a_parameter_apart_has_a_bucket_of_its_own(ranks: Ranks) -> None:
    assert ranks.run(_places) == [[[4, 12, 3, 2, 4], [6]]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_may_replace_any_of_its_parts(dtype: torch.dtype) -> None:
    for at in range(3):
        parts = list(torch.randn(3, 5).to(dtype))
        expected = (parts[0].float() + parts[1] + parts[2]).to(dtype) / 3
        sum_into(parts, [parts[at]], divisor=3)
        assert torch.equal(parts[at], expected)
