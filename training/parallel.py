"""Lays a model on the ranks, whatever the layout: for train.py and verify.py.

single     1 process                          Replicated     training/replicated.py
ddp        a whole model per rank             Replicated
fsdp       a shard of every layer per rank    Sharded        data_parallel/fsdp.py
pipeline   some of the layers per rank        Staged         pipeline/process.py
model      the same, one micro-batch          Staged
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.fsdp import FullyShardedDataParallel
from pipeline.microbatch import MicroBatches
from pipeline.partition import balance, measure_costs
from pipeline.process import ProcessPipe
from training.checkpoint import Piece, flat_pieces
from training.generation import Prefix, likeliest, newest_alone
from training.launch import World
from training.layout import LaidOutModel, Plan
from training.memory import state_bytes
from training.replicated import Replicated
from training.task import Step, Task

STRATEGIES = ("single", "ddp", "fsdp", "pipeline", "model")


def lay_out(
    args: Any, task: Task, world: World, plan: Plan, cut: Sequence[int] | None = None
) -> LaidOutModel:
    """The task's model under `args.strategy`. All ranks call it together.

    Args:
        cut: the layers per stage of a checkpoint, so that nothing is measured again.
    """
    if args.strategy in ("single", "ddp"):
        return Replicated(task, world, plan)
    if args.strategy == "fsdp":
        return Sharded(task, world, plan, args.zero)
    schedule = args.schedule if args.strategy == "pipeline" else "gpipe"
    num_microbatches = (plan.num_microbatches or 4) if args.strategy == "pipeline" else 1
    return Staged(task, world, plan, schedule, num_microbatches, args.balance, args.timeout, cut)


class Sharded(LaidOutModel):
    """Parameters, gradients and optimizer state in shards; a part of the batch on each rank."""

    def __init__(
        self, task: Task, world: World, plan: Plan, zero: int = 3, share_memory: bool = True
    ) -> None:
        self.task, self.world, self.devices = task, world, [world.device]
        self.part, self.parts = world.rank, world.world_size
        self.num_microbatches = plan.num_microbatches
        # Autocast would keep a copy of every matrix, whole, until its backward.
        self.compute_dtype = torch.bfloat16 if plan.precision == "bf16" else None
        model = task.skeleton().to(plan.dtype)
        layers = task.layers(model)
        self.layers = nn.Sequential(*layers)
        self.fsdp = FullyShardedDataParallel(
            layers, plan.make_optimizer,
            names={t: name for name, t in [*model.named_parameters(), *model.named_buffers()]},
            init=task.initialize, zero=zero, compute_dtype=self.compute_dtype,
            device=world.device, share_memory=share_memory, recorder=plan.recorder,
        )  # fmt: skip
        self.optimizers = [cast(torch.optim.Optimizer, ShardOptimizer(self.fsdp))]

    def backward(self, step: Step) -> Tensor:
        """Gradients are summed over the ranks, so the loss is divided by the global count."""
        count = max(1, step.count)
        loss = self.fsdp.train_step(step.inputs, step.targets, self.task.loss, 1 / count)
        self.fsdp.expose_gradients()
        return loss * count

    @torch.no_grad()
    def outputs(self, x: Any) -> Tensor | None:
        """Of this rank's batch; layers are gathered for it, so all ranks must call."""
        self.layers.eval()
        output = self.fsdp.forward(x)
        self.layers.train()
        return output

    def next_tokens(self, ids: Tensor, prefix: Prefix, num_tokens: int) -> Tensor:
        """Layers are gathered by all ranks together, whoever needs them."""
        self._some_rank_goes_on(True)
        return super().next_tokens(ids, prefix, num_tokens)

    def end(self) -> None:
        """Takes part in gathering until no rank has sentences left."""
        while self._some_rank_goes_on(False):
            self.outputs(None)

    def _some_rank_goes_on(self, this_one: bool) -> bool:
        going = torch.tensor(int(this_one), device=self.world.device)
        if self.world.world_size > 1:
            dist.all_reduce(going, op=dist.ReduceOp.MAX)
        return bool(going)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Gathered parameter by parameter."""
        return ((name, p.cpu()) for name, p in self.fsdp.gather() if p is not None)

    def held(self) -> Iterable[Tensor]:
        """Flat shards, one per unit."""
        return [unit.shard for unit in self.fsdp.units]

    def pieces(self, p: Tensor, t: Tensor) -> list[Piece]:
        """A flat shard holds ranges of flattened parameters."""
        (unit,) = (u.unit for u in self.fsdp.units if u.shard is p)
        found = unit.pieces(self.world.rank, t)
        return [x for f in found for x in flat_pieces(f.name, f.shape, f.offset, f.tensor)]

    def loaded(self) -> None:
        """The next forward gathers the new values."""
        self.fsdp.parameters_changed()

    def whole_parameters(self) -> dict[str, Tensor]:
        """None: every rank holds other shards."""
        return {}

    def state_bytes(self) -> dict[str, int]:
        """Of the shards."""
        held = self.fsdp.held_bytes()
        return {kind: getattr(held, kind) for kind in ("parameters", "gradients", "optimizer")}


class ShardOptimizer:
    """The optimizer of the shards. Its steps are collective: other ranks read these shards."""

    def __init__(self, fsdp: FullyShardedDataParallel) -> None:
        self.optimizer = fsdp.optimizer
        self.zero_grad, self.step = fsdp.zero_grad, fsdp.optimizer_step

    def __getattr__(self, name: str) -> Any:
        """Its groups and state are those of the optimizer within."""
        return getattr(self.optimizer, name)


class Staged(LaidOutModel):
    """The layers in stages, one on each rank; micro-batches flow through them."""

    def __init__(
        self,
        task: Task,
        world: World,
        plan: Plan,
        schedule: str = "1f1b",
        num_microbatches: int = 4,
        balance: str = "auto",
        timeout: float = 300.0,
        cut: Sequence[int] | None = None,
        share_memory: bool = True,
    ) -> None:
        self.task, self.world, self.plan, self.devices = task, world, plan, [world.device]
        self.num_microbatches, self.schedule = num_microbatches, schedule
        model = task.skeleton().to(plan.dtype)
        layers = task.layers(model)
        if balance != "auto" or cut is None or len(cut) != world.world_size:
            cut = task.sizes(balance, world.world_size)
        self.cut = cut or measured_sizes(task, world, plan, model, layers)
        self.pipe = ProcessPipe(
            nn.Sequential(*layers), self.cut, world.device, model=model,
            initialize=task.initialize, recorder=plan.recorder, share_memory=share_memory,
            timeout=timeout,
        )  # fmt: skip
        self.description = f"layers per stage: {' | '.join(map(str, self.cut))}"
        self.optimizers = [plan.make_optimizer(self.pipe.parameters())]
        plan.timeline.watch(self.optimizers[0])
        self.counted = list(self.pipe.owned_parameters().values())

    def backward(self, step: Step) -> Tensor:
        """All ranks get the loss; the first counts it."""
        count = max(1, step.count)
        with self.plan.autocast(self.devices[0]):
            loss = self.pipe.train_step(
                MicroBatches(step.inputs), MicroBatches(step.targets), self.task.loss,
                self.schedule or "gpipe", scale=1 / count,
            )  # fmt: skip
        return loss.detach() * (count if self.world.is_main else 0)

    def outputs(self, x: Any) -> Tensor | None:
        """The last rank sees them."""
        with self.plan.autocast(self.devices[0]):
            _, output = self.pipe.eval(x)
        return output

    def next_tokens(self, ids: Tensor, prefix: Prefix, num_tokens: int) -> Tensor:
        """The last rank has the logits; each keeps the cache of its own layers."""
        with self.plan.autocast(self.devices[0]):
            _, logits = self.pipe.eval((ids, newest_alone(ids)), beside=prefix)
        tokens = None if logits is None else likeliest(logits, num_tokens)
        return self.pipe.from_last(tokens)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Sent to rank 0 one at a time."""
        return gather_on_main(self.world, self.pipe.owned_parameters())

    def whole_parameters(self) -> dict[str, Tensor]:
        """Those of this stage; a tied one has a copy on every stage that uses it."""
        return dict(self.pipe.named_parameters())

    def state_bytes(self) -> dict[str, int]:
        """Of this stage."""
        return state_bytes(self.pipe.parameters(), self.optimizers)

    def close(self) -> None:
        """Hangs up."""
        self.pipe.close()


def measured_sizes(
    task: Task, world: World, plan: Plan, model: nn.Module, layers: Sequence[nn.Module]
) -> list[int]:
    """Layers per stage. Rank 0 measures them, one at a time, on a micro-batch, and tells all."""
    sizes: list[Any] = [None]
    if world.is_main:
        step = next(task.steps(0, 0, 1, plan.num_microbatches or 4))
        filled = cast(Sequence[nn.Module], _OneAtATime(task, world.device, model, layers))
        with plan.autocast(world.device):
            costs = measure_costs(
                filled, step.inputs[0], lambda output: task.loss(output, step.targets[0])
            )
        sizes = [balance(costs, world.world_size)]
    if world.world_size > 1:
        dist.broadcast_object_list(sizes, 0)
    return sizes[0]


class _OneAtATime:
    """Layers without memory, of which each is given memory and values while it is looked at."""

    def __init__(
        self, task: Task, device: torch.device, model: nn.Module, layers: Sequence[nn.Module]
    ) -> None:
        self.task, self.device, self.layers = task, device, layers
        self.names = {p: name for name, p in model.named_parameters()}

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[nn.Module]:
        for layer in self.layers:
            filled = copy.deepcopy(layer).to_empty(device=self.device)
            for p, empty in zip(filled.parameters(), layer.parameters(), strict=True):
                self.task.initialize(self.names[empty], p)
            yield filled


def gather_on_main(world: World, mine: dict[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all ranks and their names on rank 0, in the CPU's memory, sent one at a time;
    nothing on the others."""
    shapes: list[Any] = [None] * world.world_size
    dist.all_gather_object(shapes, [(n, tuple(p.shape), p.dtype) for n, p in mine.items()])
    for rank, theirs in enumerate(shapes):
        for name, shape, dtype in theirs:
            if world.rank == rank == 0:
                yield name, mine[name].detach().cpu()
            elif world.is_main:
                received = torch.empty(shape, dtype=dtype, device=world.device)
                dist.recv(received, rank)
                yield name, received.cpu()
            elif world.rank == rank:
                dist.send(mine[name].detach().contiguous(), 0)
