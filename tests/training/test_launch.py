"""Ranks are started, know each other, listen on loopback alone, and never outlive a failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks
from tests.training import programs
from tests.training.conftest import Described
from training import launch as launcher
from training.launch import (
    RunError,
    Settings,
    UserError,
    World,
    choose_device,
    core_slice,
    launch,
    listen,
    on_main,
)

ROOT = Path(__file__).resolve().parents[2]
SOON = 20.0  # seconds that the end of a process may take here; a hang takes the time-out, 60


def children(parent: int | None = None) -> list[psutil.Process]:
    """The ranks that a process, by default this one, has started and that still run."""
    return [
        p
        for p in psutil.Process(parent).children(recursive=True)
        if "spawn_main" in " ".join(p.cmdline()) and p.status() != psutil.STATUS_ZOMBIE
    ]


# ---------------------------------------------------------------- a run in which all goes well


def test_every_rank_knows_its_place(described: Described) -> None:
    place = ["rank", "world_size", "local_rank", "device", "is_main", "sum"]
    assert [[rank[key] for key in place] for rank in described.ranks] == [
        [0, 2, 0, "cpu", True, 3],
        [1, 2, 1, "cpu", False, 3],
    ]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no such thing on this system")
def test_ranks_compute_on_cores_of_their_own(described: Described) -> None:
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    expected = [cores[:half], cores[half : 2 * half]] if half else [cores, cores]
    assert [rank["cores"] for rank in described.ranks] == expected
    assert [rank["threads"] for rank in described.ranks] == [len(each) for each in expected]


def test_nothing_listens_on_other_interfaces(described: Described) -> None:
    """torch's own store would listen on every interface."""
    assert [set(rank["listening"]) for rank in described.ranks] == [{"127.0.0.1"}] * 2
    used = {ip for rank in described.ranks for ip in rank["all ips"]}
    assert used <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_a_taken_default_port_is_replaced_in_one_line(described: Described) -> None:
    before, after = f"Port {described.taken_port} is taken; the ranks meet on ", ".\n"
    printed = described.stderr
    assert (printed[: len(before)], printed[-len(after) :]) == (before, after)
    assert int(printed[len(before) : -len(after)]) not in (0, described.taken_port)


# -------------------------------------------------------------------- ranks that end too early


def test_a_rank_that_raises_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    before = children()
    with pytest.raises(SystemExit) as end:
        launch(programs.raise_on_one, Settings(2, device="cpu", master_port=0, timeout=60))
    assert end.value.code == 1
    printed = capsys.readouterr().err
    assert printed.startswith("\nrank 1 failed; the run has been ended.\nTraceback ")
    assert printed.endswith("\nValueError: the bug of rank 1\n")
    assert [printed.count(word) for word in ("Traceback", "rank 0", "programs.py")] == [1, 0, 1]
    assert children() == before


def test_a_killed_rank_is_the_cause_of_what_others_report(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before, start = children(), time.monotonic()
    with pytest.raises(SystemExit) as end:
        launch(programs.killed_on_one, Settings(2, device="cpu", master_port=0, timeout=60))
    assert end.value.code == 1
    expected = "\nrank 1 failed; the run has been ended.\nIt was ended by SIGKILL.\n"
    assert capfd.readouterr().err == expected
    assert time.monotonic() - start < 60
    assert children() == before


def test_a_rank_that_leaves_silently_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        launch(programs.leave_silently, Settings(1, device="cpu", master_port=0))
    assert end.value.code == 1
    assert capsys.readouterr().err == (
        "\nrank 0 failed; the run has been ended.\nIt exited with status 0 before it was done.\n"
    )


def test_a_rank_that_exits_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        launch(programs.leave, Settings(1, device="cpu", master_port=0))
    assert end.value.code == 1
    printed = capsys.readouterr().err
    assert printed.startswith("\nrank 0 failed; the run has been ended.\nTraceback ")
    assert printed.endswith("\nSystemExit: 0\n")


def test_a_users_mistake_that_a_rank_finds_stays_one(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as error:
        launch(programs.user_error, Settings(1, device="cpu", master_port=0))
    assert str(error.value) == "--model x: no such model; --model gpt2 works"
    assert capfd.readouterr().err == ""


def test_work_that_cannot_be_sent_is_said_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.multiprocessing.get_context", None)
    with pytest.raises(AttributeError, match="<lambda>"):
        launch(lambda _: None, Settings(1, device="cpu", master_port=0))


# ------------------------------------------------------------------------ rank 0 works alone


def _alone(rank: int, world_size: int, fails: bool) -> tuple[str | None, int]:
    """How it ends, and how often a rank was told that rank 0 lives, or told the others."""
    beats, third = [0], threading.Event()
    broadcast = dist.broadcast

    def count(*args: Any) -> None:
        broadcast(*args)
        beats[0] += 1
        if beats[0] == 3:
            third.set()

    def work() -> None:
        assert third.wait(SOON)
        if fails:
            raise RunError("the disk is full")

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(dist, "broadcast", count)
        try:
            on_main(World(rank, world_size), work)
        except RunError as error:
            return str(error), beats[0]
    return None, beats[0]


@pytest.mark.parametrize("fails", [False, True])
def test_others_wait_for_rank_0_as_long_as_it_lives(ranks: Ranks, fails: bool) -> None:
    """Each wait is short, so no time-out ends it."""
    (first, told), (second, heard) = ranks.run(_alone, fails)
    assert (first, second) == ("the disk is full" if fails else None, None)
    assert told == heard >= 4


# ---------------------------------------------------------------------- a parent that is ended


@contextmanager
def program(name: str) -> Iterator[subprocess.Popen[str]]:
    """A program with two ranks, in a process group of its own, as a terminal gives it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.training.programs", name],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
        # A shell that runs the tests in the background has SIGINT ignored, for us and ours.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks, once both are at work."""
    assert process.stdout is not None
    return [psutil.Process(int(process.stdout.readline())) for _ in range(2)]


def test_ranks_end_with_a_parent_that_is_killed() -> None:
    with program("wait_forever") as process:
        ranks = ranks_of(process)
        process.kill()
        _, alive = psutil.wait_procs(ranks, SOON)
        assert alive == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_parent_that_is_asked_to_end_takes_its_ranks_along(number: int, status: int) -> None:
    with program("wait_forever") as process:
        ranks = ranks_of(process)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # Ctrl-C reaches every process of the terminal
        else:
            process.send_signal(number)
        assert process.wait(SOON) == status
        assert [rank for rank in ranks if rank.is_running()] == []
        assert process.communicate() == ("", "")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="not Linux")
def test_ctrl_c_while_ranks_import_their_libraries_prints_nothing() -> None:
    with program("wait_forever") as process:
        until(lambda: len(children(process.pid)) == 2)
        ranks = children(process.pid)
        until(lambda: all(is_importing_torch(rank) for rank in ranks))
        assert [is_deaf_to(rank, signal.SIGINT) for rank in ranks] == [True, True]
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(SOON) == 130
        assert process.communicate() == ("", "")
        _, alive = psutil.wait_procs(ranks, SOON)
        assert alive == []


def is_importing_torch(process: psutil.Process) -> bool:
    """Whether it has begun to, which takes a second."""
    return any("libtorch" in mapped.path for mapped in process.memory_maps())


def is_deaf_to(process: psutil.Process, number: int) -> bool:
    """Whether a signal does nothing to it: is ignored, or blocked for now."""
    status = Path(f"/proc/{process.pid}/status").read_text().split()
    masks = [int(status[status.index(name) + 1], 16) for name in ("SigIgn:", "SigBlk:")]
    return bool((masks[0] | masks[1]) >> (number - 1) & 1)


def until(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds, which another process brings about."""
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# ------------------------------------------------------------------------ ports, cores, devices


def test_the_default_port_is_used_where_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher.DEFAULT_PORT == 11868
    with listen(0) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(launcher, "DEFAULT_PORT", port)
    with listen() as first, listen() as second:
        assert first.getsockname() == ("127.0.0.1", port)
        assert second.getsockname()[0] == "127.0.0.1"
        assert second.getsockname()[1] != port


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_a_users_mistake(port: int) -> None:
    with pytest.raises(UserError, match=rf"^--master_port {port}: .*without the option a free"):
        listen(port)


def test_a_given_port_that_is_taken_is_a_users_mistake() -> None:
    with listen(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError) as error:
            launch(programs.leave, Settings(1, device="cpu", master_port=port))
    assert str(error.value) == (
        f"--master_port {port}: cannot listen on 127.0.0.1:{port} ([Errno 98] Address already in "
        "use); without the option a free port is chosen"
    )


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no such thing on this system")
@pytest.mark.parametrize(
    ("cores", "slices", "each", "expected"),
    [
        ([0, 1], 1, None, [[0, 1]]),
        ([0, 1], 2, None, [[0], [1]]),
        ([0, 1], 3, None, [[0], [1], [0]]),
        ([2, 3, 5, 7, 11], 2, None, [[2, 3], [5, 7]]),
        ([2, 3, 5, 7], 2, 1, [[2], [3]]),
        ([2, 3, 5, 7], 2, 3, [[2, 3, 5], [7, 2, 3]]),
        ([2, 3], 2, 8, [[2, 3], [2, 3]]),
    ],
)
def test_cores_are_dealt_out_in_consecutive_slices(
    monkeypatch: pytest.MonkeyPatch,
    cores: list[int],
    slices: int,
    each: int | None,
    expected: list[list[int]],
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))
    assert [core_slice(i, slices, each) for i in range(slices)] == expected


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert str(choose_device("auto", 1, 2)) == "cpu"
    assert launcher.choose_backend("auto", 2) == "gloo"
    with pytest.raises(UserError, match=r"^--device cuda: no GPU .*--device cpu works"):
        choose_device("cuda", 0, 2)
    with pytest.raises(UserError, match=r"^--device mps with 2 ranks: .*--world_size 1, or --dev"):
        choose_device("mps", 0, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(choose_device("auto", r, 3)) for r in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [launcher.choose_backend("auto", n) for n in (1, 2, 3)] == ["nccl", "nccl", "gloo"]
    assert str(choose_device("cpu", 1, 2)) == "cpu"
    assert launcher.choose_backend("cpu", 2) == "gloo"
