"""What can happen to a run, and what must then be observed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from tests.chaos.programs import ALONE, OWN, TORCHRUN
from tests.chaos.run import Run, until

SECONDS = 15.0  # within which a run must have ended
TRACEBACK = "Traceback (most recent call last)"
LAST_ACTIONS = "rank  last action  "  # the head of a table, see training/launch/last_actions.py
FAILED = re.compile(r"rank (\d+) failed; ")

Strike = Callable[[Run, int], object]


@dataclass(frozen=True)
class Kind:
    """A thing that happens: `strike` does it to a run, to the rank of the given number.

    ends: by who starts the ranks, the statuses that are right (none: whatever is not 0), and what
        must be read then, a pattern in which RANK is the one that was struck.
    waits: for --timeout, before it can be noticed.
    """

    strike: Strike
    ends: dict[str, tuple[tuple[int, ...], str]]
    waits: bool = False


def _victim(run: Run, rank: int) -> psutil.Process:
    """A rank, when it has been started. Raises IndexError where the run ends before."""
    until(lambda: run.process.poll() is not None or len(run.ranks()) > rank, SECONDS)
    return run.ranks()[rank]


def _orphan_stopped(run: Run, rank: int) -> None:
    _victim(run, rank).send_signal(signal.SIGSTOP)
    run.process.kill()


def _asked(strike: Strike, number: int, *saved: int) -> Kind:
    """Nobody fails: the run is asked to end, by a signal of that number. `saved` is its status if
    it has saved first."""
    own = (128 + number, -number, *saved)  # the second: before Python has begun, or when it ends
    return Kind(strike, {OWN: (own, ""), TORCHRUN: ((), ""), ALONE: (own, "")})


KINDS = {
    "kill": Kind(
        lambda run, rank: _victim(run, rank).kill(),
        {
            OWN: ((1,), r"rank RANK failed; .*\nIt was killed by SIGKILL\."),
            TORCHRUN: ((1,), r"failed \(exitcode: -9\) local_rank: RANK "),
        },
    ),
    # A rank is stopped for longer than --timeout; under torchrun another has waited in vain.
    "stop": Kind(
        lambda run, rank: _victim(run, rank).send_signal(signal.SIGSTOP),
        dict.fromkeys((OWN, TORCHRUN), ((1,), rf"(?s){FAILED.pattern}.*{LAST_ACTIONS}")),
        waits=True,
    ),
    "ctrl-c": _asked(lambda run, _: os.killpg(run.process.pid, signal.SIGINT), signal.SIGINT),
    "hang up": _asked(lambda run, _: run.close_terminal(), signal.SIGHUP),
    "ask": _asked(lambda run, _: run.process.terminate(), signal.SIGTERM, os.EX_TEMPFAIL),
    "orphan": Kind(lambda run, _: run.process.kill(), dict.fromkeys((OWN, TORCHRUN), ((-9,), ""))),
    "orphan stopped": Kind(_orphan_stopped, dict.fromkeys((OWN, TORCHRUN), ((-9,), ""))),
}


def judge(kind: Kind, launcher: str, status: int, said: str, rank: int | None) -> list[str]:
    """What is wrong with how a run has ended; `rank` is the one that was struck, None where the run
    has no ranks. Ranks that have waited in vain print a traceback, and so may those of torchrun."""
    (statuses, pattern), wrong = kind.ends[launcher], []
    if status not in statuses and (statuses or status == 0):
        wrong.append(f"status {status}, and not {statuses or 'another than 0'}")
    words = pattern.replace("RANK", str(rank))
    if not re.search(words, said):
        wrong.append(f"{words!r} is not read")
    if launcher != TORCHRUN and not kind.waits and TRACEBACK in said:
        wrong.append("there is a traceback, though nobody has made a mistake")
    return wrong
