"""A process that has the device, started once per test session, and given functions to run.

It is forked from the server that the ranks of a test come from (tests/ranks.py), and so has the
libraries. It can start ranks (`ranks`), which have the device, too.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.ranks import Ranks, server, start_server

from . import install

NCCL = "cpu:gloo,cuda:nccl"  # as training.launch.meeting.agree_on_backend says
LIMIT = 250.0  # seconds that a function may take, the first with the start, on a busy machine


def _serve(inbox: Connection) -> None:
    install()
    start_server()
    faulthandler.enable()  # tells where every thread is, when aborted
    while True:
        try:
            function, args = inbox.recv()
        except EOFError:  # the tests are over
            return
        try:
            inbox.send((True, inspect.unwrap(function)(*args)))
        except BaseException:
            inbox.send((False, traceback.format_exc()))


_worlds: dict[tuple[int, str], Ranks] = {}


def ranks(world_size: int, backend: str = "gloo") -> Ranks:
    """For a function that runs on the device: ranks that have it, too, started once. With another
    `backend` gloo stands for NCCL under its name."""
    if (world_size, backend) not in _worlds or _worlds[world_size, backend].broken:
        _worlds[world_size, backend] = Ranks(world_size, backend=backend)
    return _worlds[world_size, backend]


class Device:
    """A process with two devices."""

    def __init__(self) -> None:
        self._pipe, theirs = server().Pipe()
        self._process: Any = server().Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        self.broken = False

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What function(*args) returns there; fails with the traceback of what it raises."""
        assert not self.broken, "an earlier test has ended this process"
        self.broken = True  # until it has answered
        self._pipe.send((function, args))
        if not self._pipe.poll(LIMIT):
            assert self._process.pid is not None
            os.kill(self._process.pid, signal.SIGABRT)  # its stacks go to standard error
            raise AssertionError(f"{function.__name__} had not ended after {LIMIT} s")
        fine, value = self._pipe.recv()
        self.broken = False
        assert fine, f"on the device:\n{value}"
        return value

    def close(self) -> None:
        self._pipe.close()
        if self.broken:
            self._process.kill()
        self._process.join(5.0)
        self._process.kill()
        self._process.join()
