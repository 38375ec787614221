"""The strategies in which no rank holds the whole model: sharded, and cut into stages."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.fsdp import FullyShardedDataParallel
from pipeline.microbatch import MicroBatches
from pipeline.partition import measure_costs, parse_balance
from pipeline.process import ProcessPipe
from project.strategies import Plan, Strategy
from project.tasks import Step, Task
from training.launch import World
from training.memory import state_bytes


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


def gather_on_main(world: World, mine: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The tensors of all ranks by name on rank 0, sent one at a time; nothing on the others."""
    shapes: list[Any] = [None] * world.world_size
    dist.all_gather_object(shapes, [(n, tuple(p.shape), p.dtype) for n, p in mine.items()])
    found: dict[str, Tensor] = {}
    for rank, theirs in enumerate(shapes):
        for name, shape, dtype in theirs:
            if world.rank == rank == 0:
                found[name] = mine[name].detach()
            elif world.is_main:
                found[name] = torch.empty(shape, dtype=dtype, device=world.device)
                dist.recv(found[name], rank)
            elif world.rank == rank:
                dist.send(mine[name].detach().contiguous(), 0)
    return found


def cut_into_stages(
    task: Task, world: World, plan: Plan, model: nn.Module, layers: Sequence[nn.Module]
) -> list[int]:
    """Layers per stage. Rank 0 measures them, one at a time, on a micro-batch, and tells all."""
    sizes: list[Any] = [None]
    if world.is_main:
        step = next(task.steps(0, 0, 1, plan.num_microbatches or 4))

        def costs() -> list[float]:
            filled = _OneAtATime(task, world, model, layers)
            return measure_costs(
                cast(Sequence[nn.Module], filled), step.inputs[0],
                lambda output: task.loss(output, step.targets[0]),
            )  # fmt: skip

        with plan.autocast():
            sizes = [parse_balance(plan.balance, len(layers), world.world_size, costs)]
    dist.broadcast_object_list(sizes, 0)
    return sizes[0]


class _OneAtATime:
    """Layers without memory, of which each is given memory and values while it is looked at."""

    def __init__(
        self, task: Task, world: World, model: nn.Module, layers: Sequence[nn.Module]
    ) -> None:
        self.task, self.device, self.layers = task, world.device, layers
        self.names = {p: name for name, p in model.named_parameters()}

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[nn.Module]:
        for layer in self.layers:
            filled = copy.deepcopy(layer).to_empty(device=self.device)
            for p, empty in zip(filled.parameters(), layer.parameters(), strict=True):
                self.task.initialize(self.names[empty], p)
            yield filled
