"""Runs that go on by themselves: torchrun starts them again, and they resume.

Ranks are killed, one after the other, at moments anywhere in the life of a run. In the end its
weights must be, bit for bit, those of a run that nobody killed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
from torch import Tensor

from tests.chaos.attempt import Attempt
from tests.chaos.programs import Program
from tests.chaos.run import Run, scratch, until
from tests.project.programs import weights

RESTARTS = 3  # that torchrun is allowed, and so the most kills
EPOCHS = 3
OPTIONS = ("--n_train", "256", "--save_every", "7", "--resume")  # of --batch_size 8: 32 steps
RUN = 240.0  # seconds that a run may take, with all its restarts


@dataclass
class Life:
    """What a run that was left alone, or killed and restarted, has come to."""

    kills: int
    seconds: float
    weights: dict[str, Tensor]
    wrong: list[str]
    said: str


def live(program: Program, moments: Sequence[tuple[float, int]]) -> Life:
    """Runs the program to its end; `moments` are by restart, how many seconds after its ranks have
    been started which one is killed."""
    with scratch() as name:
        folder = Path(name)
        command = program.command(str(folder / "work"), EPOCHS, 60.0, RESTARTS, OPTIONS)
        start = time.monotonic()
        with Run(command, folder, program.launcher) as run:
            kills = _kill(run, moments)
            run.wait(RUN)
            seconds, status = time.monotonic() - start, run.process.poll()
            wrong = [f"left: {what}" for what in run.leftovers()]
            if status != 0:
                wrong.append(f"status {status}")
            saved = any(folder.glob("work/checkpoints/*-epoch*"))
            found = weights(folder / "work") if saved else {}
            return Life(kills, seconds, found, wrong, run.said())


def _kill(run: Run, moments: Sequence[tuple[float, int]]) -> int:
    """Kills as often as the run lets it."""
    kills, seen = 0, set[int]()

    def started_again() -> bool:
        new = [process for process in run.ranks() if process.pid not in seen]
        return len(new) == 2 or run.process.poll() is not None

    for delay, rank in moments:
        until(started_again, 60.0)
        until(lambda: run.process.poll() is not None, delay)
        with suppress(psutil.NoSuchProcess, IndexError):  # it is over
            ranks = run.ranks()
            kills += ranks[rank].status() != psutil.STATUS_ZOMBIE
            ranks[rank].kill()
            seen |= {process.pid for process in ranks}
    return kills


@cache
def left_alone(program: Program) -> Life:
    """The run that nobody kills; made once."""
    return live(program, ())


class Restart(Attempt):
    """An attempt in which ranks are killed at moments drawn by `random`."""

    def make(self) -> None:
        """Does it, and fills in what came of it."""
        alone, draw = left_alone(self.program), self.random
        longest = 0.9 * alone.seconds
        moments = [(draw.uniform(0, longest), draw.randrange(2)) for _ in range(RESTARTS)]
        found = live(self.program, moments)
        self.came, self.said = f"{found.kills} kills, {found.seconds:.0f} s", found.said
        self.wrong = [*found.wrong, *(f"without a kill: {what}" for what in alone.wrong)]
        if not alone.weights or found.weights.keys() != alone.weights.keys():
            self.wrong.append(f"weights {list(found.weights)}, and not {list(alone.weights)}")
        elif unequal := [n for n, w in alone.weights.items() if not w.equal(found.weights[n])]:
            self.wrong.append(f"{len(unequal)} weights differ: {unequal[:5]}")
