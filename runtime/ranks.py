"""Collectives among some ranks: through shared memory on one host, else by their process group.

Problem. What ranks exchange in the middle of a layer cannot be hidden behind other work. On CPUs
gloo copies every byte through the kernel, there and back.

Idea. CPU ranks of one host exchange through memory that all of them map (shared_memory.py). Each
writes what it has into its own stretch, says so by a small all-reduce, and reads what it needs from
the others':

    rank 0   write slot 0 | say | read slots 0 | write slot 1 | say | read slots 1 | write slot 0

Two slots are enough: who has heard that all have said "slot 1 is written" knows that all have read
slots 0. Sums are taken in the order of ranks, so every rank has the same bits. What ranks say is
also compared: ranks that make different calls end with an error. Which ranks share a host is found
out by trying, not concluded from how many there are.

Sums of 16-bit numbers, as autocast makes them, are taken in fp32 and rounded once: rounded at every
rank, small terms would vanish. A group is sent fp32 for it, memory is not.

Cost, t ranks, a tensor of G bytes: by the group an all-reduce sends 2 G (t-1)/t from each rank, the
other two half of that; through memory each writes G and reads t G. Two slots of memory per rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.recorder import Recorder, acting
from runtime.shared_memory import CHUNK, SharedBuffers, add_up, aligned, wide

Finish = Callable[[], Tensor]
"""Waits for what was started, and gives its result; nothing else may be started before."""

_SLOTS = 2
_ALL_REDUCE, _REDUCE_SCATTER, _ALL_GATHER = 1, 2, 3  # what ranks say they do


class Ranks:
    """Some ranks that work together. All call the same methods in the same order, with tensors of
    the same shapes.

    Args:
        group: their process group; None: this rank is alone.
        share_memory: CPU ranks of one host exchange through it, where they can.
        recorder: is told of every `all_reduce`, `reduce_scatter` and `all_gather`.

    Attributes:
        rank, size: this rank's number among them, and how many there are.
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
        self._slot_bytes = 0
        self._turn = 0
        self._under_way = False

    def start_all_reduce(self, x: Tensor) -> Finish:
        """Begins the sum of all ranks' `x`."""
        if self.size == 1:
            return lambda: x
        if not self._through_memory(x):
            total = x.to(wide(x), copy=True, memory_format=torch.contiguous_format)
            work = dist.all_reduce(total, group=self.group, async_op=True)
            return self._finish("all_reduce", work, lambda: total.to(x.dtype))
        wait = self._publish(x, _ALL_REDUCE)

        def result() -> Tensor:
            total = torch.empty_like(x, memory_format=torch.contiguous_format)
            parts = [self._view(r, x.shape, x.dtype).flatten() for r in range(self.size)]
            flat = total.view(-1)
            for begin in range(0, flat.numel(), CHUNK):  # a part that stays in cache
                here = slice(begin, begin + CHUNK)
                if wide(x) != x.dtype:
                    flat[here] = add_up([part[here] for part in parts])
                    continue
                torch.add(parts[0][here], parts[1][here], out=flat[here])
                for part in parts[2:]:
                    flat[here] += part[here]
            return total

        return self._finish("all_reduce", wait, result)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`."""
        return self.start_all_reduce(x)()

    def start_reduce_scatter(self, x: Tensor, dim: int) -> Finish:
        """Begins to sum all ranks' `x`; the result is this rank's part of the sum along `dim`,
        which the number of ranks must divide."""
        if self.size == 1:
            return lambda: x
        if not self._through_memory(x):
            whole = torch.cat(x.chunk(self.size, dim)).to(wide(x))
            shape = self.part_of(x, dim).shape
            mine = torch.empty(shape, dtype=whole.dtype, device=x.device)
            work = _reduce_scatter(mine, whole, group=self.group, async_op=True)
            return self._finish("reduce_scatter", work, lambda: mine.to(x.dtype))
        wait = self._publish(x, _REDUCE_SCATTER)

        def result() -> Tensor:
            views = [self._view(r, x.shape, x.dtype) for r in range(self.size)]
            return add_up([self.part_of(view, dim) for view in views])

        return self._finish("reduce_scatter", wait, result)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part along `dim` of the sum of all ranks' `x`."""
        return self.start_reduce_scatter(x, dim)()

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' `x`, of one shape, joined along `dim`."""
        if self.size == 1:
            return x
        if not self._through_memory(x):
            whole = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
            work = _all_gather(whole.flatten(0, 1), x.contiguous(), group=self.group, async_op=True)
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
        if self._memory is None:
            self._open(x.nbytes)  # also tells whether there is such a thing
        return self._share

    def _open(self, nbytes: int) -> None:
        """Room for tensors of so many bytes. Pages that are never used take no memory."""
        self._slot_bytes = aligned(max(2 * nbytes, 1 << 24))
        self._memory = SharedBuffers.open(_SLOTS * self._slot_bytes, self.group)
        self._share = self._memory is not None

    def _publish(self, x: Tensor, what: int) -> Any:
        """Lays `x`, of one shape on all ranks, out for the others and says so."""
        if self._under_way:
            raise RuntimeError("a collective is to be finished before the next one is started")
        if x.nbytes > self._slot_bytes:
            self._open(x.nbytes)
        self._turn += 1
        self._view(self.rank, x.shape, x.dtype).copy_(x)
        # Who says something else makes another call: what it has can be of no use to this one.
        mine = what + 4 * self._turn + (x.numel() % 2**16 << 40)
        said = torch.tensor([mine])
        work = dist.all_reduce(said, group=self.group, async_op=True)
        self._under_way = True

        def wait() -> None:
            work.wait()
            self._under_way = False
            if int(said) != self.size * mine:
                raise RuntimeError("the ranks have come apart: they make different calls")

        return wait

    def _view(self, rank: int, shape: Any, dtype: torch.dtype) -> Tensor:
        """What a rank has in the slot of this turn."""
        assert self._memory is not None
        shape = torch.Size(shape)
        start = self._turn % _SLOTS * self._slot_bytes
        return self._memory.view(rank, start, shape.numel(), dtype).view(shape)

    def _finish(self, kind: str, work: Any, result: Finish) -> Finish:
        start = time.perf_counter()

        def finish() -> Tensor:
            with acting(self.recorder, kind, start=start):
                work() if callable(work) else work.wait()
                return result()

        return finish


# Their names since torch 2.13; the older ones warn there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
