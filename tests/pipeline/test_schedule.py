"""Schedules are plain lists: they can be drawn, checked and broken without running anything."""

from __future__ import annotations

import textwrap
from fractions import Fraction

import pytest

from pipeline import catalogue
from pipeline import schedule as sched
from pipeline.pipe import _clock_cycles
from pipeline.schedule import BACKWARD, Action

GRID = [(n, m) for n in range(1, 6) for m in range(1, 10)]


@pytest.mark.a4_2_1
@pytest.mark.a5_2_1
def test_clock_cycles_of_six_micro_batches_on_two_partitions() -> None:
    assert [sorted(clock) for clock in _clock_cycles(6, 2)] == [
        [(0, 0)],
        [(0, 1), (1, 0)],
        [(1, 1), (2, 0)],
        [(2, 1), (3, 0)],
        [(3, 1), (4, 0)],
        [(4, 1), (5, 0)],
        [(5, 1)],
    ]


@pytest.mark.a4_2_1
@pytest.mark.a5_2_1
def test_clock_cycles_of_three_by_three() -> None:
    assert list(_clock_cycles(3, 3)) == [
        [(0, 0)],
        [(1, 0), (0, 1)],
        [(2, 0), (1, 1), (0, 2)],
        [(2, 1), (1, 2)],
        [(2, 2)],
    ]


def test_clock_cycles_of_fewer_micro_batches_than_partitions() -> None:
    assert list(_clock_cycles(1, 3)) == [[(0, 0)], [(0, 1)], [(0, 2)]]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb"])
def test_the_table_in_the_docstring_is_the_schedule(name: str) -> None:
    table = sched.draw(catalogue.find(name)(3, 4))
    assert textwrap.indent(table, "    ") + "\n" in (sched.__doc__ or "")


def test_the_clock_table_in_the_docstring_is_the_clock_cycles() -> None:
    rows = ["k (i,j) (i,j) (i,j)", "- ----- ----- -----"]
    for k, clock in enumerate(sched.clock_cycles(3, 3)):
        cells = {j: f"({i},{j})" for i, j in clock}
        rows.append(f"{k} " + " ".join(cells.get(j, " " * 5) for j in range(3)).rstrip())
    doc = sched.clock_cycles.__doc__ or ""
    assert textwrap.indent("\n".join(rows), " " * 8) in doc


def test_1f1b_as_lists() -> None:
    assert [" ".join(map(str, actions)) for actions in sched.one_f_one_b(3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_zero_bubble_as_clock_tables() -> None:
    assert sched.draw(sched.zero_bubble(2, 4)).splitlines() == [
        "stage 0: F0 F1 .  I0 W0 F2 I1 W1 F3 I2 W2 I3 W3",
        "stage 1: .  F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3",
    ]
    assert sched.draw(sched.zero_bubble(3, 4)).splitlines() == [
        "stage 0: F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "stage 1: .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "stage 2: .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def units(schedule: sched.Schedule) -> int:
    """How long a step takes if a forward takes one unit, a backward two, each half of it one."""
    ended: dict[Action, int] = {}
    for row in sched.clock_table(schedule):
        for action in filter(None, row):
            before = [a for a in schedule[action.stage] if a in ended]
            before += sched.dependencies(action, len(schedule))
            start = max((ended[a] for a in before), default=0)
            ended[action] = start + (2 if action.kind is BACKWARD else 1)
    return max(ended.values())


@pytest.mark.parametrize(("n", "m"), GRID)
def test_zero_bubble_saves_two_thirds_of_the_bubble_of_1f1b(n: int, m: int) -> None:
    """With m < n one micro-batch's way through all stages, not the bubble, is what takes time."""
    assert units(sched.one_f_one_b(n, m)) == 3 * m + 3 * (n - 1)
    assert units(sched.zero_bubble(n, m)) == max(3 * m + n - 1, 2 * m + 2 * n - 1)
    assert len(sched.clock_table(sched.zero_bubble(n, m))) == units(sched.zero_bubble(n, m))


@pytest.mark.parametrize(("n", "m"), GRID)
def test_every_schedule_is_valid_and_holds_what_it_promises(n: int, m: int) -> None:
    limits = {
        "gpipe": [m] * n,
        "1f1b": [min(m, n - s) for s in range(n)],
        "zb": [min(m, n)] * n,
        "sequential": [1] * n,
    }
    assert set(limits) == {name for name in catalogue.SCHEDULES if catalogue.chunks_of(name) == 1}
    for name, limit in limits.items():
        schedule = catalogue.find(name)(n, m)
        sched.validate(schedule, m, max_alive=limit)
        assert sched.peak_alive(schedule) == limit


@pytest.mark.parametrize(("n", "m"), GRID)
def test_the_bubble_is_that_of_the_formula(n: int, m: int) -> None:
    bubble = Fraction(n - 1, m + n - 1)
    assert sched.bubble(sched.gpipe(n, m)) == sched.bubble(sched.one_f_one_b(n, m)) == bubble
    assert sched.bubble(sched.sequential(n, m)) == Fraction(n - 1, n)


def test_validate_names_a_missing_action() -> None:
    schedule = sched.gpipe(2, 2)
    schedule[1].remove(Action(BACKWARD, 1, 1))
    with pytest.raises(ValueError, match="stage 1: B1 is missing"):
        sched.validate(schedule, 2)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (Action(BACKWARD, 1, 1), "stage 1: B1 is there twice"),
        (Action(BACKWARD, 0, 1), r"rank 1: .* does not belong here"),
    ],
)
def test_validate_names_an_action_too_many(extra: Action, message: str) -> None:
    schedule = sched.gpipe(2, 2)
    schedule[1].append(extra)
    with pytest.raises(ValueError, match=message):
        sched.validate(schedule, 2)


def test_stages_that_do_a_micro_batch_in_different_ways_wait_for_ever() -> None:
    mixed = [sched.gpipe(2, 1)[0], sched.zero_bubble(2, 1)[1]]
    with pytest.raises(ValueError, match="deadlock: B0 on stage 0 waits for B0 on stage 1"):
        sched.validate(mixed, 1)


def test_evaluation_is_the_forwards_of_one_stage_after_the_other() -> None:
    lists = sched.forwards([0, 1, 1, 0], 2)
    drawn = [[f"{action}@{action.stage}" for action in actions] for actions in lists]
    assert drawn == [["F0@0", "F1@0", "F0@3", "F1@3"], ["F0@1", "F1@1", "F0@2", "F1@2"]]


def test_validate_names_the_action_that_breaks_the_limit() -> None:
    with pytest.raises(ValueError, match="stage 0: F2 makes 3 micro-batches alive > 2"):
        sched.validate(sched.gpipe(2, 4), 4, max_alive=[2, 2])


def test_two_swapped_micro_batches_deadlock_and_are_named() -> None:
    schedule = sched.one_f_one_b(2, 2)  # stage 0: F0 F1 B0 B1; stage 1: F0 B0 F1 B1
    schedule[0][1], schedule[0][2] = schedule[0][2], schedule[0][1]  # still fine: F0 B0 F1 B1
    sched.validate(schedule, 2)
    schedule[1][0], schedule[1][2] = schedule[1][2], schedule[1][0]  # F1 before F0 on stage 1
    with pytest.raises(ValueError, match="deadlock: B0 on stage 0 waits for B0 on stage 1; F1"):
        sched.validate(schedule, 2)


def test_in_order_each_action_comes_after_those_it_waits_for() -> None:
    drawn = [f"{action}@{action.stage}" for action in sched.in_order(sched.one_f_one_b(2, 2))]
    assert drawn == ["F0@0", "F1@0", "F0@1", "B0@1", "B0@0", "F1@1", "B1@1", "B1@0"]


def test_wrong_names_and_sizes_say_what_is_right() -> None:
    with pytest.raises(ValueError, match=r"'zigzag': choose one of gpipe, 1f1b, zb, sequential"):
        catalogue.find("zigzag")
    with pytest.raises(ValueError, match="0 micro-batches: at least 1"):
        sched.gpipe(2, 0)
