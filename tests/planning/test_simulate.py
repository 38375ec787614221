"""Schedules timed: against the clock table, and against the closed forms."""

from __future__ import annotations

import pytest

from pipeline.catalogue import SCHEDULES
from pipeline.schedule import Action, Kind, clock_table, gpipe, one_f_one_b, zero_bubble
from planning.simulate import simulate


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 4), (3, 4), (4, 2), (4, 9)])
def test_at_one_clock_each_it_is_the_clock_table(name: str, n: int, m: int) -> None:
    schedule = SCHEDULES[name](n, m)
    found = {
        (timed.action, timed.start, timed.end)
        for row in simulate(schedule, lambda _: 1.0)
        for timed in row
    }
    table = enumerate(clock_table(schedule))
    assert found == {(action, k, k + 1) for k, row in table for action in row if action}


def test_a_slow_stage_is_waited_for() -> None:
    """Two stages, two micro-batches, forward 1 and 2, backward 1 and 2."""
    rows = simulate(gpipe(2, 2), lambda action: 1.0 + action.stage)
    assert [[(str(t.action), t.start, t.end) for t in row] for row in rows] == [
        [("F0", 0, 1), ("F1", 1, 2), ("B0", 7, 8), ("B1", 9, 10)],
        [("F0", 1, 3), ("F1", 3, 5), ("B0", 5, 7), ("B1", 7, 9)],
    ]


@pytest.mark.parametrize(("n", "m"), [(2, 2), (3, 4), (4, 8)])
def test_the_closed_forms_for_backwards_twice_as_long(n: int, m: int) -> None:
    """GPipe and 1F1B take (m+n-1)(f+b); zero bubble with F = I = W takes 3m+n-1."""

    def seconds(action: Action) -> float:
        return 2.0 if action.kind is Kind.BACKWARD else 1.0

    for build, total in ((gpipe, 3 * (m + n - 1)), (one_f_one_b, 3 * (m + n - 1)),
                         (zero_bubble, 3 * m + n - 1)):  # fmt: skip
        rows = simulate(build(n, m), seconds)
        assert max(timed.end for row in rows for timed in row) == total


def test_a_schedule_that_waits_for_ever() -> None:
    with pytest.raises(ValueError, match="deadlock"):
        simulate([[Action(Kind.BACKWARD, 0, 0), Action(Kind.FORWARD, 0, 0)]], lambda _: 1.0)
