"""What each rank did last: the table below a failure.

Problem: a rank that times out knows which rank it waited for, but that one may wait for a third.
The culprit, which is slow, hung or stopped, says nothing.

Idea: a rank notes each action as it begins, in memory that all ranks of its machine share. The
first failure prints every rank's last action. The launcher makes this memory; under torchrun it is
a file in the folder that torchrun makes on each machine, and each machine prints its own ranks.

    2 of 3 ranks wait in receive of step 41; look at rank 2
    rank  last action     stage, layer or bucket  micro-batch  peer  begun
       0  receive                              0            1     1  1.0 s ago
       1  receive                              1            1     2  1.0 s ago
       2  forward                              2            1        1.1 s ago    <- the culprit

`after forward` means that the forward has ended and nothing has begun since.

Cost: about 3 microseconds per action.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import listed
from .world import LastAction

WAITS = {  # actions that end when other ranks act
    "send", "receive", "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
    "wait for all ranks", "comparison of replicas",
}  # fmt: skip


def in_file(path: Path, size: int) -> Any:
    """The last actions of `size` ranks, in a memory-mapped file."""
    nbytes = size * ctypes.sizeof(LastAction)
    with path.open("a+b") as file:
        file.truncate(nbytes)
        return (LastAction * size).from_buffer(mmap.mmap(file.fileno(), nbytes))


def in_memory(size: int) -> Any:
    """The last actions of `size` ranks, in memory that this process shares with its forks."""
    return (LastAction * size).from_buffer(mmap.mmap(-1, size * ctypes.sizeof(LastAction)))


def verdict(actions: Sequence[LastAction], first_rank: int = 0) -> str:
    """Where to look: what ranks wait in, and who does not wait. Empty if none waits, or all do."""
    names = [action.name.decode() for action in actions]
    waits = Counter(name for name in names if name in WAITS)
    others = [str(rank) for rank, name in enumerate(names, first_rank) if name not in waits]
    if not waits or not others:
        return ""
    step = next(a.step for a, name in zip(actions, names, strict=True) if name in waits)
    return (
        f"{waits.total()} of {len(names)} ranks wait in {listed(waits, 'and')} of step {step}; "
        f"look at rank {listed(others, 'and')}\n"
    )


def table(actions: Sequence[LastAction], first_rank: int = 0) -> str:
    """A line per rank of this machine, numbered from its first one, under where to look."""
    now = time.monotonic()
    lines = ["rank  last action               stage, layer or bucket  micro-batch  peer  begun"]
    for rank, action in enumerate(actions, first_rank):
        numbers = (action.place, action.microbatch, action.peer)
        place, microbatch, peer = ["" if n < 0 or not action.begun else n for n in numbers]
        begun = f"{now - action.begun:.1f} s ago" if action.begun else "not yet"
        lines.append(
            f"{rank:4}  {action.name.decode():24}{place:>24}{microbatch:>13}{peer:>6}  {begun}"
        )
    return verdict(actions, first_rank) + "".join(f"{line}\n" for line in lines)
