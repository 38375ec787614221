"""How a program ends: by a user's mistake, a failure or a signal, each reported once.

Under torchrun every rank runs the whole program: all find the same mistake, and one rank's failure
makes others fail. torchrun ends all ranks as soon as one has ended. So a rank whose message another
rank prints too, or can explain better, stays silent for GRACE seconds, in which torchrun ends it.

This module does not import torch: a mistyped option is answered at once.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

if not hasattr(signal, "SIGHUP"):
    raise SystemExit(
        "This program runs on Linux and macOS. On Windows use WSL (wsl --install), or a container."
    )

T = TypeVar("T")
GRACE = 5.0  # seconds for the rank with the original error to report, or for a process to end
OF_TERMINAL: list[int] = [signal.SIGINT, signal.SIGHUP]
ASKED = [*OF_TERMINAL, signal.SIGTERM, signal.SIGUSR1]


class UserError(Exception):
    """A user's mistake: programs print it as one line and end with status 2. The text gives the
    value, the rule, and a setting that works."""

    status = 2


def works(option: str, most: int, least: int = 1) -> str:
    """The end of a UserError's text: the values of an option that work."""
    return f"{option} {f'{least} to {most}' if most > least else most} works"


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 pair, 2 pairs."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class RunError(Exception):
    """The run cannot continue, and the text explains why, e.g. a NaN loss: programs print it as one
    line, without traceback, and end with its status."""

    status = 1


class Interrupted(SystemExit):
    """This process was asked to end, by a signal: its status is 128 + the signal."""


def torchrun(name: str, otherwise: T) -> int | T:
    """A number that torchrun gives its ranks, such as WORLD_SIZE or LOCAL_RANK; `otherwise` if
    torchrun did not start this process."""
    return int(os.environ[name]) if "TORCHELASTIC_RUN_ID" in os.environ else otherwise


def torchrun_world_size() -> int | None:
    """The number of ranks that torchrun started, or None without torchrun."""
    return torchrun("WORLD_SIZE", None)


def say(text: str) -> None:
    """Prints in one piece: ranks may share a terminal. There it erases what is left of a line that
    moved (training.files.py)."""
    with suppress(OSError):  # a terminal that is closed
        sys.stderr.write("\r\x1b[K" * sys.stderr.isatty() + text)
        sys.stderr.flush()


def of_memory(error: BaseException) -> str:
    """A line above the traceback if there was too little memory, of the CPU or of a GPU; else
    nothing. torch says the former with a plain RuntimeError."""
    of_kind = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not of_kind and "allocate memory" not in str(error):
        return ""
    return (
        "It ran out of memory. A smaller --batch_size, more --num_microbatches and --recompute "
        "always need less; a smaller model, or more ranks under fsdp, too.\n"
    )


def format_error(error: BaseException) -> str:
    """The traceback, with the notes that Python 3.10 would leave out."""
    text = of_memory(error) + "".join(traceback.format_exception(error))
    notes: list[str] = getattr(error, "__notes__", []) if sys.version_info < (3, 11) else []
    return text + "".join(f"{note}\n" for note in notes)


def refuse(message: str, status: int = 2) -> NoReturn:
    """Prints a user's mistake and ends the program. Under torchrun each host's first rank does."""
    if torchrun_world_size() is None:
        say(message)
        raise SystemExit(status)
    if torchrun("LOCAL_RANK", 0):
        time.sleep(GRACE)
    leave(message, status)


def leave(message: str, status: int) -> NoReturn:
    """Ends a rank at once: destructors of process groups may wait for ranks that never come."""
    with suppress(OSError):  # its reader may have ended
        sys.stdout.flush()
    say(message)
    os._exit(status)


def answer(numbers: Iterable[int], handler: Any) -> None:
    """From now on the handler is called with each of these signals; or the system's own ending
    holds (SIG_DFL), or nothing happens (SIG_IGN)."""
    for number in numbers:
        signal.signal(number, handler)


def heard() -> list[int]:
    """The signals by which this process may be asked to end; not one that is ignored, as under
    nohup."""
    return [number for number in ASKED if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Within it the handler is called with each signal that comes."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


def open_streams() -> None:
    """Makes a standard stream that is closed (`>&-`) one that nobody reads. Otherwise Python's is
    None, and the next file that is opened gets its number, and what a library prints."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        name, mode = [("stdin", "r"), ("stdout", "w"), ("stderr", "w")][number]
        setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
    os.close(number)


def exit_on_signals() -> None:
    """From now on Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP end the process at once: while libraries are
    imported, one of which may swallow an exception, and as process 1 of a container, which the
    system does not end by itself. `signals_end` takes over later."""
    answer(heard(), lambda number, _: os._exit(128 + number))


@contextmanager
def signals_end() -> Iterator[None]:
    """Within it Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP raise Interrupted, so that half-written files
    are removed and no traceback is printed. A signal that is ignored, as under nohup, stays
    ignored. Ranks of torchrun are left alone: they end at once."""
    if torchrun_world_size() is not None:
        yield
        return
    late: list[threading.Timer] = []

    def end(number: int, _: object) -> None:
        if late:  # a second one must not interrupt the ending
            return
        # The exception may be lost: in a destructor or callback Python only prints it.
        late.append(threading.Timer(GRACE, os._exit, (128 + number,)))
        late[0].daemon = True
        late[0].start()
        raise Interrupted(128 + number)

    atexit.register(
        answer, ASKED, signal.SIG_IGN
    )  # the run is over: a signal must not change its status
    try:
        with handled(heard(), end):
            yield
    finally:
        if late:  # this replaces what writing to a closed terminal may have raised since
            late[0].cancel()
            raise Interrupted(*late[0].args) from None
