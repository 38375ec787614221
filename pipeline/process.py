"""A pipeline of many processes: the stages are on its ranks, joined by send and receive.

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

A rank has one stage, or several, its chunks (chunks.py): ``ranks`` says who has which. It runs the
actions of its own in the order of its list; between two of them on one rank nothing is sent.

All ranks call the same methods with the same global batch, as the data loader gives it to each: the
first stage's uses x, the last one's the target, the others only the number of micro-batches.

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

Glossary: n ranks, m micro-batches, s stage, r rank, i micro-batch.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.graph import Initialize
from runtime.randomness import StepSeed
from runtime.recompute import NEVER
from runtime.recorder import Recorder, acting
from runtime.unseen import refuse_hooks

from . import microbatch
from .catalogue import plan
from .dataflow import Dataflow, Losses, LossFunction, channels
from .delivery import deliver, gradients_by_stage, hooks_held
from .messages import PeerError
from .neighbours import Neighbours
from .ownership import Ownership
from .partition import containers, split_into
from .schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    Action,
    BuildSchedule,
    Schedule,
    forwards,
)
from .stage import Stage

_GRACE = 0.2  # seconds by which a failure's cause is to be reported before its consequences


class ProcessPipe:
    """The stages of ``layers``, stage s of ``sizes[s]`` of them, on the ranks of ``group``.

    Args:
        layers: all of them, on every rank; those of other ranks are best on the meta device.
        sizes: layers per stage, a nested Sequential counting as one.
        ranks: by stage, the rank that has it, as `catalogue.places` says of a schedule; by default
            stage s is on rank s.
        device: of this rank.
        group: of the ranks; by default all.
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
        ranks: Sequence[int] | None = None,
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
        self.ranks = [*range(len(sizes))] if ranks is None else list(ranks)
        _check(len(layers), sizes, self.ranks, world_size)
        self.rank = dist.get_rank(group) if world_size > 1 else 0
        self.recorder = recorder
        self.device = torch.device(device)
        self.layers = layers
        self.peak_alive = 0
        self._parts = split_into(layers, sizes)
        self._own = [s for s, r in enumerate(self.ranks) if r == self.rank]
        by_rank = [nn.Sequential() for _ in range(world_size)]
        for part, r in zip(self._parts, self.ranks, strict=True):
            by_rank[r].extend(part)
        self.module = by_rank[self.rank]
        self._uncalled = [*containers(layers, "layers"), ("module", self.module)]
        self._by_layer, self._early, self._recompute = by_layer, early_gradients, recompute
        self._ownership = Ownership(by_rank, self.rank, layers if model is None else model)
        self._ownership.materialize(self.device, initialize)
        tied = {name: users for name, users in self._ownership.ranks.items() if len(users) > 1}
        self._neighbours = Neighbours(
            self.ranks, self.rank, tied, group, self.device, share_memory, timeout, self._acting,
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
            stages = self._stages(seed)
            sizes = partial(microbatch.sizes_by_number, num_microbatches=num_microbatches)
            inputs, targets = microbatch.cut(x, target, sizes)
            lists, _ = plan(schedule, self.ranks, len(inputs))
            tied = self._ownership.tied()
            self._deliver_early(stages, tied.values())
            with hooks_held(list(self.module.parameters())):
                loss = self._run(stages, inputs, targets, loss_fn, lists, scale)
            found = [(k.index, dict(zip(k.parameters, k.gradients, strict=True))) for k in stages]
            parts = {
                name: {s: gradients[p] for s, gradients in found if p in gradients}
                for name, p in tied.items()
            }
            own, both = gradients_by_stage(stages, {})
            for p in tied.values():
                for gradients in (*own, both):
                    gradients.pop(p, None)
            sums = self._neighbours.sum_tied(tied, parts)
            for gradients in (*own, both, sums):
                deliver(gradients)
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
        """The loss, on all ranks, and the output of the last layer, on the rank that has the last
        stage, else None.

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
            numbered = list(enumerate(targets))
            stages = self._stages(StepSeed(peek=True), beside)
            lists = forwards(self.ranks, len(inputs))
            loss = self._run(stages, inputs, numbered, loss_of, lists, scale)
            joined = microbatch.join([outputs[i] for i in sorted(outputs)]) if outputs else None
        return (None if loss_fn is None else loss), joined

    def from_last(self, value: Tensor | None) -> Tensor:
        """``value`` of the rank that has the last stage, on all ranks."""
        with self._step():
            return self._neighbours.from_last(value)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank's stages."""
        return iter(self.named_parameters().values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Those of this rank's stages, by the model's names."""
        return self._ownership.parameters()

    def owned_parameters(self) -> dict[str, nn.Parameter]:
        """Of those, the ones this rank owns. Over all ranks: each parameter of the model once."""
        return self._ownership.owned()

    def users(self, name: str) -> list[int]:
        """The ranks that have a parameter: several where it is tied."""
        return self._ownership.ranks[name]

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

    def _stages(self, seed: StepSeed, beside: Any = None) -> list[Stage]:
        """This rank's, for one step."""
        stages, first_layer = [], 0
        for s, part in enumerate(self._parts):
            if s in self._own:
                module = part if beside is None else nn.Sequential(_With(part, beside))
                stage = Stage(
                    s, module, self.device, seed, first_layer, self._by_layer, self._recompute
                )
                if s in self._neighbours.up:
                    stage.shared_before = self._neighbours.up[s].shared
                stages.append(stage)
            first_layer += len(part)
        return stages

    def _deliver_early(self, stages: Sequence[Stage], tied: Collection[nn.Parameter]) -> None:
        """A layer's gradients reach ``.grad`` during the last backward, so that who waits for them
        there, as the buckets of data parallelism do, need not wait for its end. Not those of which
        other stages have a part, nor where a hook is to run that `hooks_held` holds."""
        uses = Counter(p for stage in stages for p in {*stage.parameters})
        several = {p for p, n in uses.items() if n > 1}
        hooked = {p for p in uses if p._backward_hooks}
        for stage in stages:
            stage.deliver, stage.held_back = deliver, {*tied, *several, *hooked}

    def _run(
        self,
        stages: Sequence[Stage],
        inputs: Sequence[Any],
        targets: Sequence[Any],
        loss_fn: LossFunction,
        lists: Schedule,
        scale: float | Tensor,
    ) -> Tensor:
        refuse_hooks(self._uncalled)
        for stage in stages:
            stage.num_microbatches = len(inputs)
        losses = Losses(loss_fn, targets, scale, stages[-1].memory)
        here = [s for s in self._own if s > 0 and s - 1 in self._own]  # from one's own stage
        up: dict[int, Any] = {**channels([0, *here]), **self._neighbours.up}
        down = {**channels(here), **self._neighbours.down}
        flow = Dataflow(stages, up, down, losses, self.recorder)
        for i, value in enumerate(inputs):
            up[0].put(i, value)  # where stage 0 is not, nobody takes it
        self.peak_alive = flow.run(self._halved(lists[self.rank]))
        last = self.rank == self.ranks[-1]
        return self._neighbours.from_last(losses.total().double() if last else None)

    def _halved(self, actions: Sequence[Action]) -> list[Action]:
        """The same work, a whole backward as its two halves where between them its gradient can be
        sent to another rank."""
        result: list[Action] = []
        for action in actions:
            sent = action.stage in self._neighbours.down
            if self._early and sent and action.kind is BACKWARD:
                result += [action._replace(kind=kind) for kind in (BACKWARD_INPUT, BACKWARD_WEIGHT)]
            else:
                result.append(action)
        return result

    def _acting(self, *what: Any) -> AbstractContextManager[None]:
        return acting(self.recorder, *what)


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


def _check(num_layers: int, sizes: Sequence[int], ranks: Sequence[int], world_size: int) -> None:
    counts_fit = sum(sizes) == num_layers and min(sizes, default=0) >= 1
    if {*ranks} != {*range(world_size)} or len(ranks) != len(sizes) or not counts_fit:
        raise ValueError(
            f"sizes {list(sizes)} for {num_layers} layers, on the ranks {list(ranks)} of "
            f"{world_size}: one number per stage, each at least 1, their sum the layers, and every "
            "rank has a stage"
        )
