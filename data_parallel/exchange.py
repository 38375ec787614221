"""How shards become whole parameters, and whole gradients shards.

Problem: before a layer computes, each rank needs all shards of its parameters (all-gather);
after its backward, each rank needs the sum of all ranks' gradients of its own shard
(reduce-scatter). Both are started early and finished late, so that they travel while the layers
before and after compute.

Idea: two ways behind one interface.

`GroupExchange` uses the collectives of the process group: NCCL between GPUs, gloo otherwise. Gloo's
own reduce-scatter is an all-reduce of which most is thrown away, 19.7 ms for 12.6 MB and two ranks
of one machine; an all-to-all of the parts, which are then added up here, takes 7.8 ms.

`SharedExchange` is for CPU ranks of one machine. Shards, and the buffers in which gradients are
handed over, lie in memory that the others can read, as in shared_memory.py: a gather copies the
other ranks' shards (0.6 ms where gloo takes 10), a reduction adds up the others' gradients where
they lie, in the order of ranks. There is no network to hide, so a gather copies when it is waited
for. The process group carries announcements, each a small all-reduce:

    rank 0   backward of layer 2 | announce 0 | backward of layer 1 | sum 2, announce 1 | ...
    rank 1   backward of layer 2  | announce 0 | backward of layer 1  | sum 2, announce 1 | ...

An announcement says: the gradients of this layer are in my memory, at this offset, and of all that
was announced before I have read my part. So a sum starts when its announcement has come from all,
which they had a layer's time for, and a buffer may be written to again when the *next* one has.

An announcement also says what a rank is doing, and every rank compares: ranks that do not make the
same calls end with an error, instead of adding up what does not belong together.

Cost, W ranks, a unit of G bytes: (W-1)/W G received for a gather, as much sent for a reduction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from data_parallel.buffers import Buffer, BufferPool
from data_parallel.sharding import Unit
from runtime.shared_memory import CHUNK, SharedBuffers, add_up, aligned

Finish = Callable[[], None]
"""Waits for what was started. To be called once, in the order of the starts."""

_UPDATING = -1  # what ranks announce, as below 0 an update, from 0 on gradients: `_describe`
_ARENA = 8  # buffers of the largest size per unit of a layer: far more than are ever lent at once


class Reduction(NamedTuple):
    """The gradients of a unit: `buffer` has them whole, `target` takes this rank's part."""

    unit: Unit
    buffer: Buffer
    target: Tensor
    accumulate: bool  # adds to what target holds


class Exchange(ABC):
    """Moves shards between the ranks of a group.

    Attributes:
        buffers: memory for whole units. What is reduced must lie in one of these.
        prefetch: whether a gather that is started early travels while others compute.
        waits: whether ranks wait for each other around an update.
    """

    buffers: BufferPool
    prefetch = True
    waits = False

    def __init__(
        self, units: Sequence[Unit], device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self.units = units
        self.device = device
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._announced = self._heard = 0  # how many announcements were made; came from all
        self._pending: deque[tuple[dist.Work, Tensor]] = deque()  # the difference

    @abstractmethod
    def storage(self, unit: Unit, whole: bool) -> Tensor:
        """Zeroed memory for this rank's shard of a unit, or for all of it; to be called once per
        unit, in their order."""

    @abstractmethod
    def start_gather(self, unit: Unit, shard: Tensor, whole: Tensor) -> Finish:
        """Fills `whole` with the shards of all ranks. `shard` may be this rank's part of it."""

    @abstractmethod
    def start_reduce(self, reductions: list[Reduction]) -> Finish:
        """Sums gradients over the ranks, all units of a layer at once. The reduction before must
        be finished."""

    @abstractmethod
    def before_update(self) -> None:
        """Until no rank reads this one's shards any more."""

    @abstractmethod
    def after_update(self, backwards: int = 0) -> None:
        """Until all ranks' shards are new, by gradients of so many backwards."""

    def _announce(self, what: int, starts: Sequence[int] = ()) -> tuple[int, Tensor]:
        """Tells all ranks what this one does, and where its gradients start. Returns the number of
        the announcement, and what is announced, by rank, once that number was waited for."""
        said = torch.zeros(self.world_size, 1 + _most_per_layer(self.units), dtype=torch.int64)
        said[self.rank, : 1 + len(starts)] = torch.tensor([what, *starts])
        said = said.to(self.device)
        work = dist.all_reduce(said, group=self.group, async_op=True)
        assert work is not None
        self._pending.append((work, said))
        self._announced += 1
        return self._announced - 1, said

    def _wait_for(self, number: int) -> None:
        """Until an announcement, and those before, have come from all.

        Raises:
            RuntimeError: the ranks do not do the same; again, whenever it is called again.
        """
        while self._heard <= number:
            work, said = self._pending[0]
            work.wait()
            self._compare(said[:, 0].tolist())
            self._pending.popleft()
            self._heard += 1

    def _compare(self, announced: list[int]) -> None:
        for rank, what in enumerate(announced):
            if what != announced[0]:
                raise RuntimeError(
                    f"the ranks have come apart: rank 0 {self._describe(announced[0])}, rank "
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
        index, accumulate = divmod(what, 2)
        which = "more" if accumulate else "the first"
        return f"adds up {which} gradients of {self.units[index].entries[0].name}"


class GroupExchange(Exchange):
    """By collectives."""

    def __init__(
        self, units: Sequence[Unit], device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(units, device, group)
        self.buffers = BufferPool(lambda n: torch.empty(n, dtype=torch.uint8, device=device))
        self._by_parts = dist.get_backend(group) == "gloo"
        # Their names since torch 2.13; the older ones warn there.
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def storage(self, unit: Unit, whole: bool) -> Tensor:
        numel = unit.numel if whole else unit.shard_numel
        return torch.zeros(numel, dtype=unit.compute_dtype, device=self.device)

    def start_gather(self, unit: Unit, shard: Tensor, whole: Tensor) -> Finish:
        del unit
        work = self._gather(whole, shard, group=self.group, async_op=True)
        return lambda: _wait(work)

    def start_reduce(self, reductions: list[Reduction]) -> Finish:
        return _all([self._start_one(reduction) for reduction in reductions])

    def _start_one(self, reduction: Reduction) -> Finish:
        unit, buffer, target, accumulate = reduction
        whole = buffer.view(unit.numel, unit.dtype)
        received = torch.empty_like(whole if self._by_parts else target)
        if self._by_parts:
            work = dist.all_to_all_single(received, whole, group=self.group, async_op=True)
        else:
            work = self._reduce(received, whole, group=self.group, async_op=True)

        def finish() -> None:
            _wait(work)
            _sum_into(target, list(received.view(-1, unit.shard_numel)), accumulate)

        return finish

    def before_update(self) -> None:
        pass  # a gather has sent this rank's shard when it is finished

    def after_update(self, backwards: int = 0) -> None:
        # Nobody need wait. That all say the same is seen the next time, when the answer is here.
        number, _ = self._announce(_UPDATING - 1 - backwards)
        self._wait_for(number - 1)


class SharedExchange(Exchange):
    """By reading each other's memory. Made by `open`."""

    prefetch = False
    waits = True

    def __init__(
        self, units: Sequence[Unit], memory: SharedBuffers, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(units, torch.device("cpu"), group)
        self.memory = memory
        self._end = 0  # of what is in use of the memory
        self._shards: list[int] = []  # by unit, where it, or this rank's whole of it, starts
        self._whole: list[bool] = []
        self._starts: list[int] = []  # by buffer
        self._gathered = False  # since the last reduction or update
        self.buffers = BufferPool(
            self._new_buffer,
            size=_largest(units),
            most=_ARENA * _most_per_layer(units),
            # The last announcement may still be on its way to others: rather another buffer.
            is_free=lambda buffer: buffer.fence < max(self._heard, self._announced - 1),
            wait=lambda buffer: self._wait_for(buffer.fence),
        )

    @classmethod
    def open(
        cls, units: Sequence[Unit], zero: int, group: dist.ProcessGroup | None = None
    ) -> SharedExchange | None:
        """None where the ranks cannot share memory. All must call it together."""
        # Address space: pages that are never written to take no memory.
        parameters = sum(aligned(unit.nbytes) for unit in units)
        gradients = sum(aligned(unit.gradient_nbytes) for unit in units) if zero == 1 else 0
        nbytes = parameters + gradients + _ARENA * _most_per_layer(units) * _largest(units)
        memory = SharedBuffers.open(nbytes, group, readable=True)
        return None if memory is None else cls(units, memory, group)

    def storage(self, unit: Unit, whole: bool) -> Tensor:
        numel = unit.numel if whole else unit.shard_numel
        self._shards.append(self._reserve(numel * unit.compute_dtype.itemsize))
        self._whole.append(whole)
        return self.memory.view(self.rank, self._shards[-1], numel, unit.compute_dtype)

    def start_gather(self, unit: Unit, shard: Tensor, whole: Tensor) -> Finish:
        def finish() -> None:
            self._gathered = True
            for rank in range(self.world_size):
                part = whole[unit.part(rank)]
                if rank != self.rank:
                    self.memory.read(rank, self._offset(unit, rank), part)
                elif part.data_ptr() != shard.data_ptr():
                    part.copy_(shard)

        return finish

    def start_reduce(self, reductions: list[Reduction]) -> Finish:
        # Each rank chooses its buffers for itself, so it says where they are.
        first, starts = reductions[0], [self._starts[r.buffer.index] for r in reductions]
        what = 2 * first.unit.index + first.accumulate
        self._gathered = False
        number, said = self._announce(what, starts)

        def finish() -> None:
            self._wait_for(number)
            starts_by_rank = said[:, 1 : 1 + len(reductions)].T.tolist()
            for (unit, buffer, target, accumulate), starts in zip(
                reductions, starts_by_rank, strict=True
            ):
                inside = unit.part(self.rank).start * unit.dtype.itemsize
                parts = [
                    self.memory.view(rank, start + inside, unit.shard_numel, unit.dtype)
                    for rank, start in enumerate(starts)
                ]
                _sum_into(target, parts, accumulate)
                buffer.fence = self._announced  # the next announcement says it was read

        return finish

    def before_update(self) -> None:
        if self._gathered:  # and no reduction since, as after an evaluation
            self._wait_for(self._announce(_UPDATING)[0])

    def after_update(self, backwards: int = 0) -> None:
        self._gathered = False
        self._wait_for(self._announce(_UPDATING - 1 - backwards)[0])

    def _offset(self, unit: Unit, rank: int) -> int:
        """Where the shard of a rank starts in its memory."""
        inside = unit.part(rank).start if self._whole[unit.index] else 0
        return self._shards[unit.index] + inside * unit.compute_dtype.itemsize

    def _reserve(self, nbytes: int) -> int:
        end = self._end + aligned(nbytes)
        if end > self.memory.nbytes:
            raise RuntimeError(
                f"{len(self._starts)} buffers of shared memory are in use, and it has no more: "
                "free_param_data gives a layer's back, and share_memory=False needs none"
            )
        start, self._end = self._end, end
        return start

    def _new_buffer(self, nbytes: int) -> Tensor:
        self._starts.append(self._reserve(nbytes))
        return self.memory.view(self.rank, self._starts[-1], nbytes, torch.uint8)


def _largest(units: Sequence[Unit]) -> int:
    return max(aligned(max(unit.nbytes, unit.gradient_nbytes)) for unit in units)


def _most_per_layer(units: Sequence[Unit]) -> int:
    return max(Counter(layer for unit in units for layer in unit.layers).values())


def _sum_into(target: Tensor, parts: list[Tensor], accumulate: bool) -> None:
    """The sum of `parts`, in their order, into `target`, which may be one of them."""
    for begin in range(0, target.numel(), CHUNK):
        here = slice(begin, begin + CHUNK)
        total = add_up([part[here] for part in parts])
        if accumulate:
            target[here] += total
        else:
            target[here] = total


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _all(finishes: list[Finish]) -> Finish:
    def finish() -> None:
        for one in finishes:
            one()

    return finish
