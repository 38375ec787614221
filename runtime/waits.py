"""How long a rank waits for another."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

CHECKPOINTS = "checkpoints"  # the description of a group in which ranks wait for disks


def limit_waits(seconds: float) -> None:
    """From now on this rank waits so long for another, except in the groups of checkpoints."""
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_desc != CHECKPOINTS:
            group.set_timeout(timedelta(seconds=seconds))
