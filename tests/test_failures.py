"""What happens to runs, done to real ones: none hangs, each says why once, and none leaves a trace.

The short form of `python -m tests.chaos`: on programs that import little, several things per run.
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

START = 120.0  # seconds that the start of ranks may take here, on a busy machine
SOON = 30.0  # ... and their end
LIGHT = [sys.executable, "-m", "tests.training.programs"]
RESTARTED = [
    sys.executable, *TORCHRUN_COMMAND, "--max-restarts", "2", "-m", "tests.training.programs",
]  # fmt: skip


def test_three_runs_at_once(tmp_path: Path) -> None:
    """They do not meet, listen on loopback alone, and leave nothing, whatever is killed: the
    parent of one, a rank of another, or what starts the ranks of the third."""
    with ExitStack() as stack:
        folders, runs = [tmp_path / name for name in "abc"], []
        for folder in folders:
            folder.mkdir()
            run = Run([*LIGHT, "meet", str(folder)], folder, OWN)
            runs.append(stack.enter_context(run))
        files = [folder / f"{rank}.json" for folder in folders for rank in range(2)]
        assert until(lambda: all(file.exists() for file in files), START), runs[0].said()
        starters, ports = [], []
        for run, folder in zip(runs, folders, strict=True):
            starter = run.starter()
            assert starter is not None
            met = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
            assert met == [[starter.pid] * 2] * 2
            run.look()
            assert {ip for ip, _ in run.listening} == {"127.0.0.1"}
            starters.append(starter)
            ports += [port for _, port in run.listening]
        assert len(set(ports)) == len(ports)

        runs[0].process.kill()
        runs[1].ranks()[0].kill()
        starters[2].kill()
        for run, status, who in zip(
            runs,
            (-signal.SIGKILL, 1, 1),
            (None, "rank 0", "the process that starts the ranks"),
            strict=True,
        ):
            assert run.wait(SOON) is not None
            assert (run.process.returncode, run.leftovers()) == (status, [])
            ended = f"\n{who} failed; the run has been ended.\nIt was killed by SIGKILL.\n"
            assert (ended if who else "") in run.said()
            assert len(FAILED.findall(run.said())) == (who == "rank 0")
            assert TRACEBACK not in run.said()


def test_ctrl_c_while_ranks_import_their_libraries_prints_nothing(tmp_path: Path) -> None:
    """It reaches every process of the terminal."""
    with Run([*LIGHT, "meet", str(tmp_path)], tmp_path, OWN) as run:
        assert until(lambda: run.starter() is not None, START)
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait(SOON) is not None
        assert (run.process.returncode, run.leftovers()) == (128 + signal.SIGINT, [])
        assert FAILED.findall(run.said()) == [] and TRACEBACK not in run.said()


def test_misfortunes_under_torchrun(tmp_path: Path) -> None:
    """A rank raises; both find a mistake of the user's; and at last torchrun is killed, a rank
    being stopped."""
    with Run([*RESTARTED, "misfortunes", str(tmp_path)], tmp_path, TORCHRUN) as run:
        last = [tmp_path / f"{rank}.json" for rank in range(2)]
        assert until(lambda: all(file.exists() for file in last), START), run.said()
        said = run.said()
        assert FAILED.findall(said)[0] == "1"  # the first; the other may say that it is gone
        once = ["ValueError: the bug of rank 1", "--model x: no such model; --model gpt2 works"]
        assert [said.count(words) for words in once] == [1] * len(once), said
        run.look()
        run.ranks()[0].send_signal(signal.SIGSTOP)
        run.process.kill()
        assert run.wait(SOON) is not None
        assert run.leftovers() == []
