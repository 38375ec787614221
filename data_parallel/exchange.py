"""How shards become whole parameters, and whole gradients shards.

Problem: before a layer computes, each rank needs all shards of its parameters (all-gather);
after its backward, each rank needs the sum of all ranks' gradients of its own shard
(reduce-scatter). Both are started early and finished late, so that they travel while the layers
before and after compute.

Idea: two ways behind one interface.

`GroupExchange` uses the collectives of the process group: NCCL between GPUs, gloo otherwise. Gloo's
own reduce-scatter is an all-reduce of which most is thrown away, 19.7 ms for 12.6 MB and two ranks
of one machine; an all-to-all of the parts, which are then added up here, takes 7.8 ms.

`SharedExchange` is for CPU ranks of one machine. Shards and gradients lie in memory that the others
can read (runtime/shared_memory.py): a gather copies the other ranks' shards (0.6 ms where gloo
takes 10), a reduction adds up the others' gradients where they lie, in the order of ranks. There
is no network to hide, so a gather copies when it is waited for. The process group only carries
announcements, each a small all-reduce:

    rank 0   backward of layer 2 | announce 0 | backward of layer 1 | sum 0, announce 1 | ...
    rank 1   backward of layer 2  | announce 0 | backward of layer 1  | sum 0, announce 1 | ...

An announcement says: this layer's gradients are in my memory, and I have read my part of all that
was announced before. So a sum starts when its announcement has come from all ranks, which had a
layer's time for it, and memory is written to again once the *next* one has. All ranks take memory
in the same order, so what one has at an offset, the others have there too.

An announcement also says what a rank is doing, and every rank compares: ranks that do not make the
same calls end with an error, instead of adding up what does not belong together.

Cost, W ranks, a unit of G bytes: (W-1)/W G received for a gather, as much sent for a reduction.
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
from runtime.shared_memory import SharedBuffers, aligned, sum_into

Finish = Callable[[], None]
"""Waits for what was started. To be called once, in the order of the starts."""

_UPDATING = -1  # what ranks announce, as below 0 an update, from 0 on gradients: `_describe`


class Pool:
    """Lends memory for a moment: a layer's gathered parameters, or its gradients on their way.

    Allocating it anew for each layer would cost the kernel a page fault per 4 KiB, and keeping it
    for every layer would undo the sharding. So what is given back is kept for others, by sizes of
    powers of two: altogether at most four times the largest that are lent at the same time. Pages
    that are never written to take no memory. CUDA's own allocator keeps memory already.

    Attributes:
        peak_bytes: the most that was lent at the same time.
    """

    def __init__(self, allocate: Callable[[int], Tensor], keep: bool = True) -> None:
        self.peak_bytes = 0
        self._allocate, self._keep = allocate, keep
        self._idle: dict[int, list[Tensor]] = {}
        self._lent_bytes = 0

    def take(self, nbytes: int) -> Tensor:
        """Bytes, `nbytes` or more of them."""
        size = 1 << (nbytes - 1).bit_length() if self._keep else nbytes
        idle = self._idle.get(size)
        self._lent_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._lent_bytes)
        return idle.pop() if idle else self._allocate(size)

    def give(self, memory: Tensor) -> None:
        """Takes it back."""
        self._lent_bytes -= memory.nbytes
        if self._keep:
            self._idle.setdefault(memory.nbytes, []).append(memory)


class Reduction(NamedTuple):
    """The gradients of a unit: `whole` has them, flat, `target` takes this rank's part."""

    unit: Unit
    whole: Tensor
    target: Tensor
    accumulate: bool  # adds to what target holds
    lent: Tensor | None = None  # the memory of `whole`, to be given back


class Exchange(ABC):
    """Moves shards between the ranks of a group.

    Attributes:
        parameters, gradients: memory for whole units. Lent gradients must lie in the latter.
        prefetch: whether a gather that is started early travels while others compute.
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
        self._announced = self._heard = 0  # how many announcements were made; came from all
        self._pending: deque[tuple[dist.Work, Tensor]] = deque()  # the difference

    @abstractmethod
    def storage(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory for good. All ranks ask for the same, in the same order."""

    @abstractmethod
    def start_gather(self, unit: Unit, shard: Tensor, whole: Tensor) -> Finish:
        """Fills `whole` with the shards of all ranks. `shard` may be this rank's part of it."""

    @abstractmethod
    def start_reduce(self, reductions: list[Reduction]) -> Finish:
        """Sums gradients over the ranks, all units of a layer at once. The reduction before must
        be finished."""

    @abstractmethod
    def before_update(self) -> None:
        """Waits until no rank reads this one's shards any more."""

    @abstractmethod
    def after_update(self, backwards: int = 0) -> None:
        """Waits until all ranks' shards are new, by gradients of so many backwards."""

    def _empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _announce(self, what: int) -> int:
        """Tells all ranks what this one does. Returns the number of the announcement."""
        said = torch.zeros(self.world_size, dtype=torch.int64)
        said[self.rank] = what
        said = said.to(self.device)
        work = dist.all_reduce(said, group=self.group, async_op=True)
        assert work is not None
        self._pending.append((work, said))
        self._announced += 1
        return self._announced - 1

    def _wait_for(self, number: int) -> None:
        """Until an announcement, and those before, have come from all.

        Raises:
            RuntimeError: the ranks do not do the same; again, whenever it is called again.
        """
        while self._heard <= number:
            work, said = self._pending[0]
            work.wait()
            self._compare(said.tolist())
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
        self.gradients = self.parameters
        self._by_parts = dist.get_backend(group) == "gloo"
        # Their names since torch 2.13; the older ones warn there.
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def storage(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def start_gather(self, unit: Unit, shard: Tensor, whole: Tensor) -> Finish:
        del unit
        work = self._gather(whole, shard, group=self.group, async_op=True)
        return lambda: _wait(work)

    def start_reduce(self, reductions: list[Reduction]) -> Finish:
        finishes = [self._start_one(reduction) for reduction in reductions]

        def finish() -> None:
            for one in finishes:
                one()

        return finish

    def _start_one(self, reduction: Reduction) -> Finish:
        unit, whole, target, accumulate, lent = reduction
        received = torch.empty_like(whole if self._by_parts else target)
        if self._by_parts:
            work = dist.all_to_all_single(received, whole, group=self.group, async_op=True)
        else:
            work = self._reduce(received, whole, group=self.group, async_op=True)

        def finish() -> None:
            _wait(work)
            sum_into(list(received.view(-1, unit.shard_numel)), [target], accumulate=accumulate)
            if lent is not None:
                self.gradients.give(lent)

        return finish

    def before_update(self) -> None:
        pass  # a gather has sent this rank's shard when it is finished

    def after_update(self, backwards: int = 0) -> None:
        # Nobody need wait. That all say the same is seen the next time, when the answer is here.
        self._wait_for(self._announce(_UPDATING - 1 - backwards) - 1)


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
        self._gathered = False  # since the last reduction or update
        self._being_read: list[Tensor] = []  # lent to the last reduction
        self.gradients = Pool(lambda nbytes: self.storage(nbytes, torch.uint8))

    @classmethod
    def open(
        cls, units: Sequence[Unit], group: dist.ProcessGroup | None = None
    ) -> SharedExchange | None:
        """None where the ranks cannot share memory. All must call it together."""
        # Address space: parameters, and of the gradients either all, or for two layers at a time
        # memory that is rounded up to a power of two.
        nbytes = sum(aligned(unit.nbytes) + 4 * aligned(unit.gradient_nbytes) for unit in units)
        memory = SharedBuffers.open(nbytes, group, readable=True)
        return None if memory is None else cls(units, memory, group)

    def storage(self, numel: int, dtype: torch.dtype) -> Tensor:
        start, self._end = self._end, self._end + aligned(numel * dtype.itemsize)
        return self.memory.view(self.rank, start, numel, dtype)

    def start_gather(self, unit: Unit, shard: Tensor, whole: Tensor) -> Finish:
        in_place = whole[unit.part(self.rank)].data_ptr() == shard.data_ptr()

        def finish() -> None:
            self._gathered = True
            for rank in range(self.world_size):
                part = whole[unit.part(rank)]
                if rank != self.rank:
                    offset = self.memory.offset(part if in_place else shard)
                    self.memory.read(rank, offset, part)
                elif not in_place:
                    part.copy_(shard)

        return finish

    def start_reduce(self, reductions: list[Reduction]) -> Finish:
        first = reductions[0]
        self._gathered = False
        number = self._announce(2 * first.unit.index + first.accumulate)

        def finish() -> None:
            self._wait_for(number)  # so all have read what was announced before
            for memory in self._being_read:
                self.gradients.give(memory)
            self._being_read = [r.lent for r in reductions if r.lent is not None]
            for unit, whole, target, accumulate, _ in reductions:
                offset = self.memory.offset(whole[unit.part(self.rank)])
                parts = [
                    self.memory.view(rank, offset, unit.shard_numel, unit.dtype)
                    for rank in range(self.world_size)
                ]
                sum_into(parts, [target], accumulate=accumulate)

        return finish

    def before_update(self) -> None:
        if self._gathered:  # and no reduction since, as after an evaluation
            self._wait_for(self._announce(_UPDATING))

    def after_update(self, backwards: int = 0) -> None:
        self._gathered = False
        self._wait_for(self._announce(_UPDATING - 1 - backwards))


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
