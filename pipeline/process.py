"""A pipeline of many processes: a rank per stage, joined by send and receive.

    layers = nn.Sequential(*gpt2_layers(model))           # on every rank, on the meta device
    pipe = ProcessPipe(layers, sizes=(3, 3), model=model, initialize=initial_value)
    optimizer = torch.optim.AdamW(pipe.parameters())
    loss = pipe.train_step(x, y, loss_fn, "1f1b", num_microbatches=4, scale=1 / tokens)
    optimizer.step()                                      # of this stage's parameters

The lists of schedule.py are run by the same `Dataflow` on the same `Stage` as under threads, so
every bit of the result is the same, dropout included. Only the channels differ (neighbours.py):
what a stage hands on becomes a message that says itself what it is (messages.py), and goes through
shared memory between CPU ranks of one machine, and through process groups otherwise. Model
parallelism is the pipeline with one micro-batch.

    rank 0   x ─▸ stage 0 ══activations══▸ stage 1 ══activations══▸ stage 2 ─▸ loss   rank 2
                          ◂══gradients════         ◂══gradients════

All ranks call the same methods with the same global batch, as the data loader gives it to each: the
first uses x, the last the target, the others only the number of micro-batches.

With `early_gradients` a whole backward runs in its two halves (zero_bubble.py), the gradient sent
in between: the stage below starts earlier by the time of the weights' half. With GPipe and 1F1B,
and all thirds of the work alike, a step of n stages takes 3(m+n-1) - (n-1) thirds instead of
3(m+n-1). It costs memory, on every stage but the first: until the weights' half has run, every
product keeps its input and the gradient of its output.

Every `train_step` draws its dropout's seed from the default generator of each rank, which must be
seeded alike. `eval` leaves them as they are.

Cost: per boundary and micro-batch, one tensor each way. Memory: a stage, and what the schedule
keeps alive of activations. Adding the tied weights' gradients (GPT-2's embedding is used on the
first rank and the last) takes one exchange of them per step.

Glossary: n stages, m micro-batches, s stage, i micro-batch.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.graph import Initialize
from runtime.randomness import StepSeed
from runtime.recompute import NEVER
from runtime.recorder import Recorder, listening
from runtime.unseen import refuse_hooks

from . import microbatch
from .dataflow import Dataflow, Losses, LossFunction, channels
from .delivery import deliver, gradients_by_stage, hooks_held
from .messages import PeerError
from .neighbours import Neighbours
from .ownership import Ownership
from .partition import containers, flatten
from .schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    Action,
    BuildSchedule,
    plan,
)
from .stage import Stage

_GRACE = 0.2  # seconds by which a failure's cause is to be reported before its consequences


class ProcessPipe:
    """The stages of ``layers``, ``sizes[s]`` of them on rank s of ``group``; this rank has one.

    Args:
        layers: all of them, on every rank; those of other stages are best on the meta device.
        sizes: layers per stage, a nested Sequential counting as one; as many as there are ranks.
        device: of this rank.
        group: the ranks; by default all.
        model: whose names the parameters have; by default those of ``layers``.
        initialize: writes the values of parameters that are on the meta device.
        recorder: see runtime/recorder.py; kinds are those of schedule.Kind, and send, receive
            and all_reduce (of tied gradients); micro-batch below 0: of none.
        by_layer: see stage.py.
        early_gradients: send a gradient before those of weights are computed.
        recompute: a mode of runtime/recompute.py.
        share_memory: CPU ranks of one machine exchange through it, where they can.
        timeout: seconds that a neighbour may be silent.

    Raises ValueError where sizes, ranks and layers do not fit.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        sizes: Sequence[int],
        device: str | torch.device = "cpu",
        group: dist.ProcessGroup | None = None,
        *,
        model: nn.Module | None = None,
        initialize: Initialize | None = None,
        recorder: Recorder | None = None,
        by_layer: bool = True,
        early_gradients: bool = True,
        recompute: str = NEVER,
        share_memory: bool = True,
        timeout: float = 300.0,
    ) -> None:
        world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        _check(len(layers), sizes, world_size)
        self.rank = dist.get_rank(group) if world_size > 1 else 0
        self.num_stages = len(sizes)
        self.recorder = recorder
        self.device = torch.device(device)
        self.layers = layers
        self.peak_alive = 0
        ends = [sum(sizes[: s + 1]) for s in range(self.num_stages)]
        cut = [
            nn.Sequential(*list(layers)[end - n : end]) for n, end in zip(sizes, ends, strict=True)
        ]
        parts = [nn.Sequential(*(layer for layer, _ in flatten(part))) for part in cut]
        self.module = parts[self.rank]
        self._first_layer = sum(len(part) for part in parts[: self.rank])
        self._uncalled = [*containers(layers, "layers"), ("module", self.module)]
        self._by_layer, self._early, self._recompute = by_layer, early_gradients, recompute
        self._ownership = Ownership(parts, self.rank, layers if model is None else model)
        self._ownership.materialize(self.device, initialize)
        tied = {name: users for name, users in self._ownership.stages.items() if len(users) > 1}
        self._neighbours = Neighbours(
            self.num_stages, self.rank, tied, group, self.device, share_memory, timeout,
            self._record,
        )  # fmt: skip
        self._broken: str | None = None

    def close(self) -> None:
        """Hang up, when all that was sent has been received: after a last step of all ranks."""
        self._broken = self._broken or "it is closed"
        self._neighbours.close()

    def __enter__(self) -> ProcessPipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def train_step(
        self,
        x: Any,
        target: Any,
        loss_fn: LossFunction,
        schedule: str | BuildSchedule = "1f1b",
        num_microbatches: int = 1,
        scale: float | Tensor = 1.0,
    ) -> Tensor:
        """Forward and backward of a batch by ``schedule``; return the loss, add to ``.grad``.

        As `Pipe.train_step`: ``loss_fn(output, target)`` returns the sum over a micro-batch, and
        the loss is ``scale`` times all sums. x and target are cut into ``num_microbatches``, unless
        they are `MicroBatches`. The loss, in float64, is the same on all ranks. Raises what this
        stage raised, or `messages.PeerError` because of what another did; after that the pipe is of
        no use any more.
        """
        with self._step(), torch.enable_grad():
            seed = StepSeed()
            seed.get()  # also where no layer draws, so that all ranks have drawn as often
            stage = self._stage(seed)
            with hooks_held(list(self.module.parameters())):
                loss = self._run(stage, x, target, loss_fn, schedule, num_microbatches, scale)
            self.peak_alive = stage.peak_alive
            (own,), _ = gradients_by_stage([stage], {})
            tied = self._ownership.tied()
            parts = {name: own.pop(p, None) for name, p in tied.items()}
            sums = self._neighbours.sum_tied(tied, parts)
            deliver(own)
            deliver(sums)
            return loss

    def eval(
        self,
        x: Any,
        target: Any = None,
        loss_fn: LossFunction | None = None,
        num_microbatches: int = 1,
        scale: float | Tensor = 1.0,
        beside: Any = None,
    ) -> tuple[Tensor | None, Any]:
        """The loss, on all ranks, and the output of the last layer, on the last rank, else None.

        Layers are in evaluation mode meanwhile. Without ``loss_fn`` there is no loss. ``beside``,
        as a cache, is this rank's own: its layers find it at the end of the tuple that goes
        through them, and it is not handed on.
        """
        outputs: dict[int, Any] = {}

        def loss_of(output: Any, numbered: tuple[int, Any]) -> Tensor:
            i, part = numbered
            outputs[i] = output
            return torch.zeros(()) if loss_fn is None else loss_fn(output, part)

        target = x if loss_fn is None else target
        sizes = partial(microbatch.sizes_by_number, num_microbatches=num_microbatches)
        with self._step(), torch.no_grad(), _evaluating(self.layers):
            inputs, targets = microbatch.cut(x, target, sizes)
            numbered = microbatch.MicroBatches(enumerate(targets))
            cut = microbatch.MicroBatches(inputs)
            stage = self._stage(StepSeed(peek=True), beside)
            loss = self._run(stage, cut, numbered, loss_of, "gpipe", len(cut), scale)
            joined = microbatch.join([outputs[i] for i in sorted(outputs)]) if outputs else None
        return (None if loss_fn is None else loss), joined

    def from_last(self, value: Tensor | None) -> Tensor:
        """``value`` of the last rank, on all ranks."""
        with self._step():
            return self._neighbours.from_last(value)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this stage."""
        return iter(self.named_parameters().values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Those of this stage, by the model's names."""
        return self._ownership.parameters()

    def owned_parameters(self) -> dict[str, nn.Parameter]:
        """Of those, the ones this stage owns. Over all ranks: each parameter of the model once."""
        return self._ownership.owned()

    def users(self, name: str) -> list[int]:
        """The stages that have a parameter: several where it is tied."""
        return self._ownership.stages[name]

    def train(self, mode: bool = True) -> None:
        """Of all layers, as nn.Module.train."""
        self.layers.train(mode)

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Whatever is raised inside, the neighbours learn of it, and so do theirs."""
        if self._broken is not None:
            raise RuntimeError(f"the pipe cannot be used any more: {self._broken}; make a new one")
        try:
            yield
            self._neighbours.flush()
        except BaseException as error:
            self._broken = _in_one_line(error)
            self._neighbours.fail(self._broken)
            if isinstance(error, PeerError):
                time.sleep(_GRACE)
            raise

    def _stage(self, seed: StepSeed, beside: Any = None) -> Stage:
        module = self.module if beside is None else nn.Sequential(_With(self.module, beside))
        return Stage(
            self.rank, module, self.device, seed, self._first_layer, self._by_layer,
            self._recompute,
        )  # fmt: skip

    def _run(
        self,
        stage: Stage,
        x: Any,
        target: Any,
        loss_fn: LossFunction,
        schedule: str | BuildSchedule,
        num_microbatches: int,
        scale: float | Tensor,
    ) -> Tensor:
        refuse_hooks(self._uncalled)
        sizes = partial(microbatch.sizes_by_number, num_microbatches=num_microbatches)
        inputs, targets = microbatch.cut(x, target, sizes)
        stage.num_microbatches = len(inputs)
        lists, _ = plan(schedule, self.num_stages, len(inputs), torch.is_grad_enabled())
        if self.rank > 0:
            stage.shared_before = self._neighbours.up[self.rank].shared
        losses = Losses(loss_fn, targets, scale, stage.memory)
        inbox = channels([0])
        up = {**inbox, **self._neighbours.up}
        flow = Dataflow([stage], up, self._neighbours.down, losses, self.recorder)
        for i, value in enumerate(inputs):
            inbox[0].put(i, value)  # on other stages nobody takes it
        actions = lists[self.rank]
        flow.run(_halved(actions) if self._early and self.rank > 0 else actions)
        last = self.rank + 1 == self.num_stages
        return self._neighbours.from_last(losses.total().double() if last else None)

    def _record(self, kind: str, i: int, start: float, end: float) -> None:
        if (recorder := listening(self.recorder)) is not None:
            recorder(kind, self.rank, i, start, end)


def _halved(actions: Sequence[Action]) -> list[Action]:
    """The same work, a whole backward as its two halves: between them the gradient is sent."""
    result = []
    for action in actions:
        if action.kind is BACKWARD:
            result += [action._replace(kind=kind) for kind in (BACKWARD_INPUT, BACKWARD_WEIGHT)]
        else:
            result.append(action)
    return result


class _With(nn.Module):
    """Layers, and something that they find at the end of the tuple that goes through them."""

    is_wrapper = True  # draws nothing itself, see stage.py

    def __init__(self, layers: nn.Module, beside: Any) -> None:
        super().__init__()
        self.layers, self.beside = layers, beside

    def forward(self, value: tuple[Any, ...]) -> Any:
        output = self.layers((*value, self.beside))
        return output[:-1] if isinstance(output, tuple) else output


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True


def _in_one_line(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    notes = [note for note in getattr(error, "__notes__", []) if note not in text]
    return "; ".join([*text.splitlines(), *notes])


def _check(num_layers: int, sizes: Sequence[int], world_size: int) -> None:
    if len(sizes) != world_size or sum(sizes) != num_layers or min(sizes, default=0) < 1:
        raise ValueError(
            f"sizes {list(sizes)} for {num_layers} layers on {world_size} ranks: one number per "
            "rank, each at least 1, their sum the layers"
        )
