"""Every strategy in one form, so that the program that trains knows none of them.

A strategy holds a model, or its part of one, with an optimizer for what it holds. It is given its
part of each global batch, in micro-batches, leaves the gradients of the mean loss of the *global*
batch in its parameters, and can hand the whole weights to rank 0. How the weights are then updated
is the same for all: training/optimization.py.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from data_parallel.ddp import DistributedDataParallel
from project.tasks import Step, Task, materialize
from training.launch import World
from training.memory import state_bytes

Recorder = Callable[[str, int, int, float, float], None]


@dataclass(frozen=True)
class Plan:
    """What the options ask of a strategy."""

    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    autocast: Callable[[], AbstractContextManager[Any]]
    dtype: torch.dtype = torch.float32
    num_microbatches: int | None = None
    schedule: str = "1f1b"
    balance: str = "auto"
    zero: int = 3
    record: Recorder | None = None


class Strategy(ABC):
    """A way to train a task's model on the ranks of a run. All ranks call the same methods.

    Attributes:
        part, parts: which part of each global batch this rank is given.
        num_microbatches: into how many it is cut; None: as suits the device.
        optimizers: of the parameters that this rank holds; each is in one of them.
        counted: the parameters whose gradients this rank adds to the norm of the whole gradient,
            each of which one rank must add; None: all of its own.
    """

    part = 0
    parts = 1
    num_microbatches: int | None = None
    optimizers: list[torch.optim.Optimizer]
    counted: list[nn.Parameter] | None = None

    @abstractmethod
    def backward(self, step: Step) -> Tensor:
        """Leaves the gradients of the mean loss of the global batch in the parameters that this
        rank holds; returns this rank's part of the summed loss."""

    @abstractmethod
    def outputs(self, x: Any) -> Tensor | None:
        """The model's outputs for `x`, which is this rank's part of a batch, or None where it has
        none; None on ranks that do not get to see them."""

    @abstractmethod
    def whole_weights(self) -> dict[str, Tensor]:
        """On rank 0 every parameter by its name in the whole model; on others nothing."""

    def differing(self) -> list[str]:
        """Names of parameters of which ranks hold copies that have come apart."""
        return []

    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state that this rank holds."""

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """Ends what was started for it."""


class Single(Strategy):
    """One process, the whole model, the whole batch; micro-batches one after the other."""

    def __init__(self, task: Task, world: World, plan: Plan) -> None:
        self.task, self.world, self.plan = task, world, plan
        self.num_microbatches = plan.num_microbatches
        self.model = materialize(task, world.device, plan.dtype)
        self.net: nn.Module = nn.Sequential(*task.layers(self.model))
        self.optimizers = [plan.make_optimizer(self.model.parameters())]

    def backward(self, step: Step) -> Tensor:
        """See `Strategy`. The gradients are averaged over the ranks, so each rank's summed loss is
        divided by the *mean* number of examples per rank, and not by its own."""
        scale = self.parts / max(1, step.count)
        last = len(step.inputs) - 1
        total = torch.zeros((), device=self.world.device)
        for i, (x, target) in enumerate(zip(step.inputs, step.targets, strict=True)):
            with nullcontext() if i == last else self.no_sync():
                start = time.perf_counter()
                with self.plan.autocast():
                    loss = self.task.loss(self.net(x), target)
                middle = self._record("F", i, start)
                (loss * scale).backward()
                self._record("B", i, middle)
            total += loss.detach()
        return total

    def _record(self, kind: str, microbatch: int, start: float) -> float:
        """Records what ends now; returns the time."""
        if self.plan.record is None:
            return 0.0
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        now = time.perf_counter()
        self.plan.record(kind, -1, microbatch, start, now)
        return now

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backward only accumulates."""
        return nullcontext()

    @torch.no_grad()
    def outputs(self, x: Any) -> Tensor | None:
        """See `Strategy`."""
        if x is None:
            return None
        self.net.eval()
        with self.plan.autocast():
            output = self.net(x)
        self.net.train()
        return output

    def whole_weights(self) -> dict[str, Tensor]:
        """See `Strategy`."""
        if not self.world.is_main:
            return {}
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def state_bytes(self) -> int:
        """See `Strategy`."""
        return state_bytes(self.model.parameters(), self.optimizers)


class Ddp(Single):
    """The whole model on every rank, a part of the batch on each, gradients averaged."""

    def __init__(self, task: Task, world: World, plan: Plan) -> None:
        super().__init__(task, world, plan)
        self.part, self.parts = world.rank, world.world_size
        # Every rank has the whole gradient by then: each counts a part of it.
        self.counted = list(self.model.parameters())[world.rank :: world.world_size]
        self.ddp = self.net = DistributedDataParallel(self.net)

    def backward(self, step: Step) -> Tensor:
        """See `Strategy`."""
        loss = super().backward(step)
        self.ddp.average_gradients()
        return loss

    def no_sync(self) -> AbstractContextManager[None]:
        """See `Single`."""
        return self.ddp.no_sync()

    def differing(self) -> list[str]:
        """See `Strategy`."""
        prefixed = {id(p): name for name, p in self.model.named_parameters()}
        parameters = dict(self.ddp.module.named_parameters())
        return [prefixed[id(parameters[name])] for name in self.ddp.differing()]

    def close(self) -> None:
        """See `Strategy`."""
        self.ddp.close()


