"""A pipeline in one process: a worker thread per device.

    pipe = Pipe(nn.Sequential(WithDevice(a, "cpu:0"), WithDevice(b, "cpu:1")), split_size=8)
    pipe(x).sum().backward()                                          # like the Sequential itself
    pipe.train_step(x, y, loss_fn, schedule="1f1b", num_microbatches=4)   # with 1F1B

`Pipe.forward` is GPipe (Huang et al., 2019): m micro-batches flow through n stages in the order of
m + n - 1 clocks. Autograd sees one function from the input and the parameters to the output; its
backward runs the same clocks, last stage first, *on the workers*. Tied parameters,
`torch.autograd.grad`, `retain_graph` and hooks after a gradient's accumulation work as on the
plain Sequential; hooks on the gradient itself are refused. Second derivatives and forward-mode
differentiation do not work. worker.py says which of the caller's modes hold in the workers. A Pipe
runs one call at a time: a call from a second thread raises.

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

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from runtime.graph import Gradients, memory_of
from runtime.guards import (
    buffers_unchanged,
    refuse_gradient,
    refuse_gradient_hooks,
    refuse_hooks,
    refuse_own_forward,
)  # fmt: skip
from runtime.linear import WeightsMayWait
from runtime.randomness import FAST_PATHS, OfThread
from runtime.recompute import NEVER
from runtime.recorder import Recorder

from . import microbatch
from .autograd import pipelined
from .executor import Channel, Dataflow, LocalChannel
from .partition import _split_module, holders
from .replicas import Replicas, split_by_sizes, summed_gradients
from .schedules.catalogue import validated
from .schedules.schedule import BACKWARD, FORWARD, Action, BuildSchedule, clock_cycles
from .stage import Stage
from .step import (
    CHANGED_APART,
    SUMMED_BY_STAGES,
    Losses,
    LossFunction,
    hand_over,
    new_stages,
    on_several,
)  # fmt: skip
from .streams import channel_between
from .worker import Crew

T = TypeVar("T")
_clock_cycles = clock_cycles  # the course's name


class Pipe(nn.Module):
    """An `nn.Sequential` whose partitions compute different micro-batches at the same time.

    Args:
        module: the layers; `WithDevice` names the device of a layer that has no parameters.
        split_size: examples per micro-batch of `forward`.
        recorder: see runtime/recorder.py.
        replicas: copies of tied parameters on other devices (made by `replicas.place_layers`).
        recompute: a mode of runtime/recompute.py.
        sizes: layers per stage; by default a stage ends where the device changes. With `sizes` a
            device may have several stages (chunks), for the schedules of chunks.py.

    Attributes:
        partitions, devices: the layers of each stage, and its device.
        in_queues, out_queues: by partition, the tasks for its worker, and its answers.
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
        refuse_own_forward(module)
        self.split_size = split_size
        self.recorder = recorder
        self.recompute = recompute
        self.replicas = dict(replicas or {})
        cut = _split_module(module) if sizes is None else split_by_sizes(module, sizes)
        self.partitions, self.devices = cut
        self._uncalled = [*holders(module), *self.partitions]
        self._forwards = WeightsMayWait(self.partitions, FAST_PATHS)
        self._calls = Counter[Any]()  # by what trains: else different layers draw
        self._drawing = set[int]()  # layers, by number
        self._crew = Crew(self.devices)
        self.in_queues, self.out_queues = self._crew.in_queues, self._crew.out_queues
        # Stages on one device share a worker: by stage, the first stage with the same worker.
        self._workers = [self.in_queues.index(queue) for queue in self.in_queues]
        workers = list(dict.fromkeys(self._workers))
        # As schedules count them. Without sizes: a rank per stage, even where a device has several.
        self._ranks = [workers.index(k) if sizes else s for s, k in enumerate(self._workers)]
        self._shared = on_several([*self.partitions], self._workers)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a Pipe has threads, and can be neither copied nor saved: copy or save its "
            "state_dict(), or its layers before they are in a Pipe"
        )

    def close(self) -> None:
        """Ends the worker threads. Garbage collection does so too."""
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
            trained = [p for owned in self.stage_parameters() for p in owned if p.requires_grad]
            return pipelined(
                x, sizes, trained,
                forward=lambda batches: self.compute(batches, clocks, stages),
                backward=partial(self.backward_all, stages),
            )  # fmt: skip

    def backward_all(
        self, stages: Sequence[Stage], gradients: list[list[Tensor | None]], retain_graph: bool
    ) -> Gradients:
        """The backward of `forward`, run by autograd: the same clocks, last stage first. In
        `gradients` the inputs' replace the outputs'; returns the parameters'."""
        n = len(stages)
        actions = [Action(BACKWARD, n - 1 - j, i) for i, j in self._all_clocks(len(gradients))]
        with self._crew.alone():
            for stage in stages:
                stage.take_gradients()  # drops what a failed backward left
                stage.retain_graph = retain_graph
            down = self._channels(-1)  # from the output's gradient to the input's
            for i, gradient in enumerate(gradients):  # one entry per leaf of the output
                down[n].put(i, gradient)
            flow = Dataflow(stages, {}, down, self.recorder)
            self._run_flow(flow, actions)
            gradients[:] = [down[0].get(i) for i in range(len(gradients))]  # all workers are done
            return summed_gradients(stages, self.replicas)

    def compute(
        self, batches: list[Any], schedule: Sequence[tuple[int, int]], stages: Sequence[Stage] = ()
    ) -> None:
        """Runs each (i, j) of `schedule`, partition j on `batches[i]`, in place.

        `schedule` may be one clock, whose pairs run at the same time, or all clocks of a forward
        in sequence. A partition starts on a micro-batch as soon as the previous partition is done
        with it: nobody waits for the end of a clock. `stages`: those of `forward`; by default new
        ones. Outputs are on the device where the next partition takes them. ValueError if a
        micro-batch skips a partition on its way: it would wait for ever.
        """
        for i in dict(schedule):
            passed = [j for number, j in schedule if number == i]
            if passed != [*range(passed[0], passed[0] + len(passed))]:
                raise ValueError(
                    f"micro-batch {i} goes through the partitions {passed}: each must follow the "
                    f"one before, as {passed[0]}, {passed[0] + 1}"
                )
        stages, up = stages or self._new_stages(), self._channels(1)
        for i, j in dict(reversed(schedule)).items():  # the first partition of each micro-batch
            up[j].put(i, batches[i])
            batches[i] = None  # this list does not keep the input alive
        flow = Dataflow(stages, up, {}, self.recorder)
        self._run_flow(flow, [Action(FORWARD, j, i) for i, j in schedule])
        for i, j in dict(schedule).items():  # the last
            batches[i] = up[j + 1].get(i)  # here already: _run_flow has waited

    def _channels(self, direction: int) -> dict[int, Channel]:
        """A channel for each boundary, by the stage above: activations go up (1), gradients down
        (-1)."""
        memories = [memory_of(device) for device in self.devices]
        inner = [channel_between(*ends[::direction]) for ends in pairwise(memories)]
        return dict(enumerate([LocalChannel(), *inner, LocalChannel()]))

    def _all_clocks(self, num_batches: int) -> list[tuple[int, int]]:
        """The pairs of all clocks, in order. ValueError unless each micro-batch passes through all
        partitions once, from the first to the last."""
        n = len(self.partitions)
        pairs = [pair for clock in _clock_cycles(num_batches, n) for pair in clock]
        # sorted by micro-batch alone: the order of its partitions stays
        if sorted(pairs, key=lambda pair: pair[0]) != [*product(range(num_batches), range(n))]:
            raise ValueError(
                f"_clock_cycles({num_batches}, {n}) yields {pairs}: each of {num_batches} "
                f"micro-batches must be on each of {n} partitions once, in their order"
            )
        return pairs

    def _run_flow(self, flow: Dataflow, actions: Sequence[Action]) -> None:
        """Each worker does the actions of its stages, in this order. Warns if torch's default
        generator was used meanwhile, which watched layers leave alone."""
        by_worker: dict[int, list[Action]] = {}  # by the first stage of the worker
        for action in actions:
            by_worker.setdefault(self._workers[action.stage], []).append(action)
        jobs = {s: partial(flow.run, its_own) for s, its_own in sorted(by_worker.items())}
        before, stage = torch.get_rng_state(), flow.stages[0]
        watched = self._shared if stage.checked and stage.num_microbatches > 1 else {}
        with self._forwards, buffers_unchanged(watched, CHANGED_APART):
            self._crew.run(jobs, stop=flow.stop)  # waits for all; stop wakes those in a channel
        if not torch.equal(torch.get_rng_state(), before):
            self._calls.clear()  # the next two are checked
            warnings.warn(
                "while the stages ran, torch's default generator was used, by a layer that drew "
                "nothing before, by compiled code or by another thread: what was drawn depends on "
                "timing. The next two calls look for layers that draw now",
                stacklevel=3,
            )

    def train_step(
        self,
        x: Any,
        target: Any,
        loss_fn: LossFunction,
        schedule: str | BuildSchedule = "1f1b",
        num_microbatches: int | None = None,
        scale: float | Tensor = 1.0,
    ) -> Tensor:
        """Runs forward and backward of a batch by `schedule`, adds to `.grad`, returns the loss.

        `loss_fn(output, target)` runs on the last stage, once per micro-batch, and returns the
        *sum* over it; the loss is `scale` times all sums. `scale=1 / number_of_tokens` gives
        the mean over the target tokens of the whole batch, for any cut into micro-batches. Without
        `num_microbatches`, micro-batches have `split_size` examples; `MicroBatches` are not cut
        again. If a stage raises, no `.grad` changes. Neither x nor `scale` may require a
        gradient, and no parameter may have a hook on its gradient.
        """
        inputs, targets = microbatch.cut_batch(x, target, num_microbatches, self.split_size)
        refuse_gradient(inputs, "the input", "call pipe(x), which is differentiated by it")
        refuse_gradient(scale, "scale", "let a layer multiply by a parameter")
        refuse_hooks([self])
        refuse_gradient_hooks(self.named_parameters(), SUMMED_BY_STAGES)
        with self._crew.alone():
            stages = self._new_stages(len(inputs))
            losses, n = Losses(stages[-1], loss_fn, targets, scale), len(stages)
            up, down = self._channels(1) | {n: losses}, self._channels(-1) | {n: losses}
            for i, value in enumerate(inputs):
                up[0].put(i, value)  # all at once: the channel holds them
            _, by_clock = validated(schedule, tuple(self._ranks), len(inputs))  # of all ranks
            with torch.enable_grad():
                flow = Dataflow(stages, up, down, self.recorder)
                self._run_flow(flow, by_clock)
            hand_over(summed_gradients(stages, self.replicas))
            return losses.total()

    def run_on_stages(self, function: Callable[[int], T]) -> list[T]:
        """Calls `function(s)`, such as an optimizer's step, for every stage s on its worker, in
        parallel; returns the results."""
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
        flags = torch.is_grad_enabled(), *(m.training for m in self.modules())
        self._calls[flags] += 1
        return new_stages(
            parts, dict(enumerate(self.devices)), partial(OfThread, drawing=self._drawing),
            self._uncalled, self._calls[flags] - 1,
            recompute=self.recompute, num_microbatches=num_microbatches,
        )  # fmt: skip
