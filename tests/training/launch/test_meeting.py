"""Ranks of one attempt meet in a store that others have left their words in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import enumerate as enumerate_threads
from time import monotonic, sleep
from typing import Any

import pytest
import torch.distributed as dist

from training.launch.errors import RunError
from training.launch.meeting import fresh_part, listen, meet


def meet_all(store: Any, late: int, world_size: int = 3) -> list[Any]:
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
        parts = meet_all(store, late, world_size)
        assert [part.check(["address"]) for part in parts] == [False] * world_size
        parts[0].set("address", str(attempt))
        assert [part.get("address") for part in parts] == [str(attempt).encode()] * world_size


def test_who_is_missing_is_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(RunError, match=r"^rank 0 has waited 0.1 s .* ranks 1, 2 of 3 did not come"):
        fresh_part(store, 0, 3, 0.1)
    began = monotonic() - 9.95  # the store itself came late
    with pytest.raises(RunError, match=r"^rank 0 has waited 10 s .* ranks 1, 2 of 3 did not come"):
        fresh_part(store, 0, 3, 10.0, began)
    meet_all(store, late=0)  # now all were there once
    for rank, missing in ((0, "ranks 1, 2"), (1, "rank 0")):
        with pytest.raises(RunError, match=f"and {missing} of 3 did not come: look at their hosts"):
            fresh_part(store, rank, 3, 0.1)


@pytest.mark.usefixtures("capfd")  # torch prints that the store is gone
def test_a_store_that_is_stopped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its system accepts connections, and it never answers."""
    before = set(enumerate_threads())
    with listen() as stopped:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(stopped.getsockname()[1]))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        with pytest.raises(RunError, match=r"^rank 1 has waited 0.1 s .* look at its host, 127\.0"):
            meet(1, 2, 0.1)
    for asking in {*enumerate_threads()} - before:
        asking.join()
