"""Lays a model out on the ranks under any strategy, for train.py and verify.py.

single     1 process                          Replicated     training/replicated.py
ddp        a whole model per rank             Replicated
fsdp       a shard of every layer per rank    Sharded        data_parallel/fsdp.py
pipeline   some of the layers per rank        Staged         pipeline/process.py
model      the same, one micro-batch          Staged
tensor     a part of every matrix per rank    Staged         tensor_parallel/gpt2.py
3d         dp x pp x tp ranks                 Staged, or Sharded where --zero is 3
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.gradients import GradientBuckets
from data_parallel.sharded_optimizer import ShardedOptimizer
from pipeline.catalogue import places
from pipeline.microbatch import MicroBatches
from pipeline.partition import balance, measure_costs
from pipeline.process import ProcessPipe
from runtime.mesh import Axis, Mesh, make_mesh
from runtime.ranks import Ranks, where_hosts_meet
from runtime.recompute import NEVER, mode_of
from training.checkpoint import Piece, whole
from training.generation import newest_alone
from training.layout import LaidOutModel, Plan
from training.memory import state_bytes
from training.prefix import Prefix
from training.replicated import Replicated
from training.task import Step, Task
from training.tensor import Shared
from training.world import World


def lay_out(
    args: Any, task: Task, world: World, plan: Plan, cut: Sequence[int] | None = None
) -> LaidOutModel:
    """The task's model under `args.strategy`. All ranks call it together.

    Args:
        cut: the layers per stage of a checkpoint, which then need not be measured.
    """
    if args.strategy in ("single", "ddp"):
        return Replicated(task, world, plan)
    mesh = make_mesh(args.dp, args.pp, args.tp, args.timeout)  # all ranks make all groups
    if args.zero is not None and (args.strategy == "fsdp" or args.zero == 3):
        return Sharded(task, world, plan, args.zero, mesh, args.sequence_parallel)
    num_microbatches = {"model": 1}.get(args.strategy, plan.num_microbatches)
    if args.pp > 1:
        num_microbatches = num_microbatches or 4
    elif args.tp > 1:  # each micro-batch costs the latency of its collectives
        num_microbatches = num_microbatches or 1
    return Staged(
        task, world, plan, args.schedule, num_microbatches, args.balance, args.timeout,
        cut, mesh, args.sequence_parallel, bool(args.zero), chunks=args.chunks,  # --zero 1 or none
    )  # fmt: skip


def flat_pieces(name: str, shape: Sequence[int], start: int, values: Tensor) -> list[Piece]:
    """The pieces of a rank that holds elements start, start + 1, ... of the flattened tensor, as
    views of `values`. A range of a matrix that begins and ends inside rows gives up to three."""
    pieces, done, sizes = [], 0, (1, *shape)  # the tensor is a row of its own
    rows = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]  # elements in a row of each level
    while done < values.numel():
        at, left = start + done, values.numel() - done  # place in the tensor; elements left
        d = next(d for d, row in enumerate(rows) if at % row == 0 and row <= left)  # the longest
        offsets = [at // row % size for row, size in zip(rows, sizes, strict=True)]
        n = min(left // rows[d], sizes[d] - offsets[d])  # how many rows of that level
        box = [*(1 for _ in range(d)), n, *sizes[d + 1 :]]  # its shape, in all levels
        part = values[done : done + n * rows[d]].view(box[1:])
        pieces.append(Piece(name, part, tuple(offsets[1:]), tuple(shape)))
        done += n * rows[d]
    return pieces


class Sharded(LaidOutModel):
    """Parameters, gradients and optimizer state in shards; a part of the batch on each rank. With a
    `mesh`, its tensor axis cuts the matrices, and its data axis shards the parts."""

    def __init__(
        self,
        task: Task,
        world: World,
        plan: Plan,
        zero: int = 3,
        mesh: Mesh | None = None,
        sequence_parallel: bool = False,
        share_memory: bool = True,
    ) -> None:
        mesh = mesh or Mesh(data=everyone(world))
        self.task, self.world, self.devices, self.mesh = task, world, [world.device], mesh
        self.part, self.parts, self.shard = mesh.data.rank, mesh.data.size, mesh.tensor.rank
        self.num_microbatches = plan.num_microbatches
        # Autocast would keep a whole copy of every matrix until its backward.
        self.compute_dtype = torch.bfloat16 if plan.precision == "bf16" else None
        self.shared = shared = Shared(  # on the meta device: no memory yet
            task, mesh.tensor, plan.dtype, sequence_parallel, share_memory, plan.timeline
        )
        model = shared.model
        self.layers = nn.Sequential(*shared.layers)  # only to switch modes
        self.fsdp = FullyShardedDataParallel(  # allocates and fills this rank's shards
            shared.layers, plan.make_optimizer,
            names={t: name for name, t in [*model.named_parameters(), *model.named_buffers()]},
            init=shared.initialize, zero=zero, compute_dtype=self.compute_dtype,
            device=world.device, group=mesh.data.group, share_memory=share_memory,
            recorder=plan.timeline, recompute=plan.recompute != NEVER,
            kind=lambda name: name in shared.parts,  # cut parameters and whole ones apart
        )  # fmt: skip
        self.optimizers = [cast(torch.optim.Optimizer, FsdpOptimizer(self.fsdp))]
        # A unit has either cut parameters or whole ones.
        first_names = [(unit.unit.entries[0].name, unit.shard) for unit in self.fsdp.units]
        self.counted = [p for name, p in first_names if shared.counted(name)]
        self.on_all = [p for name, p in first_names if name not in shared.parts]  # flat shards

    def backward(self, step: Step) -> Tensor:
        """Gradients are summed over the ranks, so the loss is divided by the global count."""
        count = max(1, step.count)
        inputs = [*map(self.shared.input, step.inputs, step.targets)]  # none: it still gathers
        loss = self.fsdp.train_step(inputs, step.targets, self.shared.loss, 1 / count)
        self.fsdp.expose_gradients()  # waits for the last layers' sums over the data axis
        self.shared.sum_gradients(self.on_all)  # then over the tensor axis
        return loss * (count if self.mesh.tensor.rank == 0 else 0)  # tensor ranks have the same

    def outputs(self, x: Any) -> Tensor | None:
        """The outputs for this rank's batch."""
        output = self._forward(x)
        return None if output is None else self.shared.logits(output)

    def measure(self, x: Any, target: Any) -> Tensor | None:
        """The measure of this rank's batch."""
        x = None if x is None else self.shared.input(x, target, training=False)
        output = self._forward(x)
        return None if output is None else self.shared.measure(output, target)

    @torch.no_grad()
    def _forward(self, x: Any) -> Tensor | None:
        """Gathers layers, so all ranks must call it."""
        self.layers.eval()
        output = cast(Tensor | None, self.fsdp.forward(x))
        self.layers.train()
        return output

    def next_tokens(self, ids: Tensor, prefix: Prefix, num_tokens: int) -> Tensor:
        """All ranks gather layers together, even if only one needs them."""
        self._some_rank_goes_on(True)  # meets the call in `end` of ranks that have finished
        output = self._forward((ids, newest_alone(ids), prefix))  # [B, rows], of this rank's tokens
        assert output is not None
        return self.shared.likeliest(output, num_tokens)

    def end(self) -> None:
        """Takes part in gathering until no rank has sentences left."""
        while self._some_rank_goes_on(False):
            self._forward(None)  # helps to gather every layer for the others

    def _some_rank_goes_on(self, this_one: bool) -> bool:
        group = self.mesh.data.group
        going = torch.tensor(int(this_one))
        if self.mesh.data.size > 1:
            going = going.to(where_hosts_meet(group, self.world.device))
            dist.all_reduce(going, op=dist.ReduceOp.MAX, group=group)
        return bool(going)

    def held(self) -> Iterable[Tensor]:
        """Flat shards, one per unit."""
        return [unit.shard for unit in self.fsdp.units]

    def pieces(self, p: Tensor, t: Tensor) -> list[Piece]:
        """A flat shard holds ranges of flattened parameters."""
        (unit,) = (u.unit for u in self.fsdp.units if u.shard is p)
        found = unit.pieces(self.mesh.data.rank, t)  # ranges of parameters, views of t
        return self.shared.pieces(
            x for f in found for x in flat_pieces(f.name, f.shape, f.offset, f.tensor)
        )

    def loaded(self) -> None:
        """The next forward gathers the new values."""
        self.fsdp.parameters_changed()

    def whole_parameters(self) -> dict[str, Tensor]:
        """None: every rank holds other shards."""
        return {}

    def state_bytes(self) -> dict[str, int]:
        """The bytes of the shards."""
        return self.fsdp.held_bytes()


class FsdpOptimizer:
    """The optimizer of the shards. Its steps are collective: other ranks read these shards."""

    def __init__(self, fsdp: FullyShardedDataParallel) -> None:
        self.optimizer = fsdp.optimizer
        self.zero_grad, self.step = fsdp.zero_grad, fsdp.optimizer_step

    def __getattr__(self, name: str) -> Any:
        """Groups and state come from the wrapped optimizer."""
        return getattr(self.optimizer, name)


class Staged(LaidOutModel):
    """The layers in stages on the mesh's pipeline axis; micro-batches flow through them. Ranks of
    its tensor axis share every layer. Ranks of its data axis are replicas, each with a part of the
    batch, whose gradients are combined.

    Args:
        mesh: by default a stage on every rank.
        shard_optimizer: ZeRO 1 over the replicas.
        chunks: stages per rank; None: the schedule's own number.
    """

    schedule: str  # never None, as there are stages

    def __init__(
        self,
        task: Task,
        world: World,
        plan: Plan,
        schedule: str = "1f1b",
        num_microbatches: int | None = 4,
        balance: str = "auto",
        timeout: float = 300.0,
        cut: Sequence[int] | None = None,
        mesh: Mesh | None = None,
        sequence_parallel: bool = False,
        shard_optimizer: bool = False,
        share_memory: bool = True,
        chunks: int | None = None,
    ) -> None:
        mesh = mesh or Mesh(pipeline=everyone(world))
        self.task, self.world, self.plan, self.mesh = task, world, plan, mesh
        self.part, self.parts, self.shard = mesh.data.rank, mesh.data.size, mesh.tensor.rank
        self.devices, self.num_microbatches = [world.device], num_microbatches
        self.schedule = schedule
        ranks = places(schedule, mesh.pipeline.size, chunks)  # each stage's pipeline rank
        stages = len(ranks)
        self.ranks = ranks if stages > mesh.pipeline.size else None  # only with chunks
        if balance != "auto" or cut is None or len(cut) != stages:
            cut = task.sizes(balance, stages)  # None: to be measured
        self.cut = cut or measured_sizes(task, world, plan, stages)  # all ranks wait for rank 0
        self.shared = Shared(
            task, mesh.tensor, plan.dtype, sequence_parallel, share_memory, plan.timeline
        )
        self.pipe = ProcessPipe(  # allocates and fills this rank's stages alone
            nn.Sequential(*self.shared.layers), self.cut, world.device, mesh.pipeline.group,
            ranks=ranks, model=self.shared.model, initialize=self.shared.initialize,
            recorder=plan.timeline, share_memory=share_memory, timeout=timeout,
            recompute=mode_of(plan.recompute, stages == 1 or num_microbatches == 1),
        )  # fmt: skip
        if stages > 1:
            self.description = f"layers per stage: {' | '.join(map(str, self.cut))}"
        if self.ranks:
            self.description += f", on the ranks {', '.join(map(str, ranks))}"
        mine = self.pipe.named_parameters()  # of this rank's stages; the parts of cut ones
        self.on_all = [p for name, p in mine.items() if name not in self.shared.parts]
        self.sharded: ShardedOptimizer | None = None
        self.buckets: GradientBuckets | None = None
        if shard_optimizer and self.parts > 1:
            self._shard_optimizer(mine, Ranks(mesh.data.group, share_memory, plan.timeline))
        else:
            if self.parts > 1:
                # In buckets of their own, since the rank of the other stage must get the same bits.
                tied = [p for name, p in mine.items() if len(self.pipe.users(name)) > 1]
                self.buckets = GradientBuckets(
                    mine.values(), mesh.data.group, share_memory=share_memory,
                    recorder=plan.timeline, apart=tied,
                )  # fmt: skip
            self.optimizers = [plan.make_optimizer(mine.values())]
            owned = self.pipe.owned_parameters().keys()
            counts = [p for name, p in mine.items() if name in owned and self.shared.counted(name)]
            # Every replica has the whole gradient: each counts a part of it in the norm.
            self.counted = counts[self.part :: self.parts]
            plan.timeline.watch(self.optimizers[0])

    def _shard_optimizer(self, mine: dict[str, nn.Parameter], replicas: Ranks) -> None:
        """ZeRO 1: each replica updates its part of this rank's parameters."""

        def kind(name: str) -> tuple[bool, str | None]:
            # All ranks that hold a parameter must shard it alike: tensor ranks their whole
            # parameters, stages their tied ones.
            tied = name if len(self.pipe.users(name)) > 1 else None
            return name in self.shared.parts, tied

        owned = self.pipe.owned_parameters().keys()
        self.sharded = ShardedOptimizer(mine, self.plan.make_optimizer, replicas, kind)
        self.optimizers = [cast(torch.optim.Optimizer, self.sharded)]
        self.counted = [  # shards; of tied and of whole parameters on one rank only
            p
            for (cut, tied), p in self.sharded.shards.items()
            if (tied is None or tied in owned) and (cut or self.shard == 0)
        ]
        self.plan.timeline.watch(self.sharded.optimizer)

    def backward(self, step: Step) -> Tensor:
        """All ranks of a replica get its loss; the first counts it."""
        # The buckets hold the mean of the replicas' gradients; see `Replicated.backward`.
        count = max(1, step.count) / (self.parts if self.buckets else 1)
        loss = torch.zeros((), dtype=torch.float64)  # of a replica without examples
        if step.inputs:  # the same on all ranks of a replica: all run the pipe, or none
            inputs = map(self.shared.input, step.inputs, step.targets)
            with self.plan.autocast(self.devices[0]):
                loss = self.pipe.train_step(
                    MicroBatches(inputs), MicroBatches(step.targets), self.shared.loss,
                    self.schedule, scale=1 / count,
                )  # fmt: skip
        if self.buckets is not None:
            self.buckets.finish()  # every replica, with or without examples
        self.shared.sum_gradients(self.on_all)  # before `reduce`, which takes p.grad away
        if self.sharded is not None:
            self.sharded.reduce()  # sums over the replicas, into the shards' gradients
        first = self.mesh.pipeline.rank == self.mesh.tensor.rank == 0  # one rank counts per replica
        # `count` undoes the scale: the summed loss of this replica.
        return loss.detach() * (count if first else 0)

    def outputs(self, x: Any) -> Tensor | None:
        """The last stage sees them."""
        output = None if x is None else self._eval(x)  # last stage: [N, rows]
        return None if output is None else self.shared.logits(output)

    def measure(self, x: Any, target: Any) -> Tensor | None:
        """On the last stage."""
        if x is None:  # this replica has no batch left
            return None
        output = self._eval(self.shared.input(x, target, training=False))
        return None if output is None else self.shared.measure(output, target)

    def _eval(self, x: Any, beside: Any = None) -> Tensor | None:
        with self.plan.autocast(self.devices[0]):
            output = self.pipe.eval(x, beside)
        return cast(Tensor | None, output)

    def next_tokens(self, ids: Tensor, prefix: Prefix, num_tokens: int) -> Tensor:
        """The last stage has the logits; each rank keeps the cache of its own layers and heads."""
        logits = self._eval((ids, newest_alone(ids)), beside=prefix)  # last stage: [B, rows]
        tokens = None if logits is None else self.shared.likeliest(logits, num_tokens)
        return self.pipe.from_last(tokens)  # [B], on every stage

    def held(self) -> Iterable[Tensor]:
        """The parameters of this rank's stages, or shards of them."""
        if self.sharded is None:
            return self.pipe.parameters()
        return self.sharded.shards.values()

    def pieces(self, p: Tensor, t: Tensor) -> list[Piece]:
        """The slices of whole parameters that `t` has."""
        if self.sharded is None:
            return self.shared.pieces([whole(self._names[p], t)])
        return self.shared.pieces(
            x
            for f in self.sharded.pieces(p, t)
            for x in flat_pieces(f.name, f.shape, f.offset, f.tensor)
        )

    def loaded(self) -> None:
        """Sends the new values to all replicas."""
        if self.sharded is not None:
            self.sharded.publish()

    @property
    def _names(self) -> dict[Tensor, str]:
        return {p: name for name, p in self.pipe.named_parameters().items()}

    def whole_parameters(self) -> dict[str, Tensor]:
        """Those of this rank's stages; a tied one has a copy on every rank that uses it."""
        return self.shared.names(self.pipe.named_parameters())

    def state_bytes(self) -> dict[str, int]:
        """The bytes that this rank holds."""
        held = state_bytes(self.pipe.parameters(), self.optimizers)
        if self.sharded is not None:
            gradients = (p.grad for p in self.sharded.shards.values())
            held["gradients"] += sum(g.nbytes for g in gradients if g is not None)
        return held

    def close(self) -> None:
        """Closes the buckets and the pipe."""
        if self.buckets is not None:
            self.buckets.close()
        self.pipe.close()


def everyone(world: World) -> Axis:
    """All ranks, on one axis."""
    group = dist.group.WORLD if world.world_size > 1 else None
    return Axis(world.rank, world.world_size, group)


def measured_sizes(task: Task, world: World, plan: Plan, num_stages: int) -> list[int]:
    """Layers per stage. Rank 0 times the layers one by one on a micro-batch, and tells all."""
    if num_stages == 1:
        return [len(task.layers(task.skeleton()))]
    sizes: list[Any] = [None]
    if world.is_main:  # the others wait in the broadcast
        step = next(task.steps(0, 0, 1, plan.num_microbatches or 4))
        x, target = step.inputs[-1], step.targets[-1]  # the longest sentences
        filled = cast(Sequence[nn.Module], _OneAtATime(task, world.device, plan.dtype))
        with plan.autocast(world.device):
            costs = measure_costs(filled, x, lambda output: task.loss(output, target))
        sizes = [balance(costs, num_stages)]
    if world.world_size > 1:
        dist.broadcast_object_list(sizes, 0)
    return sizes[0]


class _OneAtATime:
    """Layers on the meta device. Iterating gives each in turn memory and values."""

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype) -> None:
        model = task.skeleton().to(dtype)
        self.task, self.device, self.layers = task, device, task.layers(model)
        self.names = {p: name for name, p in model.named_parameters()}

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[nn.Module]:
        for layer in self.layers:
            filled = copy.deepcopy(layer).to_empty(device=self.device)
            for p, empty in zip(filled.parameters(), layer.parameters(), strict=True):
                self.task.initialize(self.names[empty], p)
            yield filled
