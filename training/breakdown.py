"""Where the time of a step went, from a measured timeline: the bubble, and the shares by kind.

Definitions, per step k:

    total      from the first start to the last end of anything that any worker recorded in step k
    busy       of a worker: the time in which it computes at least one thing
    bubble     idle / total of the pipeline's actions alone (F, B, I, W, R): `total` is then from
               the first start to the last end of these, over all stages, and idle is what is not
               busy, be it that the stage waits, sends or receives; over all stages, the mean
    exposed    communication: the time in which a worker sends or receives and computes nothing
    idle       of the shares: the rest, in which it does neither

An ideal schedule's bubble is (n-1)/(m+n-1) for n stages and m micro-batches; see
pipeline/schedule.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

from training.timeline import COMMUNICATION, COMPUTE, Event

ACTIONS = ("F", "B", "I", "W", "R")
SHARES = {  # category: its kinds; time that two would claim is the first's
    "recompute": ("R",),
    "forward": ("F",),
    "backward": ("B", "I", "W"),
    "optimizer": ("optimizer",),
}
Intervals = list[tuple[float, float]]
Workers = Mapping[str, Sequence[Event]]


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The same time as disjoint intervals, in order."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """The sum of the lengths."""
    return sum(end - start for start, end in intervals)


def spent(events: Iterable[Event]) -> Intervals:
    """When at least one of the events went on."""
    return union((event.start, event.end) for event in events)


def steps_of(workers: Workers) -> list[int]:
    """The steps in which anything was recorded, in order."""
    return sorted({event.step for events in workers.values() for event in events})


def settled(steps: Sequence[int]) -> list[int]:
    """All steps but the first, which pays for what happens once; the first, if it is alone."""
    return list(steps[1:] or steps)


def in_step(workers: Workers, step: int) -> dict[str, list[Event]]:
    """What each worker did in one step."""
    return {name: [e for e in events if e.step == step] for name, events in workers.items()}


def span(workers: Workers) -> tuple[float, float]:
    """The first start and the last end; (0, 0) where there is nothing."""
    events = [event for row in workers.values() for event in row]
    if not events:
        return 0.0, 0.0
    return min(event.start for event in events), max(event.end for event in events)


def actions_only(workers: Workers) -> dict[str, list[Event]]:
    """What a schedule speaks of: forwards, backwards and their recomputation."""
    return {name: [e for e in events if e.kind in ACTIONS] for name, events in workers.items()}


def bubbles(workers: Workers) -> dict[str, float]:
    """Per worker, its bubble in one step: idle over total, as defined above."""
    actions = actions_only(workers)
    start, end = span(actions)
    total = (end - start) or 1.0
    return {name: 1 - length(spent(events)) / total for name, events in actions.items()}


def bubble(workers: Workers) -> float:
    """The bubble of one step over all workers: idle over total."""
    return fmean(bubbles(workers).values()) if workers else 0.0


def duration(workers: Workers) -> float:
    """Seconds from the first start to the last end."""
    start, end = span(workers)
    return end - start


def typical_step(workers: Workers) -> int:
    """Of the settled steps the one that lasts as long as their median."""
    steps = settled(steps_of(workers))
    times = {step: duration(in_step(workers, step)) for step in steps}
    middle = median(times.values())
    return min(steps, key=lambda step: (abs(times[step] - middle), step))


def shares(workers: Workers) -> dict[str, float]:
    """Seconds of one step by category, the mean over the workers: recompute, forward, backward,
    optimizer, other (computed, of a kind not known), communication (exposed), and idle. They add
    up to the step's duration."""
    total = duration(workers)
    rows = [_shares_of_one(events, total) for events in workers.values()]
    return {category: fmean(row[category] for row in rows) for category in rows[0]}


def _shares_of_one(events: Sequence[Event], total: float) -> dict[str, float]:
    found: dict[str, float] = {}
    claimed: list[Event] = []

    def claim(category: str, more: Iterable[Event]) -> None:
        before = length(spent(claimed))
        claimed.extend(more)
        found[category] = length(spent(claimed)) - before

    for category, kinds in SHARES.items():
        claim(category, [event for event in events if event.kind in kinds])
    claim("other", [event for event in events if event.lane == COMPUTE])
    claim("communication", [event for event in events if event.lane == COMMUNICATION])
    found["idle"] = total - length(spent(claimed))
    return found


def mean_shares(workers: Workers) -> dict[str, float]:
    """The shares of a step, the mean over the settled steps."""
    steps = [shares(in_step(workers, step)) for step in settled(steps_of(workers))]
    return {category: fmean(step[category] for step in steps) for category in steps[0]}
