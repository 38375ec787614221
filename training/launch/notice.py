"""The notice that a scheduler gives before it takes a machine away: SIGTERM, or SIGUSR1.

Problem: two minutes later everything is killed. What was computed since the last checkpoint is lost
unless all ranks save it now, after the same step; and the signal may reach only one of them.

Idea: a signal only sets a flag. At the end of a step the ranks sum their flags, in the all-reduce
that they make anyway (training/optimization.py); so all see it after the same step, save and end.
In evaluation and translation, which the epoch's checkpoint precedes, a rank just ends. Whoever
starts ranks passes the signal on to them as SIGUSR1, which may come several times. A second SIGTERM
ends at once.

Cost: one number in an all-reduce; a step's time until the save.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from .errors import RunError, handled, torchrun

NOTICES = (signal.SIGTERM, signal.SIGUSR1)
TOGETHER = 1.0  # seconds in which two SIGTERMs are one: `timeout` sends two

_given: dict[int, float] = {}  # signals of this process, inside `heeded`, and when each first came


class Ended(RunError):  # noqa: N818 (nothing failed)
    """The run has ended early because it was asked to. Its status, 75, says: try again later. On
    one host torchrun gets 0, since it restarts ranks that end with another one. On several that is
    right: hosts that got no notice go on without the one that is taken away, if they may."""

    @property
    def status(self) -> int:  # type: ignore[override]
        """The exit status of the process."""
        return 0 if torchrun("GROUP_WORLD_SIZE", None) == 1 else os.EX_TEMPFAIL


@contextmanager
def heeded(on_signal: str = "save", processes: Sequence[Any] = ()) -> Iterator[Collection[int]]:
    """Within it a notice sets the flag, and is passed on to the processes, unless `on_signal` is
    "end". A second SIGTERM meets what was there before. Yields the signals so far, in order."""
    with ExitStack() as stack:

        def heed(number: int, _: Any) -> None:
            heard = bool(_given)
            first = _given.setdefault(number, time.monotonic())
            if number == signal.SIGTERM and time.monotonic() > first + TOGETHER:
                stack.close()  # what was there before is there again
                os.kill(os.getpid(), number)
            for process in () if heard else processes:  # a second might find them at their end
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)

        stack.callback(_given.clear)
        if on_signal != "end":
            stack.enter_context(handled(NOTICES, heed))
        yield _given


def given() -> bool:
    """Whether this process was given notice."""
    return bool(_given)


def end_if_given() -> None:
    """In a loop of the evaluation: raises Ended if this process was given notice."""
    if given():
        raise Ended


@contextmanager
def ends_waits() -> Iterator[None]:
    """In the evaluation a rank that was given notice ends at its next turn. Within this a rank that
    waits for one, and loses its connection, ends alike if it was given notice, too."""
    try:
        yield
    except RuntimeError:
        if given():
            raise Ended from None
        raise
