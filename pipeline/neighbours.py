"""What one rank of a pipeline of processes has around it, and all that passes there.

Besides activations and gradients, which `Dataflow` puts and gets: the loss, known to the last rank
only; and the gradients of parameters that several stages use. All go through
the same channels, so that a rank that fails, or dies, ends every kind of waiting alike.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.graph import Gradients

from .analysis import Message
from .links import NUMBER, Activations, GradientsOf, Inbox, One, Outbox, Record
from .parcels import Ends, Route, open_group_channels
from .schedule import BACKWARD, BACKWARD_INPUT, FORWARD, Schedule, peak_alive
from .shared_messages import open_shared_channels

_TIED = -1  # the number of a message that belongs to no micro-batch


class Neighbours:
    """All channels of one rank of a pipeline: with the stage before, the one after, and those that
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
        self._tied = dict(sorted(tied.items()))
        routes: list[Route] = []
        for s in range(num_stages - 1):
            routes += [(s, s + 1, "activations"), (s + 1, s, "gradients")]
        routes += [
            (a, b, f"the gradient of {name}")
            for name, stages in self._tied.items()
            for a in stages
            for b in stages
            if a != b
        ]
        ends: Ends | None = ({}, {}, lambda: None)
        if num_stages > 1:
            shared = share_memory and device.type == "cpu"
            ends = open_shared_channels(routes, group, timeout) if shared else None
            ends = ends or open_group_channels(routes, group, device, timeout)
        assert ends is not None
        self._senders, self._receivers, self._hang_up = ends
        self._outboxes = {
            (to, what): Outbox(sender, rank, to, what, record)
            for (_, to, what), sender in self._senders.items()
        }
        self._inboxes = {
            (of, what): Inbox(receiver, rank, of, what, record)
            for (of, _, what), receiver in self._receivers.items()
        }
        # As `Dataflow` has them: activations into stage s, and gradients out of it.
        self.up: dict[int, Any] = {}
        self.down: dict[int, Any] = {}
        if rank > 0:
            self.up[rank] = self._inboxes[rank - 1, "activations"]
            self.down[rank] = self._outboxes[rank - 1, "gradients"]
        if rank + 1 < num_stages:
            self.up[rank + 1] = self._outboxes[rank + 1, "activations"]
            self.down[rank + 1] = self._inboxes[rank + 1, "gradients"]

    def announce(self, plan: Schedule, found: Sequence[Sequence[Message]]) -> None:
        """What is going to pass in a step: by the ``plan`` of all stages, and per micro-batch what
        each stage hands on."""
        alive = peak_alive(plan) if torch.is_grad_enabled() else [2] * self.num_stages
        for s in (self.rank, self.rank + 1):  # the boundary below stage s
            if not 0 < s < self.num_stages:
                continue
            up = {i: Activations(messages[s - 1]) for i, messages in enumerate(found)}
            down = {i: GradientsOf(messages[s - 1]) for i, messages in enumerate(found)}
            forwards = [a.microbatch for a in plan[s - 1] if a.kind is FORWARD]
            backwards = [a.microbatch for a in plan[s] if a.kind in (BACKWARD, BACKWARD_INPUT)]
            self.up[s].expect(up, forwards, alive[s - 1])
            self.down[s].expect(down, backwards, alive[s - 1])

    def from_last(self, number: int, value: Tensor | None, parcel: One = NUMBER) -> Tensor:
        """A tensor of the last rank's, passed down from stage to stage. ``number`` is below 0."""
        if self.rank + 1 < self.num_stages:
            value = self.down[self.rank + 1].get(number, parcel)
        assert value is not None
        if self.rank > 0:
            self.down[self.rank].put(number, value, parcel)
        return value

    def sum_tied(
        self, parameters: Mapping[str, nn.Parameter], parts: Mapping[str, Tensor | None]
    ) -> Gradients:
        """For parameters that several stages use, the sum of their gradients, in the order of the
        stages: the same bits on all of those."""
        start = time.perf_counter()
        own = {name: stages for name, stages in self._tied.items() if name in parameters}
        parcels = {name: One(p.shape, p.dtype) for name, p in parameters.items()}
        for name, stages in own.items():
            for peer in stages:
                if peer != self.rank:
                    box = self._outboxes[peer, f"the gradient of {name}"]
                    box.put(_TIED, parts[name], parcels[name])
        sums: Gradients = {}
        for name, stages in own.items():
            p = parameters[name]
            for stage in stages:
                part = parts[name]
                if stage != self.rank:
                    part = self._inboxes[stage, f"the gradient of {name}"].get(_TIED, parcels[name])
                if part is not None:
                    sums[p] = sums[p] + part if p in sums else part
        if own:
            self._record("all_reduce", _TIED, start, time.perf_counter())
        return sums

    def flush(self) -> None:
        """At the end of a step."""
        for box in self._outboxes.values():
            box.flush()

    def fail(self, reason: str) -> None:
        """Tell all neighbours that nothing more will come, and why, and hang up."""
        for sender in self._senders.values():
            sender.fail(reason)
        for receiver in self._receivers.values():
            receiver.fail(reason)
        self.close()

    def close(self) -> None:
        """Hang up. The neighbours notice when they next wait for this rank."""
        for sender in self._senders.values():
            sender.close()
        for receiver in self._receivers.values():
            receiver.close()
        self._hang_up()
