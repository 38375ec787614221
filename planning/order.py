"""Searches an order of a pipeline's actions that is shorter than every named schedule, for given
times, messages and memory.

Idea. Start from the best named schedules that fit the memory, one for each way to place stages: one
per rank, two per rank in a V, and two per rank in a loop. Cut every backward into its halves I and
W. Then move single actions to other places of their rank's list. Keep a move if the lists can still
run, fit the memory and take no longer. A move never passes an action of the same kind and stage. So
micro-batches stay in order, and a step gives the same bits as under every other schedule.

`bound` is a time that no order beats. A rank cannot begin before its first micro-batch arrives, it
does all of its work, and after its last I a gradient still travels to stage 0. The bound ignores
memory.

Glossary: n ranks, m micro-batches, r rank, s stage, i micro-batch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.schedules.catalogue import SCHEDULES, find
from pipeline.schedules.printed import peak_alive
from pipeline.schedules.schedule import Schedule, ended_with, stage_ranks

from .simulate import Simulator, Work, with_times

MOVES = 2000  # moves tried from each start
DISTANCES = (-8, -4, -3, -2, -1, 1, 2, 3, 4, 8)
ROUNDING = 1e-9


class RankTimes(NamedTuple):
    """Seconds of a micro-batch on each rank, and of a message that the rank sends."""

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    transfer: Sequence[float]

    def work(self, ranks: Sequence[int]) -> Work:
        """The input of a simulation in which rank `ranks[s]` has stage s. Stages of a rank share
        its seconds equally."""
        share = len(self.forward) / len(ranks)
        times = with_times(*([seconds[r] * share for r in ranks] for seconds in self[:3]))
        return Work(times, lambda action: self.transfer[ranks[action.stage]])


class Found(NamedTuple):
    """The shortest order, the shortest named schedule, and the seconds that no order beats."""

    lists: Schedule
    seconds: float
    name: str
    seconds_of_name: float
    bound: float


def seconds_of(lists: Schedule, times: RankTimes) -> float:
    """From the first action to the end of the last."""
    return Simulator(lists).run(times.work(stage_ranks(lists))).span


def held(lists: Schedule) -> float:
    """The most micro-batches that a rank holds. One that only one of a rank's two stages holds
    counts as half."""
    return max(peak_alive(lists)) * len(lists) / len(stage_ranks(lists))


def search_order(n: int, m: int, times: RankTimes, memory: float, seed: int = 0) -> Found:
    """The best order found in which a rank holds at most `memory` micro-batches.

    Raises ValueError, with a memory that works, if no named schedule holds so little.
    """
    named = {name: find(name)(n, m) for name in SCHEDULES}
    fitting = {name: lists for name, lists in named.items() if held(lists) <= memory + ROUNDING}
    if not fitting:
        least = min(map(held, named.values()))
        raise ValueError(f"--memory {memory:g}: every schedule holds more; {least:g} works")
    seconds = {name: seconds_of(lists, times) for name, lists in fitting.items()}
    name = min(seconds, key=seconds.__getitem__)
    lowest = min(bound(find(name)(n, 1), m, times) for name in SCHEDULES)
    starts = {}  # the shortest for each way to place stages
    for slower in sorted(seconds, key=seconds.__getitem__, reverse=True):
        starts[tuple(stage_ranks(fitting[slower]))] = in_halves(fitting[slower])
    draws = random.Random(seed)
    found = [_improved(start, times, memory, draws, lowest) for start in starts.values()]
    shortest = min(fitting[name], *found, key=lambda lists: seconds_of(lists, times))
    return Found(shortest, seconds_of(shortest, times), name, seconds[name], lowest)


def in_halves(lists: Schedule) -> Schedule:
    """The same lists, with the two halves of every whole backward one after the other."""
    return [[half for action in row for half in ended_with(action)[-2:]] for row in lists]


def _improved(
    lists: Schedule, times: RankTimes, memory: float, draws: random.Random, lowest: float
) -> Schedule:
    """The lists, improved by moves of single actions. Stops at `lowest`, which no order beats."""
    ranks, best = stage_ranks(lists), seconds_of(lists, times)
    work, most = times.work(ranks), memory * len(ranks) / len(lists)  # `most`: per stage
    for _ in range(MOVES):
        if best <= lowest * (1 + ROUNDING):
            break
        r = draws.randrange(len(lists))
        row = [*lists[r]]
        k = draws.randrange(len(row))
        to = min(max(0, k + draws.choice(DISTANCES)), len(row) - 1)
        action = row.pop(k)
        passed = row[min(k, to) : max(k, to)]
        row.insert(to, action)
        moved = [*lists[:r], row, *lists[r + 1 :]]
        same = any(a.kind is action.kind and a.stage == action.stage for a in passed)
        if same or peak_alive([row])[0] > most + ROUNDING:
            continue
        try:
            seconds = Simulator(moved).run(work).span
        except ValueError:  # a deadlock
            continue
        if seconds <= best:
            best, lists = seconds, moved
    return lists


def bound(alone: Schedule, m: int, times: RankTimes) -> float:
    """Seconds that every order of m micro-batches takes at least. `alone`: any schedule of one
    micro-batch, with the stages on the same ranks."""
    ranks = stage_ranks(alone)
    early = times._replace(backward_weight=[0.0] * len(alone))  # no gradient waits for a W
    rows = Simulator(alone).run(early.work(ranks)).rows
    back = max(row[-1].end for row in rows)  # when the gradient has reached stage 0
    late = times.backward_weight[0] * len(alone) / len(ranks)
    return max(
        row[0].start + m * (f + i) + max(m * w, back - row[-1].end + late)
        for row, f, i, w in zip(rows, *times[:3], strict=True)
    )
