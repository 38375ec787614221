"""Messages between two ranks, through process groups.

Problem. Stages must exchange activations and gradients while both sides compute, in the order of
any schedule, without a cycle of ranks that wait for each other.

Idea. Sends are asynchronous; their memory is kept until they are done. A receive is posted ahead,
so that a message travels while its receiver computes. But a receive has a size, and the shapes of
activations are known only when they arrive. Both ends have seen the same messages, so both expect
the next one to be as long as the one before. The first transfer has exactly that size; what a
longer message has left follows in a second one, which the first announces.

    expected size     4096                        270400                  270400
    transfers       | start, head, body .. | .. | | start, head, body | | start, head, body |

Each kind of message (activations into stage 1, gradients out of it, ...) is a stream with a tag of
its own, since messages of one kind are alike. So in a step like the one before each message is one
transfer, whose receive was posted when the previous one had arrived.

Between GPUs only the head is sent by gloo, so reading it never waits for the GPU; the body follows
through the device's own groups. Each direction has its group: NCCL runs the messages of one group
and pair of ranks in order, on one stream beside the compute stream. It knows no tags, so there all
kinds share a stream, and bodies are received in the order in which they were sent. A body's receive
is launched when its head is read: the hosts run ahead of their GPUs, so it waits there before the
GPU needs it. (Not launched before its head: after the last message of a step such a receive would
run on, and whoever waits for the whole GPU would wait for it. Not measured.) Ranks that share
a GPU have gloo alone, which sends from the CPU's memory: there the body goes through it, and both
ends wait. The groups come from runtime/mesh.py: all ranks of a run make them together.

A rank that fails closes its connections; ranks that notice close theirs too.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.shared_memory import aligned
from runtime.waits import time_out_of

from .messages import Message, Received

_START = struct.Struct("<qq")  # lengths of head and body
_FIRST_SIZE = 4096  # bytes expected of the first message of a stream

InFlight = tuple[dist.Work, Tensor, dist.ProcessGroup]
"""A transfer under way, its memory, and its group."""


class PeerError(dist.DistError):
    """The other end of a link has failed, ended, or been silent for as long as its group allows. A
    `DistError`, like torch's own errors of this kind: the cause is on another rank."""


class _Stream:
    """Messages in both directions with one tag, in order. The two directions expect sizes of their
    own."""

    def __init__(self, tag: int) -> None:
        self.tag = tag
        self.size_out = self.size_in = _FIRST_SIZE  # bytes of the next first transfer
        self.posted: list[InFlight] = []  # receives: at most one
        self.early: dict[tuple[str, int], Any] = {}  # arrived before they were asked for


class Link:
    """A link with the global rank ``peer``. ``bodies``: the groups for the bodies that this rank
    sends, and receives, on ``device``; none if they go through the CPU's memory."""

    def __init__(
        self,
        heads: dist.ProcessGroup,
        bodies: Sequence[dist.ProcessGroup],
        peer: int,
        device: torch.device,
    ) -> None:
        self._heads: dist.ProcessGroup | None = heads
        self._bodies, self._peer, self._device = bodies, peer, device
        self._streams: dict[int, _Stream] = {}  # by tag

    def send(self, kind: str, i: int, value: Any) -> list[InFlight]:
        """Starts to send the value of micro-batch i; the caller waits for the transfers later."""
        message = Message((kind, i, value))
        begin = aligned(_START.size + len(message.head))  # bytes before the body
        size = begin if self._bodies else begin + message.nbytes
        stream = self._stream(kind)
        envelope = torch.empty(max(size, stream.size_out), dtype=torch.uint8, device="cpu")
        start = _START.pack(len(message.head), message.nbytes) + message.head
        envelope[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        body = envelope[begin:]
        if self._bodies:
            body = torch.empty(message.nbytes, dtype=torch.uint8, device=self._device)
        message.write(body)  # before its transfer starts
        first, rest = envelope[: stream.size_out], envelope[stream.size_out : size]
        stream.size_out = _next_size(size, stream.size_out)
        assert self._heads is not None  # nobody sends after `close`
        transfers = [(memory, self._heads, stream.tag) for memory in (first, rest) if len(memory)]
        if self._bodies and message.nbytes:
            transfers.append((body, self._bodies[0], 0))
        return [(_try(dist.isend, x, self._peer, of, tag), x, of) for x, of, tag in transfers]

    def receive(self, kind: str, i: int) -> Any:
        """Waits for the value of micro-batch i. Others may arrive before it."""
        stream = self._stream(kind)
        while (kind, i) not in stream.early:
            *key, value = self._next(stream)
            stream.early[tuple(key)] = value
        return stream.early.pop((kind, i))

    def close(self) -> None:
        """Hangs up. A gloo connection closes with its last reference, and a rank that waits at the
        other end gets an error."""
        for stream in self._streams.values():
            stream.posted.clear()
        self._heads, self._bodies = None, ()

    def _stream(self, kind: str) -> _Stream:
        tag = 0 if self._bodies else zlib.crc32(kind.encode()) >> 1  # the same on both ends
        return self._streams.setdefault(tag, _Stream(tag))

    def _next(self, stream: _Stream) -> Any:
        """Waits for the next message of a stream: its kind and micro-batch, and its value."""
        if not stream.posted:
            self._post(stream)
        envelope = wait_for(stream.posted)
        length, nbytes = _START.unpack(envelope[: _START.size].numpy().tobytes())
        begin = aligned(_START.size + length)
        size = begin if self._bodies else begin + nbytes
        if size > len(envelope):  # longer than expected: the rest follows
            envelope = torch.cat([envelope, envelope.new_empty(size - len(envelope))])
            self._post(stream, envelope[stream.size_in :])
            wait_for(stream.posted)
        stream.size_in = _next_size(size, stream.size_in)
        with suppress(PeerError):  # the message that has just arrived may have been the last
            self._post(stream)  # the next travels while this one is used
        head = envelope[_START.size : _START.size + length].numpy().tobytes()
        if self._bodies:
            body = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            if nbytes:  # NCCL: the stream waits, not the host
                _try(dist.irecv, body, self._peer, self._bodies[1]).wait()
        else:
            body = envelope[begin : begin + nbytes].to(self._device)  # on a CPU a view
        return Received(head, body).load()

    def _post(self, stream: _Stream, memory: Tensor | None = None) -> None:
        """Posts the next receive, of the expected size or into ``memory``."""
        if memory is None:
            memory = torch.empty(stream.size_in, dtype=torch.uint8, device="cpu")
        assert self._heads is not None
        work = _try(dist.irecv, memory, self._peer, self._heads, stream.tag)
        stream.posted.append((work, memory, self._heads))


def open_links(
    pairs: Sequence[tuple[int, int]], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> dict[int, Link]:
    """This rank's links, by peer, through the ``groups`` of `runtime.mesh.message_groups`. All
    their ranks must call it together; ``pairs``: the linked pairs of ranks, the same on all."""
    heads, *bodies = groups  # bodies: up, down; or none
    rank, members = dist.get_rank(heads), dist.get_process_group_ranks(heads)  # members: global
    bodies = bodies if device.type != "cpu" else []
    links: dict[int, Link] = {}
    for low, high in (pair for pair in pairs if rank in pair):  # in one order on all ranks
        peer = high if rank == low else low
        # to send on, to receive on: the lower rank sends on `up`
        ways = bodies if rank == low else bodies[::-1]
        links[peer] = Link(heads, ways, members[peer], device)
        for sender in (low, high) if bodies else ():  # NCCL connects with the first message
            if rank == sender:
                hello = links[peer].send("hello", -1, torch.zeros(1, device=device))
                while hello:
                    wait_for(hello)
            else:
                links[peer].receive("hello", -1)
    return links


def close_groups(groups: list[dist.ProcessGroup]) -> None:
    """Closes the connections of gloo, and empties the list. NCCL would wait for the other ranks, so
    its groups stay until the process ends."""
    while groups:
        group = groups.pop()
        if dist.is_initialized() and dist.get_backend(group) == "gloo":
            dist.destroy_process_group(group)


def wait_for(transfers: list[InFlight]) -> Tensor:
    """Waits for the first of the transfers, and returns its memory. Gloo is told how long: it would
    wait as long as its group allowed when that was made. NCCL, which does not wait, would."""
    memory, group = transfers[0][1:]
    time_out = [time_out_of(group)] if dist.get_backend(group) == "gloo" else []
    del group  # see `_try`
    _try(transfers.pop(0)[0].wait, *time_out)
    return memory


def _next_size(size: int, expected: int) -> int:
    """The size that both ends expect of the next message: a little shorter ones are padded, rather
    than that the one after them takes two transfers."""
    return max(size, expected * 3 // 4)


def _try(call: Callable[..., Any], *inputs: Any) -> Any:
    """A call of torch.distributed, whose error is a `PeerError`. A connection closes only when
    nothing refers to it any more, and a traceback refers to the locals of its functions: so the
    error is raised without them."""
    try:
        return call(*inputs)
    except RuntimeError as error:
        problem = f"it has ended, or is silent: {str(error).splitlines()[0]}"
    del call, inputs
    raise PeerError(problem)
