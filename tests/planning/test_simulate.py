"""The simulator: exactly as closed forms say, and as the definition says, solved by relaxation."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest

from pipeline.schedules.catalogue import SCHEDULES, find
from pipeline.schedules.schedule import (
    Action,
    Kind,
    Schedule,
    dependencies,
    ended_with,
    gpipe,
    one_f_one_b,
    stage_ranks,
)
from planning.simulate import (
    EXCHANGE,
    FILL,
    IMBALANCE,
    TRANSFER,
    Simulation,
    Simulator,
    Work,
    _split,
    with_times,
)
from tests.mathematics.formulas import pipeline_bubble

F: Any = Fraction(10)  # seconds, exactly; so are the next three
HALF: Any = Fraction(9)  # the first half of a backward, for gradients of inputs
W: Any = Fraction(6)
C: Any = Fraction(3, 10)  # of a message
B = HALF + W
SIZES = [(2, 5), (3, 4), (4, 8), (5, 24), (8, 24)]


def run(name: str, n: int, m: int, transfer: Any = C) -> Simulation:
    """All stages alike. (With several stages per rank: test_schedule.py, and test_explore.py.)"""
    seconds = with_times(*([part] * n for part in (F, HALF, W)))
    return Simulator(SCHEDULES[name](n, m)).run(Work(seconds, lambda _: transfer))


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_closed_forms_of_a_step(n: int, m: int) -> None:
    """With messages. Under GPipe they delay the fill alone, once up and once down; under 1F1B the
    steady state, too, where a rank has nothing else to do while its message makes the round trip;
    under ZB-H1 there is always a W to do meanwhile, and the delay does not grow with m."""
    span = {name: run(name, n, m).span for name in ("gpipe", "1f1b", "zb")}
    assert span["gpipe"] == (m + n - 1) * (F + B) + 2 * (n - 1) * C
    trips = n - 1 + m - 1 - math.ceil(Fraction(m - 1, n))
    assert span["1f1b"] == (m + n - 1) * (F + B) + 2 * trips * C
    assert span["zb"] == m * (F + B) + (n - 1) * (F + HALF - W) + 4 * (n - 1) * C


def relaxed(schedule: Schedule, work: Work) -> dict[Action, Any]:
    """The end of every action, by the definition, until nothing changes any more."""
    ranks = stage_ranks(schedule)
    rank_of = {action: r for r, actions in enumerate(schedule) for action in actions}
    whole = {part: action for action in rank_of for part in ended_with(action)}
    needs = {a: [whole[part] for part in dependencies(a, len(ranks))] for a in rank_of}
    needed_by: dict[Action, list[Action]] = {action: [] for action in rank_of}
    for action in rank_of:
        for needed in needs[action]:
            needed_by[needed].append(action)
    ends: dict[Action, Any] = dict.fromkeys(rank_of, 0)
    while True:
        before = dict(ends)
        for actions in schedule:
            free: Any = 0
            for action in actions:
                again = work.recompute(action.stage) if action.kind.value in "BI" else 0
                start = free + again
                for needed in needs[action]:
                    sent = rank_of[needed] != rank_of[action]
                    start = max(start, ends[needed] + (work.transfer(needed) if sent else 0))
                free = ends[action] = start + work.seconds(action)
                sends = any(rank_of[a] != rank_of[action] for a in needed_by[action])
                if sends and not work.overlap:
                    free += work.transfer(action)
        if ends == before:
            return ends


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb", "interleaved", "zbv", "vhalf", "vmin"])
@pytest.mark.parametrize("overlap", [True, False])
def test_uneven_stages_are_timed_as_defined(name: str, overlap: bool) -> None:
    draw = random.Random(name)
    simulator = Simulator(find(name)(4, 6))
    stages = range(len(simulator.ranks))
    seconds = {action: float(draw.randrange(1, 9)) for action in simulator.actions}
    transfer = {action: float(draw.randrange(3)) for action in simulator.actions}
    again = [float(draw.randrange(4)) for _ in stages]
    work = Work(seconds.__getitem__, transfer.__getitem__, overlap, again.__getitem__)
    found = simulator.run(work)
    ends = {timed.action: timed.end for row in found.rows for timed in row}
    assert ends == relaxed(simulator.schedule, work)
    # Every second of a rank until its last action is work, a message it sends, or a gap.
    for r, row in enumerate(found.rows):
        idle = sum(timed.idle for timed in row)
        held = 0 if overlap else sum(  # the last action of a row may still send, after its end
            transfer[t.action]
            for t, k in zip(row, [simulator.actions.index(t.action) for t in row], strict=True)
            if simulator.remote[k] and t is not row[-1]
        )  # fmt: skip
        assert row[-1].end == found.busy[r] + idle + held


def test_gradients_are_exchanged_during_the_last_backward_or_after_it() -> None:
    one = Simulator(one_f_one_b(1, 3))
    times = with_times([F], [HALF], [W])
    apart = one.run(Work(times, exchange=lambda _: 20, overlap_exchange=False, update=lambda _: 1))
    assert apart.seconds == 3 * (F + B) + 20 + 1
    hidden = one.run(Work(times, exchange=lambda _: 14, update=lambda _: 1))
    assert hidden.seconds == 3 * (F + B) + 1
    longer = one.run(Work(times, exchange=lambda _: 20))
    assert longer.seconds == 3 * (F + B) + 20 - B
    assert [gap.causes for gap in longer.gaps] == [{EXCHANGE: 5}]


def test_every_gap_says_what_it_waits_for() -> None:
    """Equal stages without messages wait for the fill alone; messages and a slow stage come on top,
    and the causes of all gaps add up to all idle time."""
    n, m = 4, 8
    assert {c for gap in run("1f1b", n, m, 0).gaps for c in gap.causes} == {FILL}
    slow = with_times([F, F, 2 * F, F], [HALF] * n, [W] * n)
    uneven = Simulator(one_f_one_b(n, m)).run(Work(slow))
    assert {c for gap in uneven.gaps for c in gap.causes} == {FILL, IMBALANCE}
    found = Simulator(one_f_one_b(n, m)).run(Work(slow, lambda _: C))
    gaps = found.gaps
    assert {c for gap in gaps for c in gap.causes} == {FILL, IMBALANCE, TRANSFER}
    assert all(sum(gap.causes.values()) == pytest.approx(gap.end - gap.start) for gap in gaps)
    assert sum(gap.end - gap.start for gap in gaps) == n * found.span - sum(found.busy)
    waiting = next(gap for gap in gaps if gap.rank == 1)
    # The last rank ends early, and more so as the backward of stage 1 takes longer.
    slow = with_times([F] * n, [HALF, 3 * HALF, HALF, HALF], [W] * n)
    *_, end = Simulator(one_f_one_b(n, m)).run(Work(slow)).gaps
    assert (end.rank, end.before, {*end.causes}) == (3, None, {FILL, IMBALANCE})
    assert _split(2, 5, 1) == {FILL: 1, IMBALANCE: 1}
    assert (waiting.waits_for, [*waiting.causes]) == (Action(Kind.FORWARD, 0, 0), [FILL])


def test_a_deadlock_is_named() -> None:
    lists = gpipe(2, 1)
    lists[1].reverse()
    with pytest.raises(ValueError, match=r"wait for ever: B0 on stage 0, B0 on stage 1$"):
        Simulator(lists)


def test_a_hundred_stages_and_micro_batches() -> None:
    found = run("1f1b", 100, 120, 0)
    assert found.bubble == pipeline_bubble(100, 120)


def test_equal_actions_last_as_long_though_few_backwards_are_whole() -> None:
    """Those of stage 0, which are short here: what is left of their mean is less than a W."""
    times = with_times([1.0, 1.0], [1.0, 0.1], [1.0, 10.0])
    work = Work(times, recompute=(3.0, 1.0).__getitem__)
    found = Simulator(find("1f1b")(2, 4)).run(work)
    even = found.equal()
    assert min(t.end - t.start for row in even.rows for t in row) > 0
    assert sum(even.busy) == pytest.approx(sum(found.busy))
