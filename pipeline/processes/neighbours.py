"""What one rank of a pipeline of processes sends to others, and receives.

`Dataflow` sends activations and gradients. Also sent are the loss, known only to the rank with the
last stage, and the gradients of parameters shared by several ranks. All use the same links, so a
rank that fails or dies ends every kind of wait alike. Two ranks have one link, however many of
their stages are neighbours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.schedules.schedule import BACKWARD_WEIGHT, FORWARD, Schedule
from runtime.graph import Gradients
from runtime.mesh import message_groups

from .links import InFlight, Link, PeerError, close_groups, open_links, wait_for

Acting = Callable[..., AbstractContextManager[None]]  # runtime.recorder.acting, with its recorder


class PeerChannel:
    """Values of one kind over a link, from the first of the two ``ends`` to the second: stages, for
    the channels of `Dataflow`, or ranks. ``what`` names the kind and the ends.

    ``peer``: the global rank at the other end, for the recorder. ``most``: messages whose memory is
    kept; a send waits for the one that so many came after, see `Neighbours.start_step`.
    """

    def __init__(
        self, link: Link, peer: int, acting: Acting, what: str, ends: tuple[int, int]
    ) -> None:
        self._link, self._peer, self._acting = link, peer, acting
        self._what, self._ends = what, ends
        self._sends: deque[list[InFlight]] = deque()  # of messages that may be under way
        self.most = 1

    def put(self, i: int, value: Any) -> None:
        """Sends micro-batch i (-1: none); does not wait until it is received."""
        what = f"handing {self._what}"
        with _annotated(what, i), self._acting("send", self._ends[0], i, self._peer):
            self._sends.append(self._link.send(self._what, i, value))
            self.wait_for_sends(self.most)

    def get(self, i: int) -> Any:
        """Waits for micro-batch i. Messages may arrive before the schedule needs them."""
        what = f"waiting for {self._what}"
        with _annotated(what, i), self._acting("receive", self._ends[1], i, self._peer):
            return self._link.receive(self._what, i)

    def wait_for_sends(self, most: int = 0) -> None:
        """Waits until at most so many messages are under way."""
        while len(self._sends) > most:
            transfers = self._sends.popleft()
            while transfers:
                wait_for(transfers)

    def stop(self) -> None:
        """Does nothing: `Neighbours.close` ends the other ranks' waits."""


class Neighbours:
    """All links of one rank of a pipeline: with ranks of neighbouring stages, with the rank of the
    last stage, and with ranks that share parameters with it.

    ``ranks``: the rank of each stage. ``tied``: for each parameter used by several stages, its name
    and the ranks of those. ``messages``: groups from `message_groups`; without them all ranks of
    the world are here, and make them. All ranks must make theirs together.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        tied: Mapping[str, Sequence[int]],
        group: dist.ProcessGroup | None,
        messages: Sequence[dist.ProcessGroup],
        device: torch.device,
        timeout: float,
        acting: Acting,
    ) -> None:
        self._ranks, self.rank, self._group, self._acting = ranks, rank, group, acting
        self._tied = {name: users for name, users in sorted(tied.items()) if rank in users}
        linked = [*pairwise(ranks), *((r, ranks[-1]) for r in ranks)]  # the latter for `from_last`
        linked += [pair for users in tied.values() for pair in combinations(users, 2)]
        # the lower rank first
        pairs = sorted({(min(pair), max(pair)) for pair in linked if pair[0] != pair[1]})
        self.links: dict[int, Link] = {}  # by peer; one rank alone has none
        self._groups = list(messages)
        if pairs:
            self._groups = self._groups or _of_all(group, timeout)
            self.links = open_links(pairs, self._groups, device)
        self._channels: dict[str, PeerChannel] = {}  # by what they send, and between which ends
        # For `Dataflow`: activations into stage s, and gradients out of it.
        self.up: dict[int, PeerChannel] = {}
        self.down: dict[int, PeerChannel] = {}
        for s, ends in enumerate(pairwise(ranks), 1):  # the boundary below stage s
            if rank in ends and ends[0] != ends[1]:  # one of the two stages is here
                peer = ends[1] if rank == ends[0] else ends[0]
                self.up[s] = self._channel(peer, "activations", (s - 1, s), "stage")
                self.down[s] = self._channel(peer, "gradients", (s, s - 1), "stage")

    def from_last(self, value: Tensor | None) -> Tensor:
        """A tensor from the rank with the last stage, on all ranks."""
        what, last = "what the last stage found", self._ranks[-1]
        if self.rank != last:
            value = self._from(last, what)
        assert value is not None
        if self.rank == last:
            for peer in sorted({*self._ranks} - {last}):
                self._to(peer, what, value)
        return value

    def sum_tied(
        self, parameters: Mapping[str, nn.Parameter], terms: Mapping[str, Mapping[int, Tensor]]
    ) -> Gradients:
        """Sums the gradients of parameters shared by several stages, in the order of the stages:
        the same bits on all of their ranks. ``terms``: this rank's gradients, by name and stage."""
        what = "the gradients of shared parameters"
        # ranks that share any parameter with this one
        peers = sorted({r for users in self._tied.values() for r in users} - {self.rank})
        by_rank = {self.rank: terms}
        if peers:
            with self._acting("all_reduce"):
                for peer in peers:  # does not wait: all send, then all receive
                    used = {n: terms[n] for n, users in self._tied.items() if peer in users}
                    self._to(peer, what, used)
                by_rank |= {peer: self._from(peer, what) for peer in peers}
        sums: Gradients = {}
        for name, users in self._tied.items():
            p = parameters[name]
            by_stage = {s: term for r in users for s, term in by_rank[r][name].items()}
            for _, term in sorted(by_stage.items()):
                sums[p] = sums[p] + term if p in sums else term
        return sums

    def copy_tied(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Overwrites what this rank has for shared parameters, by name, with what the first of
        their ranks has. Where one of these ranks has None, all have."""
        what = "what the first rank has for"
        for name, users in self._tied.items():  # does not wait: all send, then all receive
            for peer in users[1:] if users[0] == self.rank else ():
                self._to(peer, f"{what} {name}", tensors[name])
        for name, users in self._tied.items():
            if users[0] != self.rank:
                value, target = self._from(users[0], f"{what} {name}"), tensors[name]
                if target is not None:
                    target.copy_(value)

    def start_step(self, schedule: Schedule) -> None:
        """Keeps the memory of as many messages as the schedule has under way, and not of one per
        micro-batch.

        Say that stage s - 1 holds at most n micro-batches between their forward and backward. When
        it sends its k-th activation, it has the gradients of at least k - n micro-batches, so stage
        s has received at least k - n activations. When stage s sends its k-th gradient, stage s - 1
        has run at least k forwards, hence k - n backwards, for which it received the gradients.
        """
        for s in self.up:  # the boundary between stages s - 1 and s
            held = most = 0
            for kind, stage, _ in schedule[self._ranks[s - 1]]:
                if stage == s - 1 and kind != BACKWARD_WEIGHT:
                    held += 1 if kind == FORWARD else -1
                    most = max(most, held)
            self.up[s].most = self.down[s].most = most

    def finish_step(self) -> None:
        """Waits until this process may end without losing what it sent."""
        for what, channel in self._channels.items():
            with _annotated(f"handing {what}"):
                channel.wait_for_sends()

    def close(self) -> None:
        """Hangs up. The neighbours notice when they next wait for this rank."""
        self._channels.clear()
        self.up, self.down = {}, {}
        for link in self.links.values():
            link.close()
        close_groups(self._groups)

    def _to(self, peer: int, what: str, value: Any) -> None:
        self._channel(peer, what, (self.rank, peer), "rank").put(-1, value)

    def _from(self, peer: int, what: str) -> Any:
        return self._channel(peer, what, (peer, self.rank), "rank").get(-1)

    def _channel(self, peer: int, what: str, ends: tuple[int, int], places: str) -> PeerChannel:
        name = peer if self._group is None else dist.get_global_rank(self._group, peer)
        what = f"{what} from {places} {ends[0]} to {places} {ends[1]}"
        if what not in self._channels:
            self._channels[what] = PeerChannel(self.links[peer], name, self._acting, what, ends)
        return self._channels[what]


def _of_all(group: dist.ProcessGroup | None, timeout: float) -> list[dist.ProcessGroup]:
    """Groups for the messages of all ranks of the world, which are those of ``group``."""
    size, world_size = dist.get_world_size(group), dist.get_world_size()
    if size != world_size:
        raise ValueError(
            f"a pipeline of {size} of {world_size} ranks: all ranks make the groups of its "
            "messages together, so give messages=make_mesh(...).messages, or of message_groups(...)"
        )
    return message_groups(range(world_size), timeout)


@contextmanager
def _annotated(way: str, i: int = -1) -> Iterator[None]:
    """Adds to a `PeerError` which transfer it ended, of micro-batch i if there is one."""
    try:
        yield
    except PeerError as error:
        raise PeerError(f"{way}{f', micro-batch {i}' if i >= 0 else ''}: {error}") from None
