"""One attempt: a run is started, struck at a random moment, and what is left of it inspected."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil

from tests.chaos.kinds import Kind, judge
from tests.chaos.programs import ALONE, OWN, TORCHRUN, Program
from tests.chaos.run import Run, scratch, until

STARTING, TRAINING, ENDING = PHASES = ("starting", "training", "ending")
START = 120.0  # seconds that a program may take to begin with training
TIMEOUT, STOPPED_TIMEOUT = 60.0, 8.0  # --timeout; the second where it is waited for
CHECKPOINT = "checkpoints/[0-9]*"  # that there is one shows that an epoch is done


@dataclass
class Attempt:
    """What was done to whom and when, and what came of it."""

    program: Program
    kind: Kind
    phase: str
    delay: float  # seconds after the beginning of the phase
    rank: int
    seconds: float | None = None  # from the blow to the end of every process
    status: int | None = None
    missed: bool = False  # the run was over before
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    said: str = ""

    def make(self) -> None:
        """Does it, and fills in what came of it."""
        program, kind = self.program, self.kind
        timeout = STOPPED_TIMEOUT if kind.waits else TIMEOUT
        with scratch() as name:
            folder = Path(name)
            workdir = folder / "work"
            epochs = 1 if self.phase == ENDING else 1_000_000
            command = program.command(str(workdir), epochs, timeout)
            with Run(command, folder, program.launcher, kind.failure) as run:
                if not until(lambda: _in_phase(run, self.phase, workdir), START):
                    self.wrong.append(f"it did not come to {self.phase} in {START:.0f} s")
                else:
                    time.sleep(self.delay)
                    run.look()
                    _strike(run, self)
                    limit = kind.seconds + (timeout if kind.waits else 0.0)
                    self.seconds = run.wait(limit)
                    if self.seconds is None:
                        self.wrong.append(f"still there after {limit:.0f} s")
                self.said = run.said()
                self.status = run.process.poll()
                self.left = run.leftovers()
                _judge(run, self)
                if run.launcher != TORCHRUN and (self.status or 0) >= 0:
                    # What was killed could not, and leaves it to the run that comes next.
                    self.left += half_written(workdir)

    @property
    def fine(self) -> bool:
        """Whether all is as it must be."""
        return not self.wrong and not self.left

    def __str__(self) -> str:
        victim = "" if self.program.launcher == ALONE else f", rank {self.rank}"
        when = f"{self.phase} + {self.delay:.1f} s"
        if self.seconds is None:
            end = "NOT ENDED" if self.wrong else "over before it was struck"
        else:
            end = f"ended in {self.seconds:.1f} s, status {self.status}"
        end += " (over before)" if self.missed and self.seconds is not None else ""
        return f"{self.program.name}: {self.kind.name}{victim}, {when}: {end}"


def half_written(workdir: Path) -> list[str]:
    """What a run has not put in place."""
    paths = sorted(workdir.rglob("*.part"))
    return [f"half-written {path.relative_to(workdir)}" for path in paths]


def draw(program: Program, kind: Kind, random: Random, phase: str | None = None) -> Attempt:
    """When to strike, and whom."""
    phases = PHASES if kind.at_any_time else (TRAINING,)
    phase = phase or random.choice(phases)
    longest = {STARTING: 5.0, TRAINING: 3.0, ENDING: 1.5}[phase]
    return Attempt(program, kind, phase, random.uniform(0, longest), random.randrange(2))


def _in_phase(run: Run, phase: str, workdir: Path) -> bool:
    if run.process.poll() is not None:
        return True  # it has ended by itself: that will be seen
    if phase == STARTING:
        return bool(run.starter() or run.ranks())
    return any(workdir.glob(CHECKPOINT))


def _strike(run: Run, attempt: Attempt) -> None:
    try:
        attempt.kind.strike(run, attempt.rank if run.launcher != ALONE else 0)
    except (psutil.NoSuchProcess, ProcessLookupError, IndexError):
        attempt.missed = True


def _judge(run: Run, attempt: Attempt) -> None:
    end = attempt.kind.ends[attempt.program.launcher]
    if attempt.status is None:
        return
    if attempt.phase == ENDING and attempt.status == 0:
        attempt.missed = True
        return
    if attempt.phase == STARTING and attempt.program.launcher != OWN:
        # Python itself may still import the program, and dies as it does; torchrun's ranks too.
        if attempt.status == 0:
            attempt.wrong.append("status 0")
        return
    named = None if attempt.program.launcher == ALONE else attempt.rank
    attempt.wrong += judge(end, attempt.status, attempt.said, named)
    if attempt.program.launcher == OWN:
        away = sorted({f"{ip}:{port}" for ip, port in run.listening if not _is_loopback(ip)})
        attempt.wrong += [f"listens on {place}" for place in away]


def _is_loopback(ip: str) -> bool:
    return ip.startswith("127.") or ip in ("::1", "::ffff:127.0.0.1")
