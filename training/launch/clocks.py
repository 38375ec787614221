"""How far the clocks of ranks are apart, so that a picture shows what happened at the same time."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from .world import World

ROUNDS = 20


def clock_offset(world: World) -> float:
    """Seconds to add to this rank's `time.perf_counter` to get rank 0's. All ranks call it.

    Cristian, "Probabilistic clock synchronization" (1989): rank r asks rank 0 for its time, and
    assumes that it was read in the middle of the round trip; the error is at most half of that. Of
    20 round trips the shortest is used. An offset below its error counts as 0, as on one machine.
    """
    rank, world_size = world.rank, world.world_size
    if world_size == 1:
        return 0.0
    message = torch.zeros(1, dtype=torch.float64)  # a clock, in seconds
    if rank == 0:
        for other in range(1, world_size):  # one after the other; those behind wait
            for _ in range(ROUNDS):
                dist.recv(message, other)  # its question; the content does not matter
                message.fill_(time.perf_counter())
                dist.send(message, other)
        return 0.0
    trips = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        dist.send(message, 0)
        dist.recv(message, 0)
        theirs = message.item()
        end = time.perf_counter()
        trips.append((end - start, theirs - (start + end) / 2))
    round_trip, offset = min(trips)  # of the shortest trip
    return offset if abs(offset) > round_trip / 2 else 0.0
