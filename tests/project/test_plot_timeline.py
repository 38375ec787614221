"""Where a step's time went, by numbers worked out by hand."""

from __future__ import annotations

import pytest

from project.plot_timeline import bubbles, duration, in_step, shares, spent, steps_of
from training.timeline import Event


def row(*events: tuple[str, float, float], step: int = 0) -> list[Event]:
    return [Event(kind, 0, 0, start, end, step) for kind, start, end in events]


# 10 clocks from the first forward (at 10) to the last backward (at 20).
PIPELINE = {
    "a": row(("receive", 9, 10), ("F", 10, 12), ("send", 12, 13), ("B", 17, 20)),
    "b": row(("F", 12, 14), ("B", 14, 17), ("R", 14, 15), ("optimizer", 20, 22)),
}


def test_time_that_events_share_counts_once() -> None:
    assert (
        spent(row(("F", 3, 4), ("F", 0, 1), ("F", 0.5, 2), ("F", 2, 2.5), ("F", 3.2, 3.5))) == 3.5
    )
    assert spent([]) == 0


def test_the_bubble_is_idle_over_total() -> None:
    """Sending is idle, the optimizer does not count."""
    assert bubbles(PIPELINE) == pytest.approx({"a": 0.5, "b": 0.5})
    uneven = {"a": row(("F", 0, 1)), "b": row(("F", 1, 4)), "c": row(("all_reduce", 0, 9))}
    assert bubbles(uneven) == pytest.approx({"a": 0.75, "b": 0.25, "c": 1})


def test_shares_add_up_to_the_step() -> None:
    """From 9 to 22: 13 clocks."""
    assert duration(PIPELINE) == 13
    found = shares(PIPELINE)
    assert found == pytest.approx(
        {
            "recompute": 0.5, "forward": 2, "backward": 2.5, "optimizer": 1, "other": 0,
            "communication": 1, "idle": 6,
        }
    )  # fmt: skip
    assert sum(found.values()) == pytest.approx(13)
    one = {"a": row(("B", 0, 4), ("all_reduce", 1, 5), ("all_reduce", 2, 6), ("copy", 6, 7))}
    assert shares(one) == pytest.approx(
        {
            "recompute": 0, "forward": 0, "backward": 4, "optimizer": 0, "other": 1,
            "communication": 2, "idle": 0,
        }
    )  # fmt: skip


def test_the_first_step_is_left_out_where_there_are_others() -> None:
    workers = {"a": [*row(("F", 0, 9)), *row(("F", 20, 23), step=2)], "b": row(("F", 9, 9), step=3)}
    assert steps_of(workers) == [2, 3]
    assert in_step(workers, 2) == {"a": row(("F", 20, 23), step=2), "b": []}
    assert steps_of({"a": row(("F", 0, 1), step=4)}) == [4]
