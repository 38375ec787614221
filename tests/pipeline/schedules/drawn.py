"""Schedules drawn at random: valid, and unlike any named one. And the names of those schedules that
have one stage per rank."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pipeline.schedules.catalogue import SCHEDULES, V_SHAPED
from pipeline.schedules.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Schedule,
    dependencies,
    ended_with,
)

ONE_EACH = tuple(name for name in SCHEDULES if name not in ("interleaved", *V_SHAPED))


def drawn(ranks: Sequence[int], num_microbatches: int, seed: int) -> Schedule:
    """A valid schedule of stages on these ranks. Micro-batches come in any order, forward and
    backward; some backwards are whole, others in halves."""
    draws, stages = random.Random(seed), len(ranks)
    left = {
        Action(kind, s, i)
        for s in range(stages)
        for i in range(num_microbatches)
        for kind in ((FORWARD, BACKWARD) if draws.random() < 0.5
                     else (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT))
    }  # fmt: skip
    lists: Schedule = [[] for _ in range(max(ranks) + 1)]
    done: set[Action] = set()
    while left:
        able = [a for a in sorted(left) if done.issuperset(dependencies(a, stages))]
        action = draws.choice(able)
        left.remove(action)
        done.update(ended_with(action))
        lists[ranks[action.stage]].append(action)
    return lists
