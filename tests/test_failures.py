"""What happens to runs, done to real ones: none hangs, each says why once, and none leaves a trace.

The short form of `python -m tests.chaos`: on programs that import little, several things per run.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos.__main__ import main
from tests.chaos.attempt import Attempt, half_written
from tests.chaos.kinds import FAILED, TRACEBACK, End, judge
from tests.chaos.programs import OWN, TORCHRUN
from tests.chaos.run import Run, until

SOON = 30.0  # seconds that the start or the end of a process may take here
LIGHT = [sys.executable, "-m", "tests.training.programs"]
RESTARTED = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
    "--max-restarts", "3", "-m", "tests.training.programs",
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
        assert until(lambda: all(file.exists() for file in files), SOON), runs[0].said()
        yield runs[0], runs[1]


def test_two_runs_at_once(two_runs: tuple[Run, Run]) -> None:
    """They do not meet, listen on loopback alone, and leave nothing: not when the terminal of one
    is closed, and not when a rank of the other is killed."""
    for run in two_runs:
        met = [json.loads((run.tmp.parent / f"{r}.json").read_text()) for r in range(2)]
        assert met == [[run.process.pid] * 3] * 2
        run.look()
        assert {ip for ip, _ in run.listening} == {"127.0.0.1"}
    first, second = two_runs
    assert not {port for _, port in first.listening} & {port for _, port in second.listening}

    first.close_terminal()
    second.ranks()[0].kill()
    for run, status in ((first, 128 + signal.SIGHUP), (second, 1)):
        assert run.wait(SOON) is not None
        assert (run.process.returncode, run.leftovers()) == (status, [])
    assert [FAILED.findall(run.said()) for run in two_runs] == [[], ["0"]]
    assert [run.said().count("It was ended by SIGKILL") for run in two_runs] == [0, 1]
    assert [run.said().count(TRACEBACK) for run in two_runs] == [0, 0]


def test_misfortunes_under_torchrun(tmp_path: Path) -> None:
    """A rank raises; one is killed; both find a mistake of the user's; and at last torchrun is
    killed, a rank being stopped."""
    with Run([*RESTARTED, "misfortunes", str(tmp_path)], tmp_path, TORCHRUN) as run:
        last = [tmp_path / f"{rank}.json" for rank in range(2)]
        assert until(lambda: all(file.exists() for file in last), 80), run.said()
        said = run.said()
        assert FAILED.findall(said) == ["1"]
        once = [
            "ValueError: the bug of rank 1", TRACEBACK, "failed (exitcode: -9) local_rank: 1",
            "--model x: no such model; --model gpt2 works",
        ]  # fmt: skip
        assert [said.count(words) for words in once] == [1] * len(once), said
        run.look()
        run.ranks()[0].send_signal(signal.SIGSTOP)
        run.process.kill()
        assert run.wait(SOON) is not None
        assert run.leftovers() == []


# ------------------------------------------------------------------ what the tool itself can see

LEAKY = """
import os, socket, subprocess, sys, tempfile
listening = socket.create_server(("127.0.0.1", 0), backlog=1)
os.set_inheritable(listening.fileno(), True)
tempfile.mkstemp(prefix="forgotten")
subprocess.Popen(["sleep", "50"], close_fds=False, start_new_session=True)
sys.stdin.readline()
"""


def test_what_is_left_is_found(tmp_path: Path) -> None:
    (tmp_path / "work" / "checkpoints" / ".000002-epoch1.part").mkdir(parents=True)
    with Run([sys.executable, "-S", "-c", LEAKY], tmp_path) as run:
        assert until(lambda: len(run.processes()) == 2, SOON)
        run.look()
        ((_, port),) = run.listening
        run.process.kill()
        assert run.wait(0.5) is None
        left = run.leftovers(0)
        (sleeper,) = run.processes()
    assert left[:2] == [f"process {sleeper.pid} (sleep 50)", f"port {port}"]
    assert [words.startswith("temporary file forgotten") for words in left[2:]] == [True]
    found = half_written(tmp_path / "work")
    assert found == ["half-written checkpoints/.000002-epoch1.part"]


def test_a_violation_is_shown_and_makes_the_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(attempt: Attempt) -> None:  # what it would find
        attempt.seconds, attempt.status, attempt.left, attempt.said = 1.5, 0, ["port 1"], "a\nb\n"
        attempt.wrong = judge(End((1,), True, ("boom",)), 0, attempt.said, 1)

    monkeypatch.setattr(Attempt, "make", make)
    assert main(["--only", "kill", "--program", "data parallel"]) == 1
    lines = [line.strip() for line in capsys.readouterr().out.split("\n")]
    assert lines[0].startswith("1/1  WRONG  data parallel: kill, rank ")
    assert lines[1:7] == [
        "status 0, and not 1", "named [], and not [['1']]", "'boom' is read 0 times",
        "left: port 1", "| a", "| b",
    ]  # fmt: skip
    assert lines[8:10] == [
        "program        kind  tried  missed  in time  as it must  left  slowest end",
        "data parallel  kill      1       0        1           0     1        1.5 s",
    ]
