"""What happens to runs, done to real ones: none hangs, each says why once, and none leaves a trace.

The short form of `python -m tests.chaos`: on programs that import little, several things per run.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos.kinds import FAILED, TRACEBACK
from tests.chaos.programs import OWN, TORCHRUN
from tests.chaos.run import Run, until
from tests.training import programs
from training.launch import Settings, launch

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
    is closed, and not when the parent of the other is killed while a rank is stopped."""
    for run in two_runs:
        met = [json.loads((run.tmp.parent / f"{r}.json").read_text()) for r in range(2)]
        assert met == [[run.process.pid] * 3] * 2
        run.look()
        assert {ip for ip, _ in run.listening} == {"127.0.0.1"}
    first, second = two_runs
    assert not {port for _, port in first.listening} & {port for _, port in second.listening}

    first.close_terminal()
    stopped = second.ranks()[1]
    stopped.send_signal(signal.SIGSTOP)
    second.process.kill()
    for run, status in ((first, 128 + signal.SIGHUP), (second, -signal.SIGKILL)):
        assert run.wait(SOON) is not None
        assert (run.process.returncode, run.leftovers()) == (status, [])
        assert TRACEBACK not in run.said() and "failed" not in run.said()


def test_a_stopped_rank_is_named_and_ended(capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0, where the ranks meet. That the run ends at all shows that it was killed: it cannot
    hear that it should end."""
    start = time.monotonic()
    with pytest.raises(SystemExit) as end:
        launch(programs.stop_rank_0, Settings(2, device="cpu", master_port=0, timeout=3))
    assert end.value.code == 1
    assert capfd.readouterr().err == (
        "\nrank 0 failed; the run has been ended.\n"
        "It is stopped (by SIGSTOP, or in a debugger) and does not answer.\n"
    )
    assert time.monotonic() - start < SOON


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


def test_the_tool_lists_what_there_is_and_explains_itself() -> None:
    said = [
        subprocess.run(
            [sys.executable, "-m", "tests.chaos", option],
            cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True,
        ).stdout
        for option in ("--list", "--help")
    ]  # fmt: skip
    assert "kill -9 of a rank: own, torchrun" in said[0]
    assert "--rounds" in said[1] and "counted as missed" in said[1]
