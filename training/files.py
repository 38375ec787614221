"""The names of a run's files, and how they are written: whole or not at all. Also what a run
prints, and its progress: the loss, and the time left.

Progress goes to standard error. On a terminal it is a bar; `training.launch.errors.say` erases what
an interrupted run has left of it. In a pipe or a log, whatever takes long writes a line now and
then:

    Tokenizing train: pair 1048576, 00:20
    Epoch 1: step 12 of 79, loss 3.214, 2,345 positions/s, 01:34 left
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .launch.errors import RunError, say

METRICS, OPTIONS, SUMMARY, PICTURE = "metrics.jsonl", "options.json", "summary.json", "training.png"
ENDED = "ended_on_notice"  # there if the last run was asked to end: a scheduler may start it again
CHECKPOINTS, TENSORBOARD, TOKENS = "checkpoints", "tensorboard", "tokens"  # folders
EVERY = 10.0  # seconds from a line in a log to the next one
WIDTH, HEIGHT = 80, 24  # of a terminal that does not know its own, as in some containers

# Lines of one process need only a lock among threads. tqdm's default is a named semaphore among
# processes, which a killed run would leave in /dev/shm.
tqdm.set_lock(threading.RLock())


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turns an error in writing, as of a full disk, into a RunError."""
    try:
        yield
    except Exception as error:
        # Libraries in Rust raise plain exceptions: No space left on device (os error 28).
        # torch's zip writer gives positions in the file: unexpected pos 704 vs 598.
        text = getattr(error, "strerror", None) or str(error)
        if "unexpected pos" in text:
            text = "its disk is full"
        elif not (isinstance(error, OSError) or "os error" in text):
            raise
        raise RunError(
            f"{path}: cannot be written ({text}); make room there, or write elsewhere"
        ) from error


def unused(path: Path) -> Path:
    """This path with the first number that is not taken: earlier_1, earlier_2, ..."""
    numbered = (path.with_name(f"{path.name}_{n}") for n in itertools.count(1))
    return next(other for other in numbered if not other.exists())


def show(text: str) -> None:
    """Prints. Raises RunError if nobody reads it (Broken pipe), as when `| head` has ended."""
    with writing("standard output"):
        print(text, flush=True)


def write_text(path: Path, text: str) -> None:
    """Writes a temporary file and renames it: no reader sees half of it. Raises RunError."""
    aside = path.with_name(path.name + ".part")
    try:
        with writing(path):
            # A file name that is not UTF-8 has lone surrogates, which are written as JSON escapes.
            aside.write_text(text, encoding="utf-8", errors="backslashreplace")
            aside.replace(path)  # atomic
    finally:
        aside.unlink(missing_ok=True)  # left only by an error


def write_json(path: Path, content: Any) -> None:
    """Writes indented JSON with unescaped umlauts, see `json_text` and `write_text`."""
    write_text(path, json_text(content, indent=2))


def json_text(content: Any, indent: int | None) -> str:
    """The content as JSON, with null for NaN and infinities, which JSON does not have."""
    finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
    return json.dumps(finite, indent=indent, ensure_ascii=False) + "\n"


class _Log:
    """A file for tqdm: each state of its bar becomes a line of standard error."""

    def write(self, text: str) -> None:
        """Leaves out the blanks and carriage returns by which tqdm erases the previous state."""
        if state := text.strip():
            say(f"{state}\n")

    def flush(self) -> None:
        """Files have this method; `say` has flushed already."""


def moving(
    items: Iterable[Any] | None,
    what: str,
    total: int | None,
    unit: str,
    *,
    shown: bool = True,
    done: int = 0,
    size: int = 0,
) -> tqdm[Any]:
    """Iterates over the items, with lines in a log, see above, or a bar such as
    `Epoch 1 |███   | step 12 of 79, loss 3.214, 00:34 left`.

    Args:
        items: None if the caller calls `update(n)` instead.
        shown: on one rank alone; the others only iterate.
        done: how many of `total` are done before the first item.
        size: units in an item, if it has several.
    """
    terminal = sys.stderr.isatty()
    known = terminal and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    where: dict[str, Any] = {
        "ncols": None if known else WIDTH, "nrows": None if known else HEIGHT,
        "dynamic_ncols": known,
    }  # fmt: skip
    if not terminal:
        where = {"file": _Log(), "mininterval": EVERY, "delay": EVERY}
    numbers = "{n_fmt} of {total_fmt}{postfix}, {remaining} left" if total else "{n_fmt}, {elapsed}"
    bar = "{desc} |{bar}| {unit} " if terminal else "{desc}: {unit} "
    return tqdm(
        items, what, total, initial=done, unit=unit, unit_scale=size, leave=False,
        disable=not shown, bar_format=bar + numbers, **where,
    )  # fmt: skip
