"""What happens to runs, done to real ones: none hangs, each says why once, and none leaves a trace.

The short form of `python -m tests.chaos`: on programs that import little, several things per run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos.kinds import FAILED, TRACEBACK
from tests.chaos.programs import OWN, TORCHRUN
from tests.chaos.run import Run, until

START = 120.0  # seconds that the start of ranks may take here, on a busy machine
SOON = 30.0  # ... and their end
LIGHT = [sys.executable, "-m", "tests.training.programs"]
RESTARTED = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
    "--max-restarts", "2", "-m", "tests.training.programs",
]  # fmt: skip


@pytest.fixture
def two_runs(tmp_path: Path) -> Iterator[tuple[Run, Run]]:
    """Two runs on one machine at once, whose ranks have met."""
    folders = [tmp_path / "a", tmp_path / "b"]
    with ExitStack() as stack:
        runs = []
        for folder in folders:
            folder.mkdir()
            run = Run([*LIGHT, "meet", str(folder)], folder, OWN)
            runs.append(stack.enter_context(run))
        files = [folder / f"{rank}.json" for folder in folders for rank in range(2)]
        assert until(lambda: all(file.exists() for file in files), START), runs[0].said()
        yield runs[0], runs[1]


def test_two_runs_at_once(two_runs: tuple[Run, Run]) -> None:
    """They do not meet, listen on loopback alone, and leave nothing: not when the parent of one is
    killed, and not when a rank of the other is."""
    for run in two_runs:
        met = [json.loads((run.tmp.parent / f"{r}.json").read_text()) for r in range(2)]
        starter = run.starter()
        assert starter is not None
        assert met == [[starter.pid] * 3] * 2
        run.look()
        assert {ip for ip, _ in run.listening} == {"127.0.0.1"}
    first, second = two_runs
    assert not {port for _, port in first.listening} & {port for _, port in second.listening}

    first.process.kill()
    second.ranks()[0].kill()
    for run, status in ((first, -signal.SIGKILL), (second, 1)):
        assert run.wait(SOON) is not None
        assert (run.process.returncode, run.leftovers()) == (status, [])
    assert [FAILED.findall(run.said()) for run in two_runs] == [[], ["0"]]
    assert [run.said().count("It was killed by SIGKILL") for run in two_runs] == [0, 1]
    assert [run.said().count(TRACEBACK) for run in two_runs] == [0, 0]


def test_what_starts_the_ranks_is_killed(tmp_path: Path) -> None:
    """The ranks end with it."""
    with Run([*LIGHT, "meet", str(tmp_path)], tmp_path, OWN) as run:
        assert until(lambda: (tmp_path / "1.json").exists(), START), run.said()
        starter = run.starter()
        assert starter is not None
        starter.kill()
        assert run.wait(SOON) is not None
        assert (run.process.returncode, run.leftovers()) == (1, [])
        assert run.said().endswith(
            "\nthe process that starts the ranks failed; the run has been ended.\n"
            "It was killed by SIGKILL.\n"
        )


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
        assert FAILED.findall(said) == ["1"]
        once = [
            "ValueError: the bug of rank 1", TRACEBACK,
            "--model x: no such model; --model gpt2 works",
        ]  # fmt: skip
        assert [said.count(words) for words in once] == [1] * len(once), said
        run.look()
        run.ranks()[0].send_signal(signal.SIGSTOP)
        run.process.kill()
        assert run.wait(SOON) is not None
        assert run.leftovers() == []
