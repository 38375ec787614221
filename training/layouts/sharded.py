"""A shard of every layer on each rank (ZeRO 2 and 3), for the training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from data_parallel.fsdp import FullyShardedDataParallel
from runtime.mesh import Axis, Mesh
from runtime.ranks import where_hosts_meet
from runtime.recompute import NEVER
from training.launch.world import World
from training.layouts.layout import Piece
from training.tasks.cache import Cache
from training.tasks.gpt2 import newest_tokens
from training.tasks.task import Step, TrainingTask

from .layout import LaidOutModel, Setup
from .tensor import CutTask


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
        task: TrainingTask,
        world: World,
        setup: Setup,
        zero: int = 3,
        mesh: Mesh | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        mesh = mesh or Mesh(data=everyone(world))
        self.task, self.world, self.devices, self.mesh = task, world, [world.device], mesh
        self.part, self.parts, self.shard = mesh.data.rank, mesh.data.size, mesh.tensor.rank
        self.num_microbatches = setup.num_microbatches
        # Autocast would keep a whole copy of every matrix until its backward.
        compute_dtype = torch.bfloat16 if setup.precision == "bf16" else None
        self.cut_task = cut_task = CutTask(  # on the meta device: no memory yet
            task, mesh.tensor, setup.dtype, sequence_parallel, setup.timeline
        )
        model = cut_task.model
        self.modules = cut_task.layers
        self.fsdp = FullyShardedDataParallel(  # allocates and fills this rank's shards
            cut_task.layers, setup.make_optimizer,
            names={t: name for name, t in [*model.named_parameters(), *model.named_buffers()]},
            init=cut_task.initialize, zero=zero, compute_dtype=compute_dtype,
            device=world.device, group=mesh.data.group,
            recorder=setup.timeline, recompute=setup.recompute != NEVER,
            kind=lambda name: name in cut_task.parts,  # cut parameters and whole ones apart
        )  # fmt: skip
        self.optimizers = [cast(torch.optim.Optimizer, FsdpOptimizer(self.fsdp))]
        # A unit has either cut parameters or whole ones.
        first_names = [(unit.unit.entries[0].name, unit.shard) for unit in self.fsdp.units]
        self.counted = [p for name, p in first_names if cut_task.counted(name)]
        self.on_all = [p for name, p in first_names if name not in cut_task.parts]  # flat shards

    def backward(self, step: Step) -> Tensor:
        """Gradients are summed over the ranks, so the loss is divided by the global count."""
        count = max(1, step.count)
        inputs = [*map(self.cut_task.input, step.inputs, step.targets)]  # none: it still gathers
        loss = self.fsdp.train_step(inputs, step.targets, self.cut_task.loss, 1 / count)
        self.fsdp.finish_gradients()  # waits for the last layers' sums over the data axis
        self.cut_task.sum_gradients(self.on_all)  # then over the tensor axis
        return loss * (count if self.mesh.tensor.rank == 0 else 0)  # tensor ranks have the same

    def outputs(self, x: Any) -> Tensor | None:
        """The outputs for this rank's batch."""
        output = self._forward(x)
        return None if output is None else self.cut_task.logits(output)

    def measure(self, x: Any, target: Any) -> Tensor | None:
        """The measure of this rank's batch."""
        x = None if x is None else self.cut_task.input(x, target, training=False)
        output = self._forward(x)
        return None if output is None else self.cut_task.measure(output, target)

    def _forward(self, x: Any) -> Tensor | None:
        """Gathers layers, so all ranks must call it."""
        return cast(Tensor | None, self.fsdp.forward(x))

    def next_tokens(self, ids: Tensor, cache: Cache, num_tokens: int) -> Tensor:
        """All ranks gather layers together, even if only one needs them."""
        self._some_rank_goes_on(True)  # meets the call in `end` of ranks that have finished
        output = self._forward(newest_tokens(ids, cache))  # [B, rows], of this rank's tokens
        assert output is not None
        return self.cut_task.argmax(output, num_tokens)

    def end(self, turn: Callable[[], None]) -> None:
        """Takes part in gathering until no rank has sentences left."""
        while self._some_rank_goes_on(False):
            turn()
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
        return self.cut_task.pieces(
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


def everyone(world: World) -> Axis:
    """All ranks, on one axis."""
    group = dist.group.WORLD if world.world_size > 1 else None
    return Axis(world.rank, world.world_size, group)
