"""Where the time of a recorded step went, in numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from training.timeline import EVENT_KINDS, Event

ACTIONS = ("F", "B", "I", "W", "R")  # a schedule's actions, and recomputation
Workers = Mapping[str, Sequence[Event]]  # the events of each worker, by its name


def steps_of(workers: Workers) -> list[int]:
    """The recorded steps but the first, which is slower; the first, if it is the only one."""
    steps = sorted({event.step for events in workers.values() for event in events})
    return steps[1:] or steps


def in_step(workers: Workers, step: int) -> dict[str, list[Event]]:
    """What each worker did in one step, in seconds from the first start."""
    rows = {name: [e for e in events if e.step == step] for name, events in workers.items()}
    origin = min((event.start for events in rows.values() for event in events), default=0.0)
    return {
        name: [e._replace(start=e.start - origin, end=e.end - origin) for e in events]
        for name, events in rows.items()
    }


def actions_of(workers: Workers) -> dict[str, list[Event]]:
    """The actions of a schedule: forwards, backwards and recomputation."""
    return {name: [e for e in events if e.kind in ACTIONS] for name, events in workers.items()}


def duration(workers: Workers) -> float:
    """Seconds from the first start to the last end."""
    events = [event for row in workers.values() for event in row]
    return max((e.end for e in events), default=0.0) - min((e.start for e in events), default=0.0)


def spent(events: Iterable[Event]) -> float:
    """Seconds in which at least one of the events was in progress."""
    total, until = 0.0, -math.inf
    for start, end in sorted((event.start, event.end) for event in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def bubbles(workers: Workers) -> dict[str, float]:
    """Per worker, the share of a step in which it runs no action (F, B, I, W, R): it may wait, send
    or receive. The step lasts from the first action of any worker to the last. Under GPipe and 1F1B
    the ideal share is 2(n-1)/(3m+2(n-1)) for n stages, m micro-batches."""
    actions = actions_of(workers)
    total = duration(actions) or 1.0
    return {name: 1 - spent(events) / total for name, events in actions.items()}


def shares(workers: Workers) -> dict[str, float]:
    """Seconds of one step by category, the mean over the workers; they add up to its duration.

    If two things happen at once, the earlier category counts, so `communication` is the part that
    no computation hides.
    """
    kinds = {"recompute": "R", "forward": "F", "backward": "BIW", "optimizer": ["optimizer"]}
    total, rows = duration(workers), []
    for events in workers.values():
        row, before, claimed = {}, 0.0, list[Event]()
        for category, its in {**kinds, "communication": EVENT_KINDS}.items():
            claimed += [event for event in events if event.kind in its]
            row[category], before = spent(claimed) - before, spent(claimed)
        rows.append(row | {"idle": total - before})
    return {category: fmean(row[category] for row in rows) for category in rows[0]}
