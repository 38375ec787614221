"""A pipeline in one process: a worker thread per device.

    pipe = Pipe(nn.Sequential(WithDevice(a, "cpu:0"), WithDevice(b, "cpu:1")), split_size=8)
    pipe(x).sum().backward()                                          # like the Sequential itself
    pipe.train_step(x, y, loss_fn, schedule="1f1b", num_microbatches=4)   # with 1F1B

`Pipe.forward` is GPipe (Huang et al., 2019): m micro-batches flow through n stages in the order of
m + n - 1 clocks. Autograd sees one function from the input and the parameters to the output; its
backward runs the same clocks, last stage first, *on the workers*. Tied parameters,
`torch.autograd.grad`, ``retain_graph`` and hooks after a gradient's accumulation work as on the
plain Sequential; hooks on the gradient itself are refused. Differentiating twice does not work, and
forward-mode differentiation (`torch.autograd.forward_ad`), whose state torch keeps
once per process, only on one stage. worker.py says which of the caller's modes hold. A Pipe runs
one call at a time: a call from a second thread raises.

`Pipe.train_step` computes the loss on the last stage and runs any schedule of catalogue.py. Both
add gradients in the order of the micro-batches, and give the same bits.

Cost: about 0.1 ms per action for Python and thread wake-ups, and

              idle part of the time     micro-batches held by stage s
    forward   (n-1)/(m+n-1)             m
    1f1b      (n-1)/(m+n-1)             at most min(m, n-s)
    zb        (n-1)/(3m+n-1)            at most min(m, n)

Glossary: m micro-batches, n stages, i micro-batch, j or s stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from runtime.graph import Gradients, memory_of
from runtime.guards import refuse_gradient, refuse_gradient_hooks, refuse_hooks
from runtime.randomness import OfThread, StepSeed
from runtime.recompute import NEVER
from runtime.recorder import Recorder

from . import microbatch
from .autograd import pipelined
from .executor import Channel, Dataflow, channels
from .partition import _split_module, holders
from .replicas import Replicas, gradients_by_stage, split_by_sizes, trained_parameters
from .schedules.catalogue import validated
from .schedules.schedule import BACKWARD, FORWARD, Action, BuildSchedule, clock_cycles
from .stage import Stage
from .step import SUMMED_BY_STAGES, Losses, LossFunction, hand_over, new_stages
from .streams import Copier, CopyingChannel
from .worker import Crew, Queue

T = TypeVar("T")
_clock_cycles = clock_cycles  # the course's name


class Pipe(nn.Module):
    """An `nn.Sequential` whose partitions compute different micro-batches at the same time.

    ``split_size``: examples per micro-batch of `forward`. ``recorder``: see runtime/recorder.py.
    ``replicas``: copies of tied parameters on other devices (made by `replicas.place_layers`).
    ``recompute``: a mode of runtime/recompute.py.
    ``sizes``: layers per stage; by default a stage ends where the device changes. With ``sizes`` a
    device may have several stages (chunks), for the schedules of chunks.py.
    ``peak_alive``: after a step, the most micro-batches whose activations each worker held,
    counted once for each of its stages.
    """

    def __init__(
        self,
        module: nn.Sequential,
        split_size: int = 1,
        recorder: Recorder | None = None,
        replicas: Replicas | None = None,
        recompute: str = NEVER,
        sizes: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        microbatch.sizes_by_split(1, split_size)  # raises if it is not positive
        self.split_size = int(split_size)
        self.recorder = recorder
        self.recompute = recompute
        self.replicas = dict(replicas or {})
        if sizes is None:
            self.partitions, self.devices = _split_module(module)
        else:
            self.partitions, self.devices = split_by_sizes(module, sizes)
        self._uncalled = [*holders(module), *self.partitions]
        self.peak_alive: list[int] = []
        self._crew = Crew(self.devices)
        self._copiers: dict[tuple[torch.device, torch.device], Copier] = {}
        # Stages on one device share a worker: by stage, the first stage with the same worker.
        self._workers = [self.in_queues.index(queue) for queue in self.in_queues]
        workers = list(dict.fromkeys(self._workers))
        # As schedules count them. Without sizes: a rank per stage, even where a device has several.
        self._ranks = [workers.index(k) if sizes else s for s, k in enumerate(self._workers)]

    @property
    def in_queues(self) -> list[Queue]:
        """By partition, the tasks for its worker."""
        return self._crew.in_queues

    @property
    def out_queues(self) -> list[Queue]:
        """By partition, its worker's answers."""
        return self._crew.out_queues

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a file has: all but the workers, which it starts for itself."""
        return {**self.__dict__, "_crew": None, "_copiers": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._crew = Crew(self.devices)

    def close(self) -> None:
        """End the worker threads. Garbage collection does so too."""
        self._crew.close()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forward(self, x: Any) -> Any:
        """The output of the Sequential for x, on the last device.

        x is a tensor, or nested tuples, lists and dicts of tensors, with the batch as first
        dimension. The same holds for values between layers.
        """
        refuse_gradient_hooks(self.named_parameters(), SUMMED_BY_STAGES, also_after=False)
        sizes = microbatch.sizes_by_split(microbatch.batch_size(x), self.split_size)
        clocks = self._all_clocks(len(sizes))
        with self._crew.alone():
            stages = self._new_stages(len(sizes))
            return pipelined(
                x, sizes, trained_parameters(stages, self.replicas),
                forward=lambda batches: self.compute(batches, clocks, stages),
                backward=partial(self.backward_all, stages),
            )  # fmt: skip

    def backward_all(
        self, stages: Sequence[Stage], gradients: list[list[Tensor | None]], retain_graph: bool
    ) -> Gradients:
        """The clocks of `forward`, last stage first: its backward, run by autograd. The inputs'
        ``gradients`` replace the outputs'; returns the parameters'."""
        n = len(stages)
        actions = [Action(BACKWARD, n - 1 - j, i) for i, j in self._all_clocks(len(gradients))]
        with self._crew.alone():
            for stage in stages:
                stage.take_gradients()  # drop what a failed backward left
            down = self._down(range(n + 1))  # from the output's gradient to the input's
            for i, gradient in enumerate(gradients):  # one entry per leaf of the output
                down[n].put(i, gradient)
            flow = Dataflow(stages, {}, down, self.recorder, retain_graph)
            self._run_flow(flow, actions)
            gradients[:] = [down[0].get(i) for i in range(len(gradients))]  # all workers are done
            sums = gradients_by_stage(stages, self.replicas)
        return {p: g for of_stage in sums for p, g in of_stage.items()}  # a parameter is in one

    def compute(
        self,
        batches: list[Any],
        schedule: Sequence[tuple[int, int]],
        stages: Sequence[Stage] | None = None,
    ) -> None:
        """Run each (i, j) of ``schedule``, partition j on ``batches[i]``, in place.

        ``schedule`` may be one clock, whose pairs run at the same time, or all clocks of a forward
        in sequence. A partition starts on a micro-batch as soon as the previous partition is done
        with it: nobody waits for the end of a clock. ``stages``: of `forward`; on its own it makes
        some, and leaves outputs on their partition's device.
        """
        n = len(self.devices)
        up = self._up(range(n + 1)) if stages else channels(range(n + 1))
        stages = stages or self._new_stages()
        flow = Dataflow(stages, up, {}, self.recorder)
        reached: dict[int, int] = {}  # by micro-batch, the last partition that it has passed
        for i, j in schedule:
            if i not in reached:
                flow.up[j].put(i, batches[i])
                batches[i] = None  # this list does not keep the input alive
            elif j != reached[i] + 1:
                raise ValueError(
                    f"partition {j} for micro-batch {i} comes after partition {reached[i]}: "
                    f"a micro-batch goes from each partition to the next, here {reached[i] + 1}"
                )
            reached[i] = j
        self._run_flow(flow, [Action(FORWARD, j, i) for i, j in schedule])
        for i, j in reached.items():
            batches[i] = flow.up[j + 1].get(i)  # here already: _run_flow has waited

    def _up(self, stages: Iterable[int]) -> dict[int, Channel]:
        """Channels for activations into these stages."""
        return {s: self._channel(s - 1, s) for s in stages}

    def _down(self, stages: Iterable[int]) -> dict[int, Channel]:
        """Channels for gradients out of these stages."""
        return {s: self._channel(s, s - 1) for s in stages}

    def _channel(self, source: int, target: int) -> Channel:
        """Between two stages. It copies if they are on two GPUs, and neither is the caller."""
        if not {source, target} <= {*range(len(self.devices))}:
            return Channel()
        ends = memory_of(self.devices[source]), memory_of(self.devices[target])
        if ends[0] == ends[1] or any(end.type != "cuda" for end in ends):
            return Channel()
        if ends not in self._copiers:  # one per pair of devices
            self._copiers[ends] = Copier(*ends)
        return CopyingChannel(self._copiers[ends])

    def _all_clocks(self, num_batches: int) -> list[tuple[int, int]]:
        """The pairs of all clocks, in order. ValueError unless each appears once."""
        n = len(self.partitions)
        pairs = [pair for clock in _clock_cycles(num_batches, n) for pair in clock]
        if sorted(pairs) != [(i, j) for i in range(num_batches) for j in range(n)]:
            raise ValueError(
                f"_clock_cycles({num_batches}, {n}) yields {pairs}: each of {num_batches} "
                f"micro-batches must be on each of {n} partitions once"
            )
        return pairs

    def _run_flow(self, flow: Dataflow, actions: Sequence[Action]) -> list[int]:
        """Each worker does the actions of its stages, in this order; returns, by worker, the most
        micro-batches it held."""
        by_worker: dict[int, list[Action]] = {}  # by the first stage of the worker
        for action in actions:
            by_worker.setdefault(self._workers[action.stage], []).append(action)
        jobs = {s: partial(flow.run, its_own) for s, its_own in sorted(by_worker.items())}
        return self._crew.run(jobs, stop=flow.stop)  # waits for all; stop wakes those in a channel

    def train_step(
        self,
        x: Any,
        target: Any,
        loss_fn: LossFunction,
        schedule: str | BuildSchedule = "1f1b",
        num_microbatches: int | None = None,
        scale: float | Tensor = 1.0,
    ) -> Tensor:
        """Forward and backward of a batch by ``schedule``; return the loss, add to ``.grad``.

        ``loss_fn(output, target)`` runs on the last stage, once per micro-batch, and returns the
        *sum* over it; the loss is ``scale`` times all sums. ``scale=1 / number_of_tokens`` gives
        the mean over the target tokens of the whole batch, for any cut into micro-batches. Without
        ``num_microbatches``, micro-batches have ``split_size`` examples; `MicroBatches` are not cut
        again. If a stage raises, no ``.grad`` changes. x may have a graph, into which its gradient
        goes on. ``scale`` may not require a gradient, and no parameter may have a hook on its own.
        """
        if num_microbatches is None:
            sizes = partial(microbatch.sizes_by_split, split_size=self.split_size)
        else:
            sizes = partial(microbatch.sizes_by_number, num_microbatches=num_microbatches)
        inputs, targets = microbatch.cut_batch(x, target, sizes)  # one each per micro-batch
        refuse_gradient(scale, "scale", "let a layer multiply by a parameter")
        leaves = [leaf for value in inputs for leaf in pytree.tree_leaves(value)]
        trained = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        refuse_hooks([self])
        refuse_gradient_hooks(self.named_parameters(), SUMMED_BY_STAGES)
        with self._crew.alone():
            stages = self._new_stages(len(inputs))
            losses, n = Losses(stages[-1], loss_fn, targets, scale), len(stages)
            first = 0 if any(trained) else 1  # the first stage that hands on its input's gradient
            up, down = self._up(range(n)), self._down(range(first, n))
            for i, value in enumerate(inputs):
                up[0].put(i, value)  # all at once: the channel holds them
            flow = Dataflow(stages, {**up, n: losses}, {**down, n: losses}, self.recorder)
            _, by_clock = validated(schedule, tuple(self._ranks), len(targets))  # of all ranks
            with torch.enable_grad():
                self.peak_alive = self._run_flow(flow, by_clock)
                loss = losses.total()
            for of_stage in gradients_by_stage(stages, self.replicas):
                hand_over(of_stage)
            if any(trained):  # on into the caller's graph
                gradients = [dx for i in range(len(inputs)) for dx in down[0].get(i)]  # by leaf
                pairs = [(x, dx) for x, dx in zip(leaves, gradients, strict=True) if dx is not None]
                torch.autograd.backward([x for x, _ in pairs], [dx.to(x.device) for x, dx in pairs])
            return loss

    def run_on_stages(self, function: Callable[[int], T]) -> list[T]:
        """``function(s)`` for every stage s on its worker, in parallel; for optimizer steps."""
        return self._crew.run({s: partial(function, s) for s in range(len(self.devices))})

    def stage_parameters(self) -> list[list[nn.Parameter]]:
        """Per stage, the parameters it owns; a tied parameter belongs to its first stage."""
        seen: set[nn.Parameter] = set(self.replicas)  # a copy has no owner
        owned: list[list[nn.Parameter]] = []
        for partition in self.partitions:
            owned.append([p for p in partition.parameters() if p not in seen])
            seen.update(owned[-1])
        return owned

    def _new_stages(self, num_microbatches: int = 0) -> list[Stage]:
        with torch.no_grad():  # copies of tied parameters, after an optimizer step
            for copy, original in self.replicas.items():
                copy.copy_(original, non_blocking=copy.device.type != "cpu")
        parts = [cast(nn.Sequential, part) for part in self.partitions]
        seed = StepSeed()  # one for all stages
        return new_stages(
            parts, dict(enumerate(self.devices)), lambda device: OfThread(device, seed),
            self._uncalled, recompute=self.recompute, num_microbatches=num_microbatches,
        )  # fmt: skip
