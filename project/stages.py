"""How a model is cut into stages of equal cost, and brought together again on rank 0."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.partition import measure_costs, parse_balance
from project.strategy import Plan
from project.task import Task
from training.launch import World


def gather_on_main(world: World, mine: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The tensors of all ranks by name on rank 0, in the CPU's memory, sent one at a time; nothing
    on the others."""
    shapes: list[Any] = [None] * world.world_size
    dist.all_gather_object(shapes, [(n, tuple(p.shape), p.dtype) for n, p in mine.items()])
    found: dict[str, Tensor] = {}
    for rank, theirs in enumerate(shapes):
        for name, shape, dtype in theirs:
            if world.rank == rank == 0:
                found[name] = mine[name].detach().cpu()
            elif world.is_main:
                received = torch.empty(shape, dtype=dtype, device=world.device)
                dist.recv(received, rank)
                found[name] = received.cpu()
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
