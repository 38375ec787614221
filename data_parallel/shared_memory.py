"""Adds up the ranks' buckets where they lie: for CPU ranks on one machine.

Problem: on one machine gloo sends gradients through the loopback interface: the kernel copies
every byte in and out, and with a core per rank it does so on the core that should compute.
Nothing is hidden by starting early: the copies compete with backward itself.

Idea: every rank puts its buckets into memory that the others can map. Rank r adds part r of W of
all ranks' buckets, always in the order of ranks, and writes the mean into all of them:

    bucket of rank 0   [ part 0 | part 1 ]       rank 0 reads both parts 0, writes both parts 0
    bucket of rank 1   [ part 0 | part 1 ]       rank 1 reads both parts 1, writes both parts 1

Parts are disjoint, so nobody waits within a bucket. The process group only says *when*: a bucket
is summed after a small all-reduce of its flags, to which each rank comes when its bucket is
full, and gradients are used after a barrier. A dead rank is therefore noticed as before.

Cost: per rank, G bytes read and G written, whatever W; gloo's ring takes about four times the
copies. Memory: none beyond the buckets, but for 1 MiB.

Ownership: the memory is anonymous (a memfd). It has no name that could be left behind, and is
gone with the last process that maps it, however that ends. Others reach it through /proc, which
only works on one machine, for one user, on Linux: `SharedBuffers.open` returns None elsewhere.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK = 1 << 18  # elements added at a time: a part of a bucket that stays in cache
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector


def aligned(nbytes: int) -> int:
    """The next multiple of a cache line."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class SharedBuffers:
    """A stretch of memory per rank, each mapped by all ranks.

    Attributes:
        ranks: by rank, its memory as bytes.
    """

    def __init__(self, ranks: list[Tensor], rank: int, group: dist.ProcessGroup | None) -> None:
        self.ranks = ranks
        self.rank = rank
        self.group = group

    @classmethod
    def open(cls, nbytes: int, group: dist.ProcessGroup | None = None) -> SharedBuffers | None:
        """A buffer of `nbytes` for every rank of the group, zeroed; None where they cannot share
        memory. All ranks must call it together, and all get the same answer."""
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        secret = os.urandom(16)  # tells the file of this run from any other behind the same path
        mine, descriptor = _create(secret, nbytes)
        places: list[tuple[str, bytes]] = [("", b"")] * world_size
        dist.all_gather_object(places, (f"/proc/{os.getpid()}/fd/{descriptor}", secret), group)
        maps = [mine if r == rank else _attach(*places[r], nbytes) for r in range(world_size)]
        everywhere = torch.tensor([int(all(m is not None for m in maps))])
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)
        if descriptor >= 0:
            os.close(descriptor)  # the maps keep the memory
        if not everywhere.item():
            return None
        tensors = [torch.frombuffer(m, dtype=torch.uint8, offset=_ALIGNMENT) for m in maps if m]
        return cls(tensors, rank, group)

    def view(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements of a rank's memory, from byte `offset` on."""
        return self.ranks[rank][offset : offset + numel * dtype.itemsize].view(dtype)

    def average(self, parts: list[Tensor]) -> None:
        """Writes the mean of this rank's part of `parts`, which are one bucket as the ranks hold
        it, into all of them."""
        world_size = len(parts)
        numel = parts[0].numel()
        begin, end = (numel * r // world_size for r in (self.rank, self.rank + 1))
        for start in range(begin, end, _CHUNK):
            chunks = [part[start : min(end, start + _CHUNK)] for part in parts]
            mean = chunks[0] + chunks[1] if world_size > 1 else chunks[0].clone()
            for chunk in chunks[2:]:
                mean += chunk
            mean /= world_size
            for chunk in chunks:
                chunk.copy_(mean)


def _create(secret: bytes, nbytes: int) -> tuple[mmap.mmap | None, int]:
    """New memory that starts with the secret, and its descriptor; (None, -1) where there is no
    such thing."""
    if not hasattr(os, "memfd_create"):
        return None, -1
    descriptor = -1
    try:
        descriptor = os.memfd_create("gradients")
        os.ftruncate(descriptor, _ALIGNMENT + nbytes)
        os.pwrite(descriptor, secret, 0)
        return mmap.mmap(descriptor, _ALIGNMENT + nbytes), descriptor
    except OSError:  # a sandbox that forbids it, no descriptor or memory left
        if descriptor >= 0:
            os.close(descriptor)
        return None, -1


def _attach(path: str, secret: bytes, nbytes: int) -> mmap.mmap | None:
    """Another rank's memory, or None where `path` is not it."""
    try:
        with Path(path).open("r+b") as file:
            if file.read(len(secret)) != secret:
                return None
            return mmap.mmap(file.fileno(), _ALIGNMENT + nbytes)
    except (OSError, ValueError):
        return None
