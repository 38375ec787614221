"""Collectives within a group of ranks: shared memory on one host, else the process group.

Problem. Exchanges in the middle of a layer have hardly any work to overlap with. On CPUs gloo
copies every byte into the kernel and out again.

Idea. CPU ranks of one host exchange through memory that all of them map (shared_memory.py). Each
writes its tensor into its own stretch, announces it by a small all-reduce, and reads what it needs
from the others' stretches:

    rank 0   write slot 0 | announce | read slots 0 | write slot 1 | announce | read slots 1 | ...

Two slots are enough: a rank announces slot 1 only after reading slots 0, so when all have announced
slot 1, slots 0 are free. Sums are taken in rank order, so every rank has the same bits. The
announcements are also compared: ranks that make different calls end with an error. Whether ranks
share a host is found out by trying, not inferred from their number.

Sums of 16-bit numbers (autocast) are taken in fp32 and rounded once; rounded at every rank, small
terms would vanish. For this the process group sends fp32; shared memory stays 16-bit.

Cost, t ranks, a tensor of G bytes: in a group each rank sends 2 G (t-1)/t for an all-reduce, half
of that for the other two; in memory it writes G and reads up to t G. Two slots per rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.recorder import Recorder, acting
from runtime.shared_memory import SharedBuffers, add_up, aligned, sum_into, wide

Finish = Callable[[], Tensor]
"""Waits for a started collective and returns its result. Must be called before the next start."""

_SLOTS = 2
_ALL_REDUCE, _REDUCE_SCATTER, _ALL_GATHER = 1, 2, 3  # what ranks announce


class Ranks:
    """A group of ranks. All call the same methods in the same order, with tensors of the same
    shapes.

    Args:
        group: their process group; None: this rank is alone.
        share_memory: use shared memory between CPU ranks of one host, if possible.
        recorder: is told of every `all_reduce`, `reduce_scatter` and `all_gather`.

    Attributes:
        rank, size: this rank's number in the group, and the number of ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        share_memory: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        self.group, self.recorder = group, recorder
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._share = share_memory and self.size > 1
        self._memory: SharedBuffers | None = None
        self._slot_bytes = 0  # room in each slot
        self._turn = 0  # collectives through memory so far; odd and even ones have a slot each
        self._under_way = False  # announced, not yet waited for

    def start_all_reduce(self, x: Tensor) -> Finish:
        """Begins the sum of all ranks' `x`."""
        if self.size == 1:
            return lambda: x
        if not self._through_memory(x):
            total = x.to(wide(x), copy=True, memory_format=torch.contiguous_format)  # x is kept
            work = dist.all_reduce(total, group=self.group, async_op=True)
            return self._finish("all_reduce", work, lambda: total.to(x.dtype))
        wait = self._publish(x, _ALL_REDUCE)

        def result() -> Tensor:  # after the wait: all ranks' slots are written
            total = torch.empty_like(x, memory_format=torch.contiguous_format)
            parts = [self._view(r, x.shape, x.dtype).flatten() for r in range(self.size)]
            sum_into(parts, [total.view(-1)])
            return total

        return self._finish("all_reduce", wait, result)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`."""
        return self.start_all_reduce(x)()

    def start_reduce_scatter(self, x: Tensor, dim: int) -> Finish:
        """Begins to sum all ranks' `x`; the result is this rank's part of the sum along `dim`.
        The number of ranks must divide that dimension."""
        if self.size == 1:
            return lambda: x
        if not self._through_memory(x):
            whole = torch.cat(x.chunk(self.size, dim)).to(wide(x))  # parts by rank, along dim 0
            shape = self.part_of(x, dim).shape
            mine = torch.empty(shape, dtype=whole.dtype, device=x.device)  # rounded at the end
            work = reduce_scatter(mine, whole, group=self.group, async_op=True)
            return self._finish("reduce_scatter", work, lambda: mine.to(x.dtype))
        wait = self._publish(x, _REDUCE_SCATTER)

        def result() -> Tensor:
            views = [self._view(r, x.shape, x.dtype) for r in range(self.size)]  # by rank
            return add_up([self.part_of(view, dim) for view in views])

        return self._finish("reduce_scatter", wait, result)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part along `dim` of the sum of all ranks' `x`."""
        return self.start_reduce_scatter(x, dim)()

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' `x`, concatenated along `dim`."""
        if self.size == 1:
            return x
        if not self._through_memory(x):
            whole = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)  # by rank
            work = all_gather(whole.flatten(0, 1), x.contiguous(), group=self.group, async_op=True)
            return self._finish("all_gather", work, lambda: torch.cat(whole.unbind(), dim))()
        wait = self._publish(x, _ALL_GATHER)

        def result() -> Tensor:
            return torch.cat([self._view(r, x.shape, x.dtype) for r in range(self.size)], dim)

        return self._finish("all_gather", wait, result)()

    def part_of(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor along `dim`: a view."""
        size, rest = divmod(x.size(dim), self.size)
        if rest:
            raise ValueError(
                f"dimension {dim} of {tuple(x.shape)} is not a multiple of {self.size}"
            )
        return x.narrow(dim, self.rank * size, size)

    # Shared memory

    def _through_memory(self, x: Tensor) -> bool:
        if not self._share or x.device.type != "cpu":
            return False
        if self._memory is None or x.nbytes > self._slot_bytes:
            self._open(x.nbytes)  # also finds out whether memory can be shared
        return self._share

    def _open(self, nbytes: int) -> None:
        """Makes room for tensors of `nbytes`. Pages that are never touched take no memory."""
        self._slot_bytes = aligned(max(2 * nbytes, 1 << 24))  # 16 MiB or more
        self._memory = SharedBuffers.open(_SLOTS * self._slot_bytes, self.group)
        self._share = self._memory is not None

    def _publish(self, x: Tensor, what: int) -> Any:
        """Writes `x` where the others can read it, and announces it."""
        if self._under_way:
            raise RuntimeError("a collective is to be finished before the next one is started")
        self._turn += 1  # the other slot, which all have read
        self._view(self.rank, x.shape, x.dtype).copy_(x)  # before it is announced
        # A rank that announces another number makes another call: its tensor must not be used.
        mine = what + 4 * self._turn + (x.numel() % 2**12 << 40)  # call, turn, size
        said = torch.tensor([mine])
        work = dist.all_reduce(said, group=self.group, async_op=True)
        self._under_way = True

        def wait() -> None:
            work.wait()
            self._under_way = False
            if int(said) != self.size * mine:  # the sum of all ranks' numbers
                raise RuntimeError("the ranks diverged: they make different calls")

        return wait

    def _view(self, rank: int, shape: Any, dtype: torch.dtype) -> Tensor:
        """The tensor in a rank's slot of this turn."""
        assert self._memory is not None
        shape = torch.Size(shape)
        start = self._turn % _SLOTS * self._slot_bytes  # bytes
        return self._memory.view(rank, start, shape.numel(), dtype).view(shape)

    def _finish(self, kind: str, work: Any, result: Finish) -> Finish:
        start = time.perf_counter()

        def finish() -> Tensor:
            with acting(self.recorder, kind, start=start):
                work() if callable(work) else work.wait()
                return result()

        return finish


# Renamed in torch 2.13, which warns about the old names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
