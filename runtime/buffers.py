"""Memory whose contents the ranks of a group gather, average and sum up in place.

Problem. Buckets of gradients and shards of parameters live as long as the model. A collective that
returns a new tensor would copy them every time; and the sums of one layer should travel while the
next one computes.

Idea. A communicator lends such memory, and whoever has it starts exchanges of it, to be finished
later. `Buffers` exchanges through the process group: NCCL between GPUs, gloo otherwise. Gloo's own
reduce-scatter is an all-reduce that throws most of the result away: 19.7 ms for 12.6 MB and two
ranks of one machine. An all-to-all of the parts, added up here, takes 7.8 ms.

`SharedBuffers` is for CPU ranks of one machine, which read each other's memory (shared_memory.py):
nothing travels. To start an exchange is to announce that this rank's memory may be read: eight
bytes. Reading and adding happen when it is finished, on the core that computes: so nothing overlaps
there, but a rank that is late is waited for later. A gather takes 0.6 ms where gloo takes 10.

    rank 0   backward of layer 2 | announce 2 | backward of layer 1 | sum 2, announce 1 | ...
    rank 1   backward of layer 2  | announce 2 | backward of layer 1  | sum 2, announce 1 | ...

To announce a sum means two things: its terms are in my memory, and I have read my part of all that
was announced before. So memory is reused once the *next* announcement has come from all. Sums are
taken in rank order: all ranks have the same bits. Ranks that announce different calls end with an
error instead of a wrong sum.

Cost, W ranks, G bytes: a gather receives (W-1)/W G, a sum sends as much, an average both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .recorder import Recorder, acting
from .shared_memory import SharedMemory, Wait, refuse_copies, require_agreement, sum_into
from .waits import control_device


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


class Sum(NamedTuple):
    """A flat tensor in memory of `Buffers.terms`, the same size on all ranks. Each rank gets its
    part of the sum in `target`."""

    whole: Tensor
    target: Tensor
    accumulate: bool  # add to `target` instead of overwriting it
    lent: Tensor  # the memory of `whole`, which goes back to `terms`


class Buffers:
    """Memory on one device, exchanged through a process group. `Communicator.lend` makes it.

    Args:
        comm_dtype: the type in which averages are sent and summed; by default the tensors' own.
        recorder: is told of every `barrier` of ranks that read each other's memory.

    Attributes:
        scratch: lends memory for one rank's own use.
        terms: lends memory for what is to be summed.
        overlaps: whether what was started travels while this rank computes.
    """

    overlaps = True

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None,
        recorder: Recorder | None = None,
        comm_dtype: torch.dtype | None = None,
    ) -> None:
        self.device, self.group = device, group
        self.recorder, self.comm_dtype = recorder, comm_dtype
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.scratch = self.terms = Pool(
            lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device),
            keep=device.type == "cpu",
        )
        self._hear_last: Wait = lambda: None  # the comparison before

    __getstate__ = refuse_copies

    def keep(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory, never given back. All ranks ask for the same sizes in the same order."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def start_average(self, x: Tensor) -> Wait:
        """Begins to replace a flat tensor from `keep` by its mean over the ranks, which all may
        read after the next `barrier`."""
        sent = x if self.comm_dtype is None else x.to(self.comm_dtype)
        work = dist.all_reduce(sent, group=self.group, async_op=True)

        def finish() -> None:
            work.wait()
            if sent is not x:
                x.copy_(sent)
            x.div_(self.size)

        return finish

    def start_gather(self, shard: Tensor, whole: Tensor) -> Wait:
        """Begins to fill `whole` with all ranks' shards, from `keep`. `shard` may be this rank's
        part of `whole`. No rank may change its shard before the next `barrier`."""
        return all_gather(whole, shard, group=self.group, async_op=True).wait  # whole: by rank

    def start_sums(self, sums: Sequence[Sum]) -> Wait:
        """Begins to sum tensors over the ranks. The ones before must be finished."""
        started = [
            start_reduce_scatter(s.whole, self.group, None if s.accumulate else s.target)
            for s in sums
        ]

        def finish() -> None:
            for (work, terms), s in zip(started, sums, strict=True):
                work.wait()
                if terms[0] is not s.target:  # else the sum is there
                    sum_into(terms, [s.target], accumulate=s.accumulate)
                self.terms.give(s.lent)  # sent: nobody needs it any more

        return finish

    def barrier(self) -> None:
        """Waits for all ranks, if they read each other's memory."""

    def compare(self, number: int) -> None:
        """Call after the memory has changed, with a number that must be the same on all ranks, such
        as how many steps led to it. Through a group it does not block, and a difference shows at
        the next call. It is a `barrier`, too."""
        self._hear_last()
        said = torch.tensor([number, -number], device=control_device(self.group, self.device))
        work = dist.all_reduce(said, dist.ReduceOp.MAX, group=self.group, async_op=True)

        def hear() -> None:
            work.wait()
            require_agreement(not said.sum())  # the largest number less the smallest

        self._hear_last = hear


class SharedBuffers(Buffers):
    """The buffers of CPU ranks that read each other's memory."""

    overlaps = False

    def __init__(self, memory: SharedMemory, recorder: Recorder | None) -> None:
        super().__init__(torch.device("cpu"), memory.group, recorder)
        self.memory = memory
        self._being_read: list[Tensor] = []  # lent for the last sums
        self.terms = Pool(lambda nbytes: self.keep(nbytes, torch.uint8))  # the others read them

    def keep(self, numel: int, dtype: torch.dtype) -> Tensor:
        """At the same place on all ranks."""
        return self.memory.take(numel, dtype)

    def start_average(self, x: Tensor) -> Wait:
        """Announces that `x` may be read. Rank r averages part r of W, in all ranks' memory:

            memory of rank 0   [ part 0 | part 1 ]     rank 0 reads and writes both parts 0
            memory of rank 1   [ part 0 | part 1 ]     rank 1 reads and writes both parts 1

        Parts are disjoint, so nobody waits. A rank reads G bytes and writes G, for any W.
        """
        all_have_written = self.memory.announce("average", len(x), x.dtype)

        def finish() -> None:
            all_have_written()
            begin, end = (len(x) * r // self.size for r in (self.rank, self.rank + 1))  # elements
            parts = self.memory.by_rank(x[begin:end])
            sum_into(parts, parts, divisor=self.size)

        return finish

    def start_gather(self, shard: Tensor, whole: Tensor) -> Wait:
        """Reads when it is finished, without an announcement."""
        parts = whole.chunk(self.size)  # by rank
        in_place = parts[self.rank].data_ptr() == shard.data_ptr()

        def finish() -> None:
            for rank, part in enumerate(parts):
                if rank != self.rank:
                    self.memory.read(rank, part if in_place else shard, part)
                elif not in_place:
                    part.copy_(shard)

        return finish

    def start_sums(self, sums: Sequence[Sum]) -> Wait:
        """Announces that the terms may be read; sums when it is finished."""
        calls = [(len(s.whole), s.whole.dtype) for s in sums]
        all_have_written = self.memory.announce("sum", *calls)

        def finish() -> None:
            all_have_written()  # so all have read everything announced before
            for memory in self._being_read:
                self.terms.give(memory)
            self._being_read = [s.lent for s in sums]
            for s in sums:
                part = s.whole.chunk(self.size)[self.rank]
                by_rank = self.memory.by_rank(part)
                sum_into(by_rank, [s.target], accumulate=s.accumulate)  # nobody else reads target

        return finish

    def barrier(self) -> None:
        """All ranks have read what they need of my memory, or written what I need of theirs."""
        self.compare(0)

    def compare(self, number: int) -> None:
        """Waits for all ranks, and compares the number."""
        with acting(self.recorder, "barrier"):
            self.memory.announce("barrier", number)()


def start_reduce_scatter(
    whole: Tensor, group: dist.ProcessGroup | None, target: Tensor | None = None
) -> tuple[Any, list[Tensor]]:
    """Begins to sum all ranks' `whole`, of which each rank gets a part along the first dimension.

    Gloo's own is an all-reduce that throws most of the result away. There the ranks exchange their
    parts, and each adds up what it gets.

    Args:
        target: memory for this rank's part of the sum, where the group sums.

    Returns:
        What to wait for; and then the terms of this rank's part: of gloo one of each rank, else the
        sum alone, in `target` if it is given.
    """
    size = dist.get_world_size(group)
    if dist.get_backend(group) == "gloo":
        terms = torch.empty_like(whole)  # by rank
        work = dist.all_to_all_single(terms, whole, group=group, async_op=True)
        return work, list(terms.chunk(size))
    if target is None:
        target = whole.new_empty(whole.size(0) // size, *whole.shape[1:])
    return dist.reduce_scatter_single(target, whole, group=group, async_op=True), [target]


all_gather: Any = dist.all_gather_single  # torch 2.13 warns about its older name
