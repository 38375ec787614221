"""The strategies: whole models, shards of one, and stages of one.

single     one rank                                   a plain loop
ddp        the whole model on every rank              data_parallel/ddp.py
fsdp       a shard of every layer on each rank        data_parallel/fsdp.py
pipeline   a few layers on each rank                  pipeline/process.py
model      the same, one rank computing at a time     pipeline/process.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.ddp import DistributedDataParallel
from data_parallel.fsdp import FullyShardedDataParallel
from pipeline.microbatch import MicroBatches
from pipeline.process import ProcessPipe
from project.stages import cut_into_stages, gather_on_main
from project.strategy import Plan, Strategy
from project.tasks import Step, Task, materialize
from training.launch import World
from training.memory import state_bytes


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


def skeleton_of(task: Task, plan: Plan) -> tuple[nn.Module, list[nn.Module]]:
    """The model and its layers, shapes without memory."""
    model = task.skeleton().to(plan.dtype)
    return model, task.layers(model)


class Fsdp(Strategy):
    """Parameters, gradients and optimizer state in shards, a part of the batch on each rank."""

    def __init__(self, task: Task, world: World, plan: Plan) -> None:
        self.task, self.world, self.plan = task, world, plan
        self.part, self.parts = world.rank, world.world_size
        self.num_microbatches = plan.num_microbatches
        model, layers = skeleton_of(task, plan)
        self.layers = nn.Sequential(*layers)
        self.fsdp = FullyShardedDataParallel(
            layers, plan.make_optimizer, names={p: name for name, p in model.named_parameters()},
            init=task.initialize, zero=plan.zero, device=world.device, recorder=plan.record,
        )  # fmt: skip
        self.optimizers = [cast(torch.optim.Optimizer, _ShardOptimizer(self.fsdp))]

    def backward(self, step: Step) -> Tensor:
        """See `Strategy`."""
        count = max(1, step.count)
        with self.plan.autocast():
            loss = self.fsdp.train_step(step.inputs, step.targets, self.task.loss, 1 / count)
        self.fsdp.expose_gradients()
        return loss * count

    @torch.no_grad()
    def outputs(self, x: Any) -> Tensor | None:
        """See `Strategy`."""
        self.layers.eval()
        with self.plan.autocast():
            output = self.fsdp.forward(x)
        self.layers.train()
        return output

    def whole_weights(self) -> dict[str, Tensor]:
        """See `Strategy`."""
        return {name: p.clone() for name, p in self.fsdp.gather() if p is not None}

    def state_bytes(self) -> int:
        """See `Strategy`."""
        return self.fsdp.held_bytes().state


class _ShardOptimizer:
    """The optimizer of the shards, as `Optimizers` knows optimizers."""

    def __init__(self, fsdp: FullyShardedDataParallel) -> None:
        self.fsdp = fsdp
        self.zero_grad, self.step = fsdp.zero_grad, fsdp.optimizer_step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.fsdp.optimizer.param_groups


class Pipeline(Strategy):
    """The layers in stages, one on each rank; micro-batches flow through them."""

    def __init__(self, task: Task, world: World, plan: Plan) -> None:
        self.task, self.world, self.plan = task, world, plan
        self.num_microbatches = plan.num_microbatches or 4
        model, layers = skeleton_of(task, plan)
        sizes = cut_into_stages(task, world, plan, model, layers)
        self.pipe = ProcessPipe(
            nn.Sequential(*layers), sizes, world.device, model=model, initialize=task.initialize,
            recorder=plan.record,
        )  # fmt: skip
        self.optimizers = [plan.make_optimizer(self.pipe.parameters())]
        self.counted = list(self.pipe.owned_parameters().values())

    def backward(self, step: Step) -> Tensor:
        """See `Strategy`. All ranks know the loss; the first counts it."""
        count = max(1, step.count)
        with self.plan.autocast():
            loss = self.pipe.train_step(
                MicroBatches(step.inputs), MicroBatches(step.targets), self.task.loss,
                self.plan.schedule, scale=1 / count,
            )  # fmt: skip
        return loss.detach() * (count if self.world.is_main else 0)

    def outputs(self, x: Any) -> Tensor | None:
        """See `Strategy`."""
        with self.plan.autocast():
            _, output = self.pipe.eval(x)
        return output

    def whole_weights(self) -> dict[str, Tensor]:
        """See `Strategy`."""
        return gather_on_main(self.world, self.pipe.owned_parameters())

    def differing(self) -> list[str]:
        """See `Strategy`: tied parameters have a copy on each stage that uses them."""
        owned, mine = self.pipe.owned_parameters(), self.pipe.named_parameters()
        copies = {name: p for name, p in mine.items() if name not in owned}
        asked: list[Any] = [None] * self.world.world_size
        dist.all_gather_object(asked, list(copies))
        tied = {name for names in asked for name in names}
        originals = gather_on_main(self.world, {n: p for n, p in owned.items() if n in tied})
        apart = []
        for rank, names in enumerate(asked):
            here = copies if rank == self.world.rank else {}
            found = gather_on_main(self.world, here)
            apart += [n for n in names if found and not torch.equal(found[n], originals[n])]
        return apart

    def state_bytes(self) -> int:
        """See `Strategy`."""
        return state_bytes(self.pipe.parameters(), self.optimizers)

    def close(self) -> None:
        """See `Strategy`."""
        self.pipe.close()


class ModelParallel(Pipeline):
    """The pipeline with one micro-batch: one rank computes at a time."""

    def __init__(self, task: Task, world: World, plan: Plan) -> None:
        super().__init__(task, world, plan)
        self.num_microbatches = 1


STRATEGIES: dict[str, Callable[[Task, World, Plan], Strategy]] = {
    "single": Single,
    "ddp": Ddp,
    "fsdp": Fsdp,
    "pipeline": Pipeline,
    "model": ModelParallel,
}
