"""Exchanges through shared memory and through the process group, and ranks that diverge; and the
pool. Their gradients: tests/equivalence, where each sum is left out once."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runtime.communicator import Communicator
from runtime.pool import Pool
from runtime.sums import sum_into
from tests import ranks as processes
from tests.remote import on_ranks


def calls(_rank: int, _world_size: int, share: bool) -> list[Tensor]:
    """Sums of many sizes, the later ones larger than the first memory; of 16-bit numbers; and each
    call along a dimension in the middle."""
    sizes = (1, 1000, 5 << 20, 3)
    with processes.sharing(share):
        mine = Communicator(dist.group.WORLD)
        x = torch.full((3,), 256.0 if mine.rank == 0 else 1.0, dtype=torch.bfloat16)
        wide = [mine.all_reduce(torch.full((n,), 0.1 * (mine.rank + 1)))[-2:] for n in sizes]
        ramp = RAMP * 10**mine.rank
        along = [mine.all_reduce(ramp), mine.reduce_scatter(ramp, 1), mine.all_gather(ramp, 1)]
        return [torch.cat(wide), mine.all_reduce(x), mine.reduce_scatter(x, 0), *along]


RAMP = torch.arange(36).view(2, 6, 3)


@pytest.mark.parametrize("share", [True, False])
def test_collectives_of_any_size_and_type(three_ranks: processes.Ranks, share: bool) -> None:
    """16-bit numbers are rounded once. Next to 256 comes 258 in bf16: 256 + 1, rounded, and + 1,
    rounded, is 256."""
    found = three_ranks.run(calls, share)
    for rank, (wide, total, part, *along) in enumerate(found):
        torch.testing.assert_close(wide, torch.full((7,), 0.6))
        assert wide.equal(found[0][0])  # every rank has the same bits
        assert total.dtype == part.dtype == torch.bfloat16
        assert (total.tolist(), part.tolist()) == ([258.0] * 3, [258.0])
        whole = torch.cat([RAMP, 10 * RAMP, 100 * RAMP], 1)
        wanted = [111 * RAMP, 111 * RAMP[:, 2 * rank : 2 * rank + 2], whole]
        assert [x.tolist() for x in along] == [x.tolist() for x in wanted]


@pytest.mark.parametrize("share", [True, False])
@on_ranks(2)
def test_a_sum_of_any_shape(rank: int, _: int, share: bool) -> None:
    """One number without a dimension, none at all, and a matrix that does not lie row by row."""
    with processes.sharing(share):
        mine = Communicator(dist.group.WORLD)
        for x in (torch.tensor(3.0), torch.empty(0, 2), torch.arange(6.0).view(2, 3).t()):
            assert mine.all_reduce(x * (1 + rank)).equal(3 * x)


def _in_place(rank: int, size: int, way: str) -> list[Tensor]:
    """Sums of lent memory, in the place of what was there, or added to it; and along a dimension in
    the middle."""
    found, cpu, backend = [], torch.device("cpu"), "nccl" if way == "nccl" else "gloo"
    with (
        processes.sharing(way == "memory"),
        patch("runtime.communicator.dist.get_backend", lambda _: backend),
    ):
        mine = Communicator(dist.group.WORLD)
        for accumulate in (False, True, True):
            whole = mine.take(2 * size, torch.float32, cpu)
            whole.copy_(torch.arange(2.0 * size) * 10**rank)
            found.append(torch.full((2,), 5.0))
            mine.start_reduce_scatter(whole, 0, found[-1], accumulate)()
        mine.barrier(cpu)
        return [*found, mine.reduce_scatter(RAMP * 10**rank, 1)]


def test_a_group_that_sums_finds_what_ranks_find_that_add_up(three_ranks: processes.Ranks) -> None:
    found = [three_ranks.run(_in_place, way) for way in ("gloo", "nccl", "memory")]
    for rank, ways in enumerate(zip(*found, strict=True)):
        part = [222.0 * rank, 222.0 * rank + 111]
        for *sums, along in ways:
            assert [x.tolist() for x in sums] == [part, *[[x + 5 for x in part]] * 2]
            assert along.equal(ways[0][-1])


@pytest.mark.parametrize("share", [True, False])
@on_ranks(3)
def test_a_sum_that_cannot_be_scattered_evenly_is_refused(
    _rank: int, _world_size: int, share: bool
) -> None:
    """Two of two columns for three ranks: their rows together can be divided by three."""
    with processes.sharing(share), pytest.raises(ValueError, match="is not a multiple of 3"):
        Communicator(dist.group.WORLD).reduce_scatter(torch.ones(3, 4), 1)


@pytest.mark.parametrize("share", [True, False])
@on_ranks(3)
def test_each_rank_may_send_and_get_another_number_of_rows(
    rank: int, size: int, share: bool
) -> None:
    """Rank r sends r * (q + 1) rows to rank q, so rank 0 none; then so many times as many that the
    first memory does not hold them."""
    with processes.sharing(share):
        mine = Communicator(dist.group.WORLD)
        for times in (1, 1 << 18):
            lengths = mine.gather_numbers(
                [rank * (q + 1) * times for q in range(size)], RAMP.device
            )
            x = torch.cat([torch.full((n, 1), 10 * rank + q) for q, n in enumerate(lengths[rank])])
            y = mine.all_to_all(x, lengths)
            assert y[::times].tolist() == [[10 + rank]] * (rank + 1) + [[20 + rank]] * 2 * (
                rank + 1
            )
            assert mine.all_to_all(y, [*zip(*lengths, strict=True)]).equal(x)  # and back


@on_ranks(2)
def test_memory_is_lent_again_when_all_have_read_it(rank: int, _: int) -> None:
    """The last rank reads slowly. No more than two stretches are written, in turns."""
    mine, slow = Communicator(dist.group.WORLD), rank == 1

    def read(target: Tensor, terms: list[Tensor], *_: object) -> None:
        time.sleep(0.02 * slow)
        sum_into(target, terms)

    with patch("runtime.communicator.sum_into", read):
        sums = [mine.all_reduce(torch.full((1000,), float(i))) for i in range(6)]
    assert [x.unique().tolist() for x in sums] == [[2.0 * i] for i in range(6)]
    assert mine._memory is not None and mine._memory._taken == 2 * 4096


@pytest.mark.parametrize("share", [True, False])
@on_ranks(2)
def test_a_rank_alone_lends_its_memory_again(rank: int, size: int, share: bool) -> None:
    """As FSDP does on one rank, or for experts of which each rank has others."""
    groups, cpu = [dist.new_group([r]) for r in range(size)], torch.device("cpu")
    with processes.sharing(share):
        mine, places = Communicator(groups[rank]), set[int]()
        for _ in range(3):
            whole = mine.take(1000, torch.float32, cpu)
            places.add(whole.data_ptr())
            assert mine.start_reduce_scatter(whole.fill_(2), 0)().unique().tolist() == [2.0]
    assert len(places) == 1


@pytest.mark.parametrize("share", [True, False])
@on_ranks(2)
def test_a_call_that_an_error_ended_is_not_taken_for_the_next(
    rank: int, _: int, share: bool
) -> None:
    """As attention that runs out of memory, on all ranks, while keys travel; the caller leaves the
    batch out. Rank 1 starts the next call when rank 0 would have been done with it."""
    with processes.sharing(share):
        mine, store = Communicator(dist.group.WORLD), dist.distributed_c10d._get_default_store()
        mine.all_reduce(torch.zeros(4))
        mine.start_all_reduce(torch.full((4,), 5.0))  # an error comes before it is finished
        if rank == 1:
            with pytest.raises(dist.DistStoreError):
                store.wait(["a sum without rank 1"], timedelta(seconds=0.3))
        assert mine.all_reduce(torch.ones(4)).tolist() == [2.0] * 4
        if rank == 0:
            store.set("a sum without rank 1", "")
        for k in range(5):
            assert mine.all_reduce(torch.full((4,), float(k))).tolist() == [2.0 * k] * 4
        dist.barrier()
        store.delete_key("a sum without rank 1")


OTHER_CALLS: dict[str, Callable[[Communicator, Tensor, int], object]] = {
    "kind": lambda mine, x, rank: mine.all_reduce(x) if rank else mine.all_gather(x, 0),
    "size": lambda mine, x, rank: mine.all_reduce(x if rank else x[:2]),
    "type": lambda mine, x, rank: mine.all_reduce(x if rank else x.int()),
}


@pytest.mark.parametrize("what", OTHER_CALLS)
@on_ranks(3)
def test_ranks_that_make_other_calls_are_told(rank: int, _: int, what: str) -> None:
    """A tensor of another type has as many bytes."""
    mine, x = Communicator(dist.group.WORLD), torch.ones(4)
    mine.all_reduce(x)
    with pytest.raises(RuntimeError, match="the ranks diverged: all must make the same calls"):
        OTHER_CALLS[what](mine, x, rank)


def test_the_pool_lends_what_was_given_back() -> None:
    pool = Pool(lambda n: torch.empty(n, dtype=torch.uint8))
    large, small = pool.take(1 << 20, torch.int8), pool.take(3 << 8, torch.float32)
    pool.give(large)
    pool.give(small)
    pool.give(torch.empty(4))  # which it has not lent
    assert pool.take(1 << 8, torch.float32).data_ptr() != large.data_ptr()  # or all would be large
    assert pool.take((1 << 19) + 1, torch.int8).data_ptr() == large.data_ptr()
    assert pool.take(1 << 10, torch.float32).data_ptr() == small.data_ptr()
