"""Layouts on a mesh: what they have in common, whether layers are in shards or in stages.

The mesh's tensor axis cuts the matrices (cut.py), its data and expert axes deal the batch out, its
context axis cuts the sequences. Ranks of the expert axis meet inside a layer, so they run equally
many micro-batches; a rank that has fewer runs empty ones. Losses and gradients add up over ranks of
the context axis, as over replicas.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from data_parallel.shards import FlatSlice
from runtime.axes import (
    BATCH_AXES,
    DATA_AXES,
    EXPERT_AXES,
    EXPERT_SHARD_AXES,
    LAYER_AXES,
    SHARD_AXES,
)
from runtime.communicator import Communicator
from runtime.mesh import Mesh
from training.launch.world import World
from training.tasks.experts import ExpertTask
from training.tasks.gpt2 import numbers_of_targets
from training.tasks.task import Step, TrainingTask

from .context import own_positions, rows_in_order
from .cut import CutTask, TensorCutTask
from .layout import Held, LaidOutModel, Setup, counts_here


class MeshLayout(LaidOutModel):
    """A layout on a mesh.

    Attributes:
        cut_task: the task's layers, as this rank has them.
        data_ranks: the ranks with the same layers and, experts aside, the same parts of matrices.
            They average the gradients of these, or share them out as shards.
        replicas_of_shards: those of them that hold the same shards, or the same whole parameters.
        forward_ranks: the ranks that take part in the same forward.
    """

    def __init__(self, task: TrainingTask, world: World, setup: Setup, mesh: Mesh) -> None:
        self.task, self.setup, self.mesh, self.devices = task, setup, mesh, [world.device]
        self.world = world
        self.dp_rank, self.dp_size, _ = mesh[BATCH_AXES]
        self.data_ranks, self.replicas_of_shards = mesh[DATA_AXES], mesh["dp"]
        self.mask_rank = mesh["cp"].rank * mesh["tp"].size + mesh["tp"].rank
        kind = TensorCutTask if mesh["tp"].size > 1 else CutTask
        self.cut_task = kind(task, setup, mesh)  # on the meta device: no memory
        self.forward_ranks = self.cut_task.expert_ranks

    @property
    def layer_ranks(self) -> Communicator | None:
        """All ranks except those of other stages."""
        group = self.mesh[LAYER_AXES].group
        return Communicator(group) if group is not None else None

    @property
    def sentences(self) -> tuple[int, int]:
        """Each data rank continues its own sentences. So do the ranks of the context axis, since a
        sentence that grows is not cut by positions."""
        return self.data_ranks.rank, self.data_ranks.size

    def data_axes(self, name: str) -> tuple[str, ...]:
        """The axes whose ranks average a parameter's gradient."""
        return EXPERT_AXES if name in self.cut_task.experts else DATA_AXES

    def shard_axes(self, name: str) -> tuple[str, ...]:
        """The axes whose ranks share one copy of a parameter in shards. Along dp it is repeated."""
        return EXPERT_SHARD_AXES if name in self.cut_task.experts else SHARD_AXES

    def shared_axes(self, name: str) -> tuple[str, ...]:
        """The other axes along which ranks hold the same part of a parameter: here `tp`, unless the
        parameter is cut."""
        return () if name in self.cut_task.shards else ("tp",)

    def is_first(self, name: str) -> bool:
        """Whether this rank is the first along `shared_axes`, and so counts the parameter."""
        return name in self.cut_task.shards or self.mesh["tp"].rank == 0

    def replicas(self, *axes: str) -> tuple[str, ...]:
        """Those of `axes` that have several ranks."""
        return tuple(axis for axis in axes if self.mesh[axis].size > 1)

    def held_in(self, slices: Iterable[FlatSlice]) -> list[Held]:
        """The rectangles of whole parameters in this rank's flat shards."""
        held = []
        for x in self.cut_task.cut(x for flat in slices for x in rectangles_of(*flat)):
            replicas = self.replicas("dp", *self.shared_axes(x.name))
            rank, size, _ = self.replicas_of_shards
            counts = counts_here(self.is_first(x.name), 0, rank, size)  # one of the replicas
            held.append(replace(x, replicas=replicas, counts=counts))
        return held

    def filled(self, step: Step) -> Step:
        """The step, with empty micro-batches added until every rank that shares its experts has as
        many."""
        if self.mesh["ep"].size == 1:
            return step
        number = [len(step.inputs)]
        numbers = self.cut_task.expert_ranks.gather_numbers(number, self.devices[0])
        for _ in range(max(numbers)[0] - len(step.inputs)):
            x, target = cast(ExpertTask, self.task).empty()
            step = replace(step, inputs=[*step.inputs, x], targets=[*step.targets, target])
        return step

    def no_sentences(self) -> Any:
        """An input without examples, while `evaluating`: nobody balances experts then."""
        x, _ = cast(ExpertTask, self.task).empty()
        return x._replace(balance=None)

    @abstractmethod
    def forward(self, x: Any) -> Tensor | None:
        """What the last layer returns, while `evaluating`; None on ranks that do not see it. `x` is
        None on a rank that has run out of data."""

    def outputs(self, x: Any) -> Tensor | None:
        """The logits of all tokens, on the first rank of the tensor axis and the context axis."""
        context_ranks, places = self.cut_task.context_ranks, None
        if x is not None and context_ranks.size > 1:
            numbers = torch.arange(len(numbers_of_targets(x.targets)), device=x.hidden.device)
            x, places = own_positions(x, numbers, context_ranks)
        output = self.forward(x)
        logits = None if output is None else self.cut_task.logits(output)
        if logits is None or places is None:
            return logits
        return rows_in_order(logits, places, context_ranks)

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
        """Whether a rank has sentences left. The ranks that meet in a forward all call it first:
        those with sentences left in `next_tokens`, the others in `end`."""
        going = self.forward_ranks.gather_numbers([int(this_one)], self.devices[0])
        return [1] in going


def rectangles_of(
    name: str, shape: Sequence[int], start: int, values: Tensor, parameter: Any = None
) -> list[Held]:
    """The rectangles of a rank that holds elements start, start + 1, ... of the flattened tensor,
    as views of `values`. A range of a matrix that begins and ends inside rows gives up to three.
    `parameter`: what an optimizer updates, of which `values` are a view."""
    held, done, sizes = [], 0, (1, *shape)  # the tensor is a row of its own
    rows = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]  # elements in a row of each level
    while done < values.numel():
        at, left = start + done, values.numel() - done  # place in the tensor; elements left
        d = next(d for d, row in enumerate(rows) if at % row == 0 and row <= left)  # the longest
        offsets = [at // row % size for row, size in zip(rows, sizes, strict=True)]
        n = min(left // rows[d], sizes[d] - offsets[d])  # how many rows of that level
        box = [*(1 for _ in range(d)), n, *sizes[d + 1 :]]  # its shape, in all levels
        view = values[done : done + n * rows[d]].view(box[1:])
        held.append(Held(name, view, tuple(offsets[1:]), tuple(shape), parameter=parameter))
        done += n * rows[d]
    return held
