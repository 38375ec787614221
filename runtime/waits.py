"""How long a rank waits for another, and how its host need not wait for a GPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

DISK_GROUP = "checkpoints"  # the description of a group in which ranks wait for disks


def set_timeouts(seconds: float) -> None:
    """From now on this rank waits this long for another, except in the groups of checkpoints."""
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_desc != DISK_GROUP:
            group.set_timeout(timedelta(seconds=seconds))


def time_out_of(group: dist.ProcessGroup | None) -> timedelta:
    """How long a rank waits for another of this group, through gloo."""
    members: Any = group or dist.group.WORLD
    time_out: timedelta = members._get_backend(torch.device("cpu")).options._timeout
    return time_out


def control_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Where to exchange numbers that the host needs: on the CPU, so that it does not wait for its
    GPU, if the group has CPUs (gloo, or cpu:gloo,cuda:nccl); else on `device`."""
    members: Any = group or dist.group.WORLD
    cpu = torch.device("cpu")
    return cpu if cpu in members._device_types else device
