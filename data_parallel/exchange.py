"""Gathers shards into whole parameters, and reduces whole gradients to shards.

Problem: before a layer computes, each rank needs all shards of its parameters (all-gather);
after its backward, each rank needs the sum of all ranks' gradients of its own shard
(reduce-scatter). Both start early and finish late, so that they overlap with the computation of
neighbouring layers.

Idea: two implementations of one interface.

`GroupExchange` uses the collectives of the process group: NCCL between GPUs, gloo otherwise. Gloo's
own reduce-scatter is an all-reduce that throws most of the result away: 19.7 ms for 12.6 MB and two
ranks of one machine. An all-to-all of the parts, added up here, takes 7.8 ms.

`SharedExchange` is for CPU ranks of one machine. Shards and gradients lie in memory that the others
can read (runtime/shared_memory.py). A gather copies the other ranks' shards (0.6 ms where gloo
takes 10); a reduction adds up the others' gradients in place, in rank order. There is no network to
hide, so a gather copies when it is waited for. The process group carries only announcements, each a
small all-reduce:

    rank 0   backward of layer 2 | announce 0 | backward of layer 1 | sum 0, announce 1 | ...
    rank 1   backward of layer 2  | announce 0 | backward of layer 1  | sum 0, announce 1 | ...

An announcement says: this layer's gradients are in my memory, and I have read my part of everything
announced before. A sum starts when its announcement has come from all ranks, which had a layer's
time for it. Memory is reused once the *next* announcement has come from all. All ranks take memory
in the same order, so a tensor has the same offset on every rank.

An announcement also names the call that a rank makes, and every rank compares: ranks that make
different calls end with an error instead of a wrong sum.

Cost, W ranks, a unit of G bytes: a gather receives (W-1)/W G, a reduction sends as much.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from data_parallel.sharding import Unit
from runtime.ranks import all_gather, reduce_scatter
from runtime.shared_memory import SharedBuffers, aligned, sum_into

Finish = Callable[[], None]
"""Waits for a started exchange. Call each once, in the order of the starts."""

_UPDATING = -1  # an announcement: below 0 of an update, from 0 on of gradients; see `_describe`


class Pool:
    """Lends memory for a moment: a layer's gathered parameters, or its gradients in transit.

    Allocating anew for each layer would cost a page fault per 4 KiB, and keeping memory for every
    layer would undo the sharding. So returned memory is kept for reuse, in sizes that are powers of
    two: in all at most four times the largest blocks lent at the same time. Pages that are never
    written to take no memory. CUDA's own allocator keeps memory already.

    Attributes:
        peak_bytes: the most that was lent at the same time.
    """

    def __init__(self, allocate: Callable[[int], Tensor], keep: bool = True) -> None:
        self.peak_bytes = 0
        self._allocate, self._keep = allocate, keep
        self._idle: dict[int, list[Tensor]] = {}  # by size in bytes
        self._lent_bytes = 0

    def take(self, nbytes: int) -> Tensor:
        """Lends at least `nbytes` bytes."""
        size = 1 << (nbytes - 1).bit_length() if self._keep else nbytes  # a power of two, if kept
        idle = self._idle.get(size)
        self._lent_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._lent_bytes)
        return idle.pop() if idle else self._allocate(size)

    def give(self, memory: Tensor) -> None:
        """Takes it back."""
        self._lent_bytes -= memory.nbytes
        if self._keep:
            self._idle.setdefault(memory.nbytes, []).append(memory)
        else:
            memory.untyped_storage().resize_(0)  # frees it: graphs still have views of it


class Reduction(NamedTuple):
    """The gradients of a unit, flat, in `whole`; this rank's part of their sum goes to `target`."""

    unit: Unit
    whole: Tensor
    target: Tensor
    accumulate: bool  # add to `target` instead of overwriting it
    lent: Tensor | None = None  # the memory of `whole`, to be returned to the pool


class Exchange(ABC):
    """Moves shards between the ranks of a group.

    Attributes:
        parameters, gradients: memory for whole units. Gradients must be taken from `gradients`.
        prefetch: whether a gather that starts early overlaps with computation.
        waits: whether ranks wait for each other around an update.
    """

    parameters: Pool
    gradients: Pool
    prefetch = True
    waits = False

    def __init__(
        self, units: Sequence[Unit], device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self.units = units
        self.device = device
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.parameters = Pool(self._empty, keep=device.type == "cpu")
        self._announced = self._heard = 0  # announcements made; received from all
        self._pending: deque[tuple[dist.Work, Tensor]] = deque()  # the difference

    @abstractmethod
    def storage(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory, never given back. All ranks ask for the same sizes in the same order."""

    @abstractmethod
    def start_gather(self, unit: Unit, shard: Tensor, whole: Tensor) -> Finish:
        """Fills `whole` with all ranks' shards. `shard` may be this rank's part of `whole`."""

    @abstractmethod
    def start_reduce(self, reductions: list[Reduction]) -> Finish:
        """Sums gradients over the ranks, all units of a layer at once. The previous reduction must
        be finished."""

    @abstractmethod
    def before_update(self) -> None:
        """Waits until no rank reads this one's shards any more."""

    @abstractmethod
    def after_update(self, backwards: int = 0) -> None:
        """Waits until all ranks have updated their shards; `backwards` since the last update."""

    def _empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _announce(self, what: int) -> int:
        """Tells all ranks which call this rank makes. Returns the number of the announcement."""
        said = torch.zeros(self.world_size, dtype=torch.int64)
        said[self.rank] = what  # the sum leaves every rank's number in its place
        said = said.to(self.device)
        work = dist.all_reduce(said, group=self.group, async_op=True)
        assert work is not None
        self._pending.append((work, said))
        self._announced += 1
        return self._announced - 1

    def _wait_for(self, number: int) -> None:
        """Waits until this announcement and all earlier ones have come from all ranks.

        Raises:
            RuntimeError: the ranks make different calls. Every later call raises it again.
        """
        while self._heard <= number:
            work, said = self._pending[0]
            work.wait()
            self._compare(said.tolist())
            self._pending.popleft()  # only if they agree: the next call raises again
            self._heard += 1

    def _compare(self, announced: list[int]) -> None:
        for rank, what in enumerate(announced):
            if what != announced[0]:
                raise RuntimeError(
                    f"the ranks diverged: rank 0 {self._describe(announced[0])}, rank "
                    f"{rank} {self._describe(what)}; all must make the same calls, with "
                    "forward(None) and backward(None) where they have no examples"
                )

    def _describe(self, what: int) -> str:
        if what == _UPDATING:
            return "is about to update parameters that it has gathered since its backward"
        if what < 0:
            return (
                f"has updated its parameters by the gradients of {_UPDATING - 1 - what} backwards"
            )
        index, accumulate = divmod(what, 2)  # see SharedExchange.start_reduce
        which = "more" if accumulate else "the first"
        return f"adds up {which} gradients of {self.units[index].entries[0].name}"


class GroupExchange(Exchange):
    """By collectives of the process group."""

    def __init__(
        self, units: Sequence[Unit], device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(units, device, group)
        self.gradients = self.parameters  # one pool: nobody reads this memory from outside
        self._by_parts = dist.get_backend(group) == "gloo"

    def storage(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def start_gather(self, unit: Unit, shard: Tensor, whole: Tensor) -> Finish:
        del unit
        work = all_gather(whole, shard, group=self.group, async_op=True)  # whole: by rank
        return lambda: _wait(work)

    def start_reduce(self, reductions: list[Reduction]) -> Finish:
        finishes = [self._start_one(reduction) for reduction in reductions]

        def finish() -> None:
            for one in finishes:
                one()

        return finish

    def _start_one(self, reduction: Reduction) -> Finish:
        unit, whole, target, accumulate, lent = reduction
        received = torch.empty_like(whole if self._by_parts else target)  # by rank; or the sum
        if self._by_parts:
            work = dist.all_to_all_single(received, whole, group=self.group, async_op=True)
        else:
            work = reduce_scatter(received, whole, group=self.group, async_op=True)

        def finish() -> None:
            _wait(work)  # received: [W, shard_numel] to be added up, or [1, shard_numel]
            sum_into(list(received.view(-1, unit.shard_numel)), [target], accumulate=accumulate)
            if lent is not None:
                self.gradients.give(lent)  # sent: nobody needs it any more

        return finish

    def before_update(self) -> None:
        pass  # a finished gather has already sent this rank's shard

    def after_update(self, backwards: int = 0) -> None:
        # No need to wait: this compares the previous announcement; the next call compares this one.
        self._wait_for(self._announce(_UPDATING - 1 - backwards) - 1)


class SharedExchange(Exchange):
    """By reading each other's memory. Use `open` to make one."""

    prefetch = False
    waits = True

    def __init__(
        self, units: Sequence[Unit], memory: SharedBuffers, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(units, torch.device("cpu"), group)
        self.memory = memory
        self._end = 0  # of the memory in use
        self._gathered = False  # since the last reduction or update
        self._being_read: list[Tensor] = []  # lent to the last reduction
        self.gradients = Pool(lambda nbytes: self.storage(nbytes, torch.uint8))  # the others read

    @classmethod
    def open(
        cls, units: Sequence[Unit], group: dist.ProcessGroup | None = None
    ) -> SharedExchange | None:
        """None if the ranks cannot share memory. All must call it together."""
        # Address space: all parameters; and all gradients, or those of two layers at a time in
        # blocks rounded up to a power of two.
        nbytes = sum(aligned(unit.nbytes) + 4 * aligned(unit.gradient_nbytes) for unit in units)
        memory = SharedBuffers.open(nbytes, group, readable=True)
        return None if memory is None else cls(units, memory, group)

    def storage(self, numel: int, dtype: torch.dtype) -> Tensor:
        start, self._end = self._end, self._end + aligned(numel * dtype.itemsize)  # bytes
        return self.memory.view(self.rank, start, numel, dtype)

    def start_gather(self, unit: Unit, shard: Tensor, whole: Tensor) -> Finish:
        in_place = whole[unit.part(self.rank)].data_ptr() == shard.data_ptr()  # zero 1, 2

        def finish() -> None:
            self._gathered = True  # unless a reduction follows, an update must wait
            for rank in range(self.world_size):
                part = whole[unit.part(rank)]
                if rank != self.rank:
                    offset = self.memory.offset(part if in_place else shard)  # the same there
                    self.memory.read(rank, offset, part)
                elif not in_place:
                    part.copy_(shard)

        return finish

    def start_reduce(self, reductions: list[Reduction]) -> Finish:
        first = reductions[0]
        self._gathered = False  # the announcement says that these reads are over
        number = self._announce(2 * first.unit.index + first.accumulate)  # for all reductions

        def finish() -> None:
            self._wait_for(number)  # so all have read everything announced before
            for memory in self._being_read:  # of the reduction before this one
                self.gradients.give(memory)
            self._being_read = [r.lent for r in reductions if r.lent is not None]
            for unit, whole, target, accumulate, _ in reductions:
                offset = self.memory.offset(whole[unit.part(self.rank)])  # of my part, everywhere
                parts = [  # the gradients of this shard, by rank
                    self.memory.view(rank, offset, unit.shard_numel, unit.dtype)
                    for rank in range(self.world_size)
                ]
                sum_into(parts, [target], accumulate=accumulate)  # no other rank reads target

        return finish

    def before_update(self) -> None:
        if self._gathered:  # and no reduction since: after an evaluation
            self._wait_for(self._announce(_UPDATING))

    def after_update(self, backwards: int = 0) -> None:
        self._gathered = False
        self._wait_for(self._announce(_UPDATING - 1 - backwards))


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
