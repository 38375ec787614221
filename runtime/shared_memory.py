"""Memory shared by the CPU ranks of one host: one stretch per rank, mapped by all.

Problem: on one machine gloo sends through the loopback interface. The kernel copies every byte in
and out; with one core per rank, these copies take the core that should compute.

Idea: ranks put their data in memory that the others can read. Only an announcement that the data is
ready is sent: eight bytes, through a pipe to each other rank. The system closes a pipe when its
process ends, in whatever way, so a rank that waits for it notices.

Cost: an announcement takes 20 microseconds between two ranks; an all-reduce of gloo takes 400 to
700. A stretch is larger than the host's memory; the system allocates each page when it is first
written to.

Reuse: memory of an exchange is free when all ranks have read it. All ranks make the same calls in
the same order. If this rank has read the memory of call j before it announces call k, so has every
other; so when all have announced call k, the memory of call j is free:

    rank 0   write A | announce | read A's | write B | announce | read B's | write A | ...
    rank 1   write A | announce | read A's | write B | announce | read B's | write A | ...

Ownership: the memory (a memfd) and the pipes are anonymous, and are freed with the last process
that has them, however that process ends. Their descriptors go to the other ranks through sockets
with abstract names (only on Linux). On other systems, or where a rank cannot be reached by such a
name, as on another host, `SharedMemory.open` returns None.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from .pool import Pool
from .waits import time_out_of

ALIGNMENT = 64  # bytes: a cache line, and the widest vector

Wait = Callable[[], None]
"""Waits for something that was started. Call each once, in the order of the starts."""

DATAGRAMS = socket.AF_UNIX, socket.SOCK_DGRAM
ADDRESSES_PER_BYTE = 4  # of address space per byte of the host's memory; addresses cost nothing


def aligned(nbytes: int) -> int:
    """Rounded up to a multiple of a cache line."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class SharedMemory:
    """One stretch of memory per rank, each mapped by all ranks; and pipes that announce writes.

    Args:
        files: descriptors of the memory, by rank.
        inboxes, outboxes: ends of the pipes from and to every other rank, by its number.

    Attributes:
        maps: the memory, by rank.
        pool: lends memory for exchanges.
    """

    group: dist.ProcessGroup | None
    rank: int
    files: dict[int, int]
    inboxes: dict[int, int]
    outboxes: dict[int, int]

    def __post_init__(self) -> None:
        each = os.fstat(self.files[self.rank]).st_size // len(self.files)
        self.maps = [mmap.mmap(self.files[r], each) for r in range(len(self.files))]
        for one in self.maps:  # a core dump would read all of it, and so allocate every page
            one.madvise(mmap.MADV_DONTDUMP)
        self._begin = self._view(self.rank, 0, 1, torch.uint8).data_ptr()  # an address
        self.pool = Pool(lambda nbytes: self.keep(nbytes, torch.uint8))
        self._taken = 0  # bytes of this rank's memory, see `keep`
        self._turn = 0  # announcements so far
        # Announcements not yet waited for: the turn, what was said, the memory that all ranks have
        # read by then, and the memory that they read in this call.
        self._announced: deque[tuple[int, bytes, list[Tensor], Tensor | None]] = deque()
        self._done: list[Tensor] = []  # memory that this rank has read in all ranks
        for file in chain(*(ends.values() for ends in (self.files, self.inboxes, self.outboxes))):
            weakref.finalize(self, os.close, file)

    @classmethod
    def open(cls, group: dist.ProcessGroup | None = None) -> SharedMemory | None:
        """Zeroed memory for every rank of the group; None if they cannot share memory. All ranks
        must call it together, and all get the same answer."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        files, inboxes, outboxes = dict[int, int](), dict[int, int](), dict[int, int]()
        names, name = [b""] * size, b"\0" + os.urandom(16)  # abstract: in no folder
        with socket.socket(*DATAGRAMS) as inbound, socket.socket(*DATAGRAMS) as outbound:
            try:
                files[rank] = os.memfd_create("ranks")
                pages = ADDRESSES_PER_BYTE * os.sysconf("SC_PHYS_PAGES")
                os.ftruncate(files[rank], mmap.PAGESIZE * pages)
                mmap.mmap(files[rank], 0).close()  # all stretches: addresses may be limited
                inbound.bind(name)
            except (AttributeError, OSError):  # not Linux; a sandbox forbids it
                name = b""
            dist.all_gather_object(names, name, group)
            everywhere = torch.tensor(int(all(outbound.connect_ex(other) == 0 for other in names)))
            dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)
            if not everywhere:
                for file in files.values():
                    os.close(file)
                return None
            inbound.settimeout(time_out_of(group).total_seconds())
            for k in range(1, size):  # so that each gets one at a time
                to = (rank + k) % size
                inboxes[to], outbox = os.pipe()
                outbound.connect(names[to])
                socket.send_fds(outbound, [rank.to_bytes(4, "big")], [files[rank], outbox])
                os.close(outbox)  # only the other can write now, so its end is noticed
                sender, descriptors, *_ = socket.recv_fds(inbound, 4, 2)
                r = int.from_bytes(sender, "big")
                files[r], outboxes[r] = descriptors
        return cls(group, rank, files, inboxes, outboxes)

    def announce(self, *call: object, read: Tensor | None = None) -> Wait:
        """Tells all ranks that this one has written its memory, and in which call: its kind, size,
        type. Returns a function that waits until all have said the same.

        Args:
            read: memory that the others read in this call, and that this rank then gives back.

        Raises:
            dist.DistError: the pipe to a rank has been full of unread announcements for longer than
                the group waits.
        """
        self._turn += 1
        said = blake2b(repr((self._turn, call)).encode(), digest_size=8).digest()
        for rank, outbox in self.outboxes.items():
            self._poll(rank, outbox, select.POLLOUT)
            with suppress(BrokenPipeError):  # that rank has ended: `_wait` says so
                os.write(outbox, said)
        done, self._done = self._done, []
        self._announced.append((self._turn, said, done, read))
        return partial(self._wait, self._turn)

    def _wait(self, turn: int) -> None:
        """Waits until all ranks have made the announcement of this turn. Each has then read what it
        needed before. Older announcements that nobody has waited for, since their calls ended with
        an error, come first in the pipes, and are not mistaken for this one.

        Raises:
            dist.DistError: a rank has ended, or is silent for longer than the group waits.
            RuntimeError: the ranks make different calls, so their memory must not be used.
        """
        while self._announced and self._announced[0][0] <= turn:
            _, said, done, read = self._announced.popleft()
            heard = {self._hear(r) for r in self.inboxes}  # of all, even if one differs
            require_agreement(heard <= {said})
            for memory in done:
                self.pool.give(memory)
            if read is not None:
                self._done.append(read)

    def _poll(self, rank: int, pipe: int, event: int) -> None:
        """Waits until a pipe from or to a rank can be read or written."""
        seconds = time_out_of(self.group).total_seconds()
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(1000 * seconds):
            raise dist.DistError(f"rank {rank} of the group has been silent for {seconds:g} s")

    def _hear(self, rank: int) -> bytes:
        """Waits for the next announcement of a rank."""
        self._poll(rank, self.inboxes[rank], select.POLLIN)
        heard = os.read(self.inboxes[rank], 8)
        if not heard:
            raise dist.DistError(f"rank {rank} of the group has ended")
        return heard

    def keep(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next `numel` elements of this rank's memory, zeros. Ranks that ask for the same sizes
        in the same order have a tensor at the same place."""
        start, self._taken = self._taken, self._taken + aligned(numel * dtype.itemsize)
        return self._view(self.rank, start, numel, dtype)

    def share(
        self, kind: str, x: Tensor, lengths: Sequence[Sequence[int]] = ()
    ) -> tuple[list[Tensor], Wait]:
        """Lets the others read `x`: where it lies, if that is in this memory, otherwise a copy.

        Args:
            kind: of the exchange.
            lengths: by sender and receiver, the number of rows, if ranks share different numbers.

        Returns:
            All ranks' tensors, by rank, and a function that waits for them. Read them after that,
            and before another exchange starts. Memory of the pool goes back when all have read it.
        """
        shapes = [(sum(row), *x.shape[1:]) for row in lengths] or [tuple(x.shape)] * len(self.maps)
        own = x if self._has(x) else self.pool.take(max(1, *map(prod, shapes)), x.dtype)
        begin = self._offset_of(own)
        views = [self._view(r, begin, prod(s), x.dtype).view(s) for r, s in enumerate(shapes)]
        if own is not x:
            views[self.rank].copy_(x)
        return views, self.announce(kind, begin, lengths, shapes[0], x.dtype, read=own)

    def copy_from(self, rank: int, x: Tensor, into: Tensor) -> None:
        """Copies what a rank has at the place of `x`, a tensor in this rank's memory. Unlike a copy
        from the map, this does not make the other rank's pages resident in this process."""
        target = memoryview(into.view(torch.uint8).numpy().data)
        start, done = self._offset_of(x), 0
        while done < len(target):  # a read may stop early
            done += os.preadv(self.files[rank], [target[done:]], start + done)

    def _view(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements of a rank's memory, from byte `offset` on: a storage of its own, since a
        copied or saved tensor takes its whole storage along."""
        count = max(1, numel)  # at least one: 0 would be refused
        return torch.frombuffer(self.maps[rank], dtype=dtype, count=count, offset=offset)[:numel]

    def _offset_of(self, x: Tensor) -> int:
        """Where a tensor in this rank's memory begins."""
        return x.data_ptr() - self._begin

    def _has(self, x: Tensor) -> bool:
        return 0 <= self._offset_of(x) < len(self.maps[self.rank]) and x.is_contiguous()


def require_agreement(same: bool) -> None:
    """Raises the error for ranks that make different calls, unless they make the same."""
    if not same:
        raise RuntimeError(
            "the ranks diverged: all must make the same calls in the same order, with tensors of "
            "the same size and type; a rank that has no examples makes them, too"
        )
