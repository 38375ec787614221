"""A pipeline of many processes: stages on several ranks, joined by send and receive.

    layers = nn.Sequential(*gpt2_layers(model))           # on every rank, on the meta device
    pipe = ProcessPipe(layers, sizes=(3, 3), model=model, initialize=initial_value)
    optimizer = torch.optim.AdamW(pipe.parameters())
    loss = pipe.train_step(x, y, loss_fn, "1f1b", num_microbatches=4, scale=1 / tokens)
    optimizer.step()                                      # updates this rank's parameters

The same `Dataflow` and `Stage` run the same lists as with threads, and every bit of the result is
the same, dropout included. (If three stages share a parameter and one rank has two of them, their
terms are added in a different order.) Only the channels differ (neighbours.py): a stage's output
is a self-describing message (messages.py), sent through process groups (links.py). Model
parallelism is a pipeline with one micro-batch.

    rank 0   x ─▸ stage 0 ══activations══▸ stage 1 ══activations══▸ stage 2 ─▸ loss   rank 2
                          ◂══gradients════         ◂══gradients════

How an activation reaches the next process, and who waits:

    executor.py    Dataflow._forward   output = stage.forward(i, value); up[s + 1].put(i, output)
    neighbours.py  PeerChannel.put     keeps the memory; does not wait for the receiver (start_step)
    links.py       Link.send           head and body leave by isend; the sender computes on
    links.py       Link.receive        the receive was posted when the message before had arrived
    neighbours.py  PeerChannel.get     the receiver waits here, in its own Dataflow._forward

What is computed again, and when: `recompute` says which segments (runtime/recompute.py). The last
segment of a stage is computed again in `Dataflow._backward` before it waits for the gradient, the
others in turn after that.

A rank has one stage or several, its chunks (chunks.py), and runs its actions in the order of its
list; nothing is sent between two stages of one rank. All ranks call the same methods with the same
global batch. The first stage's rank uses x, the last stage's the target, the others only the number
of micro-batches.

Every `train_step` draws its dropout seed from each rank's default generator: all ranks must be
seeded alike.

Cost: per boundary and micro-batch, one tensor each way. Memory: a stage, and the activations that
the schedule keeps alive. Tied weights (GPT-2's embedding is on the first and the last rank) take
one exchange of their gradients per step. Who adds them up, and when:

    each rank     its own part, into .grad, as its last backward passes
    its replicas  if there are any: the sum over them, in buckets, while backward runs
    sum_tied      after that, over the ranks that share the parameter, in one order: the same bits

Glossary: n ranks, m micro-batches, s stage, r rank, i micro-batch.
"""

from __future__ import annotations

import time
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline import microbatch
from pipeline.executor import Channel, Dataflow, LocalChannel
from pipeline.partition import holders, split_into
from pipeline.schedules.catalogue import validated
from pipeline.schedules.schedule import FORWARD, Action, BuildSchedule
from pipeline.stage import Stage
from pipeline.step import (
    CHANGED_APART,
    SUMMED_BY_STAGES,
    Losses,
    LossFunction,
    Ready,
    hand_over,
    new_stages,
    on_several,
)  # fmt: skip
from runtime.graph import Gradients
from runtime.guards import (
    buffers_unchanged,
    refuse_gradient,
    refuse_gradient_hooks,
    refuse_own_forward,
    refuse_to_separate,
)  # fmt: skip
from runtime.linear import WeightsMayWait
from runtime.mesh import message_groups
from runtime.meta import Initialize, materialize, names_of
from runtime.randomness import OfProcess
from runtime.recompute import NEVER
from runtime.recorder import Recorder, acting

from .links import PeerError
from .neighbours import Neighbours

_GRACE = 0.2  # seconds that a failure's consequences wait, so that its cause is reported first


class ProcessPipe:
    """A pipeline on the ranks of `group`; stage s has the next `sizes[s]` of `layers`.

    Args:
        layers: all layers, on every rank; other ranks' are best on the meta device. Parameters of
            several ranks begin with the first one's values.
        sizes: layers per stage; a nested Sequential counts as one layer.
        ranks: of each stage, from `catalogue.ranks_of_stages`; by default stage s is on rank s.
        device: of this rank.
        group: the ranks; by default all.
        messages: groups of these ranks, from a `Mesh` or `message_groups`; by default they are
            made here, by all ranks of the world together.
        model: gives the parameters their names; by default `layers` does.
        initialize: writes the values of tensors on the meta device.
        recorder: see runtime/recorder.py; kinds are those of schedule.Kind, R (recompute), send,
            receive and all_reduce (of tied gradients); micro-batch below 0: none.
        recompute: a mode of runtime/recompute.py.
        timeout: seconds that a neighbour may be silent; `messages` have limits of their own.

    Raises ValueError if sizes, ranks and layers do not fit.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        sizes: Sequence[int],
        device: str | torch.device = "cpu",
        group: dist.ProcessGroup | None = None,
        *,
        messages: Sequence[dist.ProcessGroup] = (),
        ranks: Sequence[int] | None = None,
        model: nn.Module | None = None,
        initialize: Initialize | None = None,
        recorder: Recorder | None = None,
        recompute: str = NEVER,
        timeout: float = 300.0,
    ) -> None:
        world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.ranks = [*range(len(sizes))] if ranks is None else list(ranks)
        if {*self.ranks} != {*range(world_size)} or len(self.ranks) != len(sizes):
            raise ValueError(
                f"{len(sizes)} stages on the ranks {self.ranks} of {world_size}: every stage has a "
                "rank, and every rank has a stage"
            )
        self.rank = dist.get_rank(group) if world_size > 1 else 0
        self.recorder = recorder
        self.device = torch.device(device)
        self.layers = layers
        refuse_own_forward(layers)
        self._parts = split_into(layers, sizes)  # by stage, other ranks' too
        self._own = [s for s, r in enumerate(self.ranks) if r == self.rank]
        self._is_last = self.rank == self.ranks[-1]  # has the last stage
        self.module = nn.Sequential(*(layer for s in self._own for layer in self._parts[s]))
        own, shared = {*self.module.modules()}, on_several(self._parts, self.ranks)
        self._shared = {m: name for m, name in shared.items() if m in own}
        self._uncalled = [*holders(layers), self.module]
        self._waiting = WeightsMayWait([self.module])
        self._calls = Counter[bool]()  # by grad mode: `train_step` has it, `forward` has not
        self._recompute = recompute
        names = names_of(layers if model is None else model)
        refuse_to_separate(names, "each rank would have its own")
        uses: dict[str, set[int]] = {}  # by parameter, the ranks of the stages that use it
        for part, r in zip(self._parts, self.ranks, strict=True):
            for p in part.parameters():
                uses.setdefault(names[p], set()).add(r)
        self._users = {name: sorted(users) for name, users in sorted(uses.items())}
        # of several ranks; the same order on all
        self._tied = {name: users for name, users in self._users.items() if len(users) > 1}
        self._names = materialize(self.module, names, self.device, initialize)
        if world_size > 1 and not messages:
            if world_size != dist.get_world_size():
                raise ValueError(
                    f"a pipeline of {world_size} of {dist.get_world_size()} ranks: all ranks make "
                    "the groups of its messages together, so give messages=make_mesh(...).messages"
                )
            messages = message_groups(range(world_size), timeout)
        this = weakref.proxy(self)  # no cycle: a pipe that is dropped frees its model
        # connects: all ranks are here together
        self._neighbours = Neighbours(
            self.ranks, self.rank, self._tied, messages, self.device,
            acting=lambda *what: acting(this.recorder, *what),
        )  # fmt: skip
        self._broken: str | None = None
        if initialize is None:  # which would give them the same values everywhere
            self._begin_alike()

    def close(self) -> None:
        """Hangs up. Call it after the last step of all ranks, when every message was received."""
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
        ready: Ready | None = None,
    ) -> Tensor:
        """Runs forward and backward of a batch by `schedule`, adds to `.grad`, returns the loss.

        Like `Pipe.train_step`: `loss_fn(output, target)` returns the sum over a micro-batch, and
        the loss is `scale` times all sums. x and target are cut into `num_microbatches`, unless
        they are `MicroBatches`. The rank with the last stage returns the loss, in float64, and the
        others 0, so that the sum over the ranks is the loss.

        `ready` is called with parameters to whose `.grad` this rank adds nothing more: layer by
        layer during the last backward, so that data-parallel buckets can leave before it ends. Then
        call `sum_tied` after the sums over replicas; without `ready` the step does it.

        Raises the error of this rank's stages, or `links.PeerError` for a failure on another rank.
        After an error the pipe cannot be used again.
        """
        with self._step(), torch.enable_grad():
            refuse_gradient(scale, "scale", "let a layer multiply by a parameter")
            inputs, targets = microbatch.cut_batch(x, target, num_microbatches)
            refuse_gradient(inputs, "the input", "make what computes it the first of the layers")
            lists, _ = validated(schedule, tuple(self.ranks), len(inputs))  # by rank
            self._neighbours.start_step(lists)

            def deliver(gradients: Gradients) -> None:
                hand_over(gradients)
                if ready is not None:  # a parameter may be on several stages of this rank
                    missing.subtract(gradients.keys())
                    ready([p for p in gradients if not missing[p]])

            stages = self._stages(
                recompute=self._recompute, num_microbatches=len(inputs),
                deliver=None if ready is None else deliver,  # else one graph: less for the host
            )  # fmt: skip
            missing = Counter(p for stage in stages for p in stage.parameters)
            parameters = {self._names[p]: p for p in missing}
            refuse_gradient_hooks(parameters.items(), SUMMED_BY_STAGES)
            tied = {name: parameters[name] for name in self._tied if name in parameters}
            earlier = {p: p.grad for p in tied.values()} if ready is None else {}
            for p in earlier:  # which are sums over stages already
                p.grad = None
            end: Channel = LocalChannel()
            if self._is_last:  # nobody else needs the targets
                end = losses = Losses(stages[-1], loss_fn, targets, scale)
            self._run(stages, inputs, lists[self.rank], end)
            for stage in stages:
                deliver(stage.take_gradients())
            total = losses.total() if self._is_last else torch.zeros((), device=self.device)
        if ready is None:
            self.sum_tied(tied)
        for p, gradient in earlier.items():
            if gradient is not None:
                new, p.grad = p.grad, gradient
                if new is not None:  # else no stage has trained it in this step
                    hand_over({p: new})
        return total.double()

    def forward(self, x: Any, beside: Mapping[str, Any] | None = None) -> Any:
        """The last layer's output, on the rank with the last stage; None elsewhere.

        No gradients. The layers run in the mode in which they are: for an evaluation, call
        `module.eval()` before and `module.train()` after. `beside` (e.g. a cache) belongs to
        this rank: its layers get it as these fields of a NamedTuple, and it is not sent on.
        """
        # Afterwards the generator is as if nothing had been drawn.
        with self._step(), torch.no_grad(), torch.random.fork_rng(devices=()):
            actions, end = [Action(FORWARD, s, 0) for s in self._own], LocalChannel()
            self._run(self._stages(beside), [x], actions, end)
            return end.get(0) if self._is_last else None

    def from_last(self, value: Tensor) -> Tensor:
        """`value`, on the CPU, overwritten by that of the rank with the last stage."""
        with self._step():
            self._neighbours.broadcast(value, self.ranks[-1])
            return value

    def sum_tied(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Adds up the gradients of parameters that are on several stages over these, with the same
        bits on all of their ranks. All ranks call it together, after a `train_step` with `ready`;
        without `ready` the step has done it.

        Args:
            parameters: this rank's, by their names; or what an optimizer updates instead of tied
                ones, such as shards, of one shape on all of their ranks.
        """
        with self._step(), torch.no_grad():
            terms = {
                name: p.grad.to_dense()
                for name, p in parameters.items()
                if name in self._tied and p.grad is not None
            }
            for name, total in self._neighbours.sums_over_users(terms).items():
                p = parameters[name]
                if p.grad is None or p.grad.is_sparse:
                    p.grad = None
                    hand_over({p: total})
                else:
                    p.grad.copy_(total)  # in place: it may lie in a bucket

    @torch.no_grad()
    def _begin_alike(self) -> None:
        """Tied parameters begin with the values of their first rank: a sum with this one term."""
        tied = {name: p for name, p in self.named_parameters().items() if name in self._tied}
        own = {name: p for name, p in tied.items() if self._tied[name][0] == self.rank}
        with self._step():
            for name, value in self._neighbours.sums_over_users(own).items():
                tied[name].copy_(value)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages."""
        return iter(self.named_parameters().values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank's stages, by the model's names."""
        return {self._names[p]: p for p in self.module.parameters()}

    def users(self, name: str) -> list[int]:
        """The ranks that hold a parameter: several if it is tied. The first counts it."""
        return self._users[name]

    @contextmanager
    def _step(self) -> Iterator[None]:
        """An error inside ends the waits of the neighbours, and so those of their neighbours."""
        if self._broken is not None:
            raise RuntimeError(f"the pipe cannot be used any more: {self._broken}; make a new one")
        try:
            yield
            self._neighbours.finish_step()  # sends may still be under way
        except BaseException as error:
            self._broken = _in_one_line(error)
            self._neighbours.close()  # before the sleep: others may be waiting
            if isinstance(error, PeerError):
                time.sleep(_GRACE)
            raise

    def _stages(self, beside: Mapping[str, Any] | None = None, **how: Any) -> list[Stage]:
        """This rank's stages, for one step; `how`: other arguments of `Stage`."""
        training = torch.is_grad_enabled()
        self._calls[training] += 1
        parts = self._parts
        if beside is not None:
            parts = [nn.Sequential(_With(part, beside)) for part in parts]
        return new_stages(
            parts, dict.fromkeys(self._own, self.device), OfProcess, self._uncalled,
            self._calls[training] - 1, **how,
        )  # fmt: skip

    def _run(
        self, stages: Sequence[Stage], inputs: Sequence[Any], actions: list[Action], end: Channel
    ) -> None:
        """Does this rank's actions. `end`: what the last stage hands its results to."""
        inside = [s for s in self._own if s > 0 and s - 1 in self._own]  # fed by this rank
        first, n = LocalChannel(), len(self.ranks)
        for i, value in enumerate(inputs):
            first.put(i, value)  # without stage 0 nobody takes them
        up: dict[int, Channel] = {0: first, **{s: LocalChannel() for s in inside}, n: end}
        down: dict[int, Channel] = {**{s: LocalChannel() for s in (0, *inside)}, n: end}
        up |= self._neighbours.up
        down |= self._neighbours.down
        flow = Dataflow({stage.index: stage for stage in stages}, up, down, self.recorder)
        # Autograd would run a GPU's backward on a thread of its own, where a layer that computes
        # again, as with torch.utils.checkpoint, would not find this thread's state.
        with (
            torch.autograd.set_multithreading_enabled(False), self._waiting,
            torch.random.fork_rng(devices=()),  # of the CPU
            buffers_unchanged(self._shared if stages[0].checked else {}, CHANGED_APART),
        ):  # fmt: skip
            flow.run(actions)  # on the calling thread; layers seed their draws


class _With(nn.Module):
    """A stage's layers as one, with `beside` as fields of its input, a NamedTuple."""

    def __init__(self, layers: nn.Sequential, beside: Mapping[str, Any]) -> None:
        super().__init__()
        self.layers, self.beside = layers, beside

    def forward(self, value: Any) -> Any:
        output = self.layers(value._replace(**self.beside))
        if isinstance(output, Tensor):  # of the last layer
            return output
        return output._replace(**dict.fromkeys(self.beside))  # `beside` stays here


def _in_one_line(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    notes = [note for note in getattr(error, "__notes__", []) if note not in text]
    return "; ".join([*text.splitlines(), *notes])
