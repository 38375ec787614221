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

`after forward` means that the forward has ended and nothing has begun since. Every wait for other
ranks is noted, even at the end of a step, an evaluation or a checkpoint: otherwise a rank that
waits would look like one that works. A rank that is stopped cannot say so: the system tells.

Cost: about 3 microseconds per action.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import listed

WAIT = "wait for all ranks"
WAITS = {  # actions that end when other ranks act
    "send", "receive", "all-reduce", "all-gather", "reduce-scatter", "all-to-all", WAIT,
}  # fmt: skip


class LastAction(ctypes.Structure):
    """What a rank does, or did last. Place, micro-batch and peer may be -1: none. `begun` is
    time.monotonic, which all processes of a machine share; `step` is the step of the run; `process`
    is the rank's process id."""

    _fields_ = (
        ("name", ctypes.c_char * 32),
        ("place", ctypes.c_int),
        ("microbatch", ctypes.c_int),
        ("peer", ctypes.c_int),
        ("begun", ctypes.c_double),
        ("step", ctypes.c_int),
        ("process", ctypes.c_int),
    )

    def note(self, name: str, place: int = -1, microbatch: int = -1, peer: int = -1) -> None:
        """Notes an action that begins now."""
        self.name = name.encode()
        self.place, self.microbatch, self.peer = place, microbatch, peer
        self.begun, self.process = time.monotonic(), os.getpid()

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Notes an action within another. That is noted again afterwards, unless this raises."""
        before = bytes(self)
        self.note(name)
        yield
        ctypes.memmove(ctypes.addressof(self), before, len(before))

    def waiting(self) -> AbstractContextManager[None]:
        """Notes a wait for other ranks."""
        return self.during(WAIT)

    @property
    def is_wait(self) -> bool:
        """Whether it ends when other ranks act."""
        return self.name.decode() in WAITS

    @property
    def is_stopped(self) -> bool:
        """Whether the system has stopped the rank, as far as it tells."""
        with suppress(OSError):
            # PID (NAME) STATE ...: a name may have brackets, too.
            status = Path(f"/proc/{self.process}/stat").read_text()
            return status.rpartition(") ")[2][0] in "Tt"
        return False


def in_file(path: Path, size: int) -> Any:
    """The last actions of `size` ranks, in a memory-mapped file."""
    nbytes = size * ctypes.sizeof(LastAction)
    with path.open("a+b") as file:
        file.truncate(nbytes)
        return (LastAction * size).from_buffer(mmap.mmap(file.fileno(), nbytes))


def in_memory(size: int) -> Any:
    """The last actions of `size` ranks, in memory that this process shares with its forks."""
    return (LastAction * size).from_buffer(mmap.mmap(-1, size * ctypes.sizeof(LastAction)))


def verdict(actions: Sequence[LastAction], first_rank: int = 0, failed: int | None = None) -> str:
    """Where to look: what ranks wait in, and who does not wait. Empty if none waits, or all do.

    Args:
        failed: a rank that has ended by itself, and not because it waited in vain. Then only this
            one is named; otherwise only stopped ranks, if there are any.
    """
    ranks = {*range(len(actions))}
    stopped = {r for r in ranks if actions[r].is_stopped}
    alone = stopped if failed is None else {failed - first_rank}
    waiting = [a for r, a in enumerate(actions) if a.is_wait and r not in alone]
    culprits = alone or {r for r in ranks if not actions[r].is_wait}
    if not waiting or not culprits:
        return ""
    names = Counter(action.name.decode() for action in waiting)
    culprit = listed([str(first_rank + r) for r in sorted(culprits)], "and")
    return (
        f"{len(waiting)} of {len(ranks)} ranks wait in {listed(names, 'and')} of step "
        f"{waiting[0].step}; look at rank {culprit}{' (stopped)' if culprits == stopped else ''}\n"
    )


def table(actions: Sequence[LastAction], first_rank: int = 0, failed: int | None = None) -> str:
    """A line per rank of this machine, numbered from its first one, under where to look; see
    `verdict`."""
    now = time.monotonic()
    lines = ["rank  last action               stage, layer or bucket  micro-batch  peer  begun"]
    for rank, action in enumerate(actions, first_rank):
        numbers = (action.place, action.microbatch, action.peer)
        place, microbatch, peer = ["" if n < 0 or not action.begun else n for n in numbers]
        begun = f"{now - action.begun:.1f} s ago" if action.begun else "not yet"
        lines.append(
            f"{rank:4}  {action.name.decode():24}{place:>24}{microbatch:>13}{peer:>6}  {begun}"
        )
    return verdict(actions, first_rank, failed) + "".join(f"{line}\n" for line in lines)
