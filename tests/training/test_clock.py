"""The clock of a rank against rank 0's."""

from __future__ import annotations

import time

import pytest

from tests.ranks import Ranks
from training.clock import Clock, measure_clock

AHEAD = [0.0, 1000.0, -0.25]  # seconds by which each rank's clock is off


def _measure(rank: int, world_size: int, ahead: list[float]) -> tuple[float, float, float]:
    """Offset, round trip, and how long all took."""
    start = time.perf_counter()
    clock = measure_clock(rank, world_size, lambda: time.perf_counter() + ahead[rank])
    return clock.offset, clock.round_trip, time.perf_counter() - start


def test_each_rank_finds_how_far_its_clock_is_off(three_ranks: Ranks) -> None:
    """To half a round trip, which is the bound of the method."""
    for (offset, round_trip, took), ahead in zip(
        three_ranks.run(_measure, AHEAD), AHEAD, strict=True
    ):
        assert abs(offset + ahead) <= round_trip / 2 + 1e-9
        assert 0 <= round_trip < took
    assert three_ranks.run(_measure, AHEAD)[0][:2] == (0.0, 0.0)


def test_one_machine_has_one_clock(three_ranks: Ranks) -> None:
    """What is less than the error of the measurement is taken to be nothing."""
    assert [offset for offset, *_ in three_ranks.run(_measure, [0.0] * 3)] == [0.0] * 3


def test_alone_nothing_is_measured() -> None:
    assert measure_clock(0, 1, now=lambda: pytest.fail("asked for the time")) == Clock(0.0, 0.0)
