"""Watches the ranks of a run, names the one that failed first, and leaves none behind.

Problem: when one of N processes fails, the others fail a moment later, because of it: a person
should see the one traceback that matters. And whatever happens to a rank, or to the parent, no
process may be left, and nobody may wait for one that never answers.

Idea: every rank has a pipe to its parent, through which it says how it ended. What the parent
cannot be told it looks at, every second:

    a rank                               the parent sees                 named as the cause
    raises, exits                        its report                      yes, the earliest
    is killed, leaves by os._exit        a pipe's, or process', end      yes, the earliest
    is stopped for longer than timeout   its state                       yes, the earliest
    lost a connection, waited in vain    its report, so marked           where there is no other

The last row needs its mark and not a time: a report carries the time of the failure, but a death
only the time at which it was noticed, and by then the report of one that lost its connection to
the dead rank may lie in its pipe.

Cost: a parent that wakes up once a second.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from training.ending import POLL, is_stopped

GRACE = 2.0  # seconds for the other ranks' reports, and then to end when asked


@dataclass(frozen=True)
class Report:
    """How a rank ended: done, where there is no text. `kind` is that of an error whose text says
    all there is to say, without a traceback."""

    time: float
    text: str | None = None
    kind: type[Exception] | None = None
    is_consequence: bool = False


@dataclass(frozen=True)
class Failure:
    """The rank that is named, and what is said of it."""

    rank: int
    text: str
    kind: type[Exception] | None


class Signals:
    """Within it, the signals that ask this process to end are noted and not obeyed: `number` is
    the first of them, and `heard` becomes readable. (A handler that raised could do so between
    the start of a rank and the line that notes it, or while the ranks are being ended.)"""

    number: int | None = None

    def __enter__(self) -> Signals:
        self.heard, self._tell = Pipe(duplex=False)
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGTERM", "SIGHUP", "SIGINT"):
                number = getattr(signal, name, None)  # Windows has not all of them
                # What is ignored stays ignored: SIGHUP under nohup, for one.
                if number and signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, _: object) -> None:
        if self.number is None:
            self.number = number
            self._tell.send_bytes(b"!")

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.heard.close()
        self._tell.close()


@contextmanager
def ctrl_c_held() -> Iterator[None]:
    """Processes started within it do not hear Ctrl-C, which reaches all processes of a terminal,
    until they say how they take it: each would print where in its imports it was."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # the first start() would, and then unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Ranks:
    """What the parent knows of its ranks."""

    def __init__(self, processes: list[Any], pipes: list[Connection], timeout: float) -> None:
        self.processes, self.timeout = processes, timeout
        self.silent = dict(enumerate(pipes))  # those not heard of yet
        self.stopped: dict[int, float] = {}  # for how many seconds
        self.failures: list[tuple[int, Report]] = []
        self.looked = time.monotonic()

    def hear(self, ready: list[Any]) -> None:
        """Takes the reports that have come, and the deaths."""
        for rank, pipe in list(self.silent.items()):
            if pipe in ready:
                try:
                    report = pipe.recv()
                except (EOFError, OSError):  # the latter: in the middle of its report
                    self.processes[rank].join(GRACE)
                    report = Report(time.time(), _how_it_died(self.processes[rank].exitcode))
                self._note(rank, report)
            # Something that the rank has started may hold its end of the pipe open.
            elif self.processes[rank].exitcode is not None and not pipe.poll():
                self._note(rank, Report(time.time(), _how_it_died(self.processes[rank].exitcode)))

    def look(self) -> None:
        """Finds those that are stopped, which nothing tells."""
        # Not the time since the last look: while this process itself was stopped, by Ctrl-Z say,
        # it does not count.
        now = time.monotonic()
        seconds, self.looked = min(now - self.looked, 2 * POLL), now
        for rank in list(self.silent):
            if not is_stopped(self.processes[rank].pid):
                self.stopped.pop(rank, None)
                continue
            self.stopped[rank] = self.stopped.get(rank, -seconds) + seconds
            # Where another rank has waited long enough, this one has been stopped as long.
            if self.stopped[rank] >= self.timeout or self.only_consequences():
                text = "It is stopped (by SIGSTOP, or in a debugger) and does not answer.\n"
                self._note(rank, Report(time.time(), text))

    def only_consequences(self) -> bool:
        """Whether ranks have failed, but none by itself."""
        return bool(self.failures) and all(report.is_consequence for _, report in self.failures)

    def _note(self, rank: int, report: Report) -> None:
        del self.silent[rank]
        if report.text is not None:
            self.failures.append((rank, report))

    def cause(self) -> Failure | None:
        """The first failure of its own."""
        if not self.failures:
            return None
        rank, report = min(self.failures, key=lambda f: (f[1].is_consequence, f[1].time, f[0]))
        assert report.text is not None
        return Failure(rank, report.text, report.kind)


def watch(
    processes: list[Any], pipes: list[Connection], timeout: float, signals: Signals
) -> Failure | None:
    """Returns when every rank is done, or a signal was heard; or the failure that came first, a
    moment after it."""
    ranks = _Ranks(processes, pipes, timeout)
    deadline: float | None = None
    while ranks.silent and signals.number is None:
        left = POLL if deadline is None else deadline - time.monotonic()
        if left <= 0:
            break
        ranks.hear(wait([*ranks.silent.values(), signals.heard], min(POLL, left)))
        ranks.look()
        if ranks.failures and deadline is None:
            deadline = time.monotonic() + GRACE
    if not ranks.failures and signals.number is None:
        _join(processes, GRACE)
    return ranks.cause()


def _how_it_died(exitcode: int | None) -> str:
    if exitcode is None:
        return "It closed its connection to the parent before it was done.\n"
    if exitcode < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"It was ended by {names.get(-exitcode, f'signal {-exitcode}')}.\n"
    return f"It exited with status {exitcode} before it was done.\n"


def end(processes: list[Any]) -> None:
    """Ends the ranks that still run: asked first, then not. One that is stopped hears only the
    second."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    _join(processes, GRACE)
    for process in processes:
        if process.is_alive():
            process.kill()
    _join(processes, GRACE)


def _join(processes: list[Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
