"""Gathers shards into whole parameters, and reduces whole gradients to shards.

Problem: before a layer computes, each rank needs all shards of its parameters (all-gather);
after its backward, the sum of all ranks' gradients of its own shard (reduce-scatter). Both start
early and finish late, so that they overlap with the computation of neighbouring layers.

Idea: `Exchange` uses the collectives of the process group: NCCL between GPUs, gloo otherwise.
Gloo's own reduce-scatter is an all-reduce that throws most of the result away: 19.7 ms for 12.6 MB
and two ranks of one machine. An all-to-all of the parts, added up here, takes 7.8 ms.

`SharedExchange` is for CPU ranks of one machine, which read each other's shards and gradients
(runtime/shared_memory.py). A gather copies when it is waited for: 0.6 ms where gloo takes 10. A
reduction adds up the others' gradients in place, in rank order. Only announcements are sent:

    rank 0   backward of layer 2 | announce 2 | backward of layer 1 | sum 2, announce 1 | ...
    rank 1   backward of layer 2  | announce 2 | backward of layer 1  | sum 2, announce 1 | ...

To announce a layer means two things: its gradients are in my memory, and I have read my part of all
that was announced before. A sum starts when its announcement has come from all ranks, which had a
layer's time for it. Memory is reused once the *next* announcement has come from all. Ranks that
announce different things end with an error instead of a wrong sum.

Cost, W ranks, a unit of G bytes: a gather receives (W-1)/W G, a reduction sends as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.communicator import all_gather, start_comparison, start_reduce_scatter
from runtime.shared_memory import SharedBuffers, aligned, sum_into
from runtime.waits import control_device

from .flat import Unit

Wait = Callable[[], None]
"""Waits for a started exchange. Call each once, in the order of the starts."""


class Pool:
    """Lends memory for a moment: a layer's gathered parameters, or its gradients in transit.

    Allocating anew for each layer would cost a page fault per 4 KiB, and keeping memory for every
    layer would undo the sharding. So returned memory is kept for reuse, in sizes that are powers of
    two: in all at most four times the largest blocks lent at the same time. Pages that are never
    written to take no memory. CUDA's own allocator keeps memory already.
    """

    def __init__(self, allocate: Callable[[int], Tensor], keep: bool = True) -> None:
        self._allocate, self._keep = allocate, keep
        self._idle: dict[int, list[Tensor]] = {}  # by size in bytes

    def take(self, nbytes: int) -> Tensor:
        """Lends at least `nbytes` bytes."""
        size = 1 << (nbytes - 1).bit_length() if self._keep else nbytes  # a power of two, if kept
        idle = self._idle.get(size)
        return idle.pop() if idle else self._allocate(size)

    def give(self, memory: Tensor) -> None:
        """Takes it back."""
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
    lent: Tensor  # the memory of `whole`, to be returned to the pool


class Exchange:
    """Moves shards between the ranks of a group, by its collectives.

    Attributes:
        parameters, gradients: memory for whole units. Gradients must be taken from `gradients`.
        prefetch: whether a gather that starts early overlaps with computation.
    """

    prefetch = True

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.device, self.group = device, group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.parameters = self.gradients = Pool(
            lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device),
            keep=device.type == "cpu",
        )
        self._hear_last: Wait = lambda: None  # the announcement of the update before

    def storage(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory, never given back. All ranks ask for the same sizes in the same order."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def start_gather(self, shard: Tensor, whole: Tensor) -> Wait:
        """Fills `whole` with all ranks' shards. `shard` may be this rank's part of `whole`."""
        return all_gather(whole, shard, group=self.group, async_op=True).wait  # whole: by rank

    def start_reduce(self, reductions: list[Reduction]) -> Wait:
        """Sums gradients over the ranks, all units of a layer at once. The previous reduction must
        be finished."""
        started = [
            start_reduce_scatter(r.whole, self.group, None if r.accumulate else r.target)
            for r in reductions
        ]

        def finish() -> None:
            for (work, terms), reduction in zip(started, reductions, strict=True):
                work.wait()
                if terms[0] is not reduction.target:  # else the sum is there
                    sum_into(terms, [reduction.target], accumulate=reduction.accumulate)
                self.gradients.give(reduction.lent)  # sent: nobody needs it any more

        return finish

    def compare(self, backwards: int) -> None:
        """Call after each update, with the number of backwards it used: all ranks must have as
        many. Does not block: the answer comes at the next update."""
        self._hear_last()
        self._hear_last = self._announce(-backwards)

    def _announce(self, what: int) -> Wait:
        """Tells all ranks what this one does. The result waits until all have told the same.

        It raises RuntimeError if they have not.
        """
        agreed = self._comparison(what)

        def wait() -> None:
            if not agreed():
                raise RuntimeError(
                    "the ranks diverged: all must make the same calls, with forward(None) and "
                    "backward(None) where they have no examples"
                )

        return wait

    def _comparison(self, what: int) -> Callable[[], bool]:
        return start_comparison(what, self.group, control_device(self.group, self.device))


class SharedExchange(Exchange):
    """By reading each other's memory. Use `open` to make one."""

    prefetch = False

    def __init__(self, memory: SharedBuffers) -> None:
        super().__init__(torch.device("cpu"), memory.group)
        self.memory = memory
        self._being_read: list[Tensor] = []  # lent to the last reduction
        self.gradients = Pool(lambda nbytes: self.storage(nbytes, torch.uint8))  # the others read

    @classmethod
    def open(
        cls, units: Sequence[Unit], group: dist.ProcessGroup | None = None
    ) -> SharedExchange | None:
        """None if the ranks cannot share memory. All must call it together."""
        # Address space: all parameters; and the gradients of two layers at a time, in blocks
        # rounded up to a power of two.
        nbytes = sum(aligned(unit.nbytes) + 4 * aligned(unit.gradient_nbytes) for unit in units)
        memory = SharedBuffers.open(nbytes, group)
        return None if memory is None else cls(memory)

    def storage(self, numel: int, dtype: torch.dtype) -> Tensor:
        """At the same place on all ranks."""
        return self.memory.take(numel, dtype)

    def start_gather(self, shard: Tensor, whole: Tensor) -> Wait:
        """Reads when it is waited for. No rank may change its shard before the next barrier."""
        parts = whole.chunk(self.world_size)  # by rank
        in_place = parts[self.rank].data_ptr() == shard.data_ptr()  # zero 2

        def finish() -> None:
            for rank, part in enumerate(parts):
                if rank != self.rank:
                    self.memory.read(rank, part if in_place else shard, part)
                elif not in_place:
                    part.copy_(shard)

        return finish

    def start_reduce(self, reductions: list[Reduction]) -> Wait:
        """Announces that these gradients may be read; sums when it is waited for."""
        first = reductions[0]
        all_have_announced = self._announce(1 + 2 * first.unit.index + first.accumulate)

        def finish() -> None:
            all_have_announced()  # so all have read everything announced before
            for memory in self._being_read:  # of the reduction before this one
                self.gradients.give(memory)
            self._being_read = [r.lent for r in reductions]
            for unit, whole, target, accumulate, _ in reductions:
                parts = self.memory.by_rank(whole[unit.part(self.rank)])  # this shard's gradients
                sum_into(parts, [target], accumulate=accumulate)  # no other rank reads target

        return finish

    def compare(self, backwards: int) -> None:
        """Also a barrier. Before an update (0): all ranks have read my old shards. After it: all
        have written their new ones."""
        self._announce(-backwards)()

    def _comparison(self, what: int) -> Callable[[], bool]:
        return self.memory.announce(what)
