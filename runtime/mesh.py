"""The mesh of a run: a rank's place on each axis, and the groups in which ranks work together.

    rank = ((((dp * SHARDS + shards) * EP + ep) * CP + cp) * PP + pp) * TP + tp

    dp 2, pp 2, tp 2:   dp=0   pp=0  [0 1]      dp=1   pp=0  [4 5]
                               pp=1  [2 3]             pp=1  [6 7]

Tensor-parallel ranks wait for each other several times in every layer, so they are neighbours.
Pipeline ranks exchange activations once per micro-batch. Data-parallel ranks add up gradients once
per step, so they are furthest apart; but those that share one copy of the model, in shards, are
neighbours, so that one host can hold the copy. Ranks that share sequences (cp) or experts (ep)
exchange data in every layer, too, but their axes lie outside pp and tp, so that each has pipelines
of its own. The table of axes is in axes.py.

Not torch's `DeviceMesh`, for four reasons. It cannot describe a single process without a process
group. Its groups wait half an hour. An axis with all ranks gets the default group, in which the
training loop sums its losses, instead of a group of its own. And a group over several axes exists
only after all ranks together have flattened these axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from .axes import (
    AXES,
    BATCH_AXES,
    DATA_AXES,
    EXPERT_AXES,
    EXPERT_SHARD_AXES,
    SHARD_AXES,
    axes_in_words,
    sizes,
)

# The axes whose ranks have one group: each by itself, and these combinations
GROUPS: tuple[tuple[str, ...], ...] = (
    *((axis,) for axis in AXES),
    BATCH_AXES,  # which have different parts of a batch
    DATA_AXES,  # which average gradients
    EXPERT_AXES,  # which average gradients of the same experts
    SHARD_AXES,  # which share a copy
    EXPERT_SHARD_AXES,
)


class Axis(NamedTuple):
    """This rank's place on an axis, or on several: `rank` of `size`, and the `group` of the ranks
    that differ from it only there; None if there is only one process."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Mesh:
    """This rank's place: `mesh["tp"]` is its `Axis`; `mesh["dp", "tp"]` is that of several axes, if
    `GROUPS` has them. `messages`: groups for messages between the stages of its pipeline, see
    `message_groups`."""

    places: Mapping[tuple[str, ...], Axis]
    messages: Sequence[dist.ProcessGroup] = ()

    def __getitem__(self, axes: str | tuple[str, ...]) -> Axis:
        return self.places[(axes,) if isinstance(axes, str) else axes]


def make_mesh(
    ranks: Mapping[str, int], timeout: float, more: Sequence[tuple[str, ...]] = ()
) -> Mesh:
    """Makes the groups of a run. All ranks must call it together.

    Args:
        ranks: their number on each axis; 1 on an axis that is left out.
        timeout: seconds a rank waits for the others in a collective.
        more: further combinations of axes whose ranks have one group, besides `GROUPS`.

    Raises:
        ValueError: the axes do not make up the number of ranks, or one is unknown.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    shape = [*sizes(**ranks).values()]
    if math.prod(shape) != world_size:
        product = axes_in_words(sizes(**ranks))
        raise ValueError(f"{product} is not the number of ranks, {world_size}")
    if world_size == 1:
        return Mesh(dict.fromkeys([*GROUPS, *more], Axis()))
    mesh, places = torch.arange(world_size).view(shape), {}
    messages: Sequence[dist.ProcessGroup] = ()
    groups: dict[tuple[bool, tuple[int, ...]], dist.ProcessGroup] = {}
    for axes in [*GROUPS, *more]:
        meeting = [dim for dim, axis in enumerate(AXES) if axis in axes]
        apart = [dim for dim, axis in enumerate(AXES) if axis not in axes]
        size = math.prod(shape[dim] for dim in meeting)
        # Every rank must help to make every group, in the same order.
        for members in mesh.permute(*apart, *meeting).reshape(-1, size).tolist():
            # Axes with the same ranks share a group. But axes that average gradients share none
            # with axes that exchange in a layer: gradients are averaged while backward runs.
            key = (not {"dp", "shards"}.isdisjoint(axes) and size > 1, tuple(members))
            if key not in groups:
                groups[key] = dist.new_group(members, timeout=timedelta(seconds=timeout))
            between = message_groups(members, timeout) if axes == ("pp",) and size > 1 else ()
            if dist.get_rank() in members:
                places[axes] = Axis(members.index(dist.get_rank()), size, groups[key])
                messages = messages or between
    if "nccl" in dist.get_backend():
        # NCCL connects ranks in the first collective of a group. In backward that could wait for a
        # GPU that is waiting in a message between stages.
        for (_, ranks_of_group), group in groups.items():
            if len(ranks_of_group) > 1 and dist.get_rank() in ranks_of_group:
                dist.all_reduce(torch.zeros((), device="cuda"), group=group)
    return Mesh(places, messages)


def message_groups(members: Sequence[int], timeout: float) -> list[dist.ProcessGroup]:
    """Groups in which the ranks `members` send each other messages: one for the CPU's memory, and
    with NCCL one more per direction. All ranks of the world must call it together.

    They are groups of their own because a rank that fails closes them, so that nobody waits for it.
    """
    kinds = ["gloo", "nccl", "nccl"] if "nccl" in dist.get_backend() else ["gloo"]
    return [dist.new_group(members, timedelta(seconds=timeout), kind) for kind in kinds]
