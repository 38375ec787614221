"""Run a schedule: every worker goes through its own list, as fast as its inputs arrive.

Problem. Clock by clock, all stages wait for the slowest of each clock, and the calling thread
wakes up in between. A schedule does not need clocks: an action can start as soon as its input is
there and the stage has done what its list names before it.

Idea. Neighbours are joined by two channels, activations going up and gradients coming down. A
worker takes the next action of its list, waits for the one input it needs, computes, passes the
result on. Order, and so every bit of the result, is given by the lists and not by timing.

An error on any stage stops all channels: whoever waits, or is about to, ends at once.

Where the stages are in several processes, each runs this for the stages it has, over channels
whose other end is in another process: `Links`, and process.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .crew import Stopped
from .schedule import BACKWARD, BACKWARD_WEIGHT, FORWARD, Action
from .stage import Stage

Recorder = Callable[[str, int, int, float, float], None]
"""Called by the workers with (kind, stage, micro-batch, start, end); seconds of perf_counter.

Where it has an attribute `recording` that is false, it is not called, and on a GPU nobody waits for
the kernels before reading the clock."""

LossFunction = Callable[[Any, Any], Tensor]


def listening(recorder: Recorder | None) -> Recorder | None:
    """The recorder, while it records."""
    return recorder if getattr(recorder, "recording", True) else None


@dataclass(frozen=True)
class Links:
    """``up[s]``: activations into stage s; ``down[s]``: gradients out of it, to stage s-1.

    Each is a `Channel`, or the end of one: with ``put`` where it begins, ``get`` where it ends.
    """

    num_stages: int
    up: Mapping[int, Any]
    down: Mapping[int, Any]


class Channel:
    """What one stage hands to its neighbour, by micro-batch."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._early: dict[int, Any] = {}

    def put(self, i: int, value: Any) -> None:
        self._queue.put((i, value))

    def get(self, i: int) -> Any:
        """Wait for micro-batch i. `Stopped` once `stop` was called."""
        while i not in self._early:
            entry = self._queue.get()  # no time-out: whatever ends the call calls stop()
            if entry is None:
                self.stop()
                raise Stopped
            self._early[entry[0]] = entry[1]
        return self._early.pop(i)

    def stop(self) -> None:
        self._queue.put(None)


class Dataflow:
    """The stages, micro-batches and channels of one step.

    The loss of micro-batch i is ``loss_fn(output, targets[i])``, a scalar; the gradients are those
    of ``scale`` times the sum of all losses. With ``links``, ``stages`` are those of this process,
    and the others are behind the links; without, all stages are here.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        inputs: Sequence[Any],
        targets: Sequence[Any],
        loss_fn: LossFunction,
        scale: float | Tensor,
        recorder: Recorder | None,
        links: Links | None = None,
    ) -> None:
        self.losses: list[Tensor | None] = [None] * len(inputs)
        self._stages = {stage.index: stage for stage in stages}
        self._inputs = list(inputs)
        self._targets = targets
        self._loss_fn = loss_fn
        self._scale = scale
        self._recorder = recorder
        self._stopped = False
        links = links or Links(
            len(stages), {s: Channel() for s in self._stages}, {s: Channel() for s in self._stages}
        )
        self._last = links.num_stages - 1
        self._up, self._down = links.up, links.down

    def run(self, actions: Sequence[Action]) -> None:
        """The work of one worker."""
        try:
            for action in actions:
                if self._stopped:
                    raise Stopped
                if action.kind is FORWARD:
                    self._forward(action)
                elif action.kind is BACKWARD_WEIGHT:
                    self._perform_backward(action, "backward_weight")
                else:
                    self._backward(action)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._stopped = True
        for channel in (*self._up.values(), *self._down.values()):
            channel.stop()

    def loss(self) -> Tensor:
        """``scale`` times the losses, added in the order of the micro-batches."""
        losses = [loss for loss in self.losses if loss is not None]
        return torch.stack([loss.detach() for loss in losses]).sum() * self._scale

    def _forward(self, action: Action) -> None:
        _, s, i = action
        if s == 0:
            value, self._inputs[i] = self._inputs[i], None
        else:
            value = self._up[s].get(i)
        stage = self._stages[s]
        if s < self._last:
            output = perform(action, self._recorder, stage, stage.forward, i, value)
            self._up[s + 1].put(i, output)
        else:
            target = self._targets[i]
            self.losses[i] = perform(
                action, self._recorder, stage, stage.forward, i, value,
                lambda output: self._loss(output, target),
            )  # fmt: skip

    def _loss(self, output: Any, target: Any) -> Tensor:
        device = self._stages[self._last].memory
        loss = self._loss_fn(output, pytree.tree_map_only(Tensor, lambda t: t.to(device), target))
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"loss_fn returned {found}: one number, the sum over its micro-batch, is needed, "
                "e.g. cross_entropy(output, target, reduction='sum')"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise RuntimeError(
                "the loss does not depend on anything that requires grad: does loss_fn detach, or "
                "is every parameter frozen? For the loss alone use eval_step"
            )
        return loss

    def _backward(self, action: Action) -> None:
        kind, s, i = action
        if s == self._last:
            loss = self.losses[i]
            assert loss is not None  # its forward came before, see schedule.validate
            gradients = [torch.ones_like(loss) * self._scale]
        else:
            gradients = self._down[s + 1].get(i)
        half = "backward" if kind is BACKWARD else "backward_input"
        result = self._perform_backward(action, half, gradients)
        if s > 0:
            self._down[s].put(i, result)

    def _perform_backward(self, action: Action, method: str, *args: Any) -> Any:
        stage = self._stages[action.stage]
        function = getattr(stage, method)
        return perform(
            action, self._recorder, stage, _without_autocast, function, action.microbatch, *args
        )


def _without_autocast(function: Callable[..., Any], *args: Any) -> Any:
    """Autocast, if on, is for forwards only: operators choose their backward's type themselves."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        return function(*args)


def perform(
    action: Action,
    recorder: Recorder | None,
    stage: Stage,
    function: Callable[..., Any],
    *args: Any,
) -> Any:
    """Call ``function``; tell the recorder; an error gets a note of where it happened."""
    recorder = listening(recorder)
    start = time.perf_counter() if recorder is not None else 0.0
    try:
        result = function(*args)
        if recorder is not None and stage.device.type == "cuda":
            torch.cuda.synchronize(stage.device)  # kernels run later than they are launched
    except BaseException as error:
        what = action.kind.name.lower().replace("_", " ")
        where = f"on stage {action.stage} ({stage.device})"
        _add_note(error, f"in the {what} of micro-batch {action.microbatch} {where}")
        raise
    if recorder is not None:
        recorder(action.kind.value, *action[1:], start, time.perf_counter())
    return result


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]
