"""What one rank of a pipeline of processes has around it, and all that passes there.

Besides activations and gradients, which `Dataflow` puts and gets: the loss, known to the last rank
only; and the gradients of parameters that several stages use. All go through the same links, so
that a rank that fails, or dies, ends every kind of waiting alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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

Record = Callable[[str, int, float, float], None]  # kind, micro-batch, start, end

FROM_LAST, TIED = "what the last stage found", "the gradients of shared parameters"
_NONE = -1  # the micro-batch of what belongs to none


class Link(Protocol):
    """Both ways between two ranks. Messages arrive in the order in which they were sent.

    `send`, `receive` and `flush` raise `PeerError` if the other end is lost.
    """

    def send(self, message: Message) -> None: ...
    def receive(self) -> tuple[bytes, Tensor]: ...
    def flush(self) -> None: ...
    def fail(self, reason: str) -> None: ...
    def close(self) -> None: ...


class Neighbour:
    """The other end of a link: stage ``peer``, seen from stage ``own``."""

    def __init__(self, link: Link, own: int, peer: int, record: Record) -> None:
        self.link = link
        self._own, self._peer, self._record = own, peer, record
        self._early: dict[tuple[str, int], Any] = {}

    def put(self, what: str, i: int, value: Any) -> None:
        """Hand over ``value`` of micro-batch i; does not wait until it is received."""
        start = time.perf_counter()
        try:
            self.link.send(Message((what, i, value)))
        except PeerError as error:
            way = f"handing {what} from stage {self._own} to stage {self._peer}"
            raise PeerError(f"{way}{_of(i)}: {error}") from None
        self._record("send", i, start, time.perf_counter())

    def get(self, what: str, i: int) -> Any:
        """Wait for micro-batch i. A schedule may want it later than it comes."""
        start = time.perf_counter()
        while (what, i) not in self._early:
            try:
                sent, number, value = read(*self.link.receive())
            except PeerError as error:
                way = f"stage {self._own} waited for {what} of stage {self._peer}"
                raise PeerError(f"{way}{_of(i)}: {error}") from None
            self._early[sent, number] = value
        self._record("receive", i, start, time.perf_counter())
        return self._early.pop((what, i))


class Channel:
    """As `Dataflow` has them, its other end with a neighbour. ``shared``: by micro-batch, leaves of
    what was got that lay in one memory where they come from."""

    def __init__(self, neighbour: Neighbour, what: str) -> None:
        self._neighbour, self._what = neighbour, what
        self.shared: dict[int, tuple[int, ...]] = {}

    def put(self, i: int, value: Any) -> None:
        shared = overlapping(pytree.tree_leaves(value)) if torch.is_grad_enabled() else ()
        self._neighbour.put(self._what, i, (value, shared))

    def get(self, i: int) -> Any:
        value, self.shared[i] = self._neighbour.get(self._what, i)
        return value

    def stop(self) -> None:
        """Whoever ends the step tells the others, and why: `Neighbours.fail`."""


class Neighbours:
    """All links of one rank of a pipeline: with the stage before, the one after, and those that
    share parameters with it.

    ``tied``: for each parameter of the model that several stages use, its name and those stages.
    All ranks must make theirs together.
    """

    def __init__(
        self,
        num_stages: int,
        rank: int,
        tied: Mapping[str, Sequence[int]],
        group: dist.ProcessGroup | None,
        device: torch.device,
        share_memory: bool,
        timeout: float,
        record: Record,
    ) -> None:
        self.num_stages, self.rank = num_stages, rank
        self._record = record
        self._tied = {name: users for name, users in sorted(tied.items()) if rank in users}
        pairs = {(s, s + 1) for s in range(num_stages - 1)}
        pairs |= {(a, b) for users in tied.values() for a in users for b in users if a < b}
        links: Mapping[int, Link] | None = {} if num_stages == 1 else None
        self._groups: GroupLinks | None = None
        if links is None and share_memory and device.type == "cpu":
            links = open_shared_links(sorted(pairs), group, timeout)
        if links is None:
            links = self._groups = GroupLinks(sorted(pairs), group, device, timeout)
        self._all = {peer: Neighbour(link, rank, peer, record) for peer, link in links.items()}
        # As `Dataflow` has them: activations into stage s, and gradients out of it.
        self.up: dict[int, Channel] = {}
        self.down: dict[int, Channel] = {}
        for s in (rank, rank + 1):  # the boundary below stage s
            if 0 < s < num_stages:
                neighbour = self._all[s - 1 if s == rank else s]
                self.up[s] = Channel(neighbour, "activations")
                self.down[s] = Channel(neighbour, "gradients")

    def from_last(self, value: Tensor | None) -> Tensor:
        """A tensor of the last rank's, passed down from stage to stage."""
        if self.rank + 1 < self.num_stages:
            value = self._all[self.rank + 1].get(FROM_LAST, _NONE)
        assert value is not None
        if self.rank > 0:
            self._all[self.rank - 1].put(FROM_LAST, _NONE, value)
        return value

    def sum_tied(
        self, parameters: Mapping[str, nn.Parameter], parts: Mapping[str, Tensor | None]
    ) -> Gradients:
        """For parameters that several stages use, the sum of their gradients, in the order of the
        stages: the same bits on all of those."""
        start = time.perf_counter()
        peers = sorted({s for users in self._tied.values() for s in users} - {self.rank})
        for peer in peers:
            both = {name: parts[name] for name, users in self._tied.items() if peer in users}
            self._all[peer].put(TIED, _NONE, both)
        of = {peer: self._all[peer].get(TIED, _NONE) for peer in peers} | {self.rank: parts}
        sums: Gradients = {}
        for name, users in self._tied.items():
            p = parameters[name]
            for stage in users:
                part = of[stage][name]
                if part is not None:
                    sums[p] = sums[p] + part if p in sums else part
        if self._tied:
            self._record("all_reduce", _NONE, start, time.perf_counter())
        return sums

    def flush(self) -> None:
        """At the end of a step."""
        for peer, neighbour in self._all.items():
            try:
                neighbour.link.flush()
            except PeerError as error:
                way = f"handing messages from stage {self.rank} to stage {peer}"
                raise PeerError(f"{way}: {error}") from None

    def fail(self, reason: str) -> None:
        """Tell all neighbours that nothing more will come, and why, and hang up."""
        for neighbour in self._all.values():
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
