"""What can happen to a run, and what must then be seen of it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from tests.chaos.programs import ALONE, OWN, TORCHRUN
from tests.chaos.run import Run, can_be_armed, until

SECONDS = 15.0  # within which a run must have ended
BLOWS = 120.0  # within which an armed process must compute something
TRACEBACK = "Traceback (most recent call last)"
CAUSE = "The above exception was the direct cause of"  # an error and its cause are one
LAST_ACTIONS = "rank  last action  "  # the head of a table, see training/launch/last_actions.py
FAILED = re.compile(r"rank (\d+) failed; ")

Strike = Callable[[Run, int], None]


@dataclass(frozen=True)
class End:
    """How a run must end.

    statuses: any of these; None for whatever is not 0.
    named: True, the rank that was struck is the first that is named as failed; False, some rank
        is; None: that is not ours to say.
    words: what must be read, {rank} being the one that was struck.
    tracebacks: how many; None where that is not ours to say.
    """

    statuses: tuple[int, ...] | None
    named: bool | None = True
    words: tuple[str, ...] = ()
    tracebacks: int | None = 0


@dataclass(frozen=True)
class Kind:
    """A thing that happens: `strike` does it to a run, to the rank of the given number.

    ends: by who starts the ranks.
    failure: what arm/sitecustomize.py is to do.
    waits: for --timeout, before it can be noticed.
    """

    strike: Strike
    ends: dict[str, End]
    failure: str = ""
    waits: bool = False


def _victim(run: Run, rank: int) -> psutil.Process:
    """A rank, when it has been started. Raises IndexError where the run ends before."""
    until(lambda: run.process.poll() is not None or len(run.ranks()) > rank, SECONDS)
    return run.ranks()[rank]


def _to_rank(number: int) -> Strike:
    return lambda run, rank: _victim(run, rank).send_signal(number)


def _arm(run: Run, rank: int) -> None:
    """Returns when the rank fails, which at the start it does seconds after it has been armed.
    Raises IndexError or ProcessLookupError where the run ends before."""

    def over() -> bool:
        return run.process.poll() is not None

    until(lambda: over() or (len(run.ranks()) > rank and can_be_armed(run.ranks()[rank])), SECONDS)
    run.ranks()[rank].send_signal(signal.SIGUSR2)
    until(lambda: over() or run.blown.exists(), BLOWS)
    if not run.blown.exists():
        raise ProcessLookupError


def _to_parent(number: int) -> Strike:
    return lambda run, _: run.process.send_signal(number)


def _orphan_stopped(run: Run, rank: int) -> None:
    _victim(run, rank).send_signal(signal.SIGSTOP)
    run.process.kill()


def _armed(failure: str, words: str) -> Kind:
    under_torchrun = End((1,), True, (words,), None)  # others may say that it is gone
    ends = {OWN: End((1,), True, (words,), 1), TORCHRUN: under_torchrun}
    if failure != "exit":
        ends[ALONE] = End(None, None, (words,), 1)
    return Kind(_arm, ends, failure)


def _asked(strike: Strike, number: int, *saved: int) -> Kind:
    """Nobody fails: the run is asked to end, by a signal of that number. `saved` is its status if
    it has saved first."""
    own, some = End((128 + number, *saved), None), End(None, None, (), None)
    ends = {OWN: own, TORCHRUN: some, ALONE: End((128 + number, -number, *saved), None)}
    return Kind(strike, ends)


def _killed(strike: Strike) -> Kind:
    """The parent is."""
    return Kind(strike, dict.fromkeys((OWN, TORCHRUN), End((-9,), None, (), None)))


KINDS = {
    # A rank, or a stage's thread, raises; also what would end a program without a word.
    "raise": _armed("raise", "ArithmeticError: on purpose"),
    "exit": _armed("exit", "SystemExit: 0"),
    "interrupt": _armed("interrupt", "KeyboardInterrupt: on purpose"),
    "kill": Kind(
        _to_rank(signal.SIGKILL),
        {
            OWN: End((1,), True, ("It was killed by SIGKILL.",)),
            TORCHRUN: End((1,), None, ("failed (exitcode: -9) local_rank: {rank} ",), None),
        },
    ),
    # A rank is stopped for longer than --timeout; under torchrun another has waited in vain.
    "stop": Kind(
        _to_rank(signal.SIGSTOP),
        dict.fromkeys((OWN, TORCHRUN), End((1,), False, (LAST_ACTIONS,), None)),
        waits=True,
    ),
    "ctrl-c": _asked(lambda run, _: os.killpg(run.process.pid, signal.SIGINT), signal.SIGINT),
    "hang up": _asked(lambda run, _: run.close_terminal(), signal.SIGHUP),
    "ask": _asked(_to_parent(signal.SIGTERM), signal.SIGTERM, os.EX_TEMPFAIL),
    "orphan": _killed(_to_parent(signal.SIGKILL)),
    "orphan stopped": _killed(_orphan_stopped),  # while a rank is stopped
}


def judge(end: End, status: int, said: str, rank: int | None) -> list[str]:
    """What is wrong with how a run has ended; `rank` is the one that should be named, None where
    the run has no ranks."""
    wrong = []
    if (status == 0) if end.statuses is None else (status not in end.statuses):
        wrong.append(f"status {status}, and not {end.statuses or 'another than 0'}")
    names, who = FAILED.findall(said), "" if rank is None else str(rank)
    expected = {True: names[:1] == [who], False: bool(names), None: True}
    if not expected[end.named]:
        wrong.append(f"named as failed: {names}; struck: {who}")
    for template in end.words:
        words = template.format(rank=rank)
        if words not in said:
            wrong.append(f"{words!r} is not read")
    times = said.count(TRACEBACK) - said.count(CAUSE)
    if end.tracebacks not in (None, times):
        wrong.append(f"{times} tracebacks, and not {end.tracebacks}")
    return wrong
