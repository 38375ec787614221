"""Schedules are plain lists: drawn, timed, broken, and held against what their papers promise."""

from __future__ import annotations

import textwrap
from contextlib import suppress
from fractions import Fraction
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from pipeline.pipe import _clock_cycles
from pipeline.schedules import catalogue, chunks, printed
from pipeline.schedules import schedule as sched
from pipeline.schedules.schedule import BACKWARD, BACKWARD_WEIGHT, FORWARD, Action
from planning.simulate import Simulator, Work
from tests.mathematics import formulas as cost
from tests.pipeline.schedules.drawn import ONE_EACH

GRID = [(n, m) for n in range(1, 6) for m in (*range(1, 9), 13, 24)]
ONE_CLOCK = {"F": 1, "I": 1, "W": 1, "B": 2}
OF_A_BLOCK = {"F": 20, "I": 26, "W": 17, "B": 43}  # of GPT-2, as measured on a CPU


def clocks(schedule: sched.Schedule, each: dict[str, int] = ONE_CLOCK) -> float:
    """How long a step takes if its actions take so long."""
    return Simulator(schedule).run(Work(lambda action: each[action.kind.value])).span


def idle_share(schedule: sched.Schedule) -> Fraction:
    """Of all ranks' clocks."""
    slots = [action for row in sched.clock_table(schedule) for action in row]  # ranks x clocks
    return Fraction(slots.count(None), len(slots))


@pytest.mark.a4_2_1
@pytest.mark.a5_2_1
@pytest.mark.parametrize(
    ("m", "n", "expected"),
    [
        (3, 3, [[(0, 0)], [(0, 1), (1, 0)], [(0, 2), (1, 1), (2, 0)], [(1, 2), (2, 1)], [(2, 2)]]),
        (6, 2, [[(0, 0)], *([(i, 1), (i + 1, 0)] for i in range(5)), [(5, 1)]]),
        (1, 3, [[(0, 0)], [(0, 1)], [(0, 2)]]),
        (0, 2, []),
    ],
)
def test_clock_cycles(m: int, n: int, expected: list[list[tuple[int, int]]]) -> None:
    assert [sorted(clock) for clock in _clock_cycles(m, n)] == expected


@pytest.mark.parametrize(("m", "n"), [(-1, 1), (3, 0), (0, -1)])
def test_clock_cycles_need_a_partition(m: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"^{m} micro-batches, {n} partitions: at least 0 and 1"):
        _clock_cycles(m, n)


@pytest.mark.parametrize(
    ("module", "title", "schedule"),
    [
        (sched, "GPipe, 3 stages", sched.gpipe(3, 4)),
        (sched, "1F1B, 3 stages", sched.one_f_one_b(3, 4)),
        (sched, "Zero bubble, 3 stages", sched.zero_bubble(3, 4)),
        (chunks, "Interleaved, 2 ranks", chunks.interleaved_1f1b(2, 4)),
        (chunks, "ZB-V, 2 ranks", chunks.zb_v(2, 3)),
        (chunks, "DualPipeV, 2 ranks", chunks.dual_pipe_v(2, 4)),
    ],
)
def test_the_table_in_the_docstring_is_the_schedule(
    module: Any, title: str, schedule: sched.Schedule
) -> None:
    table = textwrap.indent(printed.as_text(schedule), "    ")
    assert f"{table}\n" in module.__doc__[module.__doc__.index(f"    {title}") :]


@pytest.mark.parametrize("name", catalogue.SCHEDULES)
def test_every_schedule_can_run_and_adds_gradients_up_in_order(name: str) -> None:
    for n, m in GRID:
        schedule = catalogue.find(name)(n, m)
        sched.validate(schedule, m)
        assert sched.stage_ranks(schedule) == catalogue.ranks_of_stages(name, n)
        for actions in schedule:
            # stable: leaves the micro-batches of a kind and stage in their order
            by_stage = sorted(actions, key=lambda action: (action.kind, action.stage))
            assert by_stage == sorted(actions)


@pytest.mark.parametrize(("n", "m"), GRID)
def test_one_stage_per_rank_holds_and_idles_as_promised(n: int, m: int) -> None:
    """With m < n one micro-batch's way through all stages, not the bubble, is what takes time."""
    for name in ONE_EACH:
        held = [cost.held_microbatches(name, n, m, s) for s in range(n)]
        assert printed.peak_alive(catalogue.find(name)(n, m)) == held
    weighted = printed.peak_alive(sched.gpipe(n, m), lambda s: s + 1)
    assert weighted == [m * (s + 1) for s in range(n)]
    bubble = cost.pipeline_bubble(n, m)
    assert idle_share(sched.gpipe(n, m)) == idle_share(sched.one_f_one_b(n, m)) == bubble
    assert idle_share(sched.sequential(n, m)) == Fraction(n - 1, n)
    assert clocks(sched.one_f_one_b(n, m)) == clocks(sched.gpipe(n, m)) == 3 * (m + n - 1)
    for name in ("gpipe", "1f1b", "sequential"):
        assert {action.kind.value for row in catalogue.find(name)(n, m) for action in row} == {
            *"FB"
        }
    zero_bubble = sched.zero_bubble(n, m)
    assert clocks(zero_bubble) == max(3 * m + n - 1, 2 * m + 2 * n - 1)
    assert len(sched.clock_table(zero_bubble)) == clocks(zero_bubble)
    if m >= n:
        assert idle_share(zero_bubble) == cost.pipeline_bubble(n, m, 3)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize(("n", "m"), GRID)
def test_interleaving_divides_the_bubble_by_the_chunks(n: int, m: int, v: int) -> None:
    """Also where n does not divide m."""
    schedule = chunks.interleaved_1f1b(n, m, v)
    sched.validate(schedule, m)
    assert clocks(schedule) == (3 * (v * m + n - 1) if m >= n else 3 * (n * v + m - 1))
    if m >= n:
        assert idle_share(schedule) == cost.pipeline_bubble(n, m, v)
    if v == 1:
        assert schedule == sched.one_f_one_b(n, m)
    elif m % n == 0:
        held = [min(m * v, (v - 1) * n + 2 * (n - r - 1) + 1) for r in range(n)]
        assert printed.peak_alive(schedule) == held
        assert m == n or max(held) == cost.held_chunks("interleaved", n, v)


@pytest.mark.parametrize(("n", "m"), GRID)
def test_a_v_holds_and_idles_as_promised_on_every_rank(n: int, m: int) -> None:
    """It holds, in chunks, all of the 2n of 1F1B's first rank, a half, or a third.

    In clocks of a chunk's F, I or W, of which a rank has 6m of work, 1F1B idles 6 (n-1). The last
    rank waits n-1 for its first input: less is impossible. Nor does a V wait in every period where
    I takes longer than F and W: ZB-V in all for n-1 I, V-Half no longer than 1F1B."""
    lists = {name: catalogue.find(name)(n, m) for name in ("zbv", "vhalf", "vmin")}
    for name, schedule in lists.items():
        peaks, promise = printed.peak_alive(schedule), cost.held_chunks(name, n)
        assert max(peaks) <= promise
        if m >= 2 * n:
            assert max(peaks) == promise
            assert min(peaks) >= promise - 2  # balanced
    if m >= 2 * n:
        idle = {name: clocks(found) - 6 * m for name, found in lists.items()}
        of_1f1b = 6 * (n - 1)
        assert n - 1 <= idle["zbv"] <= n
        assert idle["zbv"] <= idle["vhalf"] <= of_1f1b / 2
        assert idle["vhalf"] <= idle["vmin"] <= of_1f1b * 2 / 3
        assert clocks(lists["zbv"], OF_A_BLOCK) - 2 * 63 * m <= 26 * (n - 1)
        assert clocks(lists["vhalf"], OF_A_BLOCK) - 2 * 63 * m <= 2 * 63 * (n - 1)
        assert n > 1 or idle_share(lists["zbv"]) == 0


def most_held(pattern: chunks.Pattern) -> int:
    """The most chunks of micro-batches that a rank holds while the pattern repeats."""
    at = {(action.kind, action.stage): clock for clock, action in pattern}
    lives = [(at[FORWARD, s], at[BACKWARD_WEIGHT, s]) for s in {a.stage for _, a in pattern}]
    return max(  # at clock t: those born, less those that have ended
        sum((t - born) // 6 - (t - dies) // 6 for born, dies in lives) for t in range(6)
    )


@pytest.mark.parametrize("name", ["zb_v", "v_half", "v_min"])
def test_no_pattern_of_a_v_that_waits_less_holds_as_little(name: str) -> None:
    """All ways to wait are tried. Two actions on one clock would cost one in every period."""
    for n in range(1, 8):
        with patch.object(chunks, "_v_shaped") as called:
            getattr(chunks, name)(n, 1)
        _, _, steps, own, most = called.call_args.args
        ways = []
        for waits in product(range(6), repeat=3):
            with suppress(ValueError):  # two actions on one clock leave too many for the two W
                patterns = [*chunks._patterns(n, steps, waits)]
                ways.append((max(map(most_held, patterns)), sum(waits), waits))
        assert (most, sum(own), own) in ways
        assert (most, sum(own)) == min(ways)[:2]


@pytest.mark.parametrize("n", range(1, 9))
def test_dual_pipe_v_is_the_order_of_torch(n: int) -> None:
    """Torch's lists for at least 2n micro-batches; of fewer the same without the others."""
    oracle = ScheduleDualPipeV.__new__(ScheduleDualPipeV)
    oracle.pp_group_size = n
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    for m in (2 * n, 2 * n + 1, 3 * n + 2):
        oracle._n_microbatches = m
        expected = []
        for r in range(n):
            operations: list[Any] = oracle._calculate_single_rank_operations(r)
            parts = [a.sub_actions or [a] for a in operations]
            expected.append([
                (kinds[a.computation_type.name], a.stage_index, a.microbatch_index)
                for part in parts for a in part
            ])  # fmt: skip
        schedule = chunks.dual_pipe_v(n, m)
        assert [[(a.kind.value, *a[1:]) for a in actions] for actions in schedule] == expected
        assert printed.peak_alive(schedule) == [min(2 * n + 1, 2 * m)] * n
        few = [[a for a in actions if a.microbatch < n] for actions in chunks.dual_pipe_v(n, 2 * n)]
        assert chunks.dual_pipe_v(n, n) == few
        assert clocks(schedule) == clocks(chunks.zb_v(n, m))  # so the order alone gains nothing
    assert clocks(schedule, OF_A_BLOCK) >= clocks(chunks.zb_v(n, m), OF_A_BLOCK)


F0, F1, B0, B1 = (Action(kind, 1, i) for kind in (FORWARD, BACKWARD) for i in (0, 1))
FIRST, LAST = sched.gpipe(2, 2)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ([FIRST, LAST[:-1]], "stage 1: B1 is there 0 times, not 1"),
        ([FIRST, [*LAST, B1]], "stage 1: B1 is there 2 times, not 1"),
        ([[*FIRST, B1], LAST], r"stage 1 is on ranks 0 and 1; each stage, counted from 0"),
        ([FIRST, sched.zero_bubble(2, 2)[1][:-1]], "stage 1: W1 is there 0 times, not 1"),
        ([FIRST, [*reversed(sched.zero_bubble(2, 2)[1])]], "deadlock: .* B0 on stage 0, W1 on"),
        (
            [sched.one_f_one_b(2, 2)[0], [F1, B0, F0, B1]],
            "deadlock: the next actions wait for ever: B0 on stage 0, B0 on stage 1",
        ),
    ],
)
def test_what_cannot_run_is_named(broken: sched.Schedule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sched.validate(broken, 2)


def test_lists_that_cannot_be_closed_up_are_refused() -> None:
    """A limit below what they hold would wait for ever."""
    with pytest.raises(ValueError, match="no rank can go on within 0 chunks"):
        chunks._close_up(chunks.zb_v(2, 3), 4, 0)
