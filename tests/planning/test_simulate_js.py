"""The page's simulator, project/page/simulate.js, beside planning/simulate.py."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest

from pipeline.schedules.catalogue import SCHEDULES, find
from pipeline.schedules.schedule import Action, Kind, Schedule, ended_with, gpipe
from planning.simulate import Simulator, Work

SCRIPT = Path(__file__).resolve().parents[2] / "project" / "page" / "simulate.js"
# Reads cases from standard input, writes what simulate.js makes of each.
HARNESS = """
const { simulate } = require(process.argv[1]);
const cases = JSON.parse(require("fs").readFileSync(0, "utf-8"));
const found = cases.map(({ schedule, work }) => {
  const step = simulate(schedule, {
    ...work,
    seconds: (kind, stage) => work.seconds[kind][stage],
    transfer: (kind, stage) => work.transfer[kind][stage],
    recompute: (stage) => work.recompute[stage],
    exchange: (stage) => work.exchange[stage],
    update: (rank) => work.update[rank],
  });
  const rows = step.rows.map((row) => row.map(({ start, end, idle }) => [start, end, idle]));
  return [rows, step.exchanged, step.updated, step.seconds, step.span, step.bubble];
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
    """A named schedule of random size, with or without early gradients, or one without a name."""
    if draw.random() < 0.4:
        return shuffled(draw)
    name, n = draw.choice([*SCHEDULES]), draw.randint(1, 6)
    m = n * draw.randint(1, 3) if name == "interleaved" else draw.randint(1, 14)
    return (find(name) if draw.random() < 0.5 else SCHEDULES[name])(n, m)


def work_of(draw: random.Random, ranks: int, stages: int) -> dict[str, Any]:
    """Random seconds of everything, as JSON; some are 0, so that ties occur, too."""

    def each(number: int) -> list[float]:
        return [draw.choice((0.0, 1.0, 3 * draw.random())) for _ in range(number)]

    return {
        "seconds": {kind.value: [x + 0.5 for x in each(stages)] for kind in Kind},
        "transfer": {kind.value: each(stages) for kind in Kind},
        "recompute": each(stages), "exchange": each(stages), "update": each(ranks),
        "overlap": draw.random() < 0.5, "overlapExchange": draw.random() < 0.5,
    }  # fmt: skip


def in_python(schedule: Schedule, work: dict[str, Any]) -> list[Any]:
    """What the harness returns, by the simulator in Python."""

    def by_action(name: str) -> Any:
        return lambda action: work[name][action.kind.value][action.stage]

    found = Simulator(schedule).run(
        Work(
            by_action("seconds"),
            by_action("transfer"),
            work["overlap"],
            work["recompute"].__getitem__,
            work["exchange"].__getitem__,
            work["overlapExchange"],
            work["update"].__getitem__,
        )
    )
    rows = [[[t.start, t.end, t.idle] for t in row] for row in found.rows]
    return [rows, found.exchanged, found.updated, found.seconds, found.span, found.bubble]


def test_javascript_simulates_like_python() -> None:
    """200 random schedules; sums are in the same order, but for the bubble's."""
    node = shutil.which("node")
    if node is None:
        warnings.warn("there is no node: project/page/simulate.js was not tested", stacklevel=1)
        pytest.skip("there is no node: apt-get install nodejs")
    draw, cases = random.Random(0), []
    for _ in range(200):
        schedule = schedule_of(draw)
        stages = 1 + max(action.stage for row in schedule for action in row)
        cases.append((schedule, work_of(draw, len(schedule), stages)))
    text = json.dumps([{"schedule": schedule, "work": work} for schedule, work in cases])
    done = subprocess.run(
        [node, "-e", HARNESS, str(SCRIPT)], input=text, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 200
    for (schedule, work), (*exact, bubble) in zip(cases, found, strict=True):
        *expected, expected_bubble = in_python(schedule, work)
        assert exact == expected
        assert bubble == pytest.approx(expected_bubble, abs=1e-12)


def test_javascript_sees_a_deadlock() -> None:
    """As Python does: B before F on one rank."""
    if (node := shutil.which("node")) is None:
        pytest.skip("there is no node")
    row = [Action(Kind.BACKWARD, 0, 0), Action(Kind.FORWARD, 0, 0)]
    with pytest.raises(ValueError, match="deadlock"):
        Simulator([row])
    script = f"require({str(SCRIPT)!r}).simulate({json.dumps([row])}, {{}})"
    done = subprocess.run([node, "-e", script], capture_output=True, text=True, timeout=60)
    assert done.returncode and "Error: deadlock" in done.stderr
