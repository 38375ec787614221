"""What can happen to a run, and what must then be seen of it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from tests.chaos.programs import ALONE, OWN, TORCHRUN
from tests.chaos.run import Run, can_be_armed, until

SECONDS = 15.0  # within which a run must have ended
STOPPED = 60.0  # torchrun waits half a minute for a rank that is stopped, before it kills it
BLOWS = 120.0  # within which an armed process must compute something
PAUSE = 1.5  # seconds of a stop that does no harm
TRACEBACK = "Traceback (most recent call last)"
LAST_ACTIONS = "rank  last action  "  # the head of a table, see training/last_actions.py
FAILED = re.compile(r"rank (\d+) failed; |The run failed\.")

Strike = Callable[[Run, int], None]


@dataclass(frozen=True)
class End:
    """How a run must end.

    statuses: any of these; None for whatever is not 0.
    named: True, the rank that was struck is named as the one that failed; False, some rank is;
        None, none is.
    words: what must be read exactly once, {rank} being the one that was struck.
    tracebacks: how many; None where that is not ours to say.
    """

    statuses: tuple[int, ...] | None
    named: bool | None = True
    words: tuple[str, ...] = ()
    tracebacks: int | None = 0


@dataclass(frozen=True)
class Kind:
    """A thing that happens: `strike` does it to a run, to the rank of the given number.

    failure: what arm/sitecustomize.py is to do. at_any_time: else only once the run trains.
    """

    name: str
    what: str
    strike: Strike
    ends: dict[str, End]
    failure: str = ""
    at_any_time: bool = True
    waits: bool = False  # for --timeout, before it can be noticed
    seconds: float = field(default=SECONDS)


def _victim(run: Run, rank: int) -> psutil.Process:
    """A rank, when it has been started. Raises IndexError where the run ends before."""
    until(lambda: run.process.poll() is not None or len(run.ranks()) > rank, SECONDS)
    return run.ranks()[rank]


def _to_rank(number: int) -> Strike:
    return lambda run, rank: _victim(run, rank).send_signal(number)


def _arm(run: Run, rank: int) -> None:
    """Returns when the rank fails, which at the start it does seconds after it has been armed.
    Raises ProcessLookupError where the run ends before."""

    def over() -> bool:
        return run.process.poll() is not None

    def ready() -> bool:
        return len(run.ranks()) > rank and can_be_armed(run.ranks()[rank])

    until(lambda: over() or ready(), SECONDS)
    run.ranks()[rank].send_signal(signal.SIGUSR1)
    until(lambda: over() or run.blown.exists(), BLOWS)
    if not run.blown.exists():
        raise ProcessLookupError


def _to_parent(number: int) -> Strike:
    return lambda run, _: run.process.send_signal(number)


def _ctrl_c(run: Run, _: int) -> None:
    os.killpg(run.process.pid, signal.SIGINT)


def _hang_up(run: Run, _: int) -> None:
    run.close_terminal()


def _orphan_stopped(run: Run, rank: int) -> None:
    _victim(run, rank).send_signal(signal.SIGSTOP)
    run.process.kill()


def _pause(run: Run, rank: int) -> None:
    victim = _victim(run, rank)
    victim.send_signal(signal.SIGSTOP)
    time.sleep(PAUSE)
    victim.send_signal(signal.SIGCONT)
    time.sleep(PAUSE)
    if run.process.poll() is None:  # it goes on, so: enough
        run.process.terminate()


def _armed(name: str, what: str, words: str) -> Kind:
    once = (words,)
    return Kind(
        name, what, _arm,
        {
            OWN: End((1,), True, once, 1),
            TORCHRUN: End((1,), True, once, 2),  # one is torchrun's
            ALONE: End((1,), True, once, 1),
        },
        failure=name,
    )  # fmt: skip


KINDS = (
    _armed("raise", "a rank, or a stage's thread, raises", "ArithmeticError: on purpose"),
    _armed("exit", "... raises SystemExit(0)", "SystemExit: 0"),
    _armed("interrupt", "... raises KeyboardInterrupt", "KeyboardInterrupt: on purpose"),
    Kind(
        "leave", "a rank leaves by os._exit(0)", _arm,
        {
            OWN: End((1,), True, ("It exited with status 0 before it was done.",)),
            TORCHRUN: End((1,), False, (), None),  # it believes the 0; the others see the loss
        },
        failure="leave",
    ),
    Kind(
        "kill", "kill -9 of a rank", _to_rank(signal.SIGKILL),
        {
            OWN: End((1,), True, ("It was ended by SIGKILL.",)),
            TORCHRUN: End((1,), None, ("failed (exitcode: -9) local_rank: {rank} ",), 1),
        },
    ),
    Kind(
        "terminate", "SIGTERM to a rank", _to_rank(signal.SIGTERM),
        {
            OWN: End((1,), True, ("It was ended by SIGTERM.",)),
            TORCHRUN: End((1,), None, ("failed (exitcode: -15) local_rank: {rank} ",), 1),
        },
    ),
    Kind(
        "stop", "a rank is stopped (SIGSTOP) for longer than --timeout",
        _to_rank(signal.SIGSTOP),
        {
            OWN: End((1,), True, ("It does not answer.", LAST_ACTIONS), None),
            TORCHRUN: End((1,), False, (LAST_ACTIONS,), None),  # another has waited in vain
        },
        waits=True,
        seconds=STOPPED,
    ),
    Kind(
        "pause", "a rank is stopped for a moment: nothing happens, until the run is asked to end",
        _pause,
        {OWN: End((143,), None), TORCHRUN: End(None, None, (), None)},
        at_any_time=False,
    ),
    Kind(
        "ctrl-c", "SIGINT to the process group", _ctrl_c,
        {OWN: End((130,), None), TORCHRUN: End(None, None, (), None), ALONE: End((130, -2), None)},
    ),
    Kind(
        "hang up", "the terminal closes (SIGHUP)", _hang_up,
        {OWN: End((129,), None), TORCHRUN: End(None, None, (), None), ALONE: End((129, -1), None)},
    ),
    Kind(
        "ask", "SIGTERM to the parent", _to_parent(signal.SIGTERM),
        {OWN: End((143,), None), TORCHRUN: End(None, None, (), None), ALONE: End((143, -15), None)},
    ),
    Kind(
        "orphan", "kill -9 of the parent", _to_parent(signal.SIGKILL),
        {OWN: End((-9,), None, (), None), TORCHRUN: End((-9,), None, (), None)},
    ),
    Kind(
        "orphan stopped", "kill -9 of the parent while a rank is stopped", _orphan_stopped,
        {OWN: End((-9,), None, (), None), TORCHRUN: End((-9,), None, (), None)},
    ),
)  # fmt: skip


def judge(end: End, status: int, said: str, rank: int | None) -> list[str]:
    """What is wrong with how a run has ended; `rank` is the one that should be named, None where
    the run has no ranks."""
    wrong = []
    if (status == 0) if end.statuses is None else (status not in end.statuses):
        expected = "not 0" if end.statuses is None else " or ".join(map(str, end.statuses))
        wrong.append(f"status {status}, and not {expected}")
    names = FAILED.findall(said)
    allowed = [[]] if end.named is None else [["" if rank is None else str(rank)]]
    if end.named is False:
        allowed = [[name] for name in names]  # any, once
    if names not in allowed:
        wrong.append(f"named {names}, and not {allowed}")
    for template in end.words:
        words = template.format(rank=rank)
        if (times := said.count(words)) != 1:
            wrong.append(f"{words!r} is read {times} times")
    if end.tracebacks is not None and (times := said.count(TRACEBACK)) != end.tracebacks:
        wrong.append(f"{times} tracebacks, and not {end.tracebacks}")
    return wrong
