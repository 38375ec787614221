"""The layout of a run: dp x pp x tp ranks, and the groups in which they work together.

    rank = (d * pp + p) * tp + t            2 x 2 x 2:   d=0   p=0  [0 1]      d=1   p=0  [4 5]
                                                               p=1  [2 3]            p=1  [6 7]

Tensor-parallel ranks wait for each other several times in every layer, so they are neighbours.
Pipeline ranks exchange activations once per micro-batch. Data-parallel ranks add up gradients once
per step, so they are furthest apart.

Not torch's `DeviceMesh`, whose groups have the default timeout of half an hour.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist


class Axis(NamedTuple):
    """This rank's coordinate on one axis: `rank` of `size`, and the `group` of the ranks that
    differ from it in this coordinate only; None: there is only one process."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


class Mesh(NamedTuple):
    """This rank's coordinates; and the groups for messages between the stages of its pipeline, see
    `message_groups`."""

    data: Axis = Axis()
    pipeline: Axis = Axis()
    tensor: Axis = Axis()
    messages: Sequence[dist.ProcessGroup] = ()


def make_mesh(dp: int, pp: int, tp: int, timeout: float) -> Mesh:
    """All ranks must call it together.

    Args:
        timeout: seconds a rank waits for the others in a collective.

    Raises:
        ValueError: there are not dp * pp * tp ranks.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if dp * pp * tp != world_size:
        raise ValueError(f"{dp} x {pp} x {tp} is not the number of ranks, {world_size}")
    if world_size == 1:
        return Mesh()
    ranks, axes = torch.arange(world_size).view(dp, pp, tp), []
    messages: Sequence[dist.ProcessGroup] = ()
    for axis, size in enumerate(ranks.shape):
        # Every rank must help to make every group, in the same order.
        for members in ranks.movedim(axis, -1).reshape(-1, size).tolist():
            group = dist.new_group(members, timeout=timedelta(seconds=timeout))
            between = message_groups(members, timeout) if axis == 1 and size > 1 else ()
            if dist.get_rank() in members:
                axes.append(Axis(members.index(dist.get_rank()), size, group))
                messages = messages or between
    data, pipeline, tensor = axes
    return Mesh(data, pipeline, tensor, messages)


def message_groups(members: Sequence[int], timeout: float) -> list[dist.ProcessGroup]:
    """Groups in which the ranks ``members`` send each other messages: one for the CPU's memory, and
    with NCCL one more per direction. All ranks of the world must call it together.

    They are apart from other groups, because a rank that fails closes them, so that nobody waits.
    """
    kinds = ["gloo", "nccl", "nccl"] if "nccl" in dist.get_backend() else ["gloo"]
    return [dist.new_group(members, timedelta(seconds=timeout), kind) for kind in kinds]
