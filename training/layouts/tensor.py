"""Layouts on a mesh, and what the mesh's tensor, expert and context axes change in them.

Ranks of the tensor axis share every layer: `CutTask` cuts a task's layers over them.

Three things change. The layers hold parts of the model's matrices, so initial values, checkpoints
and exports use `TensorShard`. The last layer computes the loss, so the labels travel with the
input, as `Sequences.labels`. A parameter that every rank holds whole is counted once in
norms; with sequence parallelism its gradient is summed over the ranks.

Ranks of the expert axis share the experts of every layer (experts/): of these each holds some. They
meet inside a layer, so they run as many micro-batches; one that has fewer runs empty ones.

Ranks of the context axis get the same micro-batches and take their positions of them (context.py).
Losses and gradients add up over them, as over replicas.

With one rank nothing changes.

`MeshLayout` is what layouts have in common that run such layers, as shards or in stages.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from data_parallel.gradients import copy_back
from data_parallel.shards import Unit
from experts.layer import share_experts
from runtime.axes import BATCH_AXES, DATA_AXES, EXPERT_AXES
from runtime.communicator import Communicator
from runtime.mesh import Axis, Mesh
from runtime.sums import add_up
from runtime.waits import control_device
from tensor_parallel.gpt2 import HeadAndLoss, TensorShard, VocabularyParallelHead, cut_matrices
from tensor_parallel.loss import argmax
from training.launch.world import World
from training.tasks.experts import ExpertTask
from training.tasks.generation import greedy
from training.tasks.gpt2 import numbers_of_targets
from training.tasks.task import Step, TrainingTask

from .context import attend_across, own_positions, rows_in_order
from .layout import Held, LaidOutModel, Setup


class CutTask:
    """The layers of a task that the ranks of the axis `tp` share, on positions that those of `cp`
    share.

    Args:
        sharing: the ranks that share experts.

    Attributes:
        model, layers: on the meta device, with this rank's shards.
        experts: the names of parameters of which each of `sharing` has other experts.
    """

    def __init__(self, task: TrainingTask, setup: Setup, mesh: Mesh, sharing: Communicator) -> None:
        self.task = task
        self.ranks = Communicator(mesh["tp"].group, recorder=setup.timeline)
        self.contexts = Communicator(mesh["cp"].group, recorder=setup.timeline)
        self.sequence_parallel = setup.args.sequence_parallel and self.ranks.size > 1
        skeleton: Any = task.skeleton().to(setup.dtype)
        self.model = skeleton
        self.shards: dict[str, TensorShard] = {}
        if sharing.size > 1:
            for name, shape in share_experts(self.model, sharing).items():
                self.shards[name] = TensorShard(shape, 0, 1, sharing.rank, sharing.size)
        self.experts = {*self.shards}
        if self.ranks.size > 1:
            self.shards |= cut_matrices(self.model, self.ranks, self.sequence_parallel)  # by name
        self.layers = task.layers(self.model)  # after `cut_matrices`: they hold its new modules
        if self.contexts.size > 1:
            attend_across(self.layers, self.contexts, setup.args.attention)
        if self.ranks.size == 1:
            return
        for layer in self.layers[:-1]:  # tells them their heads and positions
            layer.shard, layer.sequence_parallel = self.ranks.rank, self.sequence_parallel  # type: ignore[assignment]
        self.head: VocabularyParallelHead = skeleton.lm_head
        norm = skeleton.transformer.ln_f
        self.layers[-1] = HeadAndLoss(norm, self.head, self.sequence_parallel)

    def initialize(self, name: str, p: Tensor) -> None:
        """Writes the initial values of this rank's part of a parameter."""
        if name in self.shards:
            whole = p.new_empty(self.shards[name].shape)  # the whole parameter, for a moment
            self.task.initialize(name, whole)
            p.copy_(self.shards[name].of(whole))
        else:
            self.task.initialize(name, p)

    def input(self, x: Any, target: Any, training: bool = True) -> tuple[Any, Any]:
        """This rank's part of a micro-batch whose loss is wanted: the input of the first layer, and
        the labels."""
        scattered = training and self.sequence_parallel
        if self.contexts.size > 1:
            x, target = own_positions(x, target, self.contexts, self.ranks.size if scattered else 1)
        if self.ranks.size == 1:
            return x, target
        length = x.hidden.size(1)
        # Padding makes the sequence a multiple of the number of ranks.
        more = -length % self.ranks.size if scattered else 0
        if more:
            numbers = x.targets + x.targets // length * more  # earlier rows are longer
            x = x._replace(hidden=F.pad(x.hidden, (0, more)), targets=numbers)
        return x._replace(labels=target), target

    def loss(self, output: Tensor, target: Any) -> Tensor:
        """The summed loss, from the output of the last layer, which may have computed it."""
        return output if self.ranks.size > 1 else self.task.loss(output, target)

    def measure(self, output: Tensor, target: Any) -> Tensor | None:
        """The task's `measure`, from the output of the last layer in evaluation; on rank 0 only."""
        if self.ranks.size == 1:
            return self.task.measure(output, target)
        return output if self.ranks.rank == 0 else None

    def logits(self, output: Tensor) -> Tensor | None:
        """All logits [N, V], joined from the ranks' parts, for a comparison; None but on rank 0."""
        if self.ranks.size == 1:
            return output
        logits = self.ranks.all_gather(output, 1)  # [N, t rows]; the last ones may be surplus
        return logits[:, : self.head.vocabulary] if self.ranks.rank == 0 else None

    def argmax(self, output: Tensor, num_tokens: int) -> Tensor:
        """The most probable tokens, on every rank, from the ranks' parts of the logits."""
        if self.ranks.size == 1:
            return greedy(output, num_tokens)
        return argmax(output, num_tokens, self.ranks, self.head.first)

    def counted(self, name: str) -> bool:
        """Whether this rank counts a parameter: one that all have is counted by the first."""
        return name in self.shards or self.ranks.rank == 0

    def shared_axes(self, name: str) -> tuple[str, ...]:
        """The axis of the matrices, if all its ranks hold the same of a parameter."""
        return () if name in self.shards else ("tp",)

    def cut(self, held: Iterable[Held]) -> list[Held]:
        """The same rectangles of this rank's shards, as rectangles of the whole parameters."""
        rectangles = []
        for x in held:
            shard = self.shards.get(x.name)
            if shard is None:
                rectangles.append(x)
                continue
            for offsets, view in shard.rectangles(x.offsets, x.tensor):  # c_attn: of q, k and v
                rectangles.append(replace(x, tensor=view, offsets=offsets, shape=shard.shape))
        return rectangles

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums gradients over the ranks, with sequence parallelism alone: there each rank has used
        these whole parameters on its own positions. In the order of the ranks: each replica sums in
        a group of its own, and all must get the same bits."""
        if self.sequence_parallel:
            self._replace_gradients(parameters, lambda by_rank: add_up(by_rank.unbind()))

    def copy_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gives every rank the first one's gradients of parameters that all ranks hold whole.

        Each rank adds them up over replicas in a group of its own. With three or more replicas the
        order of the addition decides the last bits, and NCCL chooses one for each group.
        """
        self._replace_gradients(parameters, lambda by_rank: by_rank[0])

    @torch.no_grad()
    def _replace_gradients(
        self, parameters: Iterable[nn.Parameter], by: Callable[[Tensor], Tensor]
    ) -> None:
        """Replaces gradients by what `by` makes of those of all ranks, [t, elements]."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.ranks.size == 1 or not gradients:
            return
        flat = torch.cat([g.flatten() for g in gradients])
        replaced = by(self.ranks.all_gather(flat[None], 0))
        copy_back(replaced, gradients)  # in place: optimizers and buckets hold these tensors


class MeshLayout(LaidOutModel):
    """A layout on a mesh: its tensor axis cuts the matrices, its data and expert axes deal the
    batch out, its context axis cuts the sequences."""

    def __init__(self, task: TrainingTask, world: World, setup: Setup, mesh: Mesh) -> None:
        self.task, self.setup, self.mesh, self.devices = task, setup, mesh, [world.device]
        self.world = world
        self.dp_rank, self.dp_size, _ = mesh[BATCH_AXES]
        self.replica = mesh[DATA_AXES]  # its place among ranks that hold the same
        self.tp_rank = mesh["cp"].rank * mesh["tp"].size + mesh["tp"].rank
        self.sharing = Communicator(mesh["ep"].group, recorder=setup.timeline)
        self.together: Axis = mesh["ep"]  # the ranks that meet in a forward
        self.cut_task = CutTask(task, setup, mesh, self.sharing)  # on the meta device: no memory

    @property
    def sentences(self) -> tuple[int, int]:
        """Each replica has its own, as positions are not cut where sentences grow."""
        return self.replica.rank, self.replica.size

    def replicas(self, *axes: str) -> tuple[str, ...]:
        """Those of `axes` that have several ranks."""
        return tuple(axis for axis in axes if self.mesh[axis].size > 1)

    def data_axes(self, name: str) -> tuple[str, ...]:
        """The axes whose ranks average a parameter's gradient."""
        return EXPERT_AXES if name in self.cut_task.experts else DATA_AXES

    def filled(self, step: Step) -> Step:
        """The step with as many micro-batches as the ranks have that share experts."""
        if self.sharing.size == 1:
            return step
        numbers = self.sharing.gather_numbers([len(step.inputs)], self.devices[0])
        for _ in range(max(numbers)[0] - len(step.inputs)):
            x, target = self.empty()
            step = replace(step, inputs=[*step.inputs, x], targets=[*step.targets, target])
        return step

    def empty(self) -> tuple[Any, Any]:
        """A micro-batch without examples."""
        return cast(ExpertTask, self.task).empty()

    def no_sentences(self) -> Any:
        """An input without examples, while `evaluating`: nobody balances experts then."""
        return self.empty()[0]._replace(balance=None)

    @abstractmethod
    def forward(self, x: Any) -> Tensor | None:
        """What the last layer returns, while `evaluating`; None on ranks that do not see it. `x` is
        None on a rank that has run out of data."""

    def outputs(self, x: Any) -> Tensor | None:
        """The logits of all tokens, on the first rank of the axes of tensors and contexts."""
        contexts, places = self.cut_task.contexts, None
        if x is not None and contexts.size > 1:
            numbers = torch.arange(len(numbers_of_targets(x.targets)), device=x.hidden.device)
            x, places = own_positions(x, numbers, contexts)
        output = self.forward(x)
        logits = None if output is None else self.cut_task.logits(output)
        return (
            logits if logits is None or places is None else rows_in_order(logits, places, contexts)
        )

    def measure(self, x: Any, target: Any) -> Tensor | None:
        """Counted on one rank of the tensor axis."""
        if x is not None:
            x, target = self.cut_task.input(x, target, training=False)
        output = self.forward(x)
        return None if output is None else self.cut_task.measure(output, target)

    def end(self) -> None:
        """Takes part in forwards until no rank has sentences left."""
        while self.some_rank_goes_on(False):
            self.forward(None)

    def some_rank_goes_on(self, this_one: bool) -> bool:
        """Whether a rank has sentences left. The ranks that meet in a forward all call it before,
        those that have some in `next_tokens`, the others in `end`."""
        going = torch.tensor(int(this_one))
        if self.together.size > 1:
            going = going.to(control_device(self.together.group, self.devices[0]))
            dist.all_reduce(going, op=dist.ReduceOp.MAX, group=self.together.group)
        return bool(going)

    def held_in(
        self, unit: Unit, shard: nn.Parameter, replicas: tuple[str, ...], counts: bool
    ) -> list[Held]:
        """The rectangles of whole parameters in this rank's flat shard of a unit. A shard of gaps
        alone has an empty one, so that every shard has a record."""
        replica = self.mesh[self.data_axes(unit.entries[0].name)]
        flat = unit.slices(replica.rank, shard.detach())
        held = self.cut_task.cut(x for values in flat for x in rectangles_of(*values))
        if not held:
            name, shape, *_ = unit.entries[0]
            empty = shard.detach()[:0].view(0, *shape[1:])
            held = [Held(name, empty, (0,) * empty.dim(), tuple(shape))]
        return [replace(x, replicas=replicas, counts=counts, parameter=shard) for x in held]


def rectangles_of(name: str, shape: Sequence[int], start: int, values: Tensor) -> list[Held]:
    """The rectangles of a rank that holds elements start, start + 1, ... of the flattened tensor,
    as views of `values`. A range of a matrix that begins and ends inside rows gives up to three."""
    held, done, sizes = [], 0, (1, *shape)  # the tensor is a row of its own
    rows = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]  # elements in a row of each level
    while done < values.numel():
        at, left = start + done, values.numel() - done  # place in the tensor; elements left
        d = next(d for d, row in enumerate(rows) if at % row == 0 and row <= left)  # the longest
        offsets = [at // row % size for row, size in zip(rows, sizes, strict=True)]
        n = min(left // rows[d], sizes[d] - offsets[d])  # how many rows of that level
        box = [*(1 for _ in range(d)), n, *sizes[d + 1 :]]  # its shape, in all levels
        view = values[done : done + n * rows[d]].view(box[1:])
        held.append(Held(name, view, tuple(offsets[1:]), tuple(shape)))
        done += n * rows[d]
    return held
