"""Run a schedule: every worker goes through its own list, as fast as its inputs arrive.

Two channels join neighbours: activations go up, gradients come down. A worker takes the next action
of its list, waits for its one input, computes, and passes the result on: nobody waits for the end
of a clock. The lists, not timing, determine the order and so every bit of the result.

    batch  ─up[0]─▸ stage 0 ─up[1]─▸ stage 1 ─up[2]─▸ output, or loss
           ◂down[0]─        ◂down[1]─        ◂down[2]─ its gradient

An error on any stage stops all channels: every worker that waits, or is about to, ends at once.

With stages in several processes, each process runs this for its own stages; the other ends of some
channels are then in other processes, see process.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

from runtime.randomness import gpu_restored
from runtime.recompute import Autocast
from runtime.recorder import Recorder, acting

from .schedules.schedule import BACKWARD, BACKWARD_WEIGHT, FORWARD, Action
from .stage import Stage

RECOMPUTE = "R"  # for the recorder


class Stopped(BaseException):
    """Raised in a worker whose call has failed elsewhere; never seen by the caller."""


class Channel(Protocol):
    """Values from one stage to its neighbour, by micro-batch. Between workers of one process a
    `LocalChannel`, between GPUs a `CopyingChannel`, between processes a `PeerChannel`."""

    def put(self, i: int, value: Any) -> None:
        """Hands micro-batch i over, and does not wait until the neighbour takes it. The channel may
        keep its memory until then."""

    def get(self, i: int) -> Any:
        """Waits until the neighbour has handed micro-batch i over: the one place in a step where a
        stage waits for another. Micro-batches may arrive in a different order."""

    def stop(self) -> None:
        """Wakes whoever waits in `get` now or later, with `Stopped`."""


class LocalChannel(Channel):
    """A queue."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._early: dict[int, Any] = {}  # arrived, not yet asked for

    def put(self, i: int, value: Any) -> None:
        self._queue.put((i, value))

    def get(self, i: int) -> Any:
        while i not in self._early:
            entry = self._queue.get()  # no timeout: whoever ends the call calls stop()
            if entry is None:
                self.stop()  # for the next who waits
                raise Stopped
            self._early[entry[0]] = entry[1]
        return self._early.pop(i)

    def stop(self) -> None:
        self._queue.put(None)


@dataclass
class Dataflow:
    """The stages of this process, by number, and the channels around them, for one run of a
    schedule.

    Args:
        up: activations into stage s, one more than stages.
        down: gradients out of stage s, to stage s-1; also one more than stages.
        retain_graph: keep the graphs after backward.
    """

    stages: Sequence[Stage] | Mapping[int, Stage]
    up: Mapping[int, Channel]
    down: Mapping[int, Channel]
    recorder: Recorder | None = None
    retain_graph: bool = False
    _stopped: bool = field(default=False, init=False)  # set by any thread

    def run(self, actions: Sequence[Action]) -> None:
        """The work of one worker. Draws leave the generator of its GPU as it was."""
        try:
            with gpu_restored(self.stages[actions[0].stage].device):
                for action in actions:
                    if self._stopped:
                        raise Stopped
                    if action.kind is FORWARD:
                        self._forward(action)
                    elif action.kind is BACKWARD_WEIGHT:
                        self._backward_weight(action)
                    else:
                        self._backward(action)
        except BaseException:
            self.stop()  # wakes those that wait for this worker
            raise

    def stop(self) -> None:
        self._stopped = True  # for workers that compute now
        for channel in (*self.up.values(), *self.down.values()):
            channel.stop()

    def _forward(self, action: Action) -> None:
        _, s, i = action
        value = self.up[s].get(i)  # waits outside `_noted`: not recorded
        with self._noted(action):
            output = self.stages[s].forward(i, value)
        self.up[s + 1].put(i, output)  # detached; the next stage may start

    def _backward(self, action: Action) -> None:
        kind, s, i = action
        stage = self.stages[s]
        if stage.checkpointed(i):  # while the gradient is in transit
            with self._noted(action, RECOMPUTE):
                stage.compute_again(i)
        gradients = self.down[s + 1].get(i)  # waits
        with self._noted(action), Autocast(off=True).entered():  # it is for forwards only
            if kind is BACKWARD:
                result = stage.backward(i, gradients, self.retain_graph)
            else:
                result = stage.backward_input(i, gradients)
        self.down[s].put(i, result)  # the stage below may start; W, if any, comes later

    def _backward_weight(self, action: Action) -> None:
        with self._noted(action), Autocast(off=True).entered():
            self.stages[action.stage].backward_weight(action.microbatch)

    @contextlib.contextmanager
    def _noted(self, action: Action, part: str = "") -> Iterator[None]:
        """Reports to the recorder; adds the place to an error as a note. `part`: a part of the
        action, recorded under this kind."""
        device = self.stages[action.stage].device
        try:
            with acting(self.recorder, part or action.kind.value, *action[1:], device=device):
                yield
        except BaseException as error:
            what = action.kind.name.lower().replace("_", " ")
            where = f"on stage {action.stage} ({device})"
            note = f"in the {what} of micro-batch {action.microbatch} {where}"
            # `add_note` of Python 3.11
            error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]
            raise
