"""Memory that is lent for a moment: a layer's gathered parameters, or its gradients on their way.

Problem: with parameters sharded, each layer needs memory for its whole parameters, twice per
step, for as long as it computes. Allocating it anew each time costs the kernel a page fault per
4 KiB; keeping it for every layer would undo the sharding.

Idea: a few buffers that the layers use in turn. Each rank chooses its own; where its gradients lie
in shared memory it tells the others (see exchange.py).

Cost: as much as the largest layers that are lent memory at the same time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Buffer:
    """Memory of a pool.

    Attributes:
        memory: bytes, at least as many as were asked for.
        touched: how many of them have been in use so far.
        fence: the number of the announcement (see exchange.py) after which no other rank reads it.
    """

    def __init__(self, index: int, memory: Tensor) -> None:
        self.index = index
        self.memory = memory
        self.touched = 0
        self.fence = -1

    def view(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Its first `numel` elements."""
        return self.memory[: numel * dtype.itemsize].view(dtype)


class BufferPool:
    """Lends buffers and takes them back.

    Args:
        allocate: a new stretch of so many bytes.
        size, most: of the buffers that are lent: the least they are allocated with, and how many
            there should be.
        is_free: whether the other ranks have, or are about to have, finished with a buffer.
        wait: until they have.
    """

    def __init__(
        self,
        allocate: Callable[[int], Tensor],
        size: int = 0,
        most: int = 1 << 30,
        is_free: Callable[[Buffer], bool] = lambda _: True,
        wait: Callable[[Buffer], None] = lambda _: None,
    ) -> None:
        self.peak_bytes = 0
        self._allocate, self._size, self._most = allocate, size, most
        self._is_free, self._wait = is_free, wait
        self._buffers: list[Buffer] = []
        self._idle: list[Buffer] = []

    @property
    def held_bytes(self) -> int:
        """Lent or kept for the next."""
        return sum(buffer.touched for buffer in self._buffers)

    def take(self, nbytes: int) -> Buffer:
        """Lends a buffer: of those that fit, or would have to grow, the one that wastes least."""
        free = [b for b in self._idle if self._is_free(b)]
        # Small layers leave the large buffers alone, or every buffer would become large.
        close = [b for b in free if b.touched <= 4 * nbytes + 4096]
        if not close and (len(self._buffers) < self._most or not free):
            return self._add(max(nbytes, self._size), nbytes)
        buffer = min(close or free, key=lambda b: (abs(b.touched - nbytes), b.fence, b.index))
        self._idle.remove(buffer)
        self._wait(buffer)
        if buffer.memory.numel() < nbytes:
            buffer.memory = self._allocate(nbytes)
        self._touch(buffer, nbytes)
        return buffer

    def keep(self, nbytes: int) -> Buffer:
        """A buffer for good."""
        return self._add(nbytes, nbytes)

    def _add(self, nbytes: int, touched: int) -> Buffer:
        buffer = Buffer(len(self._buffers), self._allocate(nbytes))
        self._buffers.append(buffer)
        self._touch(buffer, touched)
        return buffer

    def _touch(self, buffer: Buffer, nbytes: int) -> None:
        buffer.touched = max(buffer.touched, nbytes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def give(self, buffer: Buffer) -> None:
        """Takes a buffer back."""
        self._idle.append(buffer)
