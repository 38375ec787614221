"""Chaos: real runs are started, something happens to them, and what is left is inspected.

Each attempt starts a program with a tiny model, waits for a random moment (while its processes
import their libraries, while it trains, or as it ends), and does one thing to one random process.
Then the run must end in time, with the right status; the rank that failed first must be named; and
no process, shared memory or temporary file may be left. (Exceptions on a rank, or on a stage's
thread: tests/training/launch/test_launch.py, tests/pipeline.)

    make chaos                                                    everything once: 30 minutes
    ROUNDS=10 python -m pytest tests/chaos/strikes.py -k "kill or stop"
    python -m pytest tests/chaos/strikes.py -k torchrun

An attempt whose run was over before it was struck is skipped. A round draws the same moments and
victims every time; what they meet there depends on the machine.
"""

from __future__ import annotations

import os
import time
from itertools import product
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.chaos.kinds import KINDS, SECONDS, judge
from tests.chaos.programs import ALONE, OWN, PROGRAMS, TORCHRUN, Program
from tests.chaos.run import Run, scratch, until

STARTING, TRAINING, ENDING = "starting", "training", "ending"
LONGEST = {STARTING: 5.0, TRAINING: 3.0, ENDING: 0.6}  # seconds after its beginning
START = 240.0  # seconds that a program may take to begin with training
TIMEOUT, STOPPED_TIMEOUT = 60.0, 8.0  # --timeout; the second where it is waited for
STOPPED = 60.0  # torchrun waits half a minute for a rank that is stopped, before it kills it
LOOPBACK = ("127.", "::1:", "::ffff:127.0.0.1:")
CHECKPOINT = "checkpoints/[0-9]*"  # that there is one shows that an epoch is done
ATTEMPTS = [
    pytest.param(name, program, number, id=f"{name}-{program.name}-{number}")
    for number, name, program in product(range(int(os.environ.get("ROUNDS", "1"))), KINDS, PROGRAMS)
    if program.launcher in KINDS[name].ends
]


@pytest.mark.timeout(2 * START + STOPPED)
@pytest.mark.parametrize(("name", "program", "number"), ATTEMPTS)
def test_a_run_that_is_struck_ends_says_why_and_leaves_nothing(
    name: str, program: Program, number: int
) -> None:
    random, kind, launcher = (
        Random(f"{number} {name} {program.name}"),
        KINDS[name],
        program.launcher,
    )
    phases = list(LONGEST)
    if kind.waits and launcher == TORCHRUN:
        phases.remove(ENDING)  # after the last barrier only torchrun would wait, without limit
    phase = random.choice(phases)
    delay, rank = random.uniform(0, LONGEST[phase]), random.randrange(2)
    timeout = STOPPED_TIMEOUT if kind.waits else TIMEOUT
    with scratch() as folder:
        workdir = Path(folder) / "work"
        command = program.command(str(workdir), 1 if phase == ENDING else 1_000_000, timeout)
        with Run(command, Path(folder), launcher) as run:
            assert until(lambda: in_phase(run, phase, workdir), START), f"no {phase}\n{run.said()}"
            time.sleep(delay)
            run.look()
            missed = False
            try:
                kind.strike(run, 0 if launcher == ALONE else rank)
            except (psutil.NoSuchProcess, ProcessLookupError, IndexError):
                missed = True
            in_time = run.wait(timeout + STOPPED if kind.waits else SECONDS) is not None
            said, status = run.said(), run.process.poll()
            wrong = [f"left: {what}" for what in run.leftovers()]
        if not in_time or status is None:
            wrong.append("it had not ended in time")
        elif phase == ENDING and status == 0:
            missed = True
        elif phase == STARTING and launcher != OWN:
            # Python itself may still import the program, and dies as it does; torchrun's ranks too.
            wrong += ["status 0"] * (status == 0)
        else:
            wrong += judge(kind, launcher, status, said, None if launcher == ALONE else rank)
        if launcher == OWN:
            places = sorted(f"{ip}:{port}" for ip, port in run.listening)
            wrong += [f"listens on {place}" for place in places if not place.startswith(LOOPBACK)]
    assert wrong == [], f"{phase} + {delay:.1f} s, rank {rank}\n{said}"
    if missed:
        pytest.skip("the run was over before it was struck")


def in_phase(run: Run, phase: str, workdir: Path) -> bool:
    """Whether it has come so far, or has ended by itself: that will be seen."""
    if run.process.poll() is not None:
        return True
    return bool(run.ranks()) if phase == STARTING else any(workdir.glob(CHECKPOINT))
