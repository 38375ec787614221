"""The page's simulator, project/page/simulate.js, beside planning/simulate.py."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.schedules.catalogue import SCHEDULES, find
from pipeline.schedules.schedule import Action, Kind, Schedule, ended_with, gpipe
from planning.simulate import Simulator, Work
from tests.which import program

SCRIPT = Path(__file__).resolve().parents[2] / "project" / "page" / "simulate.js"
# Reads cases from standard input, writes what simulate.js makes of each.
HARNESS = """
const { simulate } = require(process.argv[1]);
const cases = JSON.parse(require("fs").readFileSync(0, "utf-8"));
const found = cases.map(({ schedule, work }) => {
  const step = simulate(schedule, {
    ...work,
    seconds: (kind, stage) => work.seconds[kind][stage],
    recompute: (stage) => work.recompute[stage],
  });
  const rows = step.rows.map((row) => row.map(({ start, end }) => [start, end]));
  return [rows, step.updated, step.seconds, step.bubble];
});
process.stdout.write(JSON.stringify(found));
"""


def shuffled(draw: random.Random) -> Schedule:
    """Some legal order of actions that has no name, with stages dealt to ranks at random: the
    order in which a machine with random speeds would do them."""
    n, m, ranks = draw.randint(2, 5), draw.randint(1, 6), draw.randint(1, 3)
    seconds = {a: draw.random() for row in gpipe(n, m) for a in row}
    rank_of = [*range(ranks), *(draw.randrange(ranks) for _ in range(n - ranks))]
    draw.shuffle(rank_of)
    rank_of = [sorted(set(rank_of[:n])).index(r) for r in rank_of[:n]]
    rows: Schedule = [[] for _ in range(max(rank_of) + 1)]
    timed = [t for row in Simulator(gpipe(n, m)).run(Work(seconds.__getitem__)).rows for t in row]
    for action, *_ in sorted(timed, key=lambda t: (t.start, t.end)):
        split = action.kind is Kind.BACKWARD and draw.random() < 0.5
        halves = ended_with(action)[1:] if split else [action]
        rows[rank_of[action.stage]] += halves
    return rows


def schedule_of(draw: random.Random) -> Schedule:
    """A named schedule of random size, or one without a name."""
    if draw.random() < 0.4:
        return shuffled(draw)
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


def in_python(schedule: Schedule, work: dict[str, Any]) -> tuple[list[Any], list[float]]:
    """What the harness returns, by the simulator in Python: starts and ends; and the rest. There,
    a rank exchanges each of its stages."""
    simulator = Simulator(schedule)
    share = [work["exchange"] / simulator.ranks.count(rank) for rank in simulator.ranks]
    found = simulator.run(
        Work(
            lambda action: work["seconds"][action.kind.value][action.stage],
            lambda _: work["transfer"],
            recompute=work["recompute"].__getitem__,
            exchange=share.__getitem__,
            overlap_exchange=False,
            update=lambda _: work["update"],
        )
    )
    rows = [[[t.start, t.end] for t in row] for row in found.rows]
    return rows, [*found.updated, found.seconds, found.bubble]


def test_javascript_simulates_like_python() -> None:
    """200 random schedules; starts and ends are sums in the same order, and so the same bits."""
    node = program("node", tests="project/page/simulate.js")
    draw, cases = random.Random(0), []
    for _ in range(200):
        schedule = schedule_of(draw)
        stages = 1 + max(action.stage for row in schedule for action in row)
        cases.append((schedule, work_of(draw, stages)))
    text = json.dumps([{"schedule": schedule, "work": work} for schedule, work in cases])
    done = subprocess.run(
        [node, "-e", HARNESS, str(SCRIPT)], input=text, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 200
    for (schedule, work), (rows, updated, *rest) in zip(cases, found, strict=True):
        expected, numbers = in_python(schedule, work)
        assert rows == expected
        assert [*updated, *rest] == pytest.approx(numbers, abs=1e-12)


def test_javascript_sees_a_deadlock() -> None:
    """As Python does: B before F on one rank."""
    node = program("node", tests="project/page/simulate.js")
    row = [Action(Kind.BACKWARD, 0, 0), Action(Kind.FORWARD, 0, 0)]
    with pytest.raises(ValueError, match="deadlock"):
        Simulator([row])
    script = f"require({str(SCRIPT)!r}).simulate({json.dumps([row])}, {{}})"
    done = subprocess.run([node, "-e", script], capture_output=True, text=True, timeout=60)
    assert done.returncode and "Error: deadlock" in done.stderr
