"""Processes on a device: what one process computes, with one wait per step.

Two ranks have a device each, and NCCL, whose part gloo plays; four share two devices, and have gloo
alone. The layouts are rows of tests/equivalence.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from tests.device.seen import watch
from tests.device.session import on_device, ranks

NCCL = "cpu:gloo,cuda:nccl"  # as training.world.choose_backend says
STEPS = 2


def compared(rank: int, world_size: int, name: str) -> str:
    """Trains a row of the table; what is wrong with it."""
    from tests.equivalence.compare import check
    from tests.equivalence.plain import plain
    from tests.equivalence.table import find
    from training.world import World

    world = World(rank, world_size, rank, torch.device("cuda", rank % 2))
    torch.cuda.set_device(world.device)
    row = find(name)
    problem: Any = row.problem
    row = replace(row, problem=replace(problem, dropout=0.0))  # masks depend on the device
    reference = plain(row.problem, STEPS, torch.float64)
    return check(row, reference, world, STEPS, torch.float64).failure


@pytest.mark.parametrize(
    "name",
    [
        "fsdp2-zero1-m2", "fsdp2-zero2-m2", "fsdp2-zero3-m2", "pipeline2-1f1b-m3",
        "pipeline2-zb-m3", "pipeline2-zbv-v2_m3", "mesh2-1x1x2", "mesh2-1x1x2-sequence",
    ],
)  # fmt: skip
@on_device
def test_two_ranks_with_a_device_each(name: str) -> None:
    assert ranks(2, NCCL).run(compared, name) == ["", ""]


@pytest.mark.parametrize(
    "name", ["mesh4-2x2x1-zero1", "mesh4-1x2x2-sequence", "mesh4-2x1x2-sequence-zero3"]
)
@on_device
def test_four_ranks_that_share_devices(name: str) -> None:
    assert ranks(4).run(compared, name) == [""] * 4


def second_step(rank: int, world_size: int, name: str) -> tuple[list[str], set[str]]:
    """Where a rank waited for its device in its second step, and the collectives of devices."""
    from tests.equivalence.compare import laid_out
    from tests.equivalence.table import find
    from training.loop import seeded, train
    from training.world import World

    world = World(rank, world_size, rank, torch.device("cuda", rank % 2))
    torch.cuda.set_device(world.device)
    row = find(name)
    problem: Any = row.problem
    row = replace(row, problem=replace(problem, num_examples=16, batch_size=8, dropout=0.1))
    with laid_out(row, world, torch.float32) as training:
        steps = seeded(training._steps(), training.model, 0, 0)
        for _ in range(STEPS):
            with watch() as seen:
                train(training.model, training.optimizer, islice(steps, 1), "", rank=1)
    return [wait.where for wait in seen.waits], {c.operator for c in seen.collectives}


@pytest.mark.parametrize("zero", [1, 2, 3])
@on_device
def test_counts_and_announcements_of_shards_wait_for_no_device(zero: int) -> None:
    for waits, _ in ranks(2, NCCL).run(second_step, f"fsdp2-zero{zero}-m2"):
        assert [where for where in waits if "/data_parallel/" in where] == []


@on_device
def test_gloo_gets_no_message_of_a_device() -> None:
    """It sends from the CPU's memory alone. NCCL sends the bodies of messages."""
    moves = {"send", "recv_"}
    assert [moves & found for _, found in ranks(2).run(second_step, "pipeline2-1f1b-m3")] == [
        set()
    ] * 2
    assert [found & moves for _, found in ranks(2, NCCL).run(second_step, "pipeline2-1f1b-m3")] == [
        moves
    ] * 2
