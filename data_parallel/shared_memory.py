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
import weakref
from contextlib import suppress
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

    def __init__(
        self,
        maps: list[mmap.mmap],
        files: list[int],
        rank: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.ranks = [torch.frombuffer(m, dtype=torch.uint8, offset=_ALIGNMENT) for m in maps]
        self.rank = rank
        self.group = group
        self._mine = maps[rank]
        self._files = files
        weakref.finalize(self, _close, files)

    @classmethod
    def open(
        cls, nbytes: int, group: dist.ProcessGroup | None = None, readable: bool = False
    ) -> SharedBuffers | None:
        """A buffer of `nbytes` for every rank of the group, zeroed; None where they cannot share
        memory. All ranks must call it together, and all get the same answer. Memory is taken from
        the system page by page, when first written to.

        Args:
            readable: keeps a descriptor of each, so that `read` works.
        """
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        secret = os.urandom(16)  # tells the file of this run from any other behind the same path
        mine, descriptor = _create(secret, nbytes)
        places: list[tuple[str, bytes]] = [("", b"")] * world_size
        dist.all_gather_object(places, (f"/proc/{os.getpid()}/fd/{descriptor}", secret), group)
        found = [
            (mine, descriptor) if r == rank else _attach(*places[r], nbytes)
            for r in range(world_size)
        ]
        maps = [m for m, _ in found if m is not None]
        everywhere = torch.tensor([int(len(maps) == world_size)])
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)
        files = [file for _, file in found]
        if not (readable and everywhere.item()):
            _close(files)  # the maps keep the memory
            files = []
        return cls(maps, files, rank, group) if everywhere.item() else None

    @property
    def nbytes(self) -> int:
        """Of each rank's."""
        return self.ranks[self.rank].numel()

    def view(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements of a rank's memory, from byte `offset` on."""
        return self.ranks[rank][offset : offset + numel * dtype.itemsize].view(dtype)

    def read(self, rank: int, offset: int, into: Tensor) -> None:
        """Copies a rank's memory, from byte `offset` on, into a tensor of this one's. Unlike a
        copy out of the map, it leaves none of the other's pages among this process' own."""
        target = memoryview(into.view(torch.uint8).numpy().data)
        done = 0
        while done < len(target):
            done += os.preadv(self._files[rank], [target[done:]], _ALIGNMENT + offset + done)

    def discard(self, offset: int, nbytes: int) -> None:
        """Gives whole pages of this rank's memory back to the system; they read as zeros then."""
        begin, end = _ALIGNMENT + offset, _ALIGNMENT + offset + nbytes
        begin, end = (
            -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE,
            end // mmap.PAGESIZE * mmap.PAGESIZE,
        )
        if begin < end and hasattr(mmap, "MADV_REMOVE"):
            with suppress(OSError):
                self._mine.madvise(mmap.MADV_REMOVE, begin, end - begin)

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


def _attach(path: str, secret: bytes, nbytes: int) -> tuple[mmap.mmap | None, int]:
    """Another rank's memory and a descriptor of it; (None, -1) where `path` is not it."""
    try:
        with Path(path).open("r+b") as file:
            if file.read(len(secret)) != secret:
                return None, -1
            return mmap.mmap(file.fileno(), _ALIGNMENT + nbytes), os.dup(file.fileno())
    except (OSError, ValueError):
        return None, -1


def _close(files: list[int]) -> None:
    for file in files:
        if file >= 0:
            os.close(file)
