"""Messages between CPU ranks of one machine, through memory mapped by the sender.

Problem. gloo sends through the loopback interface: kernel and library copy every byte several
times, on the core that should compute. A message takes at least 0.7 ms, and 2 ms for 2 MB: as long
as a small model computes on a micro-batch.

Idea. The sender writes the message into a free buffer of its memory, and the buffer's place into a
pipe. The receiver copies the message out and sets the buffer's first byte back: it is free. One
copy on each side, 0.1 ms for 2 MB, and no thread.

    a's memory  [ unread | free | unread | ... ]     pipe to b  ── place, lengths ─▸
                     b reads, then sets free                    ── why a failed ───▸

A sender never waits for a buffer: if none is free, it makes another. So there are as many buffers
as messages in transit under the schedule. The system closes a pipe when its process ends, in
whatever way, so a rank that waits for it notices.

Cost: the buffers, one message per micro-batch alive at the same time.

Ownership: memory (a memfd) and pipes are anonymous, so nothing can be left behind. A rank opens
its neighbour's through /proc, as in runtime/shared_memory.py: Linux only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from io import FileIO
from multiprocessing.connection import Connection
from select import POLLOUT
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.shared_memory import ALIGNMENT, SharedBuffers, is_ready, open_pipes, read_into

from .messages import Link, Message, PeerError

_FREE, _UNREAD = 0, 1  # a buffer's first byte; the message starts at byte ALIGNMENT
_LONGEST_REASON = 1000  # characters, 4 bytes each at most: a pipe takes 4096 bytes at once


class SharedLink(Link):
    """``own``: the memory that this rank writes messages to; ``other``: that of the other end.
    Closed with the link."""

    def __init__(
        self, inbox: Connection, outbox: Connection, own: FileIO, other: FileIO, timeout: float
    ) -> None:
        super().__init__()
        self._inbox, self._outbox = inbox, outbox
        self._own, self._other = own, other
        self.timeout = timeout
        self._buffers: list[tuple[int, mmap.mmap]] = []  # in `own`, from a byte on
        self._end = 0  # bytes of `own`

    def send(self, message: Message) -> None:
        nbytes, length = message.nbytes, len(message.head)
        begin, buffer = self._buffer(ALIGNMENT + nbytes + length)
        message.write(torch.frombuffer(buffer, dtype=torch.uint8, offset=ALIGNMENT))
        buffer[ALIGNMENT + nbytes : ALIGNMENT + nbytes + length] = message.head  # after the body
        buffer[0] = _UNREAD
        # it is full if the other end has left 1,000 messages unread
        if not is_ready(self._outbox.fileno(), POLLOUT, self.timeout):
            raise PeerError(f"it has been silent for {self.timeout:g} s")
        try:
            self._outbox.send((begin, nbytes, length))
        except BrokenPipeError:
            while True:  # until it raises: the other end may have said why
                self._next()

    def receive(self) -> tuple[bytes, Tensor]:
        begin, nbytes, length = self._next()
        copy = torch.empty(nbytes + length, dtype=torch.uint8, device="cpu")
        read_into(copy, self._other.fileno(), begin + ALIGNMENT)
        os.pwrite(self._other.fileno(), bytes([_FREE]), begin)
        return copy[nbytes:].numpy().tobytes(), copy[:nbytes]

    def fail(self, reason: str) -> None:
        with contextlib.suppress(OSError):  # it may have ended
            if is_ready(self._outbox.fileno(), POLLOUT, 0):
                self._outbox.send(reason[-_LONGEST_REASON:])

    def close(self) -> None:
        for file in (self._inbox, self._outbox, self._own, self._other):
            file.close()
        self._buffers.clear()

    def _buffer(self, nbytes: int) -> tuple[int, mmap.mmap]:
        """A free buffer that is large enough: where it begins, and its memory."""
        free = [entry for entry in self._buffers if entry[1][0] == _FREE]
        for begin, buffer in free:  # the first, which is most likely in cache
            if len(buffer) >= nbytes:
                return begin, buffer
        if free:  # all are too small: replace one by a larger one
            self._buffers.remove(free[0])
            small = free[0][1]
            nbytes = max(nbytes, len(small) * 5 // 4)  # leave room to grow
            small.madvise(mmap.MADV_REMOVE)  # gives its memory back to the system
        begin = self._end
        self._end += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages
        os.ftruncate(self._own.fileno(), self._end)  # the new part is zero: free
        buffer = mmap.mmap(self._own.fileno(), self._end - begin, offset=begin)
        self._buffers.append((begin, buffer))
        return begin, buffer

    def _next(self) -> tuple[int, int, int]:
        """Wait for the place of the next message, and the lengths of its body and head."""
        if not self._inbox.poll(self.timeout):
            raise PeerError(f"it has been silent for {self.timeout:g} s")
        try:
            note = self._inbox.recv()
        except EOFError:
            raise PeerError("it has ended") from None
        if isinstance(note, str):
            raise PeerError(f"it has failed: {note}")
        begin, nbytes, length = note
        return begin, nbytes, length


def open_shared_links(
    pairs: Sequence[tuple[int, int]], group: dist.ProcessGroup | None, timeout: float
) -> dict[int, SharedLink] | None:
    """This rank's links, by peer, for the ``pairs`` of ranks; None, on all ranks, if they are not
    on one machine. All ranks of ``group`` must call it together."""
    if SharedBuffers.open(1, group) is None:  # tried, not inferred
        return None
    rank = dist.get_rank(group)
    peers = sorted({r for pair in pairs if rank in pair for r in pair} - {rank})
    memory = {r: FileIO(os.memfd_create("pipeline"), "r+b") for r in peers}
    own = {r: f"/proc/{os.getpid()}/fd/{file.fileno()}" for r, file in memory.items()}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group)  # by rank, then by peer
    theirs = {r: FileIO(everyone[r][rank], "r+b") for r in peers}
    inboxes, outboxes = open_pipes(peers, group)  # after it all have opened what is mine
    return {
        r: SharedLink(
            Connection(inboxes[r], writable=False), Connection(outboxes[r], readable=False),
            memory[r], theirs[r], timeout,
        )
        for r in peers
    }  # fmt: skip
