"""How far the clocks of ranks are apart, so that a picture shows what happened at the same time."""

from __future__ import annotations

import time

from .world import World

ROUNDS = 20


def clock_offset(world: World) -> float:
    """Seconds to add to this rank's `time.perf_counter` to get rank 0's. All ranks call it.

    They meet again and again, and read their clocks after each round. No rank leaves a round before
    all have come to it. So rank 0 leaves it later than this rank has left the round before, and
    earlier than this rank leaves the next one. Of 20 rounds the one is used in which these two are
    closest. An offset below that distance, which is the error at most, counts as 0, as on one
    machine.
    """
    clocks = []
    for _ in range(ROUNDS):
        world.gather(None)
        clocks.append(time.perf_counter())
    theirs = world.gather(clocks)[0]
    rounds = zip(clocks, clocks[1:], theirs[1:], clocks[2:], strict=False)
    error, offset = min((after - before, there - here) for before, here, there, after in rounds)
    return offset if abs(offset) > error else 0.0
