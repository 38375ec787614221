"""Messages between two ranks, through process groups.

Problem. Stages must exchange activations and gradients while both sides compute, in the order of
any schedule, without a cycle of ranks that wait for each other.

Idea. Sends are asynchronous; their memory is kept until they are done. A receive is posted ahead,
so that a message travels while its receiver computes. But a receive has a size, and the shapes of
activations are known only when they arrive. Both ends have seen the same messages, so both expect
the same length of the next one: that of the one before, but at most twice what they had expected
for that one (`_next_size`). The first transfer has exactly the expected size; the rest of a longer
message follows in a second transfer, which the first announces. Of messages of 270,400 bytes each,
the first seven take two transfers:

    expected      4096                          8192                              270400
    transfers   | start, head, body .. | .. | start, head, body .. | .. | ... | start, head, body |

So in a step most messages are one transfer, whose receive was posted when the previous one had
arrived. All messages of one direction are one stream, in the order in which they were sent; one
that arrives before it is asked for is kept.

Between GPUs only the head is sent by gloo, so reading it never waits for the GPU; the body follows
through the device's own groups. Each direction has its group: NCCL runs the messages of one group
and pair of ranks in order, on one stream beside the compute stream. A body's receive is launched
when its head is read. The host runs ahead of its GPU, which is then still computing earlier
actions. But NCCL begins a receive only after all that was launched before on the current stream: on
the compute stream it would begin between two actions, and the second would wait for it. So the
receive is launched on a stream of its own, and only what is launched next waits for it:

    host               F2 launched | head of 3 | receive 3, F3 launched
    compute stream     F1 ............ F2 ................ F3 ........    F3 waits for 3 alone
    beside             |receive 2|          |receive 3|                   for nothing of this rank

(It is not launched before its head is read: after the last message of a step such a receive would
run on, and whoever waits for the whole GPU would wait for it.) A send waits for the action whose
result it carries. An action waits for no send, except one so old that it has been received
(neighbours.py). None of this was timed on GPUs. Ranks that share a GPU have only gloo, which sends
from the CPU's memory: there the body goes through gloo, and both ends wait. The groups come from
runtime/mesh.py: all ranks of a run make them together.

A rank that fails closes its connections; ranks that notice close theirs too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.shared_memory import aligned
from runtime.waits import time_out_of

from .messages import Message, Received

_START = struct.Struct("<qq")  # where the body begins, and its length
_FIRST_SIZE = 4096  # bytes expected of the first message

InFlight = tuple[dist.Work, Tensor]
"""A transfer under way, and its memory."""


class PeerError(dist.DistError):
    """The other end of a link has failed, ended, or been silent for as long as its group allows. A
    `DistError`, like torch's own errors of this kind: the cause is on another rank."""


@dataclass(eq=False)
class Link:
    """A link with the global rank `peer`. All messages have names of their own.

    Args:
        heads: gloo's group; None once it has hung up.
        bodies: groups for the bodies that this rank sends, and receives, on `device`; none if
            they go through the CPU's memory.
    """

    heads: dist.ProcessGroup | None
    bodies: Sequence[dist.ProcessGroup]
    peer: int
    device: torch.device

    def __post_init__(self) -> None:
        self._size_out = self._size_in = _FIRST_SIZE  # bytes of the next first transfers
        self._posted: list[InFlight] = []  # receives: at most one
        self._early: dict[Any, Any] = {}  # arrived before they were asked for, by name
        self._beside = torch.cuda.Stream(self.device) if self.bodies else None  # receives bodies

    def send(self, name: Any, value: Any) -> list[InFlight]:
        """Starts to send a value; the caller waits for the transfers later."""
        message = Message((name, value))
        begin = aligned(_START.size + len(message.head))
        size = begin if self.bodies else begin + message.nbytes
        envelope = torch.empty(max(size, self._size_out), dtype=torch.uint8, device="cpu")
        start = _START.pack(begin, message.nbytes) + message.head
        envelope[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        body = envelope[begin:]
        if self.bodies:
            body = torch.empty(message.nbytes, dtype=torch.uint8, device=self.device)
        message.write(body)  # before its transfer starts
        first, rest = envelope[: self._size_out], envelope[self._size_out : size]
        self._size_out = _next_size(size, self._size_out)
        transfers = [(first, self.heads)]
        if len(rest):
            transfers.append((rest, self.heads))
        if self.bodies and message.nbytes:
            transfers.append((body, self.bodies[0]))
        return [(attempt(dist.isend, x, self.peer, group), x) for x, group in transfers]

    def receive(self, name: Any) -> Any:
        """Waits for the value of this name. Others may arrive before it."""
        while name not in self._early:
            arrived, value = self._next()
            self._early[arrived] = value
        return self._early.pop(name)

    def wait_for(self, transfers: list[InFlight]) -> Tensor:
        """Waits for the first of the transfers, and returns its memory. Gloo is told how long:
        otherwise it would wait as long as the group allowed when the group was made. NCCL is told
        nothing: its wait returns at once, and would not if it were given a time."""
        memory = transfers[0][1]
        time_out = [time_out_of(self.heads)] if memory.device.type == "cpu" else []
        attempt(transfers.pop(0)[0].wait, *time_out)
        return memory

    def close(self) -> None:
        """Hangs up. A gloo connection closes with its last reference, and a rank that waits at the
        other end gets an error."""
        self._posted.clear()
        self.heads, self.bodies = None, ()

    def _next(self) -> Any:
        """Waits for the next message: its name and value."""
        if not self._posted:
            self._post(self._size_in)
        envelope = self.wait_for(self._posted)
        begin, nbytes = _START.unpack(envelope[: _START.size].numpy().tobytes())
        size = begin if self.bodies else begin + nbytes
        if size > len(envelope):  # longer than expected: the rest follows
            self._post(size - len(envelope))
            envelope = torch.cat([envelope, self.wait_for(self._posted)])
        self._size_in = _next_size(size, self._size_in)
        with suppress(PeerError):  # the message that has just arrived may have been the last
            self._post(self._size_in)  # the next travels while this one is used
        body = envelope[begin:size].to(self.device)  # on a CPU a view
        if self.bodies and nbytes:
            body = self._receive_beside(nbytes)
        return Received(envelope[_START.size : begin].numpy().tobytes(), body).load()

    def _receive_beside(self, nbytes: int) -> Tensor:
        """A body from GPU to GPU. What is launched from now on waits for it; the host does not.

        Its memory belongs to the stream beside. When Python frees it, the GPU may still have to
        compute with it, and the next body would be written there: `record_stream` keeps the memory
        until the compute stream is done with it."""
        with torch.cuda.stream(self._beside):
            body = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            work = attempt(dist.irecv, body, self.peer, self.bodies[1])
        work.wait()
        if self._beside is not None:  # else a test sends bodies between CPUs
            body.record_stream(torch.cuda.current_stream(self.device))
        return body

    def _post(self, size: int) -> None:
        """Posts a receive of `size` bytes."""
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._posted.append((attempt(dist.irecv, memory, self.peer, self.heads), memory))


def open_links(
    pairs: Sequence[tuple[int, int]], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> dict[int, Link]:
    """This rank's links, by peer, through the `groups` of `runtime.mesh.message_groups`. All
    their ranks must call it together; `pairs`: the linked pairs of ranks, the lower first, in one
    order on all ranks."""
    heads, *bodies = groups  # bodies: up, down; or none
    rank, members = dist.get_rank(heads), dist.get_process_group_ranks(heads)  # members: global
    bodies = bodies if device.type != "cpu" else []
    links: dict[int, Link] = {}
    for low, high in (pair for pair in pairs if rank in pair):
        peer = high if rank == low else low
        ways = bodies if rank == low else bodies[::-1]  # the lower rank sends on `up`
        links[peer] = Link(heads, ways, members[peer], device)
        hello = torch.zeros(1, device=device)
        for group in bodies:  # NCCL connects with the first message, and both ends wait for that
            if group is ways[0]:
                dist.send(hello, members[peer], group)
            else:
                dist.recv(hello, members[peer], group)
    return links


def _next_size(size: int, expected: int) -> int:
    """The size that both ends expect of the next message. A message that is a little shorter than
    expected is padded, and the expected size shrinks by at most a quarter: so a longer one after it
    fits. The expected size at most doubles: after one long message, such as the gradients of an
    embedding, others are padded little."""
    return min(max(size, expected * 3 // 4), 2 * expected)


def attempt(call: Callable[..., Any], *inputs: Any) -> Any:
    """A call of torch.distributed, whose error is a `PeerError`. A connection closes only when
    nothing refers to it any more, and a traceback refers to the locals of its functions: so the
    error is raised without them."""
    try:
        return call(*inputs)
    except RuntimeError as error:
        problem = f"it has ended, or is silent: {str(error).splitlines()[0]}"
    del call, inputs
    raise PeerError(problem)
