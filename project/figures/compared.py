"""A recorded step beside its prediction: the schedule that the run followed, simulated.

The prediction takes the seconds of every action from the planner, or else from the run itself: the
median of each kind and stage. So a difference is either the planner's error, or what one step, or
one replica, had more than others. The gaps between a worker's actions are explained by the gaps
of the prediction. What those do not have is, at the end of a step, the wait for ranks that took
longer than predicted, and else `other`: the machine, other programs, uneven batches.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import NamedTuple

from pipeline.schedules.catalogue import find
from pipeline.schedules.schedule import Action, Kind, dependencies, ended_with
from planning.simulate import CAUSES, EXCHANGE, Simulation, Simulator, Work
from training.launch.errors import UserError
from training.timeline import Event

from .recorded import Run
from .steps import ACTIONS, actions_of, bubbles, duration, in_step, spent, steps_of

REPLICAS, OTHER = "slower ranks", "other"
Row = dict[Action, tuple[float, float]]  # of a worker: its actions in order, with start and end


class Seconds(NamedTuple):
    """What a run's step takes, measured: the medians of its recorded steps, in seconds."""

    actions: dict[Kind, list[float]]  # per stage, of a micro-batch
    recompute: list[float]  # per stage, of a micro-batch, outside its backward
    transfer: float  # of a message between two stages
    exchange: float  # from the last action of any worker to the first update
    update: float
    chunks: int  # stages of a rank

    def work(self) -> Work:
        """For the simulator."""
        return Work(
            lambda action: self.actions[action.kind][action.stage],
            lambda _: self.transfer,
            recompute=self.recompute.__getitem__,
            exchange=lambda _: self.exchange / self.chunks,
            overlap_exchange=False,
            update=lambda _: self.update,
        )


class Wait(NamedTuple):
    """A measured gap: idle seconds of a worker by their causes; `before` None: after its last."""

    worker: str
    start: float
    end: float
    before: Action | None
    waits_for: Action | None
    causes: dict[str, float]

    @property
    def length(self) -> float:
        """Seconds."""
        return sum(self.causes.values())

    @property
    def explained(self) -> str:
        """In words, in milliseconds."""
        when = f"before {self.before} of stage {self.before.stage}" if self.before else "at the end"
        if self.waits_for:
            when += f", which needs {self.waits_for} of stage {self.waits_for.stage}"
        parts = (f"{1e3 * part:.1f} ms {cause}" for cause, part in self.causes.items())
        return f"{when}: {' + '.join(parts)}"


def micro_batches(workers: Mapping[str, Sequence[Event]]) -> int:
    """How many a worker has in a step."""
    return len({e.microbatch for row in workers.values() for e in row if e.kind == "F"})


@dataclass(frozen=True)
class Pipeline:
    """How the workers of a run shared its schedule. `place`: per worker its rank in the pipeline;
    several workers, replicas or parts of a matrix, may have the same."""

    place: list[int]
    cut: list[int]  # layers of each stage, if known
    simulator: Simulator

    @classmethod
    def of(cls, run: Run, workers: Mapping[str, Sequence[Event]]) -> Pipeline:
        """Of a step. Without stages, a rank's micro-batches are a pipeline of one."""
        used = run.summary
        threads = used.get("world_size", 1) == 1 and len(workers) > 1
        n = len(workers) if threads else used.get("pp") or 1
        place = [r // (used.get("tp") or 1) % n for r in range(len(workers))]
        sizes = (used.get("layout") or "").split(" on ")[0]  # layers per stage: 5 | 3 on cpu:0
        cut = [int(size) for size in re.findall(r"\d+", sizes)] if n > 1 else []
        chunks = (len(cut) or n) // n
        name = (used.get("schedule") or "1f1b") if n > 1 else "1f1b"
        return cls(place, cut, Simulator(find(name, chunks)(n, micro_batches(workers))))

    def rows(self, events: Mapping[str, Sequence[Event]]) -> list[Row]:
        """The actions of a step. Without stages, a layer's events are parts of one action."""
        found = []
        for row in events.values():
            parts: defaultdict[Action, list[Event]] = defaultdict(list)
            for event in row:
                if event.kind in ACTIONS and event.kind != "R":
                    stage = event.stage if len(self.simulator.ranks) > 1 else 0
                    parts[Action(Kind(event.kind), stage, max(0, event.microbatch))].append(event)
            spans = {a: (min(e.start for e in p), max(e.end for e in p)) for a, p in parts.items()}
            found.append(dict(sorted(spans.items(), key=lambda item: item[1])))
        return found


def seconds_of(pipeline: Pipeline, steps: Iterable[Mapping[str, Sequence[Event]]]) -> Seconds:
    """Measured over some recorded steps."""
    ranks = pipeline.simulator.ranks
    taken: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    again: defaultdict[int, list[float]] = defaultdict(list)
    transfers, exchanges, updates = list[float](), list[float](), list[float]()
    for step in steps:
        rows = pipeline.rows(step)
        for row, events in zip(rows, step.values(), strict=True):
            for action, (start, end) in row.items():
                taken[action.kind, action.stage].append(end - start)
            for s in {event.stage for event in events if event.kind == "R"}:
                own = [e for e in events if e.stage == s or len(ranks) == 1]
                inside = [e for e in own if e.kind in "BI"]
                more = spent(e for e in own if e.kind in "BIR") - spent(inside)
                times = len({e.microbatch for e in inside}) or 1
                again[s if len(ranks) > 1 else 0].append(more / times)
        transfers += messages(pipeline, rows)
        last = max(end for row in rows for _, end in row.values())
        begun = [e for events in step.values() for e in events if e.kind == "optimizer"]
        if begun:
            exchanges.append(max(0.0, min(e.start for e in begun) - last))
            updates.append(fmean(e.end - e.start for e in begun))
    every = {key: median(values) for key, values in taken.items()}
    return Seconds(
        {kind: [every.get((kind, s), 0.0) for s in range(len(ranks))] for kind in Kind},
        [median(again.get(s, [0.0])) for s in range(len(ranks))],
        median(transfers or [0.0]),
        median(exchanges or [0.0]),
        median(updates or [0.0]),
        len(ranks) // len({*ranks}),
    )


def messages(pipeline: Pipeline, rows: Sequence[Row]) -> list[float]:
    """The seconds of the messages that a worker waited for: from the end of an action to the start
    of the one that needs its result, of which everything else was done before."""
    found = []
    ranks = pipeline.simulator.ranks
    size = len({*ranks})
    ends: defaultdict[tuple[int, Action], float] = defaultdict(float)  # the latest of the replicas
    for row, place in zip(rows, pipeline.place, strict=True):
        for action, (_, end) in row.items():
            for part in ended_with(action):
                ends[place, part] = max(ends[place, part], end)
    for row, place in zip(rows, pipeline.place, strict=True):
        free = 0.0
        for action, (start, end) in row.items():
            needed = [a for a in dependencies(action, len(ranks)) if ranks[a.stage] != place]
            sent = [ends[ranks[a.stage], a] for a in needed if size > 1]
            if sent and free < max(sent) <= start:
                found.append(start - max(sent))
            free = end
    return found


@dataclass(frozen=True)
class Compared:
    """A recorded step and its prediction; times are in seconds from the first action."""

    step: int
    pipeline: Pipeline
    events: dict[str, list[Event]]  # by worker
    seconds: Seconds
    predicted: Simulation

    @cached_property
    def rows(self) -> list[Row]:
        """Per worker, its actions."""
        return self.pipeline.rows(self.events)

    @property
    def measured(self) -> float:
        """Seconds of the step."""
        return duration(self.events)

    @property
    def bubble(self) -> float:
        """The share of the time from the first action to the last in which a worker has none."""
        return fmean(bubbles(self.events).values())

    @cached_property
    def expected(self) -> list[Row]:
        """Per rank of the pipeline, the predicted actions."""
        return [{t.action: (t.start, t.end) for t in row} for row in self.predicted.rows]

    def apart(self, worker: int, action: Action) -> float:
        """How much longer an action took than predicted: 0.1 is 10 %."""
        start, end = self.rows[worker][action]
        first, last = self.expected[self.pipeline.place[worker]].get(action, (0.0, 0.0))
        return (end - start) / (last - first) - 1 if last > first else 0.0

    def place(self, r: int) -> str:
        """The name of a predicted row."""
        rows = len(self.predicted.rows)
        if rows == 1:
            return "all ranks"
        return f"{'stage' if len(self.pipeline.simulator.ranks) == rows else 'rank'} {r}"

    @cached_property
    def waits(self) -> list[Wait]:
        """Every measured gap, with the causes of the predicted one in the same place."""
        known: defaultdict[tuple[int, Action | None], dict[str, float]] = defaultdict(dict)
        blame = {}
        for gap in self.predicted.gaps():
            for cause, part in gap.causes.items():
                causes = known[gap.rank, gap.before]
                causes[cause] = causes.get(cause, 0.0) + part
            blame[gap.rank, gap.before] = gap.waits_for
        found = []
        finish = max(end for row in self.rows for _, end in row.values())
        for name, place, row in zip(self.events, self.pipeline.place, self.rows, strict=True):
            busy = [e for e in self.events[name] if e.kind in ("R", "optimizer")]
            free = 0.0
            for before, (start, end) in [*row.items(), (None, (self.measured, 0.0))]:
                idle = start - free - spent(e for e in busy if free <= e.start and e.end <= start)
                if idle > 1e-4 * self.measured:
                    late = finish - free if before is None else 0.0
                    causes, needs = (
                        _share(idle, known[place, before], late),
                        blame.get((place, before)),
                    )
                    found.append(Wait(name, free, start, before, needs, causes))
                free = max(free, end)
        return found

    @property
    def idle(self) -> dict[str, dict[str, float]]:
        """Per worker, its idle seconds by cause."""
        found = {name: dict.fromkeys((*CAUSES, REPLICAS, OTHER), 0.0) for name in self.events}
        for wait in self.waits:
            for cause, part in wait.causes.items():
                found[wait.worker][cause] += part
        return found


def _share(idle: float, causes: Mapping[str, float], late: float) -> dict[str, float]:
    """Idle seconds by cause: as predicted, or less of everything. The rest is the wait for ranks
    that were `late` seconds behind, and `other`."""
    predicted = sum(causes.values())
    found = {cause: part * min(1.0, idle / predicted) for cause, part in causes.items() if part}
    rest = idle - min(idle, predicted)
    late -= sum(part for cause, part in found.items() if cause != EXCHANGE)
    found[REPLICAS] = min(rest, max(0.0, late))
    found[OTHER] = rest - found[REPLICAS]
    return {cause: part for cause, part in found.items() if part > 0.01 * idle}


def compare_step(run: Run, work: Work | None = None) -> Compared:
    """The recorded step of median duration beside its prediction, from `work` or from the medians
    of all recorded steps that have as many micro-batches. Raises UserError if there is none."""
    workers, _ = run.timeline
    steps = {k: in_step(workers, k) for k in steps_of(workers)}
    steps = {k: step for k, step in steps.items() if all(map(actions_of(step).get, step))}
    if not steps:
        raise UserError(f"{run.folder}: in no recorded step all workers had work; record more")
    middle = sorted(steps, key=lambda k: duration(steps[k]))[(len(steps) - 1) // 2]
    pipeline, m = Pipeline.of(run, steps[middle]), micro_batches(steps[middle])
    seconds = seconds_of(pipeline, [s for s in steps.values() if micro_batches(s) == m])
    origin = min(event.start for events in steps[middle].values() for event in events)
    events = {
        name: [e._replace(start=e.start - origin, end=e.end - origin) for e in row]
        for name, row in steps[middle].items()
    }
    predicted = pipeline.simulator.run(work or seconds.work())
    return Compared(middle, pipeline, events, seconds, predicted)
