"""Memory that is lent for a moment: a layer's gathered parameters, or its gradients in transit.

Allocating anew for each layer would cost a page fault per 4 KiB, and keeping memory for every layer
would undo the sharding. So returned memory is kept for reuse, in sizes that are powers of two.
If at most k tensors are lent at a time, the largest of L bytes, the pool holds at most 4 k L bytes.
Pages that are never written to take no memory. CUDA's allocator already keeps freed memory. So
there the pool keeps only tensors, which have memory while they are lent.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor


class Pool:
    """Lends flat tensors.

    Args:
        allocate: makes a tensor of that many bytes.
        keeps: whether a returned tensor keeps its memory until it is lent again. Otherwise the
            memory is freed and the tensor stays: its views are views of the memory it gets next.
    """

    def __init__(self, allocate: Callable[[int], Tensor], keeps: bool = True) -> None:
        self._allocate, self._keeps = allocate, keeps
        self._idle: dict[int, list[Tensor]] = {}  # by size in bytes
        self._lent: dict[int, Tensor] = {}  # by address

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Lends a tensor of at least one element. Its values are not set."""
        nbytes = numel * dtype.itemsize
        size = 1 << (nbytes - 1).bit_length() if self._keeps else nbytes
        idle = self._idle.get(size)
        memory = idle.pop() if idle else self._allocate(size)
        if not self._keeps:
            memory.untyped_storage().resize_(size)
        self._lent[memory.data_ptr()] = memory
        return memory[:nbytes].view(dtype)

    def give(self, x: Tensor) -> None:
        """Takes a tensor back, if it is lent."""
        memory = self._lent.pop(x.data_ptr(), None)
        if memory is None:
            return
        if not self._keeps:
            memory.untyped_storage().resize_(0)
        self._idle.setdefault(memory.nbytes, []).append(memory)


def private_pool(device: torch.device) -> Pool:
    """Lends memory of this rank alone."""
    on_cpu = device.type == "cpu"
    return Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device), on_cpu)


def return_freed_memory() -> None:
    """Makes glibc's malloc return freed memory to the system. Otherwise malloc would keep it for
    blocks of the same sizes, in addition to memory for other blocks."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
