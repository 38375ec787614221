"""Messages between ranks through process groups: from machine to machine, or from GPU to GPU.

Problem. Stages must exchange activations and gradients while both sides compute, in the order of
any schedule, without a cycle of ranks that wait for each other.

Idea. Sends are asynchronous; their memory is kept until they are done. Receives are posted ahead,
so that a message travels while its receiver computes. With gloo a message may be shorter than the
posted receive, so head and body are one transfer. Before a message that is too long, a short one
announces the size of the next.

    | lengths of head and body, received | head | body |    or:  | -1, room for the next, received |

Which sends are done? Gloo says it only to those who wait. So each transfer says how many its sender
has received: the other end lets go of as many. A link holds what the schedule has in transit, and
not a message per micro-batch of the step.

Between GPUs only the head is sent by gloo, so reading it never waits for the GPU; the body follows
through the device's own groups. Each direction has its group: NCCL runs the messages of one group
and pair of ranks in order, on one stream beside the compute stream. Ranks that share a GPU have
gloo alone, which sends from the CPU's memory: there the body goes through it, and both ends wait.
The groups come from runtime/mesh.py: all ranks of a run make them together.

A rank that fails closes its connections; ranks that notice close theirs too.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.shared_memory import aligned

from .messages import Link, Message, PeerError

_START = struct.Struct("<qqq")  # of a transfer
_FIRST_ROOM = 1 << 12  # bytes


class GroupLink(Link):
    """A link with the global rank ``peer``. ``bodies``: the groups for the bodies that this rank
    sends, and receives, on ``device``; none if they go through the CPU's memory. ``groups``: all
    groups of this rank's links, destroyed by the first that is closed."""

    def __init__(
        self,
        heads: dist.ProcessGroup,
        bodies: Sequence[dist.ProcessGroup],
        peer: int,
        device: torch.device,
        groups: list[dist.ProcessGroup],
    ) -> None:
        super().__init__()
        self._heads: dist.ProcessGroup | None = heads
        self._bodies, self._groups = bodies, groups
        self._peer, self._device = peer, device
        self._room_there = self._room_here = _FIRST_ROOM  # bytes of the posted receives
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()  # sends
        self._done = 0  # sends before these
        self._received = 0  # transfers from the other end, which has as many sends done
        self._posted: deque[tuple[dist.Work, Tensor]] = deque()  # receives: at most one
        self._lost = ""
        self._post()

    def send(self, message: Message) -> None:
        begin = aligned(_START.size + len(message.head))  # bytes before the body
        size = begin if self._bodies else begin + message.nbytes
        envelope = torch.empty(size, dtype=torch.uint8, device="cpu")
        start = _START.pack(len(message.head), message.nbytes, self._received) + message.head
        envelope[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        if size > self._room_there:  # the receive posted there is too short
            self._room_there = size * 5 // 4  # with room to grow
            larger = bytearray(_START.pack(-1, self._room_there, self._received))  # fits
            self._start(torch.frombuffer(larger, dtype=torch.uint8), self._heads)
        body = envelope[begin:]
        if self._bodies:
            body = torch.empty(message.nbytes, dtype=torch.uint8, device=self._device)
        message.write(body)  # before its transfer starts
        self._start(envelope, self._heads)
        if self._bodies and message.nbytes:
            self._start(body, self._bodies[0])

    def receive(self) -> tuple[bytes, Tensor]:
        length = -1
        while length < 0:  # -1 announces the size of the next
            if not self._posted:
                raise PeerError(self._lost)
            envelope = _wait(self._posted)
            self._received += 1
            length, nbytes, done = _START.unpack(envelope[: _START.size].numpy().tobytes())
            self._let_go(done)
            if length < 0:
                self._room_here = nbytes
            self._post()  # the next travels while this one is read
        begin = aligned(_START.size + length)
        head = envelope[_START.size : _START.size + length].numpy().tobytes()
        if not self._bodies:
            # on a CPU a view: the envelope lives with it
            return head, envelope[begin : begin + nbytes].to(self._device)
        body = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        if nbytes:  # only now is its size known
            _call(dist.irecv, body, self._peer, self._bodies[1]).wait()  # NCCL: the stream waits
            self._received += 1
        return head, body

    def flush(self) -> None:
        self._let_go(self._done + len(self._under_way))

    def close(self) -> None:
        """Hang up. A gloo connection closes with its last reference, and a rank that waits at the
        other end gets an error. NCCL would wait for the other ranks, so its groups stay until the
        process ends."""
        self._under_way.clear()
        self._posted.clear()
        self._heads, self._bodies = None, ()
        while self._groups:
            group = self._groups.pop()
            if dist.is_initialized() and dist.get_backend(group) == "gloo":
                dist.destroy_process_group(group)

    def _start(self, memory: Tensor, group: dist.ProcessGroup | None) -> None:
        work = _call(dist.isend, memory, self._peer, group)
        self._under_way.append((work, memory))  # memory: kept until it is sent

    def _let_go(self, number: int) -> None:
        """Waits for the first ``number`` sends of all, and frees their memory."""
        while self._done < number:
            _wait(self._under_way)
            self._done += 1

    def _post(self) -> None:
        """Post the next receive. If the other end has hung up, only the next `receive` raises: the
        message that has just arrived may have been the last."""
        memory = torch.empty(self._room_here, dtype=torch.uint8, device="cpu")
        try:
            self._posted.append((_call(dist.irecv, memory, self._peer, self._heads), memory))
        except PeerError as error:
            self._lost = str(error)


def open_group_links(
    pairs: Sequence[tuple[int, int]], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> dict[int, GroupLink]:
    """This rank's links, by peer, through the ``groups`` of `runtime.mesh.message_groups`. All
    their ranks must call it together; ``pairs``: the linked pairs of ranks, the same on all."""
    heads, *bodies = groups  # bodies: up, down; or none
    rank, members = dist.get_rank(heads), dist.get_process_group_ranks(heads)  # members: global
    bodies = bodies if device.type != "cpu" else []
    owned = list(groups)  # of all links together, to be destroyed
    links: dict[int, GroupLink] = {}
    for low, high in pairs:  # in the same order on all ranks: no cycle of waits
        for begin, end in ((low, high), (high, low)):
            if rank not in (begin, end):
                continue
            peer = end if rank == begin else begin
            if peer not in links:
                # to send on, to receive on: the lower rank sends on `up`
                ways = bodies if rank < peer else bodies[::-1]
                links[peer] = GroupLink(heads, ways, members[peer], device, owned)
            if rank == begin:  # the first message connects, before anybody computes
                links[peer].put("hello", torch.zeros(1, device=device))
            else:
                links[peer].get("hello")
    return links


def _call(transfer: Callable[..., dist.Work | None], *args: Any) -> dist.Work:
    try:
        work = transfer(*args)
    except RuntimeError as error:
        raise PeerError(_in_words(error)) from None
    assert work is not None
    return work


def _wait(under_way: deque[tuple[dist.Work, Tensor]]) -> Tensor:
    """Wait for the first. A connection closes only when nothing refers to it any more, and a
    traceback refers to the locals of its functions: so the error is raised without it."""
    work, memory = under_way.popleft()
    problem = ""
    try:
        work.wait()
    except RuntimeError as error:
        problem = _in_words(error)
    del work
    if problem:
        raise PeerError(problem)
    return memory


def _in_words(error: RuntimeError) -> str:
    return f"it has ended, or is silent: {str(error).splitlines()[0]}"
