"""Announcements through pipes: from ranks that say the same, say something else, end, or say
nothing. What is done with the memory: test_communicator.py."""

from __future__ import annotations

import gc
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from runtime.shared_memory import SharedMemory
from tests.remote import on_ranks
from training.options import WEEKS


def opened(group: dist.ProcessGroup | None = None) -> SharedMemory:
    memory = SharedMemory.open(group)
    assert memory is not None
    return memory


@on_ranks(3)
def test_announcements_are_compared_in_order(rank: int, _world_size: int) -> None:
    """Twice before the first is waited for; the last one differs on rank 2. Programs take no longer
    time-out than this one."""
    memory = opened(dist.new_group(timeout=timedelta(seconds=WEEKS)))
    for wait in [memory.announce("sum", size) for size in (-7, 1 << 60)]:
        wait()
    wait = memory.announce("sum", rank == 2)
    with pytest.raises(RuntimeError, match="the ranks diverged"):
        wait()


@on_ranks(2)
def test_no_core_dump_has_the_memory(_rank: int, _world_size: int) -> None:
    """Or the kernel would allocate four times the host's memory for it."""
    memory = opened()
    maps = Path("/proc/self/smaps").read_text().split("/memfd:ranks")[1:]  # of each, its flags
    dumped = [text for text in maps if " dd" not in text.split("VmFlags:")[1].split("\n")[0]]
    assert len(maps) >= len(memory.maps) == 2 and not dumped


@on_ranks(3)
def test_a_rank_that_has_ended_is_named(rank: int, _world_size: int) -> None:
    memory = opened()
    if rank == 1:
        del memory  # as its process does when it ends
        gc.collect()
    else:
        wait = memory.announce()
        with pytest.raises(dist.DistError, match="rank 1 of the group has ended"):
            wait()
    dist.barrier()


@on_ranks(3)
def test_a_rank_that_is_silent_is_named(rank: int, _world_size: int) -> None:
    memory = opened(dist.new_group(timeout=timedelta(minutes=1)))
    assert memory.group is not None
    memory.group.set_timeout(timedelta(seconds=0.2))  # as the loop does after the first step
    if rank != 1:
        wait = memory.announce()
        with pytest.raises(dist.DistError, match=r"rank 1 of the group has been silent for 0\.2 s"):
            wait()
    dist.barrier()


@on_ranks(2)
def test_a_pipe_that_is_full_is_waited_for_no_longer(rank: int, _world_size: int) -> None:
    """As it is stopped, and a step of the other has more buckets than a pipe holds."""
    memory = opened(dist.new_group(timeout=timedelta(minutes=1)))
    assert memory.group is not None
    memory.group.set_timeout(timedelta(seconds=0.2))
    if rank == 0:
        with pytest.raises(dist.DistError, match=r"rank 1 of the group has been silent for 0\.2 s"):
            for _ in range(100_000):
                memory.announce()
    dist.barrier()
