"""A recorded step beside its prediction: the schedule that the run followed, simulated.

The prediction takes the seconds of every action from the planner, or else from the run itself: the
median of each kind and stage. So a difference is either the planner's error, or the time by which
this step, or one replica, was slower than others. A gap between a worker's actions has the cause of
the gap that is predicted before the same action. If none is predicted, it is `not predicted`: the
machine, other programs, uneven batches.

The ideal is the same schedule without messages, each action as long as the mean of its kind. Its
idle time is the schedule's own; further idle time comes from the cut, the batches and the machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median, median_low

from pipeline.schedules.catalogue import find
from pipeline.schedules.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Kind,
    dependencies,
    ended_with,
)
from planning.order import RankTimes
from planning.simulate import EXCHANGE, Gap, Simulation, Simulator, Work
from runtime.axes import place_of
from training.launch.errors import UserError
from training.timeline import Event

from .runs import Run, Workers, actions_of, bubbles, duration, in_step, spent, steps_of

NOT_PREDICTED = "not predicted"
# Of a worker: its actions in order, with start and end.
ActionTimes = dict[Action, tuple[float, float]]


def micro_batches(workers: Workers) -> int:
    """How many micro-batches a step has."""
    return len({e.microbatch for events in workers.values() for e in events if e.kind == "F"})


def action_of(event: Event, num_stages: int) -> Action | None:
    """The action that an event is a part of; None for recomputation, messages and updates. Without
    stages, the events of layers are parts of the actions of stage 0."""
    if event.kind not in ("F", "B", "I", "W"):
        return None
    stage = event.stage if num_stages > 1 else 0
    return Action(Kind(event.kind), stage, max(0, event.microbatch))


def rows_of(workers: Workers, num_stages: int) -> list[ActionTimes]:
    """The actions of a step, per worker. An action lasts from its first event to its last."""
    rows = []
    for events in workers.values():
        row: ActionTimes = {}
        for e in events:
            if action := action_of(e, num_stages):
                start, end = row.get(action, (e.start, e.end))
                row[action] = min(start, e.start), max(end, e.end)
        rows.append(row)
    return rows


def measured_work(ranks: Sequence[int], rank_of: Sequence[int], steps: Iterable[Workers]) -> Work:
    """The medians of some recorded steps. `ranks` has the rank of each stage, `rank_of` that of
    each worker.

    Recomputation counts as far as it is outside a backward. The gradients' exchange lasts from the
    last action of any worker to the first update.
    """
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
    seconds = {place: median(each) for place, each in taken.items()}
    recompute = {r: median(each) for r, each in again.items()}
    transfer, exchange, update = (median(x or [0.0]) for x in (transfers, exchanges, updates))
    return Work(
        lambda action: seconds.get((action.kind, action.stage), 0.0),
        lambda _: transfer,
        recompute=lambda stage: recompute[ranks[stage]],
        exchange=lambda stage: exchange / ranks.count(ranks[stage]),
        overlap_exchange=False,
        update=lambda _: update,
    )


def messages(
    ranks: Sequence[int], rank_of: Sequence[int], rows: Sequence[ActionTimes]
) -> list[float]:
    """The seconds of the messages that a worker waited for: from the end of an action to the start
    of the action that needs its result, if nothing else held that one up."""
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

    `rank_of` has each worker's rank in the pipeline. Workers that are replicas, or hold parts of
    the same matrices, have the same one. Without stages, a rank is a pipeline of one stage. `work`
    has the medians of the run.
    """

    step: int
    rank_of: list[int]
    events: dict[str, list[Event]]  # by worker
    work: Work
    predicted: Simulation

    @property
    def ranks(self) -> list[int]:
        """The rank of each stage."""
        return self.predicted.simulator.ranks

    @property
    def measured(self) -> float:
        """Seconds of the step."""
        return duration(self.events)

    @cached_property
    def span(self) -> float:
        """Seconds from the first action of any worker to the end of the last."""
        return duration(actions_of(self.events))

    def rank_times(self) -> RankTimes:
        """Seconds of a micro-batch on each rank of the pipeline. The halves of a backward that was
        whole are taken to be equal."""
        work, n = self.work, 1 + max(self.ranks)

        def seconds(kind: Kind, s: int) -> float:
            return work.seconds(Action(kind, s, 0)) or work.seconds(Action(BACKWARD, s, 0)) / 2

        def of_ranks(kind: Kind) -> list[float]:
            stages = range(len(self.ranks))
            return [sum(seconds(kind, s) for s in stages if self.ranks[s] == r) for r in range(n)]

        early, late = of_ranks(BACKWARD_INPUT), of_ranks(BACKWARD_WEIGHT)
        messages = [work.transfer(Action(FORWARD, 0, 0))] * n
        return RankTimes(of_ranks(FORWARD), early, late, messages)

    @property
    def bubble(self) -> float:
        """The share of the span in which a worker runs no action, on average."""
        return fmean(bubbles(self.events).values())

    @cached_property
    def waits(self) -> dict[str, list[Gap]]:
        """Per worker, every gap of the span. What it waits for and its causes are those of the
        predicted gap before the same action; time beyond the predicted gap was not predicted."""
        predicted = {}
        for gap in self.predicted.gaps:
            if EXCHANGE not in gap.causes:  # the exchange comes after the span
                predicted[gap.rank, gap.before] = gap
        actions, gaps_of = actions_of(self.events), {}
        begin = min(e.start for events in actions.values() for e in events)
        for (name, events), r in zip(actions.items(), self.rank_of, strict=True):
            busy: list[tuple[float, float, Action | None]]
            busy = [(e.start, e.end, action_of(e, len(self.ranks))) for e in events]
            free, gaps_of[name] = begin, list[Gap]()
            busy.append((begin + self.span, begin + self.span, None))
            busy.sort(key=lambda each: each[:2])
            for k, (start, end, _) in enumerate(busy):
                if start > free:
                    # A gap before a recomputation is before the action that needs it.
                    before = next((action for *_, action in busy[k:] if action), None)
                    like = predicted.get((r, before), Gap(r, 0.0, 0.0, before, None, {}))
                    length = sum(like.causes.values()) or 1.0
                    part = min(1.0, (start - free) / length)
                    causes = {cause: part * seconds for cause, seconds in like.causes.items()}
                    causes[NOT_PREDICTED] = start - free - sum(causes.values())
                    gaps_of[name].append(Gap(r, free, start, before, like.waits_for, causes))
                free = max(free, end)
        return gaps_of

    @property
    def idle(self) -> dict[str, dict[str, float]]:
        """Per worker, its idle seconds by each cause that occurs; their sum is that of `bubble`."""
        causes = dict.fromkeys(
            cause for gaps in self.waits.values() for gap in gaps for cause in gap.causes
        )
        return {
            name: {cause: sum(gap.causes.get(cause, 0.0) for gap in gaps) for cause in causes}
            for name, gaps in self.waits.items()
        }


def compare_step(run: Run, work: Work | None = None, step: int | None = None) -> Compared:
    """A recorded step beside its prediction from `work`, or from the medians of all recorded steps.
    By default it is the recorded step nearest to the median of all steps of the run.

    Raises:
        UserError: the step was not recorded, or there is none in which all workers had work.
    """
    workers, n = run.timeline, run.shape["pp"]
    steps = {k: in_step(workers, k) for k in steps_of(workers)}
    steps = {k: rows for k, rows in steps.items() if all(actions_of(rows).values())}
    if not steps:
        raise UserError("in no recorded step did all workers work; record more, with --timeline")
    if step is None:
        seconds = {k: duration(rows) for k, rows in steps.items()}
        finished = "step_seconds" in run.summary
        usual = run.seconds if finished else median_low(seconds.values())
        step = min(steps, key=lambda k: abs(seconds[k] - usual))
    shown = in_step(workers, step)
    if not any(shown.values()):
        known = [event.step + 1 for events in workers.values() for event in events]
        raise UserError(f"--step {step + 1}: not recorded; take {min(known)} to {max(known)}")
    m = micro_batches(shown)
    stages = 1 + max(e.stage for row in actions_of(workers).values() for e in row) if n > 1 else 1
    simulator = Simulator(find(run.summary["schedule"] if n > 1 else "1f1b", stages // n)(n, m))
    rank_of = [place_of(r, run.shape)["pp"] for r in range(len(workers))]
    measured = measured_work(simulator.ranks, rank_of, steps.values())
    return Compared(step, rank_of, shown, measured, simulator.run(work or measured))
