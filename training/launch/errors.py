"""How a program ends: by a user's mistake or a failure, reported once.

Under torchrun every rank runs the whole program: all find the same mistake, and one rank's failure
makes others fail. torchrun ends all ranks as soon as one has ended. So a rank whose message another
rank prints too, or can explain better, stays silent for GRACE seconds, in which torchrun ends it.

This module does not import torch: a mistyped option is answered at once.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn, TypeVar

T = TypeVar("T")
GRACE = 5.0  # seconds for the rank with the original error to report


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


def parameters(number: int) -> str:
    """The size of a model: 3.8 M parameters, or 4,528 parameters."""
    return f"{number / 1e6:,.1f} M parameters" if number >= 1e6 else counted(number, "parameter")


def listed(words: Iterable[str], last: str) -> str:
    """A list as in a sentence: a, b and c. `last` is the word before the last one."""
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


def first_sentence(error: BaseException) -> str:
    """The kind of an error of `transformers`, and what it says, without the advice that follows."""
    first, *_ = re.split(r"\. |\n", str(error), maxsplit=1)
    return f"{type(error).__name__}: {first[:160]}"


class RunError(Exception):
    """The run cannot continue, and the text explains why, e.g. a NaN loss: programs print it as one
    line, without traceback, and end with its status."""

    status = 1


def torchrun(name: str, otherwise: T) -> int | T:
    """A number that torchrun gives its ranks, such as WORLD_SIZE or LOCAL_RANK; `otherwise` if
    torchrun did not start this process."""
    return int(os.environ[name]) if "TORCHELASTIC_RUN_ID" in os.environ else otherwise


def torchrun_world_size() -> int | None:
    """The number of ranks that torchrun started, or None without torchrun."""
    return torchrun("WORLD_SIZE", None)


def say(text: str) -> None:
    """Prints in one piece: ranks may share a terminal. There it erases what is left of a progress
    bar (training/files.py)."""
    with suppress(OSError, RuntimeError):  # it is closed; a signal came in the middle of writing
        sys.stderr.write("\r\x1b[K" * sys.stderr.isatty() + text)
        sys.stderr.flush()


def of_memory(error: BaseException) -> str:
    """A line above the traceback if there was too little memory, of the CPU or of a GPU; else
    nothing. For the CPU, torch raises a plain RuntimeError."""
    of_kind = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not of_kind and "allocate memory" not in str(error):
        return ""
    return (
        "It ran out of memory. These need less, in evaluation, too: a smaller --batch_size, more "
        "--num_microbatches, a smaller --model_max_length, --recompute always, a smaller model, "
        "more ranks under fsdp.\n"
    )


def format_error(error: BaseException) -> str:
    """The traceback, with the notes that Python 3.10 would leave out."""
    text = of_memory(error) + "".join(traceback.format_exception(error))
    notes: list[str] = getattr(error, "__notes__", []) if sys.version_info < (3, 11) else []
    return text + "".join(f"{note}\n" for note in notes)


def refuse(message: str, status: int = 2) -> NoReturn:
    """Prints a user's mistake and ends the program. Under torchrun only each host's first rank
    prints it, and only in the first attempt that makes it: torchrun restarts ranks, whatever their
    status."""
    if torchrun_world_size() is None:
        say(message)
        raise SystemExit(status)
    if torchrun("LOCAL_RANK", 0):
        time.sleep(GRACE)
    leave("" if _was_said(message) else message, status)


def _was_said(message: str) -> bool:
    """Whether it is the last message of an earlier attempt of torchrun on this host."""
    with suppress(KeyError, IndexError, OSError):
        file = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[2] / "refused"  # of all attempts
        before = file.read_text("utf-8") if file.exists() else ""
        file.write_text(message, "utf-8", "backslashreplace")
        return message == before
    return False


def leave(message: str, status: int) -> NoReturn:
    """Ends this process at once: to take process groups down may wait for ranks for ever."""
    with suppress(OSError, RuntimeError):  # its reader has ended; or as in `say`
        sys.stdout.flush()
    say(message)
    os._exit(status)


def open_streams() -> None:
    """Replaces a standard stream that is closed (`>&-`) by one that nobody reads. Otherwise
    Python's is None, and the next file that is opened gets the stream's number, and so what a
    library prints. A letter that the encoding lacks (LC_ALL=C, PYTHONIOENCODING) is escaped:
    \\xfc."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        name, mode = [("stdin", "r"), ("stdout", "w"), ("stderr", "w")][number]
        setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
    os.close(number)
    if isinstance(sys.stdout, TextIOWrapper):  # and not what a notebook puts there
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error has it
