"""What one rank of a pipeline of processes sends to others, and receives.

`Dataflow` sends activations and gradients; ranks that share parameters send each other their
gradients. All use the same links, so a rank that fails or dies ends every kind of wait alike. Two
ranks have one link, however many of their stages are neighbours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.executor import Channel
from pipeline.schedules.printed import peak_alive
from pipeline.schedules.schedule import Schedule
from runtime.sums import add_up

from .links import InFlight, Link, PeerError, attempt, open_links

Acting = Callable[..., AbstractContextManager[None]]  # runtime.recorder.acting, with its recorder


class PeerChannel(Channel):
    """Values of one kind over a link, from the first of the two `ends` to the second. The ends are
    stages, for the channels of `Dataflow`, or ranks.

    Attributes:
        sends: the transfers of each message that may be under way.
        most: messages that may be under way, in memory that is kept, when `put` returns.
    """

    def __init__(self, link: Link, acting: Acting, what: str, ends: tuple[int, int]) -> None:
        self._link, self._acting, self._what, self._ends = link, acting, what, ends
        self.sends: deque[list[InFlight]] = deque()
        self.most = 1

    def put(self, i: int, value: Any) -> None:
        """Sends micro-batch i (-1: none). If more than `most` messages are under way, takes
        back the memory of the oldest, which has been received: `Neighbours.start_step` says why.
        """
        with self._named("handing", i), self._acting("send", self._ends[0], i, self._link.peer):
            self.sends.append(self._link.send((self._what, i), value))
            self._wait_for_sends(self.most)

    def get(self, i: int) -> Any:
        """Waits until the neighbour has sent micro-batch i; with GPUs the host waits for its head,
        and what is launched next for its body. Some arrive before the schedule needs them."""
        at = self._ends[1]
        with self._named("waiting for", i), self._acting("receive", at, i, self._link.peer):
            return self._link.receive((self._what, i))

    def finish(self) -> None:
        """Waits until this process may end without losing what it sent."""
        with self._named("handing"):
            self._wait_for_sends(0)

    def stop(self) -> None:
        """Does nothing: `Neighbours.close` ends the other ranks' waits."""

    def _wait_for_sends(self, most: int) -> None:
        """Waits until at most this number of messages are under way."""
        while len(self.sends) > most:
            transfers = self.sends.popleft()
            while transfers:
                self._link.wait_for(transfers)

    @contextmanager
    def _named(self, way: str, i: int = -1) -> Iterator[None]:
        """Adds to a `PeerError` which transfer it ended."""
        try:
            yield
        except PeerError as error:
            which = f", micro-batch {i}" if i >= 0 else ""
            raise PeerError(f"{way} {self._what}{which}: {error}") from None


class Neighbours:
    """All links of one rank of a pipeline: with ranks of neighbouring stages, and with ranks that
    share parameters with it.

    Args:
        ranks: the rank of each stage.
        tied: by name of each parameter that several ranks use, these ranks; in the same order on
            all ranks, which make the links and add up the terms in it.
        groups: from `message_groups`. All their ranks make their neighbours together.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        tied: Mapping[str, Sequence[int]],
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        acting: Acting,
    ) -> None:
        self.rank, self._groups, self._acting = rank, list(groups), acting
        self._tied = {name: users for name, users in tied.items() if rank in users}
        linked = [*pairwise(ranks), *(p for users in tied.values() for p in combinations(users, 2))]
        pairs = sorted({(min(pair), max(pair)) for pair in linked if pair[0] != pair[1]})
        self.links = open_links(pairs, groups, device) if groups else {}  # by peer
        self._channels: list[PeerChannel] = []  # all of them
        # For `Dataflow`: activations into stage s, and gradients out of it.
        self.up: dict[int, PeerChannel] = {}
        self.down: dict[int, PeerChannel] = {}
        for s, ends in enumerate(pairwise(ranks), 1):  # the boundary below stage s
            if rank in ends and ends[0] != ends[1]:  # one of the two stages is here
                peer = ends[1] if rank == ends[0] else ends[0]
                self.up[s] = self._channel(peer, "activations", "stage", (s - 1, s))
                self.down[s] = self._channel(peer, "gradients", "stage", (s, s - 1))
        # The ranks that share any parameter with this one: to them, and from them.
        self._to_users: dict[int, PeerChannel] = {}
        self._from_users: dict[int, PeerChannel] = {}
        for peer in sorted({r for users in self._tied.values() for r in users} - {rank}):
            what = "the gradients of shared parameters"
            self._to_users[peer] = self._channel(peer, what, "rank", (rank, peer))
            self._from_users[peer] = self._channel(peer, what, "rank", (peer, rank))

    def broadcast(self, value: Tensor, source: int) -> None:
        """Overwrites a tensor on the CPU by what the rank `source` has."""
        if self._groups:
            attempt(dist.broadcast, value, None, self._groups[0], False, source)

    def sums_over_users(self, terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Adds up what the ranks that share parameters have for them, by name, in the order of the
        ranks: the same bits on all of them. A rank may have nothing for a name. A rank sends
        copies of all before it waits, so when this returns, the terms may be overwritten.
        `finish_step` waits for the sends."""
        if not self._to_users:
            return {}
        with self._acting("all_reduce"):
            for peer, channel in self._to_users.items():
                channel.put(-1, {n: t for n, t in terms.items() if peer in self._tied[n]})
            received = {peer: channel.get(-1) for peer, channel in self._from_users.items()}
        by_rank = {self.rank: terms, **received}
        sums = {}
        for name, users in self._tied.items():
            if of_users := [by_rank[r][name] for r in users if name in by_rank[r]]:
                sums[name] = add_up(of_users)
        return sums

    def start_step(self, schedule: Schedule) -> None:
        """Lets each channel keep the memory of n messages, instead of one per micro-batch. n is the
        most micro-batches that the schedule lets a rank hold. When a message is sent, all but the
        last n before it have been received: so no send waits for its receiver.

        Why: when stage s - 1 sends its k-th activation, it has the gradients of at least k - n
        micro-batches (it holds at most n between their forward and backward), so stage s has
        received at least k - n activations. When stage s sends its k-th gradient, stage
        s - 1 has run at least k forwards, hence k - n backwards, for which it received the
        gradients.
        """
        for channel in self._channels:
            channel.most = int(max(peak_alive(schedule)))

    def finish_step(self) -> None:
        """Waits until this process may end without losing what it sent."""
        for channel in self._channels:
            channel.finish()

    def close(self) -> None:
        """Hangs up. The neighbours notice when they next wait for this rank."""
        for channel in self._channels:
            channel.sends.clear()  # a transfer refers to its connection
        for link in self.links.values():
            link.close()
        if self._groups and dist.is_initialized():  # NCCL's groups would wait for the other ranks
            dist.destroy_process_group(self._groups[0])
        self._groups = []

    def _channel(self, peer: int, what: str, places: str, ends: tuple[int, int]) -> PeerChannel:
        what = f"{what} from {places} {ends[0]} to {places} {ends[1]}"
        self._channels.append(PeerChannel(self.links[peer], self._acting, what, ends))
        return self._channels[-1]
