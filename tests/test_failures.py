"""Real runs that fail or are struck: none hangs, each says why once, and none leaves a trace.

The short form of `make chaos`: on programs that import little, several things per run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.chaos.kinds import FAILED, TRACEBACK
from tests.chaos.programs import OWN, TORCHRUN, TORCHRUN_COMMAND
from tests.chaos.run import Run, until

START = 240.0  # seconds that the start of ranks may take here, on a busy machine
SOON = 240.0  # ... and their end
LAST = 3000  # characters that are shown of what a run said: torch traces every thread
LIGHT = [sys.executable, "-m", "tests.training.programs"]
RESTARTED = [
    sys.executable, *TORCHRUN_COMMAND, "--max-restarts", "1", "-m", "tests.training.programs",
]  # fmt: skip


def test_three_runs_at_once(tmp_path: Path) -> None:
    """They do not meet, and leave nothing. Ctrl-C, which reaches every process of its terminal,
    ends one while its ranks import their libraries, and prints nothing. Of another the parent is
    killed, of the third a rank."""
    with ExitStack() as stack:
        runs = []
        for folder in (tmp_path / name for name in "abc"):
            folder.mkdir()
            run = Run([*LIGHT, "meet", str(folder)], folder, OWN)
            runs.append(stack.enter_context(run))
        *others, hasty = runs
        assert until(lambda: hasty.ranks() != [], START)
        os.killpg(hasty.process.pid, signal.SIGINT)

        files = [tmp_path / name / f"{rank}.json" for name in "ab" for rank in range(2)]
        assert until(lambda: all(file.exists() for file in files), START), runs[0].said()[-LAST:]
        met = [json.loads(file.read_text()) for file in files]
        assert met == [[run.process.pid] * 2 for run in others for _ in range(2)]
        for run in others:
            run.look()

        runs[0].process.kill()
        runs[1].ranks()[0].kill()
        killed = "\nrank 0 failed; the run has been ended.\nIt was killed by SIGKILL. "
        ends = [(-signal.SIGKILL, "", 0), (1, killed, 1), (128 + signal.SIGINT, "", 0)]
        for run, (status, said, failed) in zip(runs, ends, strict=True):
            assert run.wait(SOON) is not None
            assert (run.process.returncode, run.leftovers()) == (status, [])
            heard = run.said()
            right = said in heard and TRACEBACK not in heard
            assert right and len(FAILED.findall(heard)) == failed, heard[-LAST:]


def test_misfortunes_under_torchrun(tmp_path: Path) -> None:
    """A rank raises; then torchrun is killed, a rank being stopped."""
    with Run([*RESTARTED, "misfortunes", str(tmp_path)], tmp_path, TORCHRUN) as run:
        last = [tmp_path / f"{rank}.json" for rank in range(2)]
        assert until(lambda: all(file.exists() for file in last), START), run.said()[-LAST:]
        said = run.said()
        first = FAILED.findall(said)[:1]  # the other may say that it is gone
        once = said.count("ValueError: the bug of rank 1") == 1
        assert once and first == ["1"], said[-LAST:]
        run.look()
        run.ranks()[0].send_signal(signal.SIGSTOP)
        run.process.kill()
        assert run.wait(SOON) is not None
        assert run.leftovers() == []
