"""Runs a program in a process whose libraries are imported already.

Problem: a program of two ranks imports torch and transformers three times, for four seconds of a
core each. Most tests ask what a program says and leaves, and not how Python starts.

Idea: the process is forked from the server that the ranks of a test come from (tests/ranks.py), and
forks its ranks itself. The rest is as from a shell: its command line, folder, environment, and what
it writes on file descriptors 1 and 2. Tests of starting and ending start real programs.

The programs of the tutorial ask `multiprocessing` for a server, and host the store of their ranks.
A rank that is forked beside the store's thread may hang: so they get a server before they begin.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import runpy
import select
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest

from tests.chaos.run import until
from tests.ranks import server, start_server

LIMIT = 280.0  # seconds that a program may take; less than a test has (pyproject.toml)
SOON = 60.0  # ... and the processes that it has started, to end after it


def run_warm(command: Sequence[str], folder: Path) -> CompletedProcess[str]:
    """Runs `command`, a program's path and its options, from `folder` to its end. No process of it
    may be left."""
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        args = (list(command), folder, dict(os.environ), out.name, err.name)
        process: Any = server().Process(target=_program, args=args)
        process.start()
        process.join(LIMIT)
        late = process.exitcode is None
        if late:
            process.kill()
            process.join()
        said, complained = (Path(file.name).read_text("utf-8") for file in (out, err))
    assert not late, f"{command} had not ended after {LIMIT} s\n{said}\n{complained}"
    assert until(lambda: not _of_session(process.pid), SOON), _of_session(process.pid)
    return CompletedProcess(command, process.exitcode, said, complained)


def _of_session(leader: int) -> list[psutil.Process]:
    """Processes that a program has started, and that are still there."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            dead = process.status() == psutil.STATUS_ZOMBIE
            if not dead and os.getsid(process.pid) == leader:
                found.append(process)
    return found


class Terminal:
    """A program whose standard output and error are a terminal that does not know its size, as
    those of some containers. What a person would type is sent with `type`."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.master, slave = os.openpty()
        name, environment = os.ttyname(slave), dict(os.environ)
        args = (list(command), folder, environment, name, name)
        self.process: Any = server().Process(target=_program, args=args)
        self.process.start()
        os.set_blocking(self.master, False)
        self.text = ""

    def until(self, pattern: str | None) -> None:
        """Reads until the pattern is found; None: until the program has ended."""
        end = time.monotonic() + LIMIT
        while not (re.search(pattern, self.text) if pattern else self.process.exitcode is not None):
            assert time.monotonic() < end, self.text
            self._read()
        self._read()

    def _read(self) -> None:
        select.select([self.master], [], [], 0.1)
        with suppress(OSError):  # nothing there
            while data := os.read(self.master, 1 << 16):
                self.text += data.decode("utf-8", "replace")

    def type(self, keys: str) -> None:
        """Ctrl-C is \x03."""
        os.write(self.master, keys.encode())

    def screen(self) -> list[str]:
        """The lines as they are seen in the end."""
        lines = []
        for line in self.text.replace("\r\n", "\n").split("\n"):
            shown = ""
            for part in line.split("\r"):
                erased = "\x1b[K" in part
                part = part.replace("\x1b[K", "")
                shown = part if erased else part + shown[len(part) :]
            lines.append(shown.rstrip())
        return lines


def _program(
    command: list[str], folder: Path, environment: dict[str, str], out: str, err: str
) -> None:
    os.setsid()  # a terminal becomes this process' own, and sends it Ctrl-C,
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background ignores
    for number, name in ((1, out), (2, err)):
        os.dup2(os.open(name, os.O_RDWR), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, "utf-8"), os.fdopen(2, "w", 1, "utf-8")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    start_server()
    fork = mp.get_context("fork")
    pytest.MonkeyPatch().setattr("training.launch.launch.get_context", lambda _: fork)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")
