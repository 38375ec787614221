"""A schedule as a person reads it: its clock table, and how much it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from .schedule import HELD_MORE, Action, Schedule, clock_table, stage_ranks


def peak_alive(schedule: Schedule, held: Callable[[int], float] = lambda _: 1) -> list[float]:
    """Per rank, the most micro-batches whose activations (F until B or W) it holds at once, counted
    once for each of its stages; or the most bytes, if a micro-batch on stage s takes `held(s)`."""
    return [
        max(accumulate(HELD_MORE[kind] * held(stage) for kind, stage, _ in actions))
        for actions in schedule
    ]


def as_text(schedule: Schedule) -> str:
    """The clock table as text, one line per rank, as at the top of schedule.py. If a rank has
    several stages, a letter names the stage: see chunks.py."""
    ranks = stage_ranks(schedule)
    word = "stage" if len(ranks) == len(schedule) else "rank"
    lines = []
    for r, column in enumerate(zip(*clock_table(schedule), strict=True)):  # the clocks of rank r
        cells = ["." if action is None else name_of(action, ranks) for action in column]
        width = max(len(name_of(action, ranks)) for action in schedule[r])
        lines.append(f"{word} {r}: " + " ".join(f"{cell:{width}}" for cell in cells).rstrip())
    return "\n".join(lines)


def name_of(action: Action, ranks: Sequence[int]) -> str:
    """F0; if its rank, from `stage_ranks`, has several stages: F0a, F0b, ..."""
    stages = [s for s, r in enumerate(ranks) if r == ranks[action.stage]]  # its rank's: a, b, ...
    return str(action) + (chr(ord("a") + stages.index(action.stage)) if len(stages) > 1 else "")
