"""Collectives within a group of ranks: shared memory on one host, else the process group.

Problem. Exchanges in the middle of a layer have hardly any work to overlap with. On CPUs gloo
copies every byte into the kernel and out again.

Idea. CPU ranks of one host exchange through memory that all of them map (shared_memory.py). Each
writes its tensor into its own stretch, announces it, and reads what it needs from the others'
stretches:

    rank 0   write slot 0 | announce | read slots 0 | write slot 1 | announce | read slots 1 | ...

Two slots are enough: a rank announces slot 1 only after reading slots 0, so when all have announced
slot 1, slots 0 are free. Sums are taken in rank order, so every rank has the same bits. An
announcement says which call it is, its turn, and the size and type of its tensor: ranks that make
different calls end with an error. Whether ranks share a host is found out by trying, not inferred
from their number.

Each call can be started and finished later. A process group sends in between. Through memory
nothing happens in between: the tensor is written when the call starts, and read and added up when
it is finished; so a rank only waits less for one that is late.

Sums of 16-bit numbers (autocast) are taken in fp32 and rounded once; rounded at every rank, small
terms would vanish. For this the process group sends fp32; shared memory stays 16-bit.

A communicator also lends memory that lives longer than a call, and is exchanged in place
(buffers.py): for buckets of gradients, and for shards.

Cost, t ranks, a tensor of G bytes: in a group each rank sends 2 G (t-1)/t for an all-reduce, half
of that for the others; in memory it writes G and reads up to t G. Two slots per rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .buffers import Buffers, SharedBuffers, all_gather, start_reduce_scatter
from .recorder import Recorder, acting
from .shared_memory import SharedMemory, add_up, aligned, sum_into, wide
from .waits import control_device

Finish = Callable[[], Tensor]
"""Waits for a started collective and returns its result. Must be called before the next start."""

Started = tuple[Callable[[], object], Finish]
"""How to wait for a collective, and how to read its result then."""

Lengths = Sequence[Sequence[int]]
"""By sender and receiver."""

_SLOTS = 2


class Communicator:
    """A group of ranks. All call the same methods in the same order, with tensors of the same
    shapes; in an all-to-all their numbers of rows may differ.

    Args:
        group: their process group; None: this rank is alone.
        recorder: is told of every call. Through memory, of its start and its end, since nothing
            happens in between.

    Attributes:
        rank, size: this rank's number in the group, and the number of ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, recorder: Recorder | None = None
    ) -> None:
        self.group, self.recorder = group, recorder
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._share = self.size > 1
        self._memory: SharedMemory | None = None
        self._slot_bytes = -1  # room in each slot; -1: not opened
        self._turn = 0  # collectives through memory so far; odd and even ones have a slot each
        self._under_way = False  # one that is not finished yet

    def start_all_reduce(self, x: Tensor) -> Finish:
        """Begins the sum of all ranks' `x`."""
        return self._start("all_reduce", x, 0)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`."""
        return self.start_all_reduce(x)()

    def start_reduce_scatter(self, x: Tensor, dim: int) -> Finish:
        """Begins to sum all ranks' `x`; the result is this rank's part of the sum along `dim`.
        Raises ValueError if the number of ranks does not divide that dimension."""
        self.shard_of(x, dim)  # its rows might divide by chance, and wrong parts be sent
        return self._start("reduce_scatter", x, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part along `dim` of the sum of all ranks' `x`."""
        return self.start_reduce_scatter(x, dim)()

    def start_all_gather(self, x: Tensor, dim: int) -> Finish:
        """Begins to gather all ranks' `x`, concatenated along `dim`."""
        return self._start("all_gather", x, dim)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' `x`, concatenated along `dim`."""
        return self.start_all_gather(x, dim)()

    def start_all_to_all(self, x: Tensor, lengths: Lengths) -> Finish:
        """Begins to exchange rows, of which each rank may send and get another number.

        Args:
            x: this rank's rows, those for rank 0 first: lengths[rank][0] of them, and so on.
            lengths: by sender and receiver, the number of rows; the same on all ranks, for example
                from `gather_numbers`.

        Returns:
            What has the rows for this rank, those of rank 0 first.
        """
        return self._start("all_to_all", x, 0, lengths)

    def all_to_all(self, x: Tensor, lengths: Lengths) -> Tensor:
        """See `start_all_to_all`."""
        return self.start_all_to_all(x, lengths)()

    def gather_numbers(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """All ranks' numbers, by rank, of which each has as many. Waits for a GPU only if the group
        has no CPUs."""
        if self.group is not None:
            device = control_device(self.group, device)
        x = torch.tensor([numbers], device=device)
        gathered: list[list[int]] = self.all_gather(x, 0).tolist()
        return gathered

    def shard_of(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor along `dim`: a view. Raises ValueError if the number of
        ranks does not divide that dimension."""
        size, rest = divmod(x.size(dim), self.size)
        if rest:
            raise ValueError(
                f"dimension {dim} of {tuple(x.shape)} is not a multiple of {self.size}"
            )
        return x.narrow(dim, self.rank * size, size)

    def lend(
        self, nbytes: int, device: torch.device, comm_dtype: torch.dtype | None = None
    ) -> Buffers:
        """Room for tensors of `nbytes` together, each rounded up to a cache line, on a device. CPU
        ranks of one machine read each other's.

        Args:
            comm_dtype: the type in which averages are sent and summed; by default their own.
        """
        if device.type == "cpu" and comm_dtype is None:
            memory = SharedMemory.open(nbytes, self.group)  # None on all ranks, or on none
            if memory is not None:
                return SharedBuffers(memory, self.recorder)
        return Buffers(device, self.group, self.recorder, comm_dtype)

    def _start(self, kind: str, x: Tensor, dim: int, lengths: Lengths = ()) -> Finish:
        if self.size == 1:
            return lambda: x
        start: float | None = time.perf_counter()
        begin = self._in_group
        nbytes = x.nbytes
        if lengths:  # the same on all ranks
            nbytes = max(map(sum, lengths)) * math.prod(x.shape[1:]) * x.itemsize
        if self._through_memory(x.device, nbytes):
            begin, start = self._in_memory, None  # nothing happens until it is finished
        with acting(self.recorder, kind) if start is None else nullcontext():
            wait, result = begin(kind, x, dim, lengths)

        def finish() -> Tensor:
            with acting(self.recorder, kind, start=start):
                wait()
                return result()

        return finish

    def _in_group(self, kind: str, x: Tensor, dim: int, lengths: Lengths) -> Started:
        options: Any = {"group": self.group, "async_op": True}
        if kind == "all_reduce":
            total = x.to(wide(x), copy=True, memory_format=torch.contiguous_format)  # x is kept
            return dist.all_reduce(total, **options).wait, lambda: total.to(x.dtype)
        if kind == "reduce_scatter":
            parts = torch.cat(x.chunk(self.size, dim)).to(wide(x))  # by rank, along dim 0
            work, terms = start_reduce_scatter(parts, self.group)
            return work.wait, lambda: add_up(terms).to(x.dtype)
        if kind == "all_to_all":
            received = [row[self.rank] for row in lengths]
            rows = x.new_empty(sum(received), *x.shape[1:])
            sizes = received, list(lengths[self.rank])
            work = dist.all_to_all_single(rows, x.contiguous(), *sizes, **options)
            return work.wait, lambda: rows
        whole = x.new_empty(self.size, *x.shape)  # by rank
        work = all_gather(whole.flatten(0, 1), x.contiguous(), **options)
        return work.wait, lambda: torch.cat(whole.unbind(), dim)

    def _through_memory(self, device: torch.device, nbytes: int) -> bool:
        if self._share and device.type == "cpu" and nbytes > self._slot_bytes:
            # Pages that are never touched take no memory.
            self._slot_bytes = aligned(max(2 * nbytes, 1 << 24))  # 16 MiB or more
            self._memory = SharedMemory.open(_SLOTS * self._slot_bytes, self.group)
            self._share = self._memory is not None  # found out by the first call
        return self._share and device.type == "cpu"

    def _in_memory(self, kind: str, x: Tensor, dim: int, lengths: Lengths) -> Started:
        """Writes `x` where the others can read it, and announces it."""
        assert self._memory is not None
        if self._under_way:
            raise RuntimeError("finish a collective before the next one is started")
        self._under_way = True
        self._turn += 1  # the other slot, which all have read
        begin = self._turn % _SLOTS * self._slot_bytes
        shapes = [(sum(row), *x.shape[1:]) for row in lengths] or [x.shape] * self.size
        views = [  # by rank
            self._memory.view(r, begin, math.prod(shape), x.dtype).view(shape)
            for r, shape in enumerate(shapes)
        ]
        views[self.rank].copy_(x)  # before it is announced
        all_have_written = self._memory.announce(kind, lengths or x.numel(), x.dtype)

        def wait() -> None:
            self._under_way = False
            all_have_written()

        def result() -> Tensor:  # after the wait: all ranks' slots are written
            if kind == "all_gather":
                return torch.cat(views, dim)
            if kind == "all_to_all":
                by_sender = zip(views, lengths, strict=True)
                return torch.cat([view.split(list(row))[self.rank] for view, row in by_sender])
            if kind == "reduce_scatter":
                return add_up([self.shard_of(view, dim) for view in views])
            total = torch.empty_like(x, memory_format=torch.contiguous_format)
            sum_into([view.flatten() for view in views], [total.view(-1)])
            return total

        return wait, result
