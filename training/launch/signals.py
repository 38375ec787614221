"""What a signal does to a process: Ctrl-C, SIGHUP when the terminal closes, and notice (SIGTERM or
SIGUSR1), which a scheduler gives before it takes a machine away.

    to                        Ctrl-C, SIGHUP           notice
    a program                 ends it and its ranks    while it trains: passed on to its ranks
    ... without ranks         ends it                  while it trains: as a rank
    a rank of a program       nothing: see above       saves the step, or ends the evaluation
    a rank of torchrun        the system ends it       the same

Before and after the training notice ends a process like any other signal. A signal that is ignored,
as under nohup, stays ignored. Each part of a program answers signals in its own way (`handled`),
and gives them back to the part around it.

Two minutes after a notice everything is killed. What was computed since the last checkpoint is lost
unless all ranks save it now, after the same step; and the signal may reach only one of them. So it
only sets a flag. At the end of a step the ranks sum their flags, in the all-reduce that they make
anyway (training/optimization.py); so all see it after the same step, save and end. The epoch's
checkpoint precedes its evaluation: there a rank just ends. A second SIGTERM ends a process at once.

This module does not import torch: it is the first that a program needs.
"""

from __future__ import annotations

import os
import signal
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

OF_TERMINAL: list[int] = [signal.SIGINT, signal.SIGHUP]
NOTICES: list[int] = [signal.SIGTERM, signal.SIGUSR1]
ASKED = [*OF_TERMINAL, *NOTICES]
TOGETHER = 1.0  # seconds in which two SIGTERMs are one: `timeout` sends two
# The notice that this process was given, inside `heeded`: signals, and when each first came.
NOTICED: dict[int, float] = {}


class Ended(RunError):  # noqa: N818 (nothing failed)
    """The run has ended early because it was asked to. Its status, 75, says: try again later. On
    one host torchrun gets 0, since it restarts ranks that end with another one. On several that is
    right: hosts that got no notice go on without the one that is taken away, if they may."""

    @property
    def status(self) -> int:  # type: ignore[override]
        """The exit status of the process."""
        return 0 if torchrun("GROUP_WORLD_SIZE", None) == 1 else os.EX_TEMPFAIL


def answer(numbers: Sequence[int], handler: Any) -> dict[int, Any]:
    """From now on the handler is called with each of these signals that is not ignored; or the
    system's own ending holds (SIG_DFL), or nothing happens (SIG_IGN). Returns what was before."""
    before = {number: signal.getsignal(number) for number in numbers}
    for number, usual in before.items():
        if usual is not signal.SIG_IGN:
            signal.signal(number, handler)
    return before


@contextmanager
def handled(numbers: Sequence[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Within it the handler is called with each of these signals that is not ignored."""
    before = answer(numbers, handler)
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


def end(number: int, _: object = None, message: str = "") -> NoReturn:
    """Ends this process and those that it has started, as a signal of this number does. (An
    exception might be swallowed by a library, or interrupt a destructor, where it is only
    printed.)"""
    for process in active_children():
        process.kill()
        process.join()
    leave(message, 128 + number)


@contextmanager
def heeded(processes: Sequence[Any] = ()) -> Iterator[None]:
    """Within it a notice sets the flag, and is passed on to the processes."""

    def heed(number: int, _: object) -> None:
        is_first = not NOTICED
        since = NOTICED.setdefault(number, time.monotonic())
        if number == signal.SIGTERM and time.monotonic() > since + TOGETHER:
            end(number)
        for process in processes if is_first else ():  # a second might meet them at their end
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)

    with handled(NOTICES, heed):
        try:
            yield
        finally:
            NOTICED.clear()


@contextmanager
def ended_by_notice() -> Iterator[None]:
    """Within it a notice raises Ended. A rank that waits for one that has ended so, and loses its
    connection, raises Ended, too, if it was given notice: its own is handled before its error."""

    def raise_ended(number: int, _: object) -> None:
        if not NOTICED:
            NOTICED[number] = time.monotonic()
            raise Ended

    with handled(NOTICES, raise_ended):
        if NOTICED:
            raise Ended
        yield
