"""Simulates a schedule: when each action runs, given the duration of every action.

A rank starts the next action of its list as soon as its previous action and the action's
dependencies on other ranks have ended; transfers take no time. This is the ideal beside which a
measured timeline is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pipeline.schedule import Action, Schedule, clock_table, dependencies, ranks_of


class Timed(NamedTuple):
    """An action with its start and end."""

    action: Action
    start: float
    end: float


def simulate(schedule: Schedule, seconds: Callable[[Action], float]) -> list[list[Timed]]:
    """Per rank, its actions with start and end, from 0.

    Raises:
        ValueError: the schedule deadlocks.
    """
    ended: dict[Action, float] = {}  # seconds
    num_stages = len(ranks_of(schedule))
    rows: list[list[Timed]] = [[] for _ in schedule]
    for clock in clock_table(schedule):  # in this order dependencies come first
        for row, action in zip(rows, clock, strict=True):
            if action is None:
                continue
            ready = [ended[needed] for needed in dependencies(action, num_stages)]
            # when this rank is free and all inputs are there
            start = max([*ready, row[-1].end if row else 0.0], default=0.0)
            ended[action] = start + seconds(action)
            row.append(Timed(action, start, ended[action]))
    return rows
