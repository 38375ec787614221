"""Ranks of one attempt meet in a store that others have left their words in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import sleep
from typing import Any

import pytest
import torch.distributed as dist

from training.launch.errors import RunError
from training.launch.meeting import fresh_part


def meet(store: Any, late: int, world_size: int = 3) -> list[Any]:
    """What each rank is given; one comes when the others have read what was left of it."""

    def come(rank: int) -> Any:
        sleep(0.2 * (rank == late))
        return fresh_part(store, rank, world_size, 10.0)

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(come, range(world_size)))


@pytest.mark.parametrize("late", [0, 2])
def test_every_attempt_has_a_part_of_its_own(late: int) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    for attempt, world_size in enumerate((3, 3, 2, 3)):  # a host leaves, and comes back
        parts = meet(store, late, world_size)
        assert [part.check(["address"]) for part in parts] == [False] * world_size
        parts[0].set("address", str(attempt))
        assert [part.get("address") for part in parts] == [str(attempt).encode()] * world_size


def test_who_is_missing_is_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(RunError, match=r"^rank 0 has waited 0.1 s .* ranks 1, 2 of 3 did not come"):
        fresh_part(store, 0, 3, 0.1)
    meet(store, late=0)  # now all were there once
    for rank, missing in ((0, "ranks 1, 2"), (1, "rank 0")):
        with pytest.raises(RunError, match=f"and {missing} of 3 did not come: look at their hosts"):
            fresh_part(store, rank, 3, 0.1)
