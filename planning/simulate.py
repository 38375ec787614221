"""When each action of a schedule runs, if every action takes as long as it is said to take.

A rank starts the next action of its list as soon as it has ended the one before and what the
action depends on has ended elsewhere; transfers take no time. That is the ideal that a measured
timeline is drawn beside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pipeline.schedule import Action, Schedule, clock_table, dependencies, ranks_of


class Timed(NamedTuple):
    """An action, and when it runs."""

    action: Action
    start: float
    end: float


def simulate(schedule: Schedule, seconds: Callable[[Action], float]) -> list[list[Timed]]:
    """Per rank, its actions with start and end, from 0.

    Raises:
        ValueError: the schedule waits for ever.
    """
    ended: dict[Action, float] = {}
    num_stages = len(ranks_of(schedule))
    rows: list[list[Timed]] = [[] for _ in schedule]
    for clock in clock_table(schedule):  # an order in which all dependencies come before
        for row, action in zip(rows, clock, strict=True):
            if action is None:
                continue
            ready = [ended[needed] for needed in dependencies(action, num_stages)]
            start = max([*ready, row[-1].end if row else 0.0], default=0.0)
            ended[action] = start + seconds(action)
            row.append(Timed(action, start, ended[action]))
    return rows
