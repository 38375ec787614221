"""What passes between two processes: tensors packed into one stretch of memory, one way.

Problem. Stages in processes must hand on activations and gradients while both sides compute, in
any order that a schedule may have, without ever waiting for each other in a circle. With one
group and blocking calls, or gloo's batched ones, 1F1B does: one side sends an activation, the
other a gradient, and each waits to be received.

Idea. Each way between two ranks is a channel of its own, and nothing but the need of an input
ever waits: sends are asynchronous, their memory is kept until they are done, and receives are
posted ahead, in the order in which the other side sends, which the schedule says. The channels up
and down have groups of their own: NCCL runs what belongs to one group and pair of ranks in order,
on one stream, beside the one that computes.

A message is one transfer whatever its number of tensors:

    | header, 64 bytes or more: per tensor whether it is there | tensor 0 | tensor 1 ...

On GPUs the header is not read, since that would wait for the GPU: there a gradient that is not
there comes as zeros. Who fails closes its connections, and so do those who notice.

Between CPU ranks of one machine shared_messages.py takes the place of the groups.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from runtime.shared_memory import aligned

_AHEAD = 2  # receives that wait at a time for what is not needed yet

Route = tuple[int, int, str]  # from rank, to rank of the pipeline, and what for


class PeerError(dist.DistError):
    """The other end of a channel has failed, ended, or kept silent for too long. As torch's own
    errors of this kind it says no more than that: the cause is with another rank."""


class Layout:
    """Where tensors of given shapes and types lie in a message of ``nbytes``."""

    def __init__(self, kinds: Sequence[tuple[Sequence[int], torch.dtype]]) -> None:
        self._places = []
        end = aligned(max(1, len(kinds)))
        for shape, dtype in kinds:
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            self._places.append((begin, end, tuple(shape), dtype))
            end = aligned(end)
        self.nbytes = end

    def write(self, memory: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Pack ``tensors`` into ``memory``, bytes; None is a tensor that is not there."""
        there = [tensor is not None for tensor in tensors]
        memory[: len(there)] = torch.tensor(there, dtype=torch.uint8)
        for tensor, (begin, end, shape, dtype) in zip(tensors, self._places, strict=True):
            place = memory[begin:end].view(dtype).view(shape)
            if tensor is None:
                place.zero_()
            else:
                place.copy_(tensor)

    def read(self, memory: Tensor) -> list[Tensor | None]:
        """The tensors, as views of ``memory``."""
        n = len(self._places)
        there = memory[:n].tolist() if memory.device.type == "cpu" else [1] * n
        return [
            memory[begin:end].view(dtype).view(shape) if here else None
            for here, (begin, end, shape, dtype) in zip(there, self._places, strict=True)
        ]


UnderWay: TypeAlias = "deque[tuple[int, dist.Work, Tensor]]"
Expected = Sequence[tuple[int, Layout]]  # the messages of a step, in the order of their sending


class Sender(Protocol):
    """The end of a channel where messages begin. They have numbers, which the receiver knows."""

    def expect(self, messages: Expected, capacity: int) -> None:
        """Announce the messages of a step. At most ``capacity`` are under way at a time."""

    def send(self, number: int, layout: Layout, tensors: Sequence[Tensor | None]) -> None:
        """Hand over a message; does not wait until it is received."""

    def flush(self) -> None:
        """At the end of a step: return when this process may end without harm to what it sent."""

    def fail(self, reason: str) -> None:
        """Tell the receiver why nothing more will come. `close` is called next."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """The end where messages arrive."""

    def expect(self, messages: Expected) -> None:
        """Announce the messages of a step, in the order in which they will be sent."""

    def receive(self, number: int, layout: Layout) -> list[Tensor | None]:
        """Wait for a message. Raises `PeerError` if it will not come."""

    def fail(self, reason: str) -> None:
        """Tell the sender why nothing more will be taken. `close` is called next."""

    def close(self) -> None: ...


Ends: TypeAlias = tuple[dict[Route, Sender], dict[Route, Receiver], Callable[[], None]]
"""A rank's ends of channels, and what to call when all are closed."""


class GroupSender:
    """Sends through a process group to its rank ``peer``, counted over all processes."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group: dist.ProcessGroup | None = group
        self._peer, self._device = peer, device
        self._under_way: UnderWay = deque()

    def expect(self, messages: Expected, capacity: int) -> None:
        """Nothing to prepare: each message has memory of its own."""

    def send(self, number: int, layout: Layout, tensors: Sequence[Tensor | None]) -> None:
        memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
        layout.write(memory, tensors)
        try:
            work = dist.isend(memory, self._peer, self._group, tag=_tag(number))
        except RuntimeError as error:
            raise PeerError(_in_words(error)) from None
        assert work is not None
        self._under_way.append((number, work, memory))

    def flush(self) -> None:
        while self._under_way:
            _wait(self._under_way)

    def fail(self, reason: str) -> None:
        """There is no place for a reason: the connection is closed."""

    def close(self) -> None:
        self._under_way.clear()
        self._group = None


class GroupReceiver:
    """The other end of a `GroupSender`."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group: dist.ProcessGroup | None = group
        self._peer, self._device = peer, device
        self._expected: deque[tuple[int, Layout]] = deque()
        self._posted: UnderWay = deque()
        self._here: dict[int, Tensor] = {}

    def expect(self, messages: Expected) -> None:
        self._expected.extend(messages)
        self._post()

    def receive(self, number: int, layout: Layout) -> list[Tensor | None]:
        while number not in self._here:
            if not self._posted:
                self.expect([(number, layout)])
            first, work, memory = self._posted.popleft()
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerError(
                    f"it has ended, or is silent ({str(error).splitlines()[0]})"
                ) from None
            self._here[first] = memory
            self._post()
        return layout.read(self._here.pop(number))

    def fail(self, reason: str) -> None:
        """As GroupSender.fail."""

    def close(self) -> None:
        self._posted.clear()
        self._group = None

    def _post(self) -> None:
        while self._expected and len(self._posted) < _AHEAD:
            number, layout = self._expected.popleft()
            memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
            try:
                work = dist.irecv(memory, self._peer, self._group, tag=_tag(number))
            except RuntimeError as error:
                raise PeerError(_in_words(error)) from None
            assert work is not None
            self._posted.append((number, work, memory))


def open_group_channels(
    routes: Sequence[Route], group: dist.ProcessGroup | None, device: torch.device, timeout: float
) -> Ends:
    """This rank's ends of the routes, through new groups: one for those to higher ranks, one for
    those to lower ones. All ranks of ``group`` must call it together."""
    rank = dist.get_rank(group)
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    groups = _new_groups(members, group, device, timeout)
    senders: dict[Route, Sender] = {}
    receivers: dict[Route, Receiver] = {}
    for route in routes:
        begin, end, _ = route
        one_way = groups[begin > end]
        if begin == rank:
            senders[route] = GroupSender(one_way, members[end], device)
            senders[route].send(0, Layout([]), [])
        if end == rank:  # the first message makes the connection, while nobody computes yet
            receivers[route] = GroupReceiver(one_way, members[begin], device)
            receivers[route].receive(0, Layout([]))
    return senders, receivers, partial(_hang_up, groups)


def _new_groups(
    members: list[int], group: dist.ProcessGroup | None, device: torch.device, timeout: float
) -> list[dist.ProcessGroup]:
    """Two groups of the members of ``group``, which call it together.

    `dist.new_group` names a part's groups by how many this process has at the moment: one made
    after another was closed meets what that has left in the store, and members of different numbers
    of groups never meet. Here the first member gives the name. Unlike the rest of this file this
    takes two functions that torch keeps to itself.
    """
    name: list[Any] = [os.urandom(8).hex()]
    dist.broadcast_object_list(name, members[0], group, device)
    world = c10d._get_default_group()
    backend, store = c10d._world.pg_map[world]
    groups = []
    for way in ("up", "down"):
        new, _ = c10d._new_process_group_helper(
            len(members), dist.get_rank(group), members, c10d.Backend(backend), store,
            c10d.GroupName(f"pipeline {name[0]} {way}"), timeout=timedelta(seconds=timeout),
            device_id=world.bound_device_id,
        )  # fmt: skip
        c10d._world.pg_group_ranks[new] = {member: k for k, member in enumerate(members)}
        groups.append(new)
    return groups


def _hang_up(groups: list[dist.ProcessGroup]) -> None:
    """Leave the groups. With gloo that closes the connections, and whoever waits at their other
    ends is told; NCCL would wait for the others, so it is left to the end of the process."""
    while groups:
        group = groups.pop()
        if dist.is_initialized() and dist.get_backend(group) == "gloo":
            dist.destroy_process_group(group)


def _wait(under_way: UnderWay) -> tuple[int, Tensor]:
    """Wait for the first of them. A connection is closed when nothing refers to it any more, and an
    error's traceback refers to whatever its functions had: so it is raised without."""
    number, work, memory = under_way.popleft()
    problem = ""
    try:
        work.wait()
    except RuntimeError as error:
        problem = _in_words(error)
    del work
    if problem:
        raise PeerError(problem)
    return number, memory


def _in_words(error: RuntimeError) -> str:
    return f"it has ended, or is silent: {str(error).splitlines()[0]}"


def _tag(number: int) -> int:
    return number + 8  # a few messages of a step have negative numbers
