"""Memory that the CPU ranks of one host share: a stretch of each, mapped by all.

Problem: on one machine gloo sends through the loopback interface: the kernel copies every byte in
and out, and with a core per rank it does so on the core that should compute.

Idea: what ranks exchange lies in memory that the others can read, so only *when* is sent, in small
messages of the process group. A dead rank is noticed as before.

Cost: none of its own; pages that are never written to take no memory.

Ownership: the memory is anonymous (a memfd). It has no name that could be left behind, and is
gone with the last process that maps it, however that ends. Others reach it through /proc, which
only works on one machine, for one user, on Linux: `SharedBuffers.open` returns None elsewhere.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1 << 18  # elements added at a time: a part that stays in cache
ALIGNMENT = 64  # bytes: a cache line, and the widest vector


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """The sum, in the order of ranks, 16-bit numbers in fp32 and rounded once; where there is one
    part, that part itself."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0].to(wide(parts[0])) + parts[1]
    for part in parts[2:]:
        total += part
    return total.to(parts[0].dtype)


def wide(x: Tensor) -> torch.dtype:
    """The type in which such numbers are added up."""
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype


def sum_into(
    parts: Sequence[Tensor], targets: Sequence[Tensor], divisor: int = 1, accumulate: bool = False
) -> None:
    """Writes the sum of the parts, divided by `divisor`, into every target, of which each may be
    one of the parts. A chunk at a time, which stays in cache."""
    for begin in range(0, parts[0].numel(), CHUNK):
        here = slice(begin, begin + CHUNK)
        total = add_up([part[here] for part in parts])
        if divisor > 1:
            total = total / divisor
        for target in targets:
            if accumulate:
                target[here] += total
            else:
                target[here] = total


def aligned(nbytes: int) -> int:
    """The next multiple of a cache line."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


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
        self.ranks = [torch.frombuffer(m, dtype=torch.uint8, offset=ALIGNMENT) for m in maps]
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

    def offset(self, tensor: Tensor) -> int:
        """The byte at which a tensor in this rank's memory starts."""
        return tensor.data_ptr() - self.ranks[self.rank].data_ptr()

    def average(self, offset: int, numel: int, dtype: torch.dtype) -> None:
        """Replaces what all ranks have at an offset by its mean. All must have written theirs
        before; a barrier must come after, before anybody reads.

        Rank r averages part r of W, in the memory of all ranks:

            memory of rank 0   [ part 0 | part 1 ]     rank 0 reads and writes both parts 0
            memory of rank 1   [ part 0 | part 1 ]     rank 1 reads and writes both parts 1

        Parts are disjoint, so nobody waits. A rank reads G bytes and writes G, whatever W.
        """
        world_size = len(self.ranks)
        begin, end = (numel * r // world_size for r in (self.rank, self.rank + 1))
        parts = [self.view(r, offset, numel, dtype)[begin:end] for r in range(world_size)]
        sum_into(parts, parts, divisor=world_size)

    def read(self, rank: int, offset: int, into: Tensor) -> None:
        """Copies a rank's memory, from byte `offset` on, into a tensor of this one's. Unlike a
        copy out of the map, it leaves none of the other's pages among this process' own."""
        target = memoryview(into.view(torch.uint8).numpy().data)
        done = 0
        while done < len(target):
            done += os.preadv(self._files[rank], [target[done:]], ALIGNMENT + offset + done)


def _create(secret: bytes, nbytes: int) -> tuple[mmap.mmap | None, int]:
    """New memory that starts with the secret, and its descriptor; (None, -1) where there is no
    such thing."""
    if not hasattr(os, "memfd_create"):
        return None, -1
    descriptor = -1
    try:
        descriptor = os.memfd_create("ranks")
        os.ftruncate(descriptor, ALIGNMENT + nbytes)
        os.pwrite(descriptor, secret, 0)
        return mmap.mmap(descriptor, ALIGNMENT + nbytes), descriptor
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
            return mmap.mmap(file.fileno(), ALIGNMENT + nbytes), os.dup(file.fileno())
    except (OSError, ValueError):
        return None, -1


def _close(files: list[int]) -> None:
    for file in files:
        if file >= 0:
            os.close(file)
