"""The links of one rank of a pipeline of processes, and everything sent over them.

`Dataflow` sends activations and gradients. Also sent are the loss, known only to the rank with the
last stage, and the gradients of parameters shared by several ranks. All use the same links, so a
rank that fails or dies ends every kind of wait alike. Two ranks have one link, however many of
their stages are neighbours: a message names its kind and the receiving stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from runtime.graph import Gradients
from runtime.sharing import overlapping

from .group_messages import GroupLinks
from .messages import Message, PeerError, read
from .shared_messages import open_shared_links

Acting = Callable[..., AbstractContextManager[None]]  # runtime.recorder.acting, with its recorder

UP, DOWN = "activations", "gradients"
FROM_LAST, TIED = "what the last stage found", "the gradients of shared parameters"
_NONE = -1  # the micro-batch of messages without one


class Link(Protocol):
    """Both directions between two ranks. Messages arrive in the order in which they were sent.

    `send`, `receive` and `flush` raise `PeerError` if the other end is lost.
    """

    def send(self, message: Message) -> None: ...
    def receive(self) -> tuple[bytes, Tensor]: ...
    def flush(self) -> None: ...
    def fail(self, reason: str) -> None: ...
    def close(self) -> None: ...


class Neighbour:
    """The other end of a link: the rank ``peer``, seen from the rank ``own``.

    A message is identified by its kind (``what``), the stage it goes to, and the micro-batch; one
    that belongs to no stage goes to a rank.
    """

    def __init__(
        self, link: Link, own: int, peer: int, acting: Acting, group: dist.ProcessGroup | None
    ) -> None:
        self.link, self._acting = link, acting
        self._own, self._peer = own, peer
        self._name = peer if group is None else dist.get_global_rank(group, peer)
        # arrived before it was asked for; by kind, receiving stage or rank, micro-batch
        self._early: dict[tuple[str, int, int], Any] = {}

    def put(self, what: str, i: int, value: Any, stages: tuple[int, int] | None = None) -> None:
        """Send ``value`` of micro-batch i from the first of the ``stages`` to the second; does not
        wait until it is received."""
        begin, end = stages or (self._own, self._peer)
        place = "rank" if stages is None else "stage"
        try:
            with self._acting("send", begin, i, self._name):
                self.link.send(Message((what, end, i, value)))  # the first three say for whom
        except PeerError as error:
            way = f"handing {what} from {place} {begin} to {place} {end}"
            raise PeerError(f"{way}{_of(i)}: {error}") from None

    def get(self, what: str, i: int, stages: tuple[int, int] | None = None) -> Any:
        """Wait for micro-batch i. Messages may arrive before the schedule needs them."""
        begin, end = stages or (self._peer, self._own)
        place = "rank" if stages is None else "stage"
        try:
            with self._acting("receive", end, i, self._name):
                while (what, end, i) not in self._early:
                    sent, to, number, value = read(*self.link.receive())
                    self._early[sent, to, number] = value  # perhaps of another stage
        except PeerError as error:
            way = f"{place} {end} waited for {what} of {place} {begin}"
            raise PeerError(f"{way}{_of(i)}: {error}") from None
        return self._early.pop((what, end, i))


class Channel:
    """A channel of `Dataflow` whose other end is on a neighbour: from the first of the ``stages``
    to the second. ``shared``: by micro-batch, the leaves of a received value that shared memory on
    the sender."""

    def __init__(self, neighbour: Neighbour, what: str, stages: tuple[int, int]) -> None:
        self._neighbour, self._what, self._stages = neighbour, what, stages
        self.shared: dict[int, tuple[int, ...]] = {}

    def put(self, i: int, value: Any) -> None:
        shared = overlapping(pytree.tree_leaves(value)) if torch.is_grad_enabled() else ()
        # every tensor arrives as a copy, which does not show what it shared
        self._neighbour.put(self._what, i, (value, shared), self._stages)

    def get(self, i: int) -> Any:
        value, self.shared[i] = self._neighbour.get(self._what, i, self._stages)  # for the stage
        return value

    def stop(self) -> None:
        """Does nothing: `Neighbours.fail` tells the other ranks, with the reason."""


class Neighbours:
    """All links of one rank of a pipeline: with ranks of neighbouring stages, with ranks r - 1 and
    r + 1, and with ranks that share parameters with it.

    ``ranks``: the rank of each stage. ``tied``: for each parameter used by several ranks, its name
    and those ranks. All ranks must make theirs together.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        tied: Mapping[str, Sequence[int]],
        group: dist.ProcessGroup | None,
        device: torch.device,
        share_memory: bool,
        timeout: float,
        acting: Acting,
    ) -> None:
        self.rank, self._last = rank, ranks[-1]
        self._acting = acting
        self._tied = {name: users for name, users in sorted(tied.items()) if rank in users}
        # the lower rank first
        pairs = {(min(ends), max(ends)) for ends in pairwise(ranks) if ends[0] != ends[1]}
        pairs |= {(r, r + 1) for r in range(max(ranks))}  # for `from_last`
        pairs |= {(a, b) for users in tied.values() for a in users for b in users if a < b}
        links: Mapping[int, Link] | None = None if pairs else {}  # one rank alone: no links
        self._groups: GroupLinks | None = None
        if links is None and share_memory and device.type == "cpu":
            links = open_shared_links(sorted(pairs), group, timeout)  # None: on several machines
        if links is None:  # all ranks agree on this
            links = self._groups = GroupLinks(sorted(pairs), group, device, timeout)
        self._all = {r: Neighbour(link, rank, r, acting, group) for r, link in links.items()}
        # For `Dataflow`: activations into stage s, and gradients out of it.
        self.up: dict[int, Channel] = {}
        self.down: dict[int, Channel] = {}
        for s, ends in enumerate(pairwise(ranks), 1):  # the boundary below stage s
            if rank in ends and ends[0] != ends[1]:  # one of the two stages is here
                neighbour = self._all[ends[1] if rank == ends[0] else ends[0]]
                self.up[s] = Channel(neighbour, UP, (s - 1, s))
                self.down[s] = Channel(neighbour, DOWN, (s, s - 1))

    def from_last(self, value: Tensor | None) -> Tensor:
        """A tensor from the rank with the last stage, passed on from rank to rank."""
        away = (self.rank > self._last) - (self.rank < self._last)  # 0: this rank has it
        if away:
            value = self._all[self.rank - away].get(FROM_LAST, _NONE)  # from one rank nearer to it
        assert value is not None
        for way in (away,) if away else (-1, 1):  # away from it; if it is here, both ways
            if (neighbour := self._all.get(self.rank + way)) is not None:
                neighbour.put(FROM_LAST, _NONE, value)
        return value

    def sum_tied(
        self,
        parameters: Mapping[str, nn.Parameter],
        parts: Mapping[str, Mapping[int, Tensor | None]],
    ) -> Gradients:
        """Sums the gradients of parameters shared by several ranks, in the order of the stages: the
        same bits on all of these ranks. ``parts``: this rank's gradients, by name and stage."""
        if not self._tied:
            return {}
        with self._acting("all_reduce"):
            # ranks that share any parameter with this one
            peers = sorted({r for users in self._tied.values() for r in users} - {self.rank})
            for peer in peers:
                both = {name: parts[name] for name, users in self._tied.items() if peer in users}
                self._all[peer].put(TIED, _NONE, both)  # does not wait: all send, then all receive
            of = {peer: self._all[peer].get(TIED, _NONE) for peer in peers} | {self.rank: parts}
            sums: Gradients = {}
            for name, users in self._tied.items():
                p = parameters[name]
                every = {s: part for r in users for s, part in of[r][name].items()}  # by stage
                for _, part in sorted(every.items()):
                    if part is not None:
                        sums[p] = sums[p] + part if p in sums else part
        return sums

    def flush(self) -> None:
        """At the end of a step: see `Link.flush`."""
        for peer, neighbour in self._all.items():
            try:
                neighbour.link.flush()
            except PeerError as error:
                way = f"handing messages from rank {self.rank} to rank {peer}"
                raise PeerError(f"{way}: {error}") from None

    def fail(self, reason: str) -> None:
        """Tell all neighbours why nothing more will come, and hang up."""
        for neighbour in self._all.values():  # all are told before any link closes
            neighbour.link.fail(reason)
        self.close()

    def close(self) -> None:
        """Hang up. The neighbours notice when they next wait for this rank."""
        for neighbour in self._all.values():
            neighbour.link.close()
        if self._groups is not None:
            self._groups.hang_up()


def _of(i: int) -> str:
    return f", micro-batch {i}" if i >= 0 else ""
