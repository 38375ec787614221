"""How a program ends: by a user's mistake, a failure, a signal or on notice, each reported once.

Under torchrun every rank runs the whole program: all find the same mistake, and one rank's failure
makes others fail. torchrun ends all ranks as soon as one has ended. So a rank whose message another
rank prints too, or can explain better, stays silent for GRACE seconds, in which torchrun ends it.

A scheduler gives notice before it takes a machine away: SIGTERM, or SIGUSR1. Two minutes later
everything is killed. What was computed since the last checkpoint is lost unless all ranks save it
now, after the same step; and the signal may reach only one of them. So a signal only sets a flag.
At the end of a step the ranks sum their flags, in the all-reduce that they make anyway
(training/optimization.py); so all see it after the same step, save and end. In evaluation and
translation, which the epoch's checkpoint precedes, a rank just ends. Whoever starts ranks passes
the signal on to them as SIGUSR1, which may come several times. A second SIGTERM ends at once.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn, TypeVar

if not hasattr(signal, "SIGHUP"):
    raise SystemExit(
        "This program runs on Linux and macOS. On Windows use WSL (wsl --install), or a container."
    )

T = TypeVar("T")
GRACE = 5.0  # seconds for the rank with the original error to report, or for a process to end
OF_TERMINAL: list[int] = [signal.SIGINT, signal.SIGHUP]
NOTICES: list[int] = [signal.SIGTERM, signal.SIGUSR1]
ASKED = [*OF_TERMINAL, *NOTICES]
TOGETHER = 1.0  # seconds in which two SIGTERMs are one: `timeout` sends two
# The notice that this process was given, inside `heeded`: signals, and when each first came.
NOTICED: dict[int, float] = {}


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


def listed(words: Iterable[str], last: str) -> str:
    """A list as in a sentence: a, b and c. `last` is the word before the last one."""
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


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


# Notice


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
            heard = bool(NOTICED)
            first = NOTICED.setdefault(number, time.monotonic())
            if number == signal.SIGTERM and time.monotonic() > first + TOGETHER:
                stack.close()  # what was there before is there again
                os.kill(os.getpid(), number)
            for process in () if heard else processes:  # a second might find them at their end
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)

        stack.callback(NOTICED.clear)
        if on_signal != "end":
            stack.enter_context(handled(NOTICES, heed))
        yield NOTICED


def end_if_given() -> None:
    """In a loop of the evaluation: raises Ended if this process was given notice."""
    if NOTICED:
        raise Ended


@contextmanager
def ends_waits() -> Iterator[None]:
    """In the evaluation a rank that was given notice ends at its next turn. Within this a rank that
    waits for one, and loses its connection, ends alike if it was given notice, too."""
    try:
        yield
    except RuntimeError:
        if NOTICED:
            raise Ended from None
        raise
