"""The pages' simulator, project/page/simulate.js, beside planning/simulate.py and validate()."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.schedules.catalogue import SCHEDULES, find
from pipeline.schedules.printed import peak_alive
from pipeline.schedules.schedule import Kind, Schedule, validate
from planning.simulate import Simulator, Work
from tests.pipeline.schedules.drawn import drawn
from tests.which import in_node

SCRIPT = Path(__file__).resolve().parents[2] / "project" / "page" / "simulate.js"
# Reads cases from standard input, writes what simulate.js makes of each.
HARNESS = """
const { simulate, gapsOf, heldAfter, validate } = require(process.argv[1]);
const cases = JSON.parse(require("fs").readFileSync(0, "utf-8"));
const found = cases.map(({ schedule, work, microbatches }) => {
  if (!work) return validate(schedule, microbatches);
  const timed = {
    ...work,
    seconds: (kind, stage) => work.seconds[kind][stage],
    recompute: (stage) => work.recompute[stage],
  };
  const step = simulate(schedule, timed);
  const rows = step.rows.map((row) => row.map(({ start, end }) => [start, end]));
  const gaps = gapsOf(schedule, { ...timed, exchange: 0, update: 0 }).map(
    (gap) => [[gap.rank, gap.before, gap.waitsFor], [gap.start, gap.end], gap.causes]);
  const held = schedule.map((row) => Math.max(...heldAfter(row)));
  return [rows, gaps, held, step.updated, step.seconds, step.bubble];
});
process.stdout.write(JSON.stringify(found));
"""


def schedule_of(draw: random.Random) -> Schedule:
    """A named schedule of random size, or one without a name, with stages dealt to ranks at
    random."""
    if draw.random() < 0.4:
        dealt = [draw.randrange(3) for _ in range(draw.randint(2, 5))]
        ranks = [sorted({*dealt}).index(rank) for rank in dealt]  # each has a stage
        return drawn(ranks, draw.randint(1, 6), seed=draw.randrange(1000))
    name, n = draw.choice([*SCHEDULES]), draw.randint(1, 6)
    m = n * draw.randint(1, 3) if name == "interleaved" else draw.randint(1, 14)
    return find(name)(n, m)


def work_of(draw: random.Random, stages: int) -> dict[str, Any]:
    """Random seconds of everything, as JSON; some are 0, so that ties occur, too."""

    def each(number: int) -> list[float]:
        return [draw.choice((0.0, 1.0, 3 * draw.random())) for _ in range(number)]

    transfer, exchange, update = each(3)
    return {
        "seconds": {kind.value: [x + 0.5 for x in each(stages)] for kind in Kind},
        "recompute": each(stages), "transfer": transfer, "exchange": exchange, "update": update,
    }  # fmt: skip


def in_python(schedule: Schedule, work: dict[str, Any]) -> tuple[list[Any], list[Any], list[float]]:
    """What the harness returns, by the simulator in Python: starts and ends; gaps of a step that
    ends with its last action; and the rest. There, a rank exchanges each of its stages."""
    simulator = Simulator(schedule)
    share = [work["exchange"] / simulator.ranks.count(rank) for rank in simulator.ranks]
    timed = Work(
        lambda action: work["seconds"][action.kind.value][action.stage],
        lambda _: work["transfer"],
        recompute=work["recompute"].__getitem__,
    )
    gaps: list[Any] = []
    for gap in simulator.run(timed).gaps:
        actions = [a and [a.kind.value, *a[1:]] for a in (gap.before, gap.waits_for)]
        gaps.append([[gap.rank, *actions], [gap.start, gap.end], gap.causes])
    found = simulator.run(
        replace(
            timed, exchange=share.__getitem__, overlap_exchange=False,
            update=lambda _: work["update"],
        )
    )  # fmt: skip
    rows = [[[t.start, t.end] for t in row] for row in found.rows]
    return rows, gaps, [*peak_alive(schedule), *found.updated, found.seconds, found.bubble]


def test_javascript_simulates_like_python() -> None:
    """200 random schedules; starts and ends are sums in the same order, and so the same bits. Every
    gap has the same cause."""
    draw, cases = random.Random(0), list[dict[str, Any]]()
    for _ in range(200):
        schedule = schedule_of(draw)
        stages = 1 + max(action.stage for row in schedule for action in row)
        cases.append({"schedule": schedule, "work": work_of(draw, stages)})
    causes = set[str]()
    for case, (rows, gaps, held, updated, *rest) in zip(
        cases, in_node(HARNESS, SCRIPT, cases), strict=True
    ):
        expected, expected_gaps, numbers = in_python(**case)
        assert rows == expected
        assert [*held, *updated, *rest] == pytest.approx(numbers, abs=1e-12)
        assert [about for about, *_ in gaps] == [about for about, *_ in expected_gaps]
        for (_, times, parts), (_, own_times, own_parts) in zip(gaps, expected_gaps, strict=True):
            assert times == pytest.approx(own_times, abs=1e-12)
            # What is nothing but rounding may be left out.
            for cause in parts.keys() | own_parts.keys():
                assert parts.get(cause, 0) == pytest.approx(own_parts.get(cause, 0), abs=1e-9)
            causes |= parts.keys()
    assert causes == {"fill", "imbalance", "transfer"}


def broken(draw: random.Random, schedule: Schedule) -> Schedule:
    """The lists after a change that a reader of the page could make; some can still run."""
    lists = [list(row) for row in schedule]
    row, other = draw.choice([row for row in lists if row]), draw.choice(lists)
    action = row.pop(draw.randrange(len(row)))
    change = draw.choice(("move", "move", "remove", "twice", "to a rank"))
    if change != "remove":
        row.insert(draw.randint(0, len(row)), action)
    if change in ("twice", "to a rank"):
        other.insert(draw.randint(0, len(other)), action)
    return lists


def test_javascript_says_what_breaks_a_schedule_in_the_words_of_python() -> None:
    draw, cases, expected = random.Random(2), list[dict[str, Any]](), list[str]()
    for _ in range(150):
        schedule = schedule_of(draw)
        for _ in range(draw.randint(1, 3)):
            schedule = broken(draw, schedule)
        microbatches = 1 + max(action.microbatch for row in schedule for action in row)
        cases.append({"schedule": schedule, "microbatches": microbatches})
        try:
            validate(schedule, microbatches)
            expected.append("")
        except ValueError as error:
            expected.append(str(error))
    assert in_node(HARNESS, SCRIPT, cases) == expected
    begin = {sentence.partition(" ")[0] for sentence in expected}
    assert begin == {"", "deadlock:", "stage"}  # all that may be wrong has been seen
