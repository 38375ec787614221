"""Searches the order of a pipeline's actions: shorter than any schedule that has a name, for these
times, messages and memory.

Every micro-batch is F, I and W on each stage, so that no backward is whole. A rank has one stage,
or two, in a V or in loops. First orders are made action by action: of the ranks the one goes on
that can begin first, and takes I before F before W; W fills what would else be idle, and makes room
where memory is full. What counts as idle enough, which chunk comes first and how many micro-batches
a rank may hold is drawn at random. Then the best of these, and the schedules that have a name, are
improved by moving one action at a time to another place of its list. Backwards stay in the order of
the micro-batches, so that a step gives the bits of every other schedule.

`bound` is what no order beats: a rank cannot begin before its first micro-batch has arrived, does
all of its work, and then the last gradient travels to stage 0; and a rank that may hold c
micro-batches, each for as long as it travels to the last stage and back, needs that long for c.

Glossary: n ranks, m micro-batches, r rank, s stage, i micro-batch.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pipeline.schedules.catalogue import SCHEDULES, find
from pipeline.schedules.printed import peak_alive
from pipeline.schedules.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    HELD_MORE,
    Action,
    Schedule,
    dependencies,
    stage_ranks,
)

from .simulate import Simulator, Work

DRAWN, MOVED = 60, 1500  # orders that are made, and moves that are tried on each of the best three
WorkOf = Callable[[Sequence[int]], Work]  # by the rank of each stage
_HALVES = (BACKWARD_INPUT, BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Found:
    """The best order, and the best schedule that has a name, with their seconds."""

    lists: Schedule
    seconds: float
    name: str
    of_name: float
    bound: float  # of all orders of one or two stages per rank


def seconds_of(lists: Schedule, work: WorkOf) -> float:
    """From the first action to the end of the last."""
    return Simulator(lists).run(work(stage_ranks(lists))).span


def held(lists: Schedule) -> float:
    """The most micro-batches of a whole rank that one holds."""
    return max(peak_alive(lists)) * len(lists) / len(stage_ranks(lists))


def search_order(n: int, m: int, work: WorkOf, memory: float, seed: int = 0) -> Found:
    """The best order that was found in which a rank holds at most `memory` micro-batches.

    Raises ValueError, with a memory that works, if no schedule that has a name holds so little.
    """
    named = {name: find(name)(n, m) for name in SCHEDULES}
    fitting = {name: lists for name, lists in named.items() if held(lists) <= memory + 1e-9}
    if not fitting:
        least = min(map(held, named.values()))
        raise ValueError(f"--memory {memory:g}: every schedule holds more; {least:g} works")
    times = {name: seconds_of(lists, work) for name, lists in fitting.items()}
    best = min(times, key=times.__getitem__)
    draws = random.Random(seed)
    once = [*range(n)]
    placements = [once, once + once[::-1], 2 * once] if n > 1 else [once]  # each, in a V, in loops
    starts = [in_halves(lists) for lists in fitting.values()]
    starts += [
        order for ranks in placements for _ in range(DRAWN)
        if (order := _made(ranks, m, work(ranks), memory, draws))
    ]  # fmt: skip
    by_seconds = sorted(((seconds_of(lists, work), k) for k, lists in enumerate(starts)))
    lowest = min(bound(ranks, m, work(ranks), memory) for ranks in placements)
    found = (times[best], fitting[best])
    for _, k in by_seconds[:3]:
        moved = _improved(starts[k], work, memory, draws, lowest)
        found = min(found, moved, key=lambda each: each[0])
    return Found(found[1], found[0], best, times[best], lowest)


def in_halves(lists: Schedule) -> Schedule:
    """The same lists with every whole backward as its halves, one after the other."""
    return [
        [half for a in actions for half in ([a] if a.kind is not BACKWARD else _both(a))]
        for actions in lists
    ]


def _both(backward: Action) -> list[Action]:
    return [backward._replace(kind=half) for half in _HALVES]


def _made(
    ranks: Sequence[int], m: int, work: Work, memory: float, draws: random.Random
) -> Schedule | None:
    """An order, made action by action; None if it came to a dead end."""
    n, stages = max(ranks) + 1, len(ranks)
    own = [[s for s in range(stages) if ranks[s] == r] for r in range(n)]
    chunks = stages // n
    most = [draws.choice((memory, memory, min(memory, n - r))) * chunks for r in range(n)]
    patience = draws.choice((0.0, 0.25, 0.5, 0.75, 1.0))  # of a W, that another action waits
    turns = draws.choice((1, -1)), draws.choice((1, -1))  # which chunk comes first, F and I
    lists: Schedule = [[] for _ in range(n)]
    free, alive, ends = [0.0] * n, [0] * n, dict[Action, float]()
    following = {(kind, s): 0 for kind in (FORWARD, BACKWARD_INPUT) for s in range(stages)}
    waiting = [deque[Action]() for _ in range(n)]  # I whose W has not come yet

    def ready(action: Action, r: int) -> float | None:
        start = free[r]
        for needed in dependencies(action, stages):
            if needed not in ends:
                return None
            away = work.transfer(needed) if ranks[needed.stage] != r else 0.0
            start = max(start, ends[needed] + away)
        return start

    def next_of(r: int) -> tuple[float, int, int, Action] | None:
        """When rank r can begin what, before all else."""
        able = []
        for (order, kind), turn in zip(enumerate((BACKWARD_INPUT, FORWARD)), turns, strict=True):
            for s in own[r]:
                i = following[kind, s]
                # The last place is for a rank's last stage, so that what has begun can end.
                room = most[r] - (s != own[r][-1])
                if i < m and (kind is not FORWARD or alive[r] + 1 <= room):
                    action = Action(kind, s, i)
                    if (start := ready(action, r)) is not None:
                        able.append((start, order, turn * s, action))
        first = min(able, default=None)
        if waiting[r]:
            weights = waiting[r][0]._replace(kind=BACKWARD_WEIGHT)
            idle = first[0] - free[r] if first else 0.0
            if not first or idle > patience * work.seconds(weights) + 1e-12:
                return free[r], 2, 0, weights
        return first

    options = [next_of(r) for r in range(n)]
    while any(options):
        r = min((option[0], r) for r, option in enumerate(options) if option)[1]
        start, _, _, action = options[r]  # type: ignore[misc]
        lists[r].append(action)
        free[r] = ends[action] = start + work.seconds(action)
        alive[r] += HELD_MORE[action.kind]
        if action.kind is BACKWARD_WEIGHT:
            waiting[r].popleft()
        else:
            following[action.kind, action.stage] += 1
            if action.kind is BACKWARD_INPUT:
                waiting[r].append(action)
        beside = {r, ranks[max(0, action.stage - 1)], ranks[min(stages - 1, action.stage + 1)]}
        for each in beside:
            options[each] = next_of(each)
    return lists if sum(map(len, lists)) == 3 * stages * m else None


def _improved(
    lists: Schedule, work: WorkOf, memory: float, draws: random.Random, lowest: float
) -> tuple[float, Schedule]:
    """The best that moves of single actions made of it, and its seconds."""
    best, ranks = seconds_of(lists, work), stage_ranks(lists)
    timed, most = work(ranks), memory * len(ranks) / len(lists)
    for _ in range(MOVED):
        if best <= lowest * (1 + 1e-9):
            break
        r = draws.randrange(len(lists))
        k, by = draws.randrange(len(lists[r])), draws.choice((-8, -4, -3, -2, -1, 1, 2, 3, 4, 8))
        row = [*lists[r]]
        action = row.pop(k)
        row.insert(max(0, min(len(row), k + by)), action)
        if not _in_order(row) or max(accumulate(HELD_MORE[a.kind] for a in row)) > most + 1e-9:
            continue
        moved = [*lists[:r], row, *lists[r + 1 :]]
        try:
            seconds = Simulator(moved).run(timed).span
        except ValueError:  # a deadlock
            continue
        if seconds <= best:
            best, lists = seconds, moved
    return best, lists


def _in_order(row: list[Action]) -> bool:
    """Whether every stage takes its micro-batches in order, and W comes after its I."""
    last: dict[tuple[object, int], int] = {}
    for kind, s, i in row:
        if last.get((kind, s), -1) >= i:
            return False
        if kind is BACKWARD_WEIGHT and last.get((BACKWARD_INPUT, s), -1) < i:
            return False
        last[kind, s] = i
    return True


def bound(ranks: Sequence[int], m: int, work: Work, memory: float) -> float:
    """Seconds that every order takes at least, with the stages on these ranks."""
    stages, chunks = len(ranks), len(ranks) / (max(ranks) + 1)
    there, back, late = (
        [work.seconds(Action(kind, s, 0)) for s in range(stages)]
        for kind in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    away = [
        work.transfer(Action(FORWARD, s, 0)) if a != b else 0.0
        for s, (a, b) in enumerate(pairwise(ranks))
    ]
    # Until stage s can begin; and from the end of its I to the end of stage 0's.
    before = [*accumulate((a + b for a, b in zip(there, away, strict=False)), initial=0.0)]
    after = [*accumulate((a + b for a, b in zip(back, away, strict=False)), initial=0.0)]
    path = sum(there) + sum(back) + 2 * sum(away)
    least = path + late[0]
    for r in range(max(ranks) + 1):
        own = [s for s in range(stages) if ranks[s] == r]
        first, most = own[0], m * sum(there[s] + back[s] for s in own)
        weights = m * sum(late[s] for s in own)
        least = max(least, before[first] + most + max(weights, after[first] + late[0]))
        lives = sum(path - before[s] - after[s] + late[s] for s in own)
        least = max(least, before[first] + m * lives / (memory * chunks))
    return least
