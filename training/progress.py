"""A line that moves on a terminal: how far a run is, its loss, and the time left.

It goes to standard error, and only where that is a terminal: nothing of it is in a file or a pipe.
`training.launch.errors.say` erases what an interrupted run has left of it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

WIDTH, HEIGHT = 80, 24  # of a terminal that does not know its own, as that of some containers

# Lines of one process need only a lock among threads. tqdm's default is a named semaphore among
# processes, which a killed run would leave in /dev/shm.
tqdm.set_lock(threading.RLock())


def moving(
    items: Iterable[Any] | None,
    what: str,
    total: int | None,
    unit: str,
    *,
    shown: bool = True,
    done: int = 0,
) -> tqdm[Any]:
    """The items, with a line such as `Epoch 1 |███   | step 12 of 79, loss 3.214, 00:34 left`.

    Args:
        items: what is iterated over; None: the caller calls `update(n)`.
        shown: on one rank alone; the others only iterate.
        done: of `total`, before the first item.
    """
    known = sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    return tqdm(
        items, what, total, initial=done, unit=unit, leave=False,
        disable=None if shown else True,  # None: unless it is a terminal
        ncols=None if known else WIDTH, nrows=None if known else HEIGHT, dynamic_ncols=known,
        bar_format="{desc} |{bar}| {unit} {n_fmt} of {total_fmt}{postfix}, {remaining} left",
    )  # fmt: skip
