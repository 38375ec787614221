"""Simulates a schedule: when each action runs, given the duration of every action.

Problem. A step is slower than its arithmetic, since ranks wait for each other. How long, where,
and for what?

Idea. A rank starts the next action of its list as soon as its previous action has ended and the
results of the action's dependencies on other ranks have arrived. So one pass over the lists, each
action after its dependencies, gives all times. The lists are those that the programs run.

- A message takes `transfer` seconds. It overlaps with the sender's next action, or holds it up.
- A recomputation (R) precedes its backward, and runs while the gradient is on its way.
- When a rank has all gradients of a stage, the replicas of the stage exchange them. This overlaps
  with the last backward of that stage, or waits until the rank has no more actions. The update
  comes last.

An idle gap has several causes. They are told apart by simulating again: what is left with equal
stages and no messages is `fill`, which the schedule itself causes; what uneven stages add is
`imbalance`; what messages add is `transfer`; the wait for other replicas' gradients is `exchange`.

Cost: 3 to 5 us per action to prepare a schedule, 1 us to simulate it. Seconds may be any unit.

Glossary: n ranks, m micro-batches, r rank, s stage, i micro-batch, k the number of an action.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pipeline.schedules.schedule import (
    FORWARD,
    Action,
    Kind,
    Schedule,
    dependencies,
    ended_with,
    in_order,
    stage_ranks,
)

FILL, IMBALANCE, TRANSFER, EXCHANGE = CAUSES = ("fill", "imbalance", "transfer", "exchange")


class Timed(NamedTuple):
    """An action with its start and end, and the idle seconds of its rank before the start."""

    action: Action
    start: float
    end: float
    idle: float = 0.0
    waits_for: Action | None = None  # on another rank: what ended the idle time


class Gap(NamedTuple):
    """Idle seconds of a rank. `causes` says how many of them each cause has."""

    rank: int
    start: float
    end: float
    before: Action | None  # the next action; None: the step has ended
    waits_for: Action | None
    causes: dict[str, float]


@dataclass(frozen=True)
class Work:
    """Seconds of everything in a step. `exchange` is given per stage, `update` per rank."""

    seconds: Callable[[Action], float]
    transfer: Callable[[Action], float] = lambda _: 0  # by the action whose result is sent
    overlap: bool = True  # a message does not hold up its sender
    recompute: Callable[[int], float] = lambda _: 0  # by stage: the forward before a backward
    exchange: Callable[[int], float] = lambda _: 0
    overlap_exchange: bool = True
    update: Callable[[int], float] = lambda _: 0


class Simulator:
    """A schedule, prepared once for any number of simulations.

    Raises ValueError, naming what waits, if the schedule deadlocks.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.ranks = schedule, stage_ranks(schedule)
        self.actions = in_order(schedule)
        number = {part: k for k, action in enumerate(self.actions) for part in ended_with(action)}
        self.rank = [self.ranks[action.stage] for action in self.actions]
        self.needs = [
            [number[a] for a in dependencies(action, len(self.ranks))] for action in self.actions
        ]
        self.remote = [False] * len(self.actions)  # its result goes to another rank
        for k, needs in enumerate(self.needs):
            for needed in needs:
                self.remote[needed] |= self.rank[needed] != self.rank[k]

    def run(self, work: Work) -> Simulation:
        """When everything happens. The step starts at 0."""
        actions, rank, remote = self.actions, self.rank, self.remote
        zero: float = 0  # not 0.0: fractions stay exact
        rows: list[list[Timed]] = [[] for _ in self.schedule]
        busy = [zero] * len(rows)
        free = [zero] * len(rows)  # when the rank can start its next action
        arrives = [zero] * len(actions)  # when another rank has the result
        for k, (action, r, needs) in enumerate(zip(actions, rank, self.needs, strict=True)):
            waits_for = None
            backward = action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
            again = work.recompute(action.stage) if backward else zero
            start = before = free[r] + again
            for needed in needs:
                if rank[needed] != r and arrives[needed] > start:
                    start, waits_for = arrives[needed], actions[needed]
            end = arrives[k] = free[r] = start + work.seconds(action)
            rows[r].append(Timed(action, start, end, start - before, waits_for))
            busy[r] += again + end - start
            if remote[k]:
                arrives[k] += work.transfer(action)
                if not work.overlap:
                    free[r] = arrives[k]
        exchanged = [self._exchanged(row, work) for row in rows]
        updated = [end + work.update(r) for r, end in enumerate(exchanged)]
        return Simulation(self, work, rows, busy, exchanged, updated)

    @staticmethod
    def _exchanged(row: list[Timed], work: Work) -> float:
        """When a rank has exchanged all its gradients with its replicas, one stage at a time."""
        last = {t.action.stage: t for t in row if t.action.kind is not FORWARD}
        until: float = 0
        for timed in sorted(last.values(), key=lambda t: t.end):
            begin = timed.start if work.overlap_exchange else row[-1].end
            until = max(timed.end, max(until, begin) + work.exchange(timed.action.stage))
        return max(until, row[-1].end)


@dataclass(frozen=True)
class Simulation:
    """A simulated step. Per rank: its actions (`rows`), their seconds, recomputation included
    (`busy`), and when its exchange and its update end (`exchanged`, `updated`)."""

    simulator: Simulator
    work: Work
    rows: list[list[Timed]]
    busy: list[float]
    exchanged: list[float]
    updated: list[float]

    @property
    def seconds(self) -> float:
        """The step, from its start to the end of the last update."""
        return max(self.updated)

    @cached_property
    def span(self) -> float:
        """From the first action to the end of the last."""
        return max(row[-1].end for row in self.rows)

    @property
    def bubble(self) -> float:
        """The share of the span in which a rank idles, on average: (n-1)/(m+n-1) for 1F1B
        with whole backwards. b / (1 - b) is the other common definition, idle seconds as a share
        of the work: (n-1)/m for 1F1B."""
        return 1 - sum(self.busy) / (len(self.rows) * self.span)

    @cached_property
    def gaps(self) -> list[Gap]:
        """Every idle gap, with its causes, sorted by rank and time."""
        work, equal = self.work, self.equal()
        level = self.simulator.run(Work(work.seconds, recompute=work.recompute))  # no messages
        gaps = []
        for r, row in enumerate(self.rows):
            for timed, uneven, even in zip(row, level.rows[r], equal.rows[r], strict=True):
                if timed.idle > 1e-9 * self.span:
                    causes = _split(timed.idle, uneven.idle, even.idle)
                    place = (r, timed.start - timed.idle, timed.start)
                    gaps.append(Gap(*place, timed.action, timed.waits_for, causes))
            end, last = self.exchanged[r], row[-1].end
            if end > last:
                gaps.append(Gap(r, last, end, None, None, {EXCHANGE: end - last}))
            if (rest := self.seconds - self.updated[r]) > 1e-9 * self.span:
                others = (level.seconds - level.updated[r], equal.seconds - equal.updated[r])
                causes = _split(rest, *others)
                gaps.append(Gap(r, self.updated[r], self.seconds, None, None, causes))
        return gaps

    @cached_property
    def idle(self) -> dict[str, float]:
        """Idle seconds of the average rank, by cause."""
        sums: defaultdict[str, float] = defaultdict(float)
        for gap in self.gaps:
            for cause, part in gap.causes.items():
                sums[cause] += part / len(self.rows)
        return dict(sums)

    def equal(self) -> Simulation:
        """The same step without messages, if every action takes as long as the mean of its kind."""
        seconds, stages = self.work.seconds, len(self.simulator.ranks)
        sums: defaultdict[Kind, list[float]] = defaultdict(list)
        for action in self.simulator.actions:
            sums[action.kind].append(seconds(action))
        mean = {kind: sum(all_) / len(all_) for kind, all_ in sums.items()}
        again = sum(map(self.work.recompute, range(stages))) / stages
        return self.simulator.run(Work(lambda a: mean[a.kind], recompute=lambda _: again))


def _split(idle: float, uneven: float, even: float) -> dict[str, float]:
    """Idle seconds by cause, which add up to `idle`. `uneven`: those of the same gap without
    messages. `even`: those without messages and with equal stages."""
    fill = min(idle, even)
    imbalance = min(idle - fill, max(uneven - even, 0))
    parts = {FILL: fill, IMBALANCE: imbalance, TRANSFER: idle - fill - imbalance}
    return {cause: part for cause, part in parts.items() if part > 0}


def with_times(
    forward: Sequence[float], backward_input: Sequence[float], backward_weight: Sequence[float]
) -> Callable[[Action], float]:
    """A function that gives an action's seconds, from those of each stage. A whole backward takes
    as long as both halves."""
    table = {
        Kind.FORWARD: forward,
        Kind.BACKWARD_INPUT: backward_input,
        Kind.BACKWARD_WEIGHT: backward_weight,
        Kind.BACKWARD: [a + b for a, b in zip(backward_input, backward_weight, strict=True)],
    }
    return lambda action: table[action.kind][action.stage]
