"""Messages between CPU ranks of one machine, through memory mapped by both.

Problem. gloo sends through the loopback interface: kernel and library copy every byte several
times, on the core that should compute. A message takes at least 0.7 ms, and 2 ms for 2 MB: as long
as a small model computes on a micro-batch.

Idea. The sender packs the body of a message into one of its buffers and sends the buffer's number
and the head over a socket. The receiver copies the body out and sends the number back, which frees
the buffer. One copy on each side, 0.1 ms for 2 MB, and no thread.

    a     buffers [ 3 | 4 | - ]    b
          ── message: head, buffer 1 ─▸         (with the buffer's descriptor, if it is new)
          ◂───────── free: buffer 0 ──
          ── failed: why ─────────────▸

A sender never waits for a buffer: if none is free, it makes another. So there are as many buffers
as messages in transit under the schedule. The system closes a socket when its process ends, in
whatever way, so a rank that waits for it notices.

Cost: the buffers, one message per micro-batch alive at the same time.

Ownership: memory is anonymous (a memfd), so nothing can be left behind; socket names vanish with
their sockets. Linux only: elsewhere `open_shared_links` returns None.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .messages import Message, PeerError

_PLACE = struct.Struct("<cqq")  # a message's kind, buffer, and bytes of body
_MESSAGE, _FREE, _FAILED = b"m", b"-", b"f"
_PACKET = 1 << 17  # bytes, the longest packet
_CONNECT = 30.0  # seconds


class SharedLink:
    """A link with the rank at the other end of ``connection``, which the link owns."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self._socket, self._timeout = connection, timeout
        connection.setblocking(False)
        self._buffers: list[Tensor] = []  # for what this rank sends
        self._free: list[int] = []  # numbers of those that the other end has copied out
        self._theirs: dict[int, Tensor] = {}  # the other end's buffers, by number
        self._arrived: deque[tuple[bytes, int, int]] = deque()  # head, buffer, bytes of body
        self._lost: str | None = None

    def send(self, message: Message) -> None:
        """Does not wait until it is received."""
        self._look()  # above all, which buffers are free again
        if self._lost is not None:
            raise PeerError(self._lost)
        if len(message.head) > _PACKET - _PLACE.size:
            raise ValueError(
                f"a value that passes between stages has {len(message.head):,} bytes beside the "
                f"contents of its tensors, and at most {_PACKET - _PLACE.size:,} are sent: make "
                "tensors of them"
            )
        k, descriptors = self._buffer(message.nbytes)
        try:
            message.write(self._buffers[k])  # before the packet: it may be read at once
            self._send(_PLACE.pack(_MESSAGE, k, message.nbytes) + message.head, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)  # mapped here, and sent: the receiver has its own

    def receive(self) -> tuple[bytes, Tensor]:
        """Wait for the next message: its head and its body."""
        while not self._arrived:
            if self._lost is not None:
                raise PeerError(self._lost)
            self._wait(select.POLLIN)
            self._look()
        head, k, nbytes = self._arrived.popleft()
        body = self._theirs[k][:nbytes].clone()  # a copy: the buffer is about to be overwritten
        with contextlib.suppress(PeerError):  # the sender may have ended since
            self._send(_PLACE.pack(_FREE, k, 0), [])
        return head, body

    def flush(self) -> None:
        """Nothing to wait for: the receiver has mapped the memory and keeps it."""

    def fail(self, reason: str) -> None:
        """Tell the other end why nothing more will come. Call `close` next."""
        with contextlib.suppress(OSError):
            self._socket.send(_FAILED + reason.encode()[-_PACKET // 2 :])

    def close(self) -> None:
        self._socket.close()
        self._buffers.clear()
        self._theirs.clear()
        self._lost = "the link is closed"

    def _buffer(self, nbytes: int) -> tuple[int, list[int]]:
        """The number of a free buffer that is large enough, and its descriptor if it is new."""
        for k in reversed(self._free):  # the last one used is most likely in cache
            if self._buffers[k].numel() >= nbytes:
                self._free.remove(k)
                return k, []
        nbytes = max(1, nbytes)
        if self._free:  # all are too small: replace one by a larger one
            k = self._free.pop()
            nbytes = max(nbytes, self._buffers[k].numel() * 5 // 4)  # leave room to grow
        else:
            k = len(self._buffers)
            self._buffers.append(torch.empty(0))
        descriptor = os.memfd_create("pipeline")  # closed by `send`
        os.ftruncate(descriptor, nbytes)
        self._buffers[k] = _mapped(descriptor)
        return k, [descriptor]

    def _send(self, packet: bytes, descriptors: Sequence[int]) -> None:
        while True:
            try:
                socket.send_fds(self._socket, [packet], descriptors)  # all of it or nothing
                return
            except BlockingIOError:  # the other end has left hundreds of messages unread
                self._wait(select.POLLIN | select.POLLOUT)  # read, too: both ends may be full
                self._look()
            except ConnectionError:
                self._look()  # it may have said why
                raise PeerError(self._lost or "it has ended") from None

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        if not poll.poll(self._timeout * 1000):  # milliseconds
            raise PeerError(f"it has been silent for {self._timeout:g} s")

    def _look(self) -> None:
        """Read all packets that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while self._lost is None:  # until BlockingIOError: all are read
                packet, descriptors = _read(self._socket)
                if packet[:1] in (_MESSAGE, _FREE):
                    kind, k, nbytes = _PLACE.unpack_from(packet)
                    if kind == _FREE:
                        self._free.append(k)  # one of our own buffers
                        continue
                    for descriptor in descriptors:  # new, or larger than the one before
                        self._theirs[k] = _mapped(descriptor)
                        os.close(descriptor)
                    self._arrived.append((packet[_PLACE.size :], k, nbytes))
                elif packet:
                    self._lost = f"it has failed: {packet[1:].decode(errors='replace')}"
                else:  # end of file
                    self._lost = "it has ended"


def open_shared_links(
    pairs: Sequence[tuple[int, int]], group: dist.ProcessGroup | None, timeout: float
) -> dict[int, SharedLink] | None:
    """This rank's links, by peer; None, on all ranks, if any pair cannot connect.

    In each of the ``pairs`` the lower rank connects to the higher one. All ranks of ``group`` must
    call it together.
    """
    rank = dist.get_rank(group)
    listener = _listen(len(pairs))
    secret = os.urandom(16)  # this rank's; only the ranks of the group learn it
    own = (listener.getsockname(), secret) if listener else None
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group)  # now all are listening
    connections: dict[int, socket.socket] = {}
    works = all(everyone)
    with contextlib.suppress(OSError):
        for low, high in pairs if works else ():
            if low == rank:
                connections[high] = _connect(everyone[high], rank)  # accepted later, from a backlog
    works = works and len(connections) == sum(low == rank for low, _ in pairs)
    dist.all_gather_object(everyone, works, group)  # now: who has connected
    try:
        if listener is None or not all(everyone):
            for connection in connections.values():
                connection.close()
            return None
        for _ in [low for low, high in pairs if high == rank]:  # one for each lower peer; any order
            peer, connection = _accept(listener, secret)
            connections[peer] = connection
        return {peer: SharedLink(c, timeout) for peer, c in sorted(connections.items())}
    finally:
        if listener is not None:
            listener.close()


def _listen(backlog: int) -> socket.socket | None:
    """A listening socket with a unique name; None if the system has none."""
    if not hasattr(os, "memfd_create"):
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.settimeout(_CONNECT)
        # An abstract name, no file. The system chooses from few names, so that a socket of this
        # run on another machine could have the same one.
        listener.bind(b"\0" + os.urandom(16))
        listener.listen(backlog)
    except OSError:
        listener.close()
        return None
    return listener


def _connect(place: tuple[bytes, bytes], rank: int) -> socket.socket:
    address, secret = place
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_CONNECT)
        connection.connect(address)
        connection.sendall(secret + b"%d" % rank)
    except OSError:
        connection.close()
        raise
    return connection


def _accept(listener: socket.socket, secret: bytes) -> tuple[int, socket.socket]:
    """The next connection that sends the secret: anybody on the machine may connect."""
    while True:
        connection, _ = listener.accept()
        connection.settimeout(_CONNECT)
        with contextlib.suppress(OSError):
            hello = connection.recv(64)
            if hello[: len(secret)] == secret:
                return int(hello[len(secret) :]), connection  # the peer's rank
        connection.close()


def _mapped(descriptor: int) -> Tensor:
    size = os.fstat(descriptor).st_size
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)  # keeps the mapping


def _read(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A packet with its descriptors; an empty packet at the end."""
    for _ in range(2):  # a reset is reported once, ahead of packets sent before it
        with contextlib.suppress(ConnectionError):
            packet, descriptors, _, _ = socket.recv_fds(connection, _PACKET, 1)
            return packet, descriptors
    return b"", []
