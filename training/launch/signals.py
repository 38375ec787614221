"""What a signal does to a process: Ctrl-C, SIGHUP when the terminal closes, and notice, which a
scheduler gives before it takes a machine away: SIGTERM, SIGUSR1 (Slurm if asked, SGE), SIGUSR2
(submitit, SGE, LSF) or SIGXCPU (time is used up).

    process                    at Ctrl-C, SIGHUP           at notice, while it trains
    a program with ranks       ends, and ends its ranks    passes the notice on to its ranks
    a program without ranks    ends                        saves the step, or leaves the evaluation;
                                                           and ends
    a rank of a program        goes on: its program        the same
                               ends it
    a rank of torchrun         ends                        the same

Before and after the training, notice ends a process like any other signal. A signal that is
ignored, as under nohup, stays ignored. Each part of a program sets its own handlers (`handlers`),
and restores those of the part around it when it is left.

A scheduler kills all processes soon after its notice, often within two minutes. What was computed
since the last checkpoint is lost unless all ranks save it now, after the same step; and the signal
may reach only one of them. So notice only sets a flag. At the end of a step the ranks sum their
flags, in the all-reduce that they make anyway (training/optimization.py); so all see it after the
same step, save and end. The epoch's checkpoint precedes its evaluation, so there a rank just ends.
A second SIGTERM ends a process at once.

This module does not import torch: it is the first that a program needs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import active_children
from typing import Any, NoReturn

from .errors import RunError, leave, torchrun

if not hasattr(signal, "SIGHUP"):
    raise SystemExit(
        "This program runs on Linux and macOS. On Windows use WSL (wsl --install), or a container."
    )

TERMINAL_SIGNALS: list[int] = [signal.SIGINT, signal.SIGHUP]
NOTICE_SIGNALS: list[int] = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
ENDING_SIGNALS = [*TERMINAL_SIGNALS, *NOTICE_SIGNALS]
TOGETHER = 1.0  # seconds in which two SIGTERMs are one: `timeout` sends two
# The flag: the notices that this process was given inside `notice_sets_flag`, by signal, with the
# time at which each first came.
NOTICES_GIVEN: dict[int, float] = {}


def die_with_parent() -> None:
    """Linux kills this process when its parent ends, however that happens, even while it is
    stopped. Elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Ended(RunError):  # noqa: N818 (nothing failed)
    """The run has ended early because it was asked to. Its status, 75, says: try again later. On
    one host torchrun gets 0, since it restarts ranks that end with any other status. On several
    a restart is right: hosts without notice go on without the one that is taken away, if they
    may."""

    @property
    def status(self) -> int:  # type: ignore[override]
        """The exit status of the process."""
        return 0 if torchrun("GROUP_WORLD_SIZE", None) == 1 else os.EX_TEMPFAIL


def set_handlers(numbers: Sequence[int], handler: Any) -> dict[int, Any]:
    """Sets the handler of each of these signals that is not ignored: a function, or SIG_DFL (the
    system ends the process) or SIG_IGN (nothing happens). Returns the previous handlers."""
    before = {number: signal.getsignal(number) for number in numbers}
    for number, earlier in before.items():
        if earlier is not signal.SIG_IGN:
            signal.signal(number, handler)
    return before


@contextmanager
def handlers(numbers: Sequence[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Within it the handler is called with each of these signals that is not ignored."""
    before = set_handlers(numbers, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def end_process(number: int, _: object = None, message: str = "") -> NoReturn:
    """Ends this process and those that it has started, as a signal of this number does. (An
    exception might be swallowed by a library, or interrupt a destructor, where it is only
    printed.)"""
    for process in active_children():
        process.kill()
        process.join()
    leave(message, 128 + number)


@contextmanager
def notice_sets_flag(processes: Sequence[Any] = ()) -> Iterator[None]:
    """Within it a notice sets the flag, and is passed on to the processes."""

    def set_flag(number: int, _: object) -> None:
        is_first = not NOTICES_GIVEN
        since = NOTICES_GIVEN.setdefault(number, time.monotonic())
        if number == signal.SIGTERM and time.monotonic() > since + TOGETHER:
            end_process(number)
        for process in processes if is_first else ():  # a second one might hit them at their end
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)

    with handlers(NOTICE_SIGNALS, set_flag):
        try:
            yield
        finally:
            NOTICES_GIVEN.clear()


@contextmanager
def notice_raises() -> Iterator[None]:
    """Within it a notice raises Ended. If a rank loses its connection to one that has ended so, it
    raises Ended, too, if it was given notice: the notice is handled before the error."""

    def raise_ended(number: int, _: object) -> None:
        if not NOTICES_GIVEN:
            NOTICES_GIVEN[number] = time.monotonic()
            raise Ended

    with handlers(NOTICE_SIGNALS, raise_ended):
        if NOTICES_GIVEN:
            raise Ended
        yield
