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
from typing import Any

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
    "--max-restarts", "4", "-m", "tests.training.programs",
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
    is closed, and not when a rank of the other is stopped. It does not hear that it should end."""
    for run in two_runs:
        met = [json.loads((run.tmp.parent / f"{r}.json").read_text()) for r in range(2)]
        assert met == [[run.process.pid] * 3] * 2
        run.look()
        assert {ip for ip, _ in run.listening} == {"127.0.0.1"}
    first, second = two_runs
    assert not {port for _, port in first.listening} & {port for _, port in second.listening}

    first.close_terminal()
    second.ranks()[0].send_signal(signal.SIGSTOP)
    for run, status in ((first, 128 + signal.SIGHUP), (second, 1)):
        assert run.wait(SOON) is not None
        assert (run.process.returncode, run.leftovers()) == (status, [])
    assert [FAILED.findall(run.said()) for run in two_runs] == [[], ["0"]]
    assert [run.said().count("It is stopped (by SIGSTOP") for run in two_runs] == [0, 1]
    assert [run.said().count(TRACEBACK) for run in two_runs] == [0, 0]


def test_misfortunes_under_torchrun(tmp_path: Path) -> None:
    """A rank raises; one is killed; one is stopped when the other is done; both find a mistake of
    the user's; and at last torchrun is killed, a rank being stopped."""
    with Run([*RESTARTED, "misfortunes", str(tmp_path)], tmp_path, TORCHRUN) as run:
        last = [tmp_path / f"{rank}.json" for rank in range(2)]
        assert until(lambda: all(file.exists() for file in last), 80), run.said()
        said = run.said()
        assert FAILED.findall(said) == ["1", "0"]
        once = [
            "ValueError: the bug of rank 1", TRACEBACK,
            "It was stopped (by SIGSTOP, or in a debugger) and did not answer.",
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


def test_what_is_half_written_is_found(tmp_path: Path) -> None:
    for name in ("checkpoints/000001-epoch0", "checkpoints/.000002-epoch1.part"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "state.json").touch()
    (tmp_path / "summary.json.part").touch()
    assert half_written(tmp_path) == [
        "half-written checkpoints/.000002-epoch1.part", "half-written summary.json.part"
    ]  # fmt: skip


def test_shared_memory_that_is_left_is_found(tmp_path: Path) -> None:
    program = (
        "import mmap, os, sys, time\n"
        "file = open(f'/dev/shm/forgotten_{os.getpid()}', 'w+b'); file.truncate(4096)\n"
        "held = mmap.mmap(file.fileno(), 4096); time.sleep(60)"
    )
    with Run([sys.executable, "-S", "-c", program], tmp_path) as run:
        path = Path(f"/dev/shm/forgotten_{run.process.pid}")

        def seen() -> bool:
            run.look()
            return bool(run.mapped)

        try:
            assert until(seen, SOON)
            run.process.kill()
            assert run.wait(SOON) is not None
            assert run.leftovers(0) == [f"shared memory {path}"]
        finally:
            path.unlink(missing_ok=True)


def test_the_tool_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "kill -9 of a rank: own, torchrun\n" in listed
    assert "\nrestart " in listed


def make_up(monkeypatch: pytest.MonkeyPatch, **found: Any) -> None:
    """Attempts are not made; this is what they find."""

    def make(attempt: Attempt) -> None:
        for name, value in {"seconds": 1.5, "status": 1, **found}.items():
            setattr(attempt, name, value)

    monkeypatch.setattr(Attempt, "make", make)


def test_a_tally_of_all_that_was_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_up(monkeypatch)
    asked = ["--only", "kill", "--program", "data parallel", "--rounds", "3", "--phase", "training"]
    assert main(asked) == 0
    printed = capsys.readouterr().out
    assert [line.split("+")[0] for line in printed.split("\n")[:3]] == [
        f"   {i}/3  data parallel: kill, rank {rank}, training "
        for i, rank in enumerate((0, 1, 1), 1)
    ]
    assert printed.split("\n")[4:6] == [
        "program        kind  tried  missed  in time  as it must  left  slowest end",
        "data parallel  kill      3       0        3           3     0        1.5 s",
    ]
    assert main(asked) == 0
    assert capsys.readouterr().out.split("\n")[:3] == printed.split("\n")[:3]  # the same draws


def test_a_violation_is_shown_and_makes_the_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_up(monkeypatch, left=["port 1"], wrong=["status 0, and not 1"], said="a\nb\n")
    assert main(["--only", "kill", "--program", "torchrun"]) == 1
    lines = capsys.readouterr().out.split("\n")
    assert lines[0].startswith("   1/1  WRONG  torchrun: kill, rank ")
    assert [line.strip() for line in lines[1:5]] == [
        "status 0, and not 1", "left: port 1", "| a", "| b"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (1, "rank 1 failed; all\nTraceback (most recent call last)\nboom\n", []),
        (0, "rank 1 failed; all\nTraceback (most recent call last)\nboom", ["status 0, and not 1"]),
        (1, "rank 0 failed; all\nTraceback (most recent call last)\nboom",
         ["named ['0'], and not [['1']]"]),
        (1, "boom\nrank 1 failed; all\nboom",
         ["'boom' is read 2 times", "0 tracebacks, and not 1"]),
    ],
)  # fmt: skip
def test_what_the_tool_calls_wrong(status: int, said: str, expected: list[str]) -> None:
    assert judge(End((1,), True, ("boom",), 1), status, said, 1) == expected
