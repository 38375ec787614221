"""The notice that a scheduler gives before it takes a machine away: SIGTERM, or SIGUSR1.

Problem: two minutes later everything is killed. What was computed since the last checkpoint is lost
unless all ranks save it now, after the same step; and the signal may reach only one of them.

Idea: a signal only sets a flag. At the end of a step the ranks sum their flags, in the all-reduce
that they make anyway (training/optimization.py); so all see it after the same step, save and end.
Evaluation, which no checkpoint holds, looks at the flag itself. Whoever starts ranks passes the
signal on to them as SIGUSR1, which may come several times. A second SIGTERM ends at once.

Cost: one number in an all-reduce; a step's time until the save.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from .errors import RunError

NOTICES = (signal.SIGTERM, signal.SIGUSR1)

_given: list[int] = []  # the signals of this process


class Ended(RunError):  # noqa: N818 (nothing failed)
    """The run has ended early because it was asked to. Its status says: try again later."""

    status = os.EX_TEMPFAIL  # 75


@contextmanager
def heeded(on_signal: str) -> Iterator[None]:
    """Within it a notice sets the flag, unless `on_signal` is "end"."""
    if on_signal == "end":
        yield
        return

    def heed(number: int, _: Any) -> None:
        if number == signal.SIGTERM and number in _given:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        _given.append(number)

    _given.clear()
    before = {number: signal.signal(number, heed) for number in NOTICES}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def given() -> bool:
    """Whether this process was given notice."""
    return bool(_given)


def look() -> None:
    """Raises Ended if this process was given notice. For work that need not be finished."""
    if _given:
        raise Ended


@contextmanager
def passed_on(processes: Sequence[Any]) -> Iterator[list[int]]:
    """Within it the first notice is passed on to these processes, and the second one meets what was
    there before. Yields the signals so far."""
    came: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        came.append(number)
        restore()
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, pass_on) for number in NOTICES}
    try:
        yield came
    finally:
        restore()
