"""Messages between CPU ranks of one machine, through memory that both have mapped.

Problem. gloo sends through the loopback interface: kernel and library copy every byte several
times, on the core that should compute, and a message needs 0.7 ms at least and 2 ms for 2 MB,
which is as long as a small model computes on a micro-batch.

Idea. The sender owns a ring of slots; it packs a message into the next one and counts up an event;
the receiver waits for the event, copies the message out and counts up another event, which says
that the slot is free. One copy on each side, 0.1 ms for 2 MB, and no thread.

    sender    slots [ 3 | 4 | - | - ]    receiver
              ready: +1 per message ──▸
              ◂── free: +1 per message taken
              socket ──▸ a new ring (when messages grow); why the sender failed; its end

The socket carries the descriptors of the events and of the memory, and it is closed by the system
when its process ends, however that happens: whoever waits also waits for that.

A sender waits only when all slots are taken, and has as many as the schedule lets messages be on
their way: it waits in evaluation, and never for a rank that waits for it.

Cost: the ring, one message per micro-batch that is alive at a time (`schedule.peak_alive`).

Ownership: memory and events are anonymous (a memfd, eventfds), so nothing can be left behind; the
sockets have names that vanish with them. Linux only: `open_shared_channels` returns None elsewhere.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .parcels import Ends, Expected, Layout, PeerError, Route

_HEAD = struct.Struct("<qq48x")  # of a slot: the message's number and size; a cache line
_RING = struct.Struct("<qqq")  # of a ring: slots, bytes of each, messages before its first
_EVENTS, _NEW_RING, _FAILURE = b"e", b"r", b"f"
_PACKET = 1 << 14  # bytes of the longest packet on the socket
_CONNECT = 30.0  # seconds


class _Ring:
    """Slots in shared memory."""

    def __init__(self, descriptor: int, count: int, slot_bytes: int) -> None:
        self.count, self.slot_bytes = count, slot_bytes
        self._map = mmap.mmap(descriptor, count * slot_bytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def label(self, k: int, number: int, nbytes: int) -> None:
        _HEAD.pack_into(self._map, k * self.slot_bytes, number, nbytes)

    def read_label(self, k: int) -> tuple[int, int]:
        number, nbytes = _HEAD.unpack_from(self._map, k * self.slot_bytes)
        return number, nbytes

    def slot(self, k: int, nbytes: int) -> Tensor:
        begin = k * self.slot_bytes + _HEAD.size
        return self._bytes[begin : begin + nbytes]


class SharedSender:
    """Begins the channel on ``connection``, a connected socket, which it owns from now on."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self._socket, self._timeout = connection, timeout
        self._ready, self._free = os.eventfd(0), os.eventfd(0)
        self._socket.settimeout(timeout)
        with _peer_is_there():
            socket.send_fds(self._socket, [_EVENTS], [self._ready, self._free])
        self._ring: _Ring | None = None
        self._sent = 0
        self._unread = 0  # messages, of an earlier ring too
        self._in_ring = 0  # messages that this ring has carried

    def expect(self, messages: Expected, capacity: int) -> None:
        largest = max((layout.nbytes for _, layout in messages), default=0)
        self._make_room(largest, capacity)

    def send(self, number: int, layout: Layout, tensors: Sequence[Tensor | None]) -> None:
        ring = self._make_room(layout.nbytes, 1)
        while min(self._unread, self._in_ring) >= ring.count:
            self._wait_for_a_free_slot()
        k = self._in_ring % ring.count
        layout.write(ring.slot(k, layout.nbytes), tensors)
        ring.label(k, number, layout.nbytes)
        os.eventfd_write(self._ready, 1)
        self._sent += 1
        self._unread += 1
        self._in_ring += 1

    def flush(self) -> None:
        """Nothing to wait for: the receiver has the memory, and keeps it."""

    def fail(self, reason: str) -> None:
        _report(self._socket, reason)

    def close(self) -> None:
        if self._ready >= 0:
            self._socket.close()
            os.close(self._ready)
            os.close(self._free)
        self._ready = self._free = -1
        self._ring = None

    def _make_room(self, nbytes: int, capacity: int) -> _Ring:
        """A ring with slots large enough, and enough of them; the receiver is given a new one."""
        ring = self._ring
        if ring is not None and ring.slot_bytes >= _HEAD.size + nbytes and ring.count >= capacity:
            return ring
        count = max(capacity, ring.count if ring else 0)
        slot_bytes = _HEAD.size + nbytes
        if ring is not None and slot_bytes > ring.slot_bytes:
            slot_bytes = max(slot_bytes, ring.slot_bytes * 5 // 4 // 64 * 64)  # it may grow on
        elif ring is not None:
            slot_bytes = ring.slot_bytes
        descriptor = os.memfd_create("pipeline")
        try:
            os.ftruncate(descriptor, count * slot_bytes)
            self._ring = _Ring(descriptor, count, slot_bytes)
            packet = _NEW_RING + _RING.pack(count, slot_bytes, self._sent)
            socket.send_fds(self._socket, [packet], [descriptor])
        except ConnectionError:
            raise PeerError(_last_words(_read(self._socket)[0])) from None
        finally:
            os.close(descriptor)
        self._in_ring = 0
        return self._ring

    def _wait_for_a_free_slot(self) -> None:
        readable = _wait([self._free, self._socket.fileno()], self._timeout)
        if self._free not in readable:  # the receiver says nothing but its last words
            raise PeerError(_last_words(_read(self._socket)[0]))
        self._unread -= os.eventfd_read(self._free)


class SharedReceiver:
    """Ends the channel on ``connection``, which it owns from now on."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self._socket, self._timeout = connection, timeout
        connection.settimeout(timeout)
        with _peer_is_there():
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
            if not descriptors:
                raise ConnectionError
        self._ready, self._free = descriptors
        connection.setblocking(False)
        self._rings: deque[tuple[int, _Ring]] = deque()  # with the number of messages before each
        self._ring: _Ring | None = None
        self._first = 0
        self._waiting = 0  # messages in slots
        self._taken = 0
        self._here: dict[int, Tensor] = {}
        self._lost: str | None = None

    def expect(self, messages: Expected) -> None:
        """Nothing to prepare: messages say what they are."""

    def receive(self, number: int, layout: Layout) -> list[Tensor | None]:
        while number not in self._here:
            while not self._waiting:
                self._wait()
            self._take()
        message = self._here.pop(number)
        if message.numel() != layout.nbytes:
            raise PeerError(
                f"it sent {message.numel()} bytes where {layout.nbytes} were expected: give all "
                "ranks the same batch"
            )
        return layout.read(message)

    def fail(self, reason: str) -> None:
        _report(self._socket, reason)

    def close(self) -> None:
        if self._ready >= 0:
            self._socket.close()
            os.close(self._ready)
            os.close(self._free)
        self._ready = self._free = -1
        self._ring = None
        self._rings.clear()

    def _take(self) -> None:
        """Copy the next message out of its slot."""
        while self._rings and self._rings[0][0] == self._taken:  # a ring may carry nothing at all
            self._first, self._ring = self._rings.popleft()
        assert self._ring is not None
        k = (self._taken - self._first) % self._ring.count
        number, nbytes = self._ring.read_label(k)
        self._here[number] = self._ring.slot(k, nbytes).clone()
        os.eventfd_write(self._free, 1)
        self._taken += 1
        self._waiting -= 1

    def _wait(self) -> None:
        if self._lost is not None:
            raise PeerError(self._lost)
        readable = _wait([self._ready, self._socket.fileno()], self._timeout)
        if self._ready in readable:
            self._waiting += os.eventfd_read(self._ready)
        # Also if poll has not seen it: a ring is announced before the first message in it.
        with contextlib.suppress(BlockingIOError):
            while self._lost is None:
                self._read_packet()

    def _read_packet(self) -> None:
        packet, descriptors = _read(self._socket)
        if packet[:1] == _NEW_RING:
            count, slot_bytes, first = _RING.unpack(packet[1:])
            self._rings.append((first, _Ring(descriptors[0], count, slot_bytes)))
            os.close(descriptors[0])
        else:
            self._lost = _last_words(packet)
            if packet:  # what it sent before it failed is of no use
                self._waiting = 0
            elif _readable([self._ready], 0.0):  # sent since the event was read, and before its end
                self._waiting += os.eventfd_read(self._ready)


def open_shared_channels(
    routes: Sequence[Route], group: dist.ProcessGroup | None, timeout: float
) -> Ends | None:
    """This rank's ends of the routes; None, on all ranks, if any two cannot share memory.

    All ranks of ``group`` must call it together.
    """
    rank = dist.get_rank(group)
    mine = [route for route in routes if route[1] == rank]
    listeners = _listen(mine)
    secret = os.urandom(16)
    own = {route: (s.getsockname(), secret) for route, s in zip(mine, listeners, strict=False)}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group)
    addresses = {route: place for places in everyone for route, place in places.items()}
    connections: dict[Route, socket.socket] = {}
    with contextlib.suppress(OSError):
        for route in routes:
            if route[0] == rank and route in addresses:
                connections[route] = _connect(*addresses[route])
    works = len(own) == len(mine) and len(connections) == sum(r[0] == rank for r in routes)
    dist.all_gather_object(everyone, works, group)
    try:
        if not all(everyone):
            for connection in connections.values():
                connection.close()
            return None
        senders = {route: SharedSender(c, timeout) for route, c in connections.items()}
        receivers = {
            route: SharedReceiver(_accept(listener, secret), timeout)
            for route, listener in zip(mine, listeners, strict=True)
        }
        return {**senders}, {**receivers}, lambda: None
    finally:
        for listener in listeners:
            listener.close()


def _listen(routes: Sequence[Route]) -> list[socket.socket]:
    """A socket for each route, with a name that no other has; none where there are none."""
    listeners: list[socket.socket] = []
    if not hasattr(os, "memfd_create") or not hasattr(os, "eventfd"):
        return listeners
    try:
        for _ in routes:
            listeners.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listeners[-1].settimeout(_CONNECT)
            # No file: the name is abstract. Those that the system chooses are few, and on another
            # machine a socket of ours may have the same one.
            listeners[-1].bind(b"\0" + os.urandom(16))
            listeners[-1].listen()
    except OSError:
        while listeners:
            listeners.pop().close()
    return listeners


def _connect(address: bytes, secret: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_CONNECT)
        connection.connect(address)
        connection.sendall(secret)
    except OSError:
        connection.close()
        raise
    return connection


def _accept(listener: socket.socket, secret: bytes) -> socket.socket:
    """The connection of the rank that knows the secret: anybody on the machine may connect."""
    while True:
        connection, _ = listener.accept()
        connection.settimeout(_CONNECT)
        with contextlib.suppress(OSError):
            if connection.recv(len(secret)) == secret:
                return connection
        connection.close()


def _wait(descriptors: Sequence[int], timeout: float) -> list[int]:
    """Those that can be read, as soon as any can."""
    ready = _readable(descriptors, timeout)
    if not ready:
        raise PeerError(f"it has been silent for {timeout:g} s")
    return ready


def _readable(descriptors: Sequence[int], timeout: float) -> list[int]:
    """The same; none after `timeout` seconds."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(timeout * 1000)]


def _read(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A packet with its descriptors; an empty one at the end."""
    for _ in range(2):  # a reset is told once, and comes before what was sent before it
        with contextlib.suppress(ConnectionError):
            packet, descriptors, _, _ = socket.recv_fds(connection, _PACKET, 1)
            return packet, descriptors
    return b"", []


def _report(connection: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError):
        connection.send(_FAILURE + reason.encode()[-_PACKET + 1 :])


@contextlib.contextmanager
def _peer_is_there() -> Iterator[None]:
    """Says what it means when a connection that is being made fails."""
    try:
        yield
    except TimeoutError:
        raise PeerError("it is silent") from None
    except ConnectionError:
        raise PeerError("it has ended") from None


def _last_words(packet: bytes) -> str:
    if packet[:1] == _FAILURE:
        return f"it has failed: {packet[1:].decode(errors='replace')}"
    return "it has ended"
