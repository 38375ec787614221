"""The strategies: whole models, shards of one, and stages of one.

single     one rank                                   a plain loop
ddp        the whole model on every rank              data_parallel/ddp.py
fsdp       a shard of every layer on each rank        data_parallel/fsdp.py
pipeline   a few layers on each rank                  pipeline/process.py
model      the same, one rank computing at a time     pipeline/process.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from project.task import Step, Task, materialize
from training.generation import Prefix, likeliest, newest_alone
from training.launch import World
from training.memory import state_bytes
from training.pieces import Piece, flat_pieces, whole
from training.state import whole_parameters


class Single(Strategy):
    """One process, the whole model, the whole batch; micro-batches one after the other."""

    def __init__(self, task: Task, world: World, plan: Plan) -> None:
        self.task, self.world, self.plan = task, world, plan
        self.num_microbatches, self.replicated = plan.num_microbatches, True
        self.model = materialize(task, world.device, plan.dtype)
        self.net: nn.Module = nn.Sequential(*task.layers(self.model))
        self._pieces = whole_parameters(self.model)
        self.optimizers = [plan.make_optimizer(self.model.parameters())]
        plan.timeline.watch(self.optimizers[0])

    def backward(self, step: Step) -> Tensor:
        """See `Strategy`. The gradients are averaged over the ranks, so each rank's summed loss is
        divided by the *mean* number of examples per rank, and not by its own."""
        scale = self.parts / max(1, step.count)
        last, timeline = len(step.inputs) - 1, self.plan.timeline
        total = torch.zeros((), dtype=self.plan.dtype, device=self.world.device)
        for i, (x, target) in enumerate(zip(step.inputs, step.targets, strict=True)):
            with nullcontext() if i == last else self.no_sync():
                with self.plan.autocast(), timeline.span("F", microbatch=i):
                    loss = self.task.loss(self.net(x), target)
                with timeline.span("B", microbatch=i):
                    (loss * scale).backward()
            total += loss.detach()
        return total

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
        return {name: p.detach().cpu() for name, p in self.model.named_parameters()}

    def held(self) -> Iterable[Tensor]:
        """See `Strategy`."""
        return self.model.parameters()

    def pieces(self, p: Tensor, t: Tensor) -> list[Piece]:
        """See `Strategy`."""
        return self._pieces(p, t)

    def state_bytes(self) -> dict[str, int]:
        """See `Strategy`."""
        return state_bytes(self.model.parameters(), self.optimizers)


class Ddp(Single):
    """The whole model on every rank, a part of the batch on each, gradients averaged."""

    def __init__(self, task: Task, world: World, plan: Plan) -> None:
        super().__init__(task, world, plan)
        self.part, self.parts = world.rank, world.world_size
        # Every rank has the whole gradient by then: each counts a part of it.
        self.counted = list(self.model.parameters())[world.rank :: world.world_size]
        self.ddp = self.net = DistributedDataParallel(self.net, recorder=plan.recorder)

    def backward(self, step: Step) -> Tensor:
        """See `Strategy`."""
        loss = super().backward(step)
        self.ddp.average_gradients()
        return loss

    def no_sync(self) -> AbstractContextManager[None]:
        """See `Single`."""
        return self.ddp.no_sync()

    def copies(self) -> Mapping[str, Tensor]:
        """See `Strategy`. Not buffers: what a module writes into them stays on its rank."""
        return dict(self.model.named_parameters())

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
        # Autocast would keep a copy of every matrix, whole, until its backward.
        self.compute_dtype = plan.compute_dtype
        model, layers = skeleton_of(task, plan)
        self.layers = nn.Sequential(*layers)
        named = [*model.named_parameters(), *model.named_buffers()]
        self.fsdp = FullyShardedDataParallel(
            layers, plan.make_optimizer, names={t: name for name, t in named},
            init=task.initialize, zero=plan.zero, compute_dtype=self.compute_dtype,
            device=world.device, recorder=plan.recorder,
        )  # fmt: skip
        self.optimizers = [cast(torch.optim.Optimizer, _ShardOptimizer(self.fsdp))]

    def backward(self, step: Step) -> Tensor:
        """See `Strategy`."""
        count = max(1, step.count)
        loss = self.fsdp.train_step(step.inputs, step.targets, self.task.loss, 1 / count)
        self.fsdp.expose_gradients()
        return loss * count

    @torch.no_grad()
    def outputs(self, x: Any) -> Tensor | None:
        """See `Strategy`."""
        self.layers.eval()
        output = self.fsdp.forward(x)
        self.layers.train()
        return output

    def next_tokens(self, ids: Tensor, prefix: Prefix, num_tokens: int) -> Tensor:
        """See `Strategy`. Layers are gathered by all ranks together, whoever needs them."""
        self._some_rank_goes_on(True)
        return super().next_tokens(ids, prefix, num_tokens)

    def end(self) -> None:
        """See `Strategy`."""
        while self._some_rank_goes_on(False):
            self.outputs(None)

    def _some_rank_goes_on(self, this_one: bool) -> bool:
        going = torch.tensor(int(this_one), device=self.world.device)
        dist.all_reduce(going, op=dist.ReduceOp.MAX)
        return bool(going)

    def whole_weights(self) -> dict[str, Tensor]:
        """See `Strategy`."""
        return {name: p.cpu() for name, p in self.fsdp.gather() if p is not None}

    def held(self) -> Iterable[Tensor]:
        """See `Strategy`."""
        return [unit.shard for unit in self.fsdp.units]

    def pieces(self, p: Tensor, t: Tensor) -> list[Piece]:
        """See `Strategy`."""
        (unit,) = (u.unit for u in self.fsdp.units if u.shard is p)
        found = unit.pieces(self.world.rank, t)
        return [x for f in found for x in flat_pieces(f.name, f.shape, f.offset, f.tensor)]

    def loaded(self) -> None:
        """See `Strategy`."""
        self.fsdp.parameters_changed()

    def state_bytes(self) -> dict[str, int]:
        """See `Strategy`."""
        held = self.fsdp.held_bytes()
        return {kind: getattr(held, kind) for kind in ("parameters", "gradients", "optimizer")}


class _ShardOptimizer:
    """The optimizer of the shards, as `Optimizers` knows optimizers."""

    def __init__(self, fsdp: FullyShardedDataParallel) -> None:
        self.optimizer = fsdp.optimizer
        self.zero_grad, self.step = fsdp.zero_grad, fsdp.optimizer_step

    def __getattr__(self, name: str) -> Any:
        """Its groups and state are those of the optimizer within."""
        return getattr(self.optimizer, name)


class Pipeline(Strategy):
    """The layers in stages, one on each rank; micro-batches flow through them."""

    def __init__(self, task: Task, world: World, plan: Plan) -> None:
        self.task, self.world, self.plan = task, world, plan
        self.num_microbatches, self.schedule = plan.num_microbatches or 4, plan.schedule
        model, layers = skeleton_of(task, plan)
        sizes = cut_into_stages(task, world, plan, model, layers)
        self.pipe = ProcessPipe(
            nn.Sequential(*layers), sizes, world.device, model=model, initialize=task.initialize,
            recorder=plan.recorder, timeout=plan.timeout,
        )  # fmt: skip
        self.layout = f", layers {' | '.join(map(str, sizes))}"
        self.optimizers = [plan.make_optimizer(self.pipe.parameters())]
        plan.timeline.watch(self.optimizers[0])
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

    def next_tokens(self, ids: Tensor, prefix: Prefix, num_tokens: int) -> Tensor:
        """See `Strategy`. The last rank has the logits; each keeps the cache of its own layers."""
        with self.plan.autocast():
            _, logits = self.pipe.eval((ids, newest_alone(ids)), beside=prefix)
        tokens = None if logits is None else likeliest(logits, num_tokens)
        return self.pipe.from_last(tokens, like=ids[:, 0])

    def whole_weights(self) -> dict[str, Tensor]:
        """See `Strategy`."""
        return gather_on_main(self.world, self.pipe.owned_parameters())

    def held(self) -> Iterable[Tensor]:
        """See `Strategy`."""
        return self.pipe.parameters()

    def pieces(self, p: Tensor, t: Tensor) -> list[Piece]:
        """See `Strategy`. What several stages use, all of them hand over."""
        return [whole(n, t) for n, q in self.pipe.named_parameters().items() if q is p]

    def copies(self) -> Mapping[str, Tensor]:
        """See `Strategy`: tied parameters have a copy on each stage that uses them."""
        return self.pipe.named_parameters()

    def state_bytes(self) -> dict[str, int]:
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
