"""Which rank is named, of several that failed; and what ends a wait."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from pipeline.exchange import PeerError
from training.ending import RunError, UserError, is_consequence
from training.watch import Failure, Report, Signals, watch

KILLED = "It was ended by SIGKILL.\n"
STOPPED = "It is stopped (by SIGSTOP, or in a debugger) and does not answer.\n"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here takes time."""
    monkeypatch.setattr("training.watch.GRACE", 0.2)
    monkeypatch.setattr("training.watch.POLL", 0.1)


class FakeRanks:
    """What a parent has of its ranks: pipes to talk into, processes that are none."""

    def __init__(self, number: int) -> None:
        pairs = [Pipe() for _ in range(number)]
        self.ours: list[Connection] = [ours for ours, _ in pairs]
        self.theirs: list[Connection] = [theirs for _, theirs in pairs]
        self.processes: list[Any] = [
            SimpleNamespace(exitcode=None, join=lambda *_: None, pid=os.getpid())
            for _ in range(number)
        ]

    def die(self, rank: int, exitcode: int = -signal.SIGKILL) -> None:
        """Its end of the pipe closes with it."""
        self.processes[rank].exitcode = exitcode
        self.theirs[rank].close()

    def watch(self, timeout: float = 60.0) -> Failure | None:
        """What the parent makes of it."""
        with Signals() as signals:
            return watch(self.processes, self.ours, timeout, signals)


def lost(when: float) -> Report:
    """A rank lost its connection to another."""
    return Report(when, "lost", is_consequence=True)


def test_all_are_done() -> None:
    ranks = FakeRanks(2)
    for pipe in ranks.theirs:
        pipe.send(Report(1.0))
    assert ranks.watch() is None


def test_a_death_is_the_cause_of_a_connection_that_was_lost_before_it_was_seen() -> None:
    ranks = FakeRanks(3)
    ranks.theirs[0].send(lost(1.0))
    ranks.theirs[2].send(lost(2.0))
    ranks.die(1)
    assert ranks.watch() == Failure(1, KILLED, None)


def test_a_traceback_that_came_before_a_silent_death_is_the_cause() -> None:
    """The death may be a consequence: of an abort in a library, or of memory."""
    ranks = FakeRanks(2)
    ranks.theirs[1].send(Report(time.time() - 1, "the bug"))
    ranks.die(0, -signal.SIGABRT)
    assert ranks.watch() == Failure(1, "the bug", None)


def test_a_traceback_that_came_after_a_death_is_not() -> None:
    ranks = FakeRanks(2)
    ranks.theirs[1].send(Report(time.time() + 1, "a file of rank 0 is missing"))
    ranks.die(0)
    assert ranks.watch() == Failure(0, KILLED, None)


@pytest.mark.parametrize("kind", [None, UserError, RunError])
def test_of_failures_of_their_own_the_earliest_is_the_cause(kind: type[Exception] | None) -> None:
    ranks = FakeRanks(3)
    ranks.theirs[0].send(Report(2.0, "later"))
    ranks.theirs[1].send(Report(1.0, "first", kind))
    ranks.theirs[2].send(lost(0.0))
    assert ranks.watch() == Failure(1, "first", kind)


def test_of_consequences_alone_the_earliest_is_named() -> None:
    ranks = FakeRanks(2)
    ranks.theirs[0].send(lost(2.0))
    ranks.theirs[1].send(lost(1.0))
    assert ranks.watch() == Failure(1, "lost", None)


def test_a_rank_that_dies_while_it_reports() -> None:
    ranks = FakeRanks(1)
    os.write(ranks.theirs[0].fileno(), struct.pack("!i", 100) + b"half of it")
    ranks.die(0)
    assert ranks.watch() == Failure(0, KILLED, None)


def test_a_rank_that_dies_is_noticed_though_a_child_of_its_holds_the_pipe() -> None:
    ranks = FakeRanks(2)
    ranks.processes[1].exitcode = 0
    text = "It exited with status 0 before it was done.\n"
    assert ranks.watch() == Failure(1, text, None)


def test_a_signal_without_a_name() -> None:
    ranks = FakeRanks(1)
    ranks.die(0, -35)
    assert ranks.watch() == Failure(0, "It was ended by signal 35.\n", None)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_rank_that_is_stopped_for_longer_than_the_timeout(
    sleeper: subprocess.Popen[bytes],
) -> None:
    """Nobody waits for it: it is alone, or the others are done."""
    ranks = FakeRanks(2)
    ranks.processes[1].pid = sleeper.pid
    ranks.theirs[0].send(Report(1.0))
    sleeper.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    assert ranks.watch(timeout=0.3) == Failure(1, STOPPED, None)
    assert time.monotonic() - start >= 0.3


def test_a_rank_that_is_stopped_is_why_another_has_waited_in_vain(
    sleeper: subprocess.Popen[bytes],
) -> None:
    ranks = FakeRanks(2)
    ranks.processes[1].pid = sleeper.pid
    ranks.theirs[0].send(lost(1.0))
    sleeper.send_signal(signal.SIGSTOP)
    assert ranks.watch(timeout=60) == Failure(1, STOPPED, None)


def test_a_stop_of_a_moment_is_none(sleeper: subprocess.Popen[bytes]) -> None:
    ranks = FakeRanks(1)
    ranks.processes[0].pid = sleeper.pid
    looks: list[int] = []

    def exitcode() -> None:  # asked for at every look
        looks.append(signal.SIGCONT if len(looks) % 2 else signal.SIGSTOP)
        sleeper.send_signal(looks[-1])
        if len(looks) == 6:
            ranks.theirs[0].send(Report(1.0))

    ranks.processes[0] = _Asked(sleeper.pid, exitcode)
    assert ranks.watch(timeout=0.15) is None
    assert len(looks) >= 6


class _Asked:
    """A process that does something whenever it is asked whether it has ended."""

    def __init__(self, pid: int, then: Any) -> None:
        self.pid, self.then = pid, then

    def join(self, _: float) -> None:
        """Has ended."""

    @property
    def exitcode(self) -> None:
        self.then()


# ------------------------------------------------------------------------------------ signals


def test_a_signal_ends_the_wait_and_a_second_does_nothing() -> None:
    ranks = FakeRanks(1)
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert signals.number == signal.SIGTERM
        assert watch(ranks.processes, ranks.ours, 60.0, signals) is None
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_ignored_signal_stays_ignored() -> None:
    """nohup ignores SIGHUP; a handler of ours would end the run when the terminal is closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) == signals._note
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# ----------------------------------------------------------------------- causes and consequences

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


def raised(*errors: BaseException, cause: bool = False) -> BaseException:
    """The last of errors that were raised one while the one before was handled."""
    *before, last = errors
    try:
        try:
            if before:
                raise raised(*before)
        except BaseException as error:
            if cause:
                raise last from error
            raise last  # noqa: B904 (that is the point)
        raise last
    except BaseException as error:
        return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(GLOO), True),
        (dist.DistNetworkError("recv failed"), True),
        (dist.DistStoreError("wait timeout after 5000ms"), True),
        (PeerError("stage 0 waited for gradients of stage 1: it has ended"), True),
        (ValueError("the bug"), False),
        (RuntimeError("shape mismatch"), False),
        (SystemExit(0), False),
        (raised(RuntimeError(GLOO), ValueError("no result")), True),
        (raised(RuntimeError(GLOO), ValueError("no result"), cause=True), True),
        (raised(ValueError("the bug"), RuntimeError(GLOO)), False),
    ],
    ids=repr,
)
def test_what_began_an_error_says_whether_it_is_a_consequence(
    error: BaseException, expected: bool
) -> None:
    assert is_consequence(error) is expected
