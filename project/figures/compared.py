"""A recorded step beside its prediction: the schedule that the run followed, simulated.

The prediction takes the seconds of every action from the planner, or else from the run itself: the
median of each kind and stage. So a difference is either the planner's error, or what one step, or
one replica, had more than others. The gaps between a worker's actions are explained by the gaps
of the prediction. The rest is, at the end of a step, the wait for ranks that took longer than
predicted, and otherwise `other`: the machine, other programs, uneven batches.

The ideal is the same schedule without messages, each action as long as the mean of its kind. Its
idle time is the schedule's own; any more comes from the cut, the batches and the machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import NamedTuple

from pipeline.schedules.catalogue import find
from pipeline.schedules.schedule import Action, Kind, dependencies, ended_with
from planning.simulate import CAUSES, EXCHANGE, Gap, Simulation, Simulator, Work
from runtime.axes import place_of, ranks_of, sizes
from training.launch.errors import UserError
from training.timeline import Event

from .runs import Run, Workers, actions_of, bubbles, duration, in_step, spent, steps_of

REPLICAS, OTHER = "slower ranks", "other"
# Of a worker: its actions in order, with start and end.
ActionTimes = dict[Action, tuple[float, float]]


class StepSeconds(NamedTuple):
    """What a run's step takes, measured: the medians of its recorded steps, in seconds."""

    actions: dict[Kind, list[float]]  # per stage, of a micro-batch
    recompute: list[float]  # per stage, of a micro-batch, outside its backward
    transfer: float  # of a message between two stages
    exchange: float  # of a rank's gradients: from the last action of any worker to the first update
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


def micro_batches(workers: Workers) -> int:
    """How many a step has."""
    return len({e.microbatch for events in workers.values() for e in events if e.kind == "F"})


def action_of(event: Event, num_stages: int) -> Action:
    """The action of an F, B, I or W. Without stages, a layer's events are parts of one."""
    stage = event.stage if num_stages > 1 else 0
    return Action(Kind(event.kind), stage, max(0, event.microbatch))


def rows_of(workers: Workers, num_stages: int) -> list[ActionTimes]:
    """The actions of a step, per worker."""
    rows = []
    for events in workers.values():
        times: defaultdict[Action, list[float]] = defaultdict(list)
        for e in events:
            if e.kind in ("F", "B", "I", "W"):
                times[action_of(e, num_stages)] += [e.start, e.end]
        rows.append({action: (min(clock), max(clock)) for action, clock in times.items()})
    return rows


def median_seconds(
    ranks: Sequence[int], rank_of: Sequence[int], steps: Iterable[Workers]
) -> StepSeconds:
    """The seconds of some recorded steps. `ranks`: of the stages; `rank_of`: of the workers."""
    taken: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    again: defaultdict[int, list[float]] = defaultdict(list)  # by rank
    transfers, exchanges, updates = list[float](), list[float](), list[float]()
    for step in steps:
        rows = rows_of(step, len(ranks))
        for r, row, events in zip(rank_of, rows, step.values(), strict=True):
            for action, (start, end) in row.items():
                taken[action.kind, action.stage].append(end - start)
            backwards = sum(a.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) for a in row)
            alone = spent(e for e in events if e.kind in ("B", "I"))
            both = spent(e for e in events if e.kind in ("B", "I", "R"))
            again[r].append((both - alone) / max(1, backwards))
        transfers += messages(ranks, rank_of, rows)
        last = max(end for row in rows for _, end in row.values())
        begun = [e for events in step.values() for e in events if e.kind == "optimizer"]
        if begun:
            exchanges.append(max(0.0, min(e.start for e in begun) - last))
            updates.append(fmean(e.end - e.start for e in begun))
    stages = range(len(ranks))
    return StepSeconds(
        {kind: [median(taken.get((kind, s), [0.0])) for s in stages] for kind in Kind},
        [median(again[ranks[s]]) for s in stages],
        median(transfers or [0.0]),
        median(exchanges or [0.0]),
        median(updates or [0.0]),
        len(ranks) // len({*ranks}),
    )


def messages(
    ranks: Sequence[int], rank_of: Sequence[int], rows: Sequence[ActionTimes]
) -> list[float]:
    """The seconds of the messages that a worker waited for: from the end of an action to the start
    of the one that needs its result, of which everything else was done before."""
    ends: defaultdict[Action, float] = defaultdict(float)  # the latest of the replicas
    for row in rows:
        for action, (_, end) in row.items():
            for part in ended_with(action):
                ends[part] = max(ends[part], end)
    waited = []
    for row, r in zip(rows, rank_of, strict=True):
        free = 0.0
        for action, (start, end) in row.items():
            sent = [ends[a] for a in dependencies(action, len(ranks)) if ranks[a.stage] != r]
            if sent and free < max(sent) <= start:
                waited.append(start - max(sent))
            free = end
    return waited


@dataclass(frozen=True)
class Compared:
    """A recorded step and its prediction; times are in seconds from the first action.

    `rank_of`: per worker its rank in the pipeline; several workers, replicas or parts of a matrix,
    may have the same. Without stages, a rank's micro-batches are a pipeline of one.
    """

    step: int
    rank_of: list[int]
    events: dict[str, list[Event]]  # by worker
    seconds: StepSeconds
    predicted: Simulation

    @cached_property
    def ranks(self) -> list[int]:
        """The rank of each stage."""
        return self.predicted.simulator.ranks

    @property
    def measured(self) -> float:
        """Seconds of the step."""
        return duration(self.events)

    @property
    def bubble(self) -> float:
        """The share of the time from the first action to the last in which a worker has none."""
        return fmean(bubbles(self.events).values())

    @cached_property
    def waits(self) -> dict[str, list[Gap]]:
        """Per worker, every measured gap, with the causes of the predicted one in its place."""
        causes: defaultdict[tuple[int, Action | None], dict[str, float]] = defaultdict(dict)
        waits_for = {}
        for gap in self.predicted.gaps:  # at the end there may be two, of different causes
            causes[gap.rank, gap.before] |= gap.causes
            waits_for[gap.rank, gap.before] = gap.waits_for
        rows = rows_of(self.events, len(self.ranks))
        finish = max(end for row in rows for _, end in row.values())
        gaps_of = {}
        for (name, events), r, row in zip(self.events.items(), self.rank_of, rows, strict=True):
            busy = [e for e in events if e.kind in ("R", "optimizer")]
            gaps_of[name] = list[Gap]()
            free = 0.0
            for before, (start, end) in [*row.items(), (None, (self.measured, self.measured))]:
                idle = start - free - spent(e for e in busy if free <= e.start and e.end <= start)
                if idle > 1e-3 * self.measured:
                    late = finish - free if before is None else 0.0
                    parts = _share(idle, causes[r, before], late)
                    needs = waits_for.get((r, before))
                    gaps_of[name].append(Gap(r, free, start, before, needs, parts))
                free = max(free, end)
        return gaps_of

    @property
    def idle(self) -> dict[str, dict[str, float]]:
        """Per worker, its idle seconds by each cause that occurs in the step."""
        causes = {cause for gaps in self.waits.values() for gap in gaps for cause in gap.causes}
        shown = [cause for cause in (*CAUSES, REPLICAS, OTHER) if cause in causes]
        return {
            name: {cause: sum(gap.causes.get(cause, 0.0) for gap in gaps) for cause in shown}
            for name, gaps in self.waits.items()
        }


def _share(idle: float, causes: Mapping[str, float], late: float) -> dict[str, float]:
    """Idle seconds by cause: as predicted, or less of everything. The rest is the wait for ranks
    that were `late` seconds behind, and `other`."""
    predicted = sum(causes.values())
    parts = {cause: part * min(1.0, idle / predicted) for cause, part in causes.items() if part}
    rest = idle - min(idle, predicted)
    late -= sum(part for cause, part in parts.items() if cause != EXCHANGE)
    parts[REPLICAS] = min(rest, max(0.0, late))
    parts[OTHER] = rest - parts[REPLICAS]
    return {cause: part for cause, part in parts.items() if part > 0.01 * idle}


def compare(
    workers: Workers,
    schedule: str,
    rank_of: list[int],
    *,
    step: int | None = None,
    work: Work | None = None,
) -> Compared:
    """A recorded step, by default the one of median duration, beside its prediction: from `work`,
    or from the medians of all recorded steps that have as many micro-batches.

    Raises:
        UserError: the step was not recorded, or there is none in which all workers had work.
    """
    steps = {k: in_step(workers, k) for k in steps_of(workers)}
    steps = {k: rows for k, rows in steps.items() if all(actions_of(rows).values())}
    if not steps:
        raise UserError("in no recorded step all workers had work; record more, with --timeline")
    if step is None:
        step = sorted(steps, key=lambda k: duration(steps[k]))[(len(steps) - 1) // 2]
    shown = in_step(workers, step)
    if not any(shown.values()):
        known = [event.step + 1 for events in workers.values() for event in events]
        raise UserError(f"--step {step + 1}: not recorded; take {min(known)} to {max(known)}")
    n, m = max(rank_of) + 1, micro_batches(shown)
    stages = 1 + max(e.stage for row in actions_of(workers).values() for e in row) if n > 1 else 1
    simulator = Simulator(find(schedule, stages // n)(n, m))
    alike = [rows for rows in steps.values() if micro_batches(rows) == m]
    seconds = median_seconds(simulator.ranks, rank_of, alike or [shown])
    return Compared(step, rank_of, shown, seconds, simulator.run(work or seconds.work()))


def compare_step(run: Run, work: Work | None = None, step: int | None = None) -> Compared:
    """As `compare`, of a run."""
    used, workers = run.summary, run.timeline
    threads = used.get("world_size", 1) == 1 and len(workers) > 1
    ranks = sizes(pp=len(workers)) if threads else ranks_of(used)
    n, rank_of = ranks["pp"], [place_of(r, ranks)["pp"] for r in range(len(workers))]
    schedule = used["schedule"] if n > 1 else "1f1b"
    return compare(workers, schedule, rank_of, step=step, work=work)
