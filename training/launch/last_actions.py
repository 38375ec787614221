"""What each rank did last: the table below a failure.

Problem: a rank that times out knows which rank it waited for, but that one may wait for a third.
The culprit, which is slow, hung or stopped, says nothing.

Idea: a rank notes each action as it begins, in memory that all ranks of its machine share. The
first failure prints every rank's last action. The launcher makes this memory; under torchrun it is
a file in the folder that torchrun makes on each machine. Of several machines each that a failure
reaches puts its ranks' actions into torchrun's store; ranks whose actions are not there are
elsewhere.

    2 of 3 ranks wait in receive of step 41; rank 2 is elsewhere: look there
    rank  last action     stage, layer or bucket  micro-batch  peer  begun
       0  receive                              0            1     1  1.0 s ago
       1  receive                              1            1     2  1.0 s ago
       2  forward                              2            1        1.1 s ago    <- the culprit

`after forward` means that the forward has ended and nothing has begun since.

Cost: about 3 microseconds per action; after a failure on several machines at most `SAID` seconds
for a rank that waits, and one more if the store does not answer.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import TimeoutError as NoAnswerError
from pathlib import Path
from typing import Any

from .meeting import in_time
from .world import LastAction

WAITS = {  # actions that end when other ranks act
    "send", "receive", "all-reduce", "all-gather", "reduce-scatter", "wait for all ranks",
    "comparison of replicas",
}  # fmt: skip

SAID = 2.0  # seconds in which a failure of the exchange has reached all ranks that wait


def in_file(path: Path, size: int) -> Any:
    """The last actions of `size` ranks, in a memory-mapped file."""
    nbytes = size * ctypes.sizeof(LastAction)
    with path.open("a+b") as file:
        file.truncate(nbytes)
        return (LastAction * size).from_buffer(mmap.mmap(file.fileno(), nbytes))


def of_all_machines(
    store: Any, actions: Sequence[LastAction], first_rank: int, world_size: int, waits: bool
) -> list[LastAction]:
    """Puts this machine's last actions into the store of this attempt. If this rank `waits`, also
    returns those of all ranks: of a machine that has put none there in time, actions that are no
    waits. Otherwise, or if the store's host does not answer, returns none.

    A rank that fails while it computes does not ask: the others hear of it when it has ended.
    """
    keys = [f"last action of {rank}" for rank in range(world_size)]

    def ask() -> list[LastAction]:
        for rank, action in enumerate(actions, first_rank):
            store.set(keys[rank], bytes(action))
        if not waits:
            return []
        end = time.monotonic() + SAID
        while time.monotonic() < end and not store.check(keys):
            time.sleep(SAID / 100)
        silent = bytes(LastAction(b"silent", begun=end))
        said = [store.get(key) if store.check([key]) else silent for key in keys]
        return [LastAction.from_buffer_copy(one) for one in said]

    try:
        return in_time(SAID + 1, ask)
    except (RuntimeError, NoAnswerError):  # the store's host is gone, or stopped
        return []


def verdict(actions: Sequence[LastAction], first_rank: int = 0) -> str:
    """Where to look: what ranks wait in, and who does not wait; or, if all wait, who does not wait
    in the same as most. Empty if none waits, or all wait in the same."""
    names = [action.name.decode() for action in actions]
    waits = Counter(name for name in names if name in WAITS)
    if not waits or not all(action.begun for action in actions):  # all are on their way
        return ""
    if waits.total() == len(names):
        waits = Counter(dict(waits.most_common(1)))
    elsewhere = [rank for rank, name in enumerate(names, first_rank) if name not in waits]
    if not elsewhere:
        return ""
    count, most = waits.total(), [name for name, _ in waits.most_common()]
    step = next(a.step for a, name in zip(actions, names, strict=True) if name == most[0])
    who = f"rank {elsewhere[0]} is" if len(elsewhere) == 1 else f"ranks {elsewhere} are"
    wait = "waits" if count == 1 else "wait"
    return (
        f"{count} of {len(names)} ranks {wait} in {' and '.join(most)} of step {step}; {who} "
        "elsewhere: look there\n"
    )


def table(
    actions: Sequence[LastAction], first_rank: int = 0, everyone: Sequence[LastAction] = ()
) -> str:
    """A line per rank of this machine, numbered from its first one, under where to look: among them
    or, if there are other machines, among `everyone`."""
    now = time.monotonic()
    lines = ["rank  last action               stage, layer or bucket  micro-batch  peer  begun"]
    for rank, action in enumerate(actions, first_rank):
        numbers = (action.place, action.microbatch, action.peer)
        place, microbatch, peer = ["" if n < 0 or not action.begun else n for n in numbers]
        begun = f"{now - action.begun:.1f} s ago" if action.begun else "not yet"
        lines.append(
            f"{rank:4}  {action.name.decode():24}{place:>24}{microbatch:>13}{peer:>6}  {begun}"
        )
    where = verdict(everyone) if everyone else verdict(actions, first_rank)
    return where + "".join(f"{line}\n" for line in lines)
