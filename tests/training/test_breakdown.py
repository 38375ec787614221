"""Where a step's time went, by numbers worked out by hand."""

from __future__ import annotations

import pytest

from training.breakdown import (
    bubble,
    bubbles,
    duration,
    in_step,
    length,
    mean_shares,
    settled,
    shares,
    typical_step,
    union,
)
from training.timeline import Event


def row(*events: tuple[str, float, float], step: int = 0) -> list[Event]:
    return [Event(kind, 0, 0, start, end, step) for kind, start, end in events]


def test_union() -> None:
    assert union([(3, 4), (0, 1), (0.5, 2), (2, 2.5), (3.2, 3.5)]) == [(0, 2.5), (3, 4)]
    assert length([(0, 2.5), (3, 4)]) == 3.5
    assert union([]) == []


# 10 clocks from the first forward (at 10) to the last backward (at 20).
PIPELINE = {
    "a": row(("receive", 9, 10), ("F", 10, 12), ("send", 12, 13), ("B", 17, 20)),
    "b": row(("F", 12, 14), ("B", 14, 17), ("R", 14, 15), ("optimizer", 20, 22)),
}


def test_the_bubble_is_idle_over_total() -> None:
    """Sending is idle, the optimizer does not count; what is recomputed within a backward counts
    once."""
    assert bubbles(PIPELINE) == pytest.approx({"a": 0.5, "b": 0.5})
    assert bubble(PIPELINE) == pytest.approx(0.5)
    uneven = {"a": row(("F", 0, 1)), "b": row(("F", 1, 4))}
    assert bubbles(uneven) == pytest.approx({"a": 0.75, "b": 0.25})
    assert bubble(uneven) == pytest.approx(0.5)
    assert bubble({"a": row(("all_reduce", 0, 1))}) == 1


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


def test_only_communication_that_nothing_hides_counts() -> None:
    one = {"a": row(("B", 0, 4), ("all_reduce", 1, 5), ("all_reduce", 2, 6), ("copy", 6, 7))}
    assert shares(one) == pytest.approx(
        {
            "recompute": 0, "forward": 0, "backward": 4, "optimizer": 0, "other": 1,
            "communication": 2, "idle": 0,
        }
    )  # fmt: skip


def test_the_first_step_is_left_out_where_there_are_others() -> None:
    times = {0: 9.0, 1: 1.0, 2: 3.0, 3: 1.5}
    events = [e for k, t in times.items() for e in row(("F", 10.0 * k, 10.0 * k + t), step=k)]
    workers = {"a": events}
    assert typical_step(workers) == 3
    assert mean_shares(workers)["forward"] == pytest.approx((1 + 3 + 1.5) / 3)
    assert in_step(workers, 2) == {"a": row(("F", 20, 23), step=2)}
    assert (settled([4, 5, 6]), settled([4])) == ([5, 6], [4])
