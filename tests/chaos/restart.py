"""Runs that go on by themselves: torchrun starts them again, and they resume.

Ranks are killed, one after the other, at moments anywhere in the life of a run. In the end its
weights must be, bit for bit, those of a run that nobody killed, and its workdir must hold the same
files. Steps are counted in rank 0 (arm/sitecustomize.py): those beyond the ones of the run that
nobody killed were done again, since the last checkpoint did not have them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

import psutil
import torch
from safetensors.torch import load_file

from tests.chaos.programs import Program
from tests.chaos.run import Run, scratch, until

RESTARTS = 3  # that torchrun is allowed, and so the most kills
EPOCHS = 3
OPTIONS = ("--n_train", "256", "--save_every", "7", "--resume")  # of --batch_size 8: 32 steps
RUN = 240.0  # seconds that a run may take, with all its restarts
NOTES = "Resumed from "  # what a program says when it goes on from a checkpoint


@dataclass
class Life:
    """What a run that was left alone, or killed and restarted, has come to."""

    status: int | None
    seconds: float
    steps: int
    files: list[str]
    weights: dict[str, torch.Tensor]
    said: str
    left: list[str]
    kills: int = 0
    resumed: int = 0  # from a checkpoint, and not from the beginning


def live(program: Program, moments: Sequence[tuple[float, int]]) -> Life:
    """Runs the program to its end; `moments` are by restart, how many seconds after its ranks have
    been started which one is killed."""
    with scratch() as name:
        folder = Path(name)
        workdir, exported, steps = folder / "work", folder / "exported", folder / "steps"
        more = (*OPTIONS, "--export", str(exported))
        command = program.command(str(workdir), EPOCHS, 60.0, RESTARTS, more)
        start = time.monotonic()
        with Run(command, folder, program.launcher, count_in=steps) as run:
            kills = _kill(run, moments)
            run.wait(RUN)
            weights = exported / "model.safetensors"
            return Life(
                status=run.process.poll(),
                seconds=time.monotonic() - start,
                steps=steps.stat().st_size if steps.exists() else 0,
                files=_files(folder),
                weights=load_file(weights) if weights.exists() else {},
                said=run.said(),
                left=run.leftovers(),
                kills=kills,
                resumed=run.stdout.read_text().count(NOTES),
            )


def _files(folder: Path) -> list[str]:
    """What the run has written, by the names that do not depend on the machine."""
    mine = ("stdout", "stderr", "steps", "tmp")
    paths = (path.relative_to(folder) for path in folder.rglob("*"))
    return sorted(str(path) for path in paths if path.parts[0] not in mine)


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


@dataclass
class Restart:
    """An attempt: when whom to kill, and what came of it."""

    program: Program
    random: Random
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    said: str = ""
    life: Life | None = None
    steps: int = 0  # of the run that nobody killed

    @property
    def redone(self) -> int:
        """Steps that were done more than once."""
        return self.life.steps - self.steps if self.life else 0

    def make(self) -> None:
        """Does it, and fills in what came of it."""
        expected = left_alone(self.program)
        longest = 0.9 * expected.seconds
        moments = [(self.random.uniform(0, longest), self.random.randrange(2)) for _ in range(3)]
        self.life = found = live(self.program, moments)
        self.said, self.left, self.steps = found.said, found.left, expected.steps
        for who, life in (("the run that nobody killed", expected), ("the run", found)):
            if life.status != 0:
                self.wrong.append(f"{who} ended with status {life.status}")
        if other := sorted({*found.files} ^ {*expected.files}):
            self.wrong.append(f"files that only one of the runs has: {other}")
        if not expected.weights or found.weights.keys() != expected.weights.keys():
            self.wrong.append(f"weights {list(found.weights)}, and not {list(expected.weights)}")
        else:
            pairs = {name: (found.weights[name], w) for name, w in expected.weights.items()}
            unequal = [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]
            self.wrong += [f"{len(unequal)} weights differ: {unequal[:5]}"] if unequal else []

    @property
    def fine(self) -> bool:
        """Whether all is as it must be."""
        return not self.wrong and not self.left

    def __str__(self) -> str:
        if self.life is None:
            return f"{self.program.name}: restart"
        return (
            f"{self.program.name}: restart, {self.life.kills} kills, {self.life.resumed} times "
            f"from a checkpoint, {self.redone} of {self.steps} steps done again, "
            f"{self.life.seconds:.0f} s, status {self.life.status}"
        )


def tally(restarts: Sequence[Restart]) -> str:
    """One line for all."""
    lives = [restart.life for restart in restarts if restart.life is not None]
    equal = sum(not restart.wrong for restart in restarts)
    return (
        f"restart: {len(restarts)} runs, {sum(life.kills for life in lives)} kills, "
        f"{sum(life.resumed for life in lives)} resumed from a checkpoint, "
        f"{sum(restart.redone for restart in restarts)} of "
        f"{sum(restart.steps for restart in restarts)} steps done again; "
        f"bit for bit the weights of a run that nobody killed: {equal} of {len(restarts)}; "
        f"left: {sum(len(restart.left) for restart in restarts)}"
    )
