"""Several stages per rank: as lists, drawn, and held against what their papers promise."""

from __future__ import annotations

import textwrap
from fractions import Fraction

import pytest

from pipeline import catalogue, chunks
from pipeline import schedule as sched
from pipeline.schedule import FORWARD, Action, Kind
from planning.simulate import simulate

GRID = [(n, m) for n in range(1, 7) for m in (*range(1, 9), 13, 24)]
V_SHAPED = ["zbv", "vhalf", "vmin"]


ALIKE = {"F": 1, "I": 1, "W": 1, "B": 2}
OF_A_BLOCK = {"F": 20, "I": 26, "W": 17, "B": 43}  # of GPT-2, as measured on a CPU


def clocks(schedule: sched.Schedule, each: dict[str, int] = ALIKE) -> float:
    """How long a step takes if its actions take so long; by default F, I and W one clock each."""
    rows = simulate(schedule, lambda a: each[a.kind.value])
    return max(timed.end for row in rows for timed in row)


def check(schedule: sched.Schedule, ranks: list[int], m: int) -> None:
    """It can run, its stages are on these ranks, and each adds gradients up in order."""
    sched.validate(schedule, m)
    assert sched.ranks_of(schedule) == ranks
    for actions in schedule:
        for kind in Kind:
            for s in range(len(ranks)):
                order = [a.microbatch for a in actions if (a.kind, a.stage) == (kind, s)]
                assert order == sorted(order)


@pytest.mark.parametrize(
    ("name", "build", "m"),
    [("Interleaved", chunks.interleaved_1f1b, 4), ("ZB-V", chunks.zb_v, 3)],
)
def test_the_table_in_the_docstring_is_the_schedule(name: str, build: object, m: int) -> None:
    assert callable(build)
    table = textwrap.indent(sched.draw(build(2, m)), "    ")
    doc = chunks.__doc__ or ""
    assert f"{table}\n" in doc[doc.index(f"    {name}, 2 ranks") :]


def test_megatrons_order_of_chunks() -> None:
    """Of Narayanan et al. (2021), figure 4, the first of four ranks: ten forwards of two chunks."""
    first = chunks.interleaved_1f1b(4, 8, 2)[0]
    names = [sched.name_of(action, chunks.looped(4, 2)) for action in first]
    assert names[:16] == (
        [
            "F0a",
            "F1a",
            "F2a",
            "F3a",
            "F0b",
            "F1b",
            "F2b",
            "F3b",
            "F4a",
            "F5a",
            "F6a",
            "B0b",
            "F7a",
            "B1b",
            "F4b",
            "B2b",
        ]
    )
    assert names[-6:] == ["B6b", "B7b", "B4a", "B5a", "B6a", "B7a"]


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize(("n", "m"), GRID)
def test_interleaving_divides_the_bubble_by_the_chunks(n: int, m: int, v: int) -> None:
    """Also where n does not divide m. With m < n one micro-batch's way through all stages is what
    takes time."""
    schedule = chunks.interleaved_1f1b(n, m, v)
    check(schedule, [*range(n)] * v, m)
    ideal = 3 * (v * m + n - 1) if m >= n else 3 * (n * v + m - 1)
    assert clocks(schedule) == ideal
    if m >= n:
        assert sched.bubble(schedule) == Fraction(n - 1, v * m + n - 1)
    if v == 1:
        assert schedule == sched.one_f_one_b(n, m)
    if m % n == 0 and v > 1:
        held = [min(m * v, (v - 1) * n + 2 * (n - r - 1) + 1) for r in range(n)]
        assert sched.peak_alive(schedule) == held


@pytest.mark.parametrize("name", V_SHAPED)
@pytest.mark.parametrize(("n", "m"), GRID)
def test_a_v_holds_what_it_promises_on_every_rank(name: str, n: int, m: int) -> None:
    """In chunks, of which 1F1B's first rank holds 2n: all of that, a half, or a third; rounded up
    to whole ranks, the micro-batch that is being computed included."""
    schedule = catalogue.find(name)(n, m)
    check(schedule, [*range(n), *reversed(range(n))], m)
    promise = {"zbv": 2 * n, "vhalf": 2 * -(-(n + 1) // 2), "vmin": 2 * -(-(n + 2) // 3)}[name]
    peaks = sched.peak_alive(schedule)
    assert max(peaks) <= promise
    if m >= 2 * n:
        assert max(peaks) == promise
        assert min(peaks) >= promise - 2  # balanced


@pytest.mark.parametrize(("n", "m"), [(n, m) for n, m in GRID if m >= 2 * n])
def test_a_v_idles_less_than_1f1b(n: int, m: int) -> None:
    """In clocks of a chunk's F, I or W, of which a rank has 6m of work, 1F1B idles 6 (n-1). The
    last rank waits n-1 for its first input: less is impossible.

    Nor does a V wait in every period where I takes longer than F and W: ZB-V in all for n-1 I,
    V-Half no longer than 1F1B."""
    lists = {name: catalogue.find(name)(n, m) for name in V_SHAPED}
    idle = {name: clocks(found) - 6 * m for name, found in lists.items()}
    of_1f1b = 6 * (n - 1)
    assert n - 1 <= idle["zbv"] <= n
    assert idle["zbv"] <= idle["vhalf"] <= of_1f1b / 2
    assert idle["vhalf"] <= idle["vmin"] <= of_1f1b * 2 / 3
    assert clocks(lists["zbv"], OF_A_BLOCK) - 2 * 63 * m <= 26 * (n - 1)
    assert clocks(lists["vhalf"], OF_A_BLOCK) - 2 * 63 * m <= 2 * 63 * (n - 1)


def test_clock_by_clock() -> None:
    assert sched.draw(chunks.v_min(3, 2)).splitlines() == [
        "rank 0: F0a F1a .   .   .   F0b I0b W0b F1b I1b W1b I0a W0a .   .   I1a W1a",
        "rank 1: .   F0a F1a .   F0b .   F1b I0b W0b .   I0a I1b W0a W1b I1a W1a .",
        "rank 2: .   .   F0a F0b F1a F1b .   .   I0b I0a W0b W0a I1b I1a W1b W1a .",
    ]


def test_a_stage_on_two_ranks_is_refused_and_so_is_one_that_is_left_out() -> None:
    both = [[Action(FORWARD, 0, 0)], [Action(FORWARD, 0, 1)]]
    with pytest.raises(ValueError, match=r"rank 1: .*: rank 0 has that stage"):
        sched.validate(both, 1)
    with pytest.raises(ValueError, match=r"have the stages \[0, 2\]: they are counted from 0"):
        sched.validate([[Action(FORWARD, 0, 0)], [Action(FORWARD, 2, 0)]], 1)


def test_a_wrong_number_of_chunks_says_which_is_right() -> None:
    with pytest.raises(ValueError, match="1f1b, chunks 2: a rank has 1 stage there; schedule inte"):
        catalogue.find("1f1b", 2)
    with pytest.raises(ValueError, match="zbv, chunks 3: a rank has 2 stages there"):
        catalogue.find("zbv", 3)
    assert catalogue.chunks_of("interleaved") == 2
    assert catalogue.places("interleaved", 2, 3) == [0, 1, 0, 1, 0, 1]
    with pytest.raises(ValueError, match=r"on the ranks \[0, 1, 0, 1\], and the pipeline its 4 on"):
        catalogue.plan(chunks.interleaved_1f1b, [0, 1, 1, 0], 2)
