"""How far this rank's clock is from rank 0's, so that what all ranks did fits into one picture.

Problem. `time.perf_counter` is precise, but where it starts is each machine's own affair. On one
machine under Linux all processes read the same clock (CLOCK_MONOTONIC); elsewhere nothing is sure.

Idea (Cristian, "Probabilistic clock synchronization", 1989). Rank r notes its time, asks rank 0
for its, and notes when the answer is there. Rank 0 read its clock somewhere in between; taken to
be the middle, the error is at most half the round trip. Of a few round trips the shortest counts.
An offset that is smaller than its possible error tells nothing: it is taken to be 0, which it is
on one machine.

Cost: 20 round trips per rank, once. Clocks of two machines drift apart by some microseconds per
second, so this is for timelines of seconds and not of hours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

ROUNDS = 20


@dataclass(frozen=True)
class Clock:
    """`now() + offset` is the time of rank 0, give or take half of `round_trip`; seconds."""

    offset: float = 0.0
    round_trip: float = 0.0


def measure_clock(
    rank: int, world_size: int, now: Callable[[], float] = time.perf_counter, rounds: int = ROUNDS
) -> Clock:
    """The clock of this rank against rank 0's. All ranks of the default group call it together."""
    if world_size == 1:
        return Clock()
    on_gpu = "gloo" not in str(dist.get_backend())
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    message = torch.zeros(1, dtype=torch.float64, device=device)
    if rank == 0:
        for other in range(1, world_size):
            for _ in range(rounds):
                dist.recv(message, other)
                message.fill_(now())
                dist.send(message, other)
        return Clock()
    trips = []
    for _ in range(rounds):
        start = now()
        dist.send(message, 0)
        dist.recv(message, 0)
        theirs = message.item()  # on a GPU this waits until it is there
        end = now()
        trips.append((end - start, theirs - (start + end) / 2))
    round_trip, offset = min(trips)
    return Clock(offset if abs(offset) > round_trip / 2 else 0.0, round_trip)
