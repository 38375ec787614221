"""One attempt: a run is started, struck at a random moment, and what is left of it inspected."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil

from tests.chaos.kinds import KINDS, SECONDS, judge
from tests.chaos.programs import ALONE, OWN, TORCHRUN, Program
from tests.chaos.run import Run, scratch, until

STARTING, TRAINING, ENDING = "starting", "training", "ending"
LONGEST = {STARTING: 5.0, TRAINING: 3.0, ENDING: 0.6}  # seconds after its beginning
START = 120.0  # seconds that a program may take to begin with training
TIMEOUT, STOPPED_TIMEOUT = 60.0, 8.0  # --timeout; the second where it is waited for
STOPPED = 60.0  # torchrun waits half a minute for a rank that is stopped, before it kills it
LOOPBACK = ("127.", "::1:", "::ffff:127.0.0.1:")
CHECKPOINT = "checkpoints/[0-9]*"  # that there is one shows that an epoch is done


@dataclass
class Attempt:
    """What is done to a program, at a moment and to a rank drawn by `random`; and what came of
    it. Missed: the run was over before."""

    program: Program
    kind: str
    random: Random
    wrong: list[str] = field(default_factory=list)
    said: str = ""
    missed: bool = False
    came: str = "not made"

    def make(self) -> None:
        """Does it, and fills in what came of it."""
        program, kind = self.program, KINDS[self.kind]
        phases = list(LONGEST)
        if kind.waits and program.launcher == TORCHRUN:
            phases.remove(ENDING)  # after the last barrier only torchrun would wait, without limit
        phase = self.random.choice(phases)
        delay, rank = self.random.uniform(0, LONGEST[phase]), self.random.randrange(2)
        victim = None if program.launcher == ALONE else rank
        timeout = STOPPED_TIMEOUT if kind.waits else TIMEOUT
        limit = timeout + STOPPED if kind.waits else SECONDS
        with scratch() as name:
            workdir = Path(name) / "work"
            command = program.command(str(workdir), 1 if phase == ENDING else 1_000_000, timeout)
            with Run(command, Path(name), program.launcher) as run:
                end = "NOT ENDED"
                if not until(lambda: _in_phase(run, phase, workdir), START):
                    self.wrong.append(f"it did not come to {phase} in {START:.0f} s")
                else:
                    time.sleep(delay)
                    run.look()
                    try:
                        kind.strike(run, victim or 0)
                    except (psutil.NoSuchProcess, ProcessLookupError, IndexError):
                        self.missed = True
                    if (seconds := run.wait(limit)) is None:
                        self.wrong.append(f"still there after {limit:.0f} s")
                    else:
                        end = f"ended in {seconds:.1f} s, status {run.process.poll()}"
                self.said, status = run.said(), run.process.poll()
                self.wrong += [f"left: {what}" for what in run.leftovers()]
                if status is not None:
                    self._judge(run, phase, victim, status)
                if run.launcher != TORCHRUN and (status or 0) >= 0:
                    # What was killed could not, and leaves it to the run that comes next.
                    halves = sorted(workdir.rglob("*.part"))
                    self.wrong += [f"left half-written: {path}" for path in halves]
        struck = "" if victim is None else f", rank {victim}"
        before = " (over before)" if self.missed else ""
        self.came = f"{phase} + {delay:.1f} s{struck}: {end}{before}"

    def _judge(self, run: Run, phase: str, rank: int | None, status: int) -> None:
        launcher = self.program.launcher
        if phase == ENDING and status == 0:
            self.missed = True
        elif phase == STARTING and launcher != OWN:
            # Python itself may still import the program, and dies as it does; torchrun's ranks too.
            self.wrong += ["status 0"] if status == 0 else []
        else:
            self.wrong += judge(KINDS[self.kind], launcher, status, self.said, rank)
            if launcher == OWN:
                places = sorted(f"{ip}:{port}" for ip, port in run.listening)
                away = [place for place in places if not place.startswith(LOOPBACK)]
                self.wrong += [f"listens on {place}" for place in away]

    def __str__(self) -> str:
        return f"{self.program.name}: {self.kind}, {self.came}"


def _in_phase(run: Run, phase: str, workdir: Path) -> bool:
    if run.process.poll() is not None:
        return True  # it has ended by itself: that will be seen
    if phase == STARTING:
        return bool(run.ranks())
    return any(workdir.glob(CHECKPOINT))
