"""Ranks are started, know each other, listen on loopback alone, and never outlive a failure."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from pipeline.messages import PeerError
from runtime.cores import core_slice
from tests.ranks import Ranks
from tests.training import programs
from tests.training.conftest import Described
from training import launch as launcher
from training.errors import RunError, UserError
from training.launch import (
    Failure,
    Settings,
    is_consequence,
    launch,
    listen,
    stay_on_interface_to,
    watch,
)
from training.world import World, choose_backend, choose_device, on_main


def children() -> list[psutil.Process]:
    """The ranks that this process has started and that still run."""
    return [
        p
        for p in psutil.Process().children(recursive=True)
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


def failed(capfd: pytest.CaptureFixture[str], work: Callable[[World], None], ranks: int) -> str:
    """What is read of a run that fails. It leaves no process."""
    before = children()
    with pytest.raises(SystemExit) as end:
        launch(work, Settings(ranks, device="cpu", master_port=0, timeout=60))
    assert (end.value.code, children()) == (1, before)
    return capfd.readouterr().err


def test_a_rank_that_raises_ends_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    printed = failed(capfd, programs.raise_on_one, 2)
    assert printed.startswith("\nrank 1 failed; the run has been ended.\nTraceback ")
    assert printed.endswith("\nValueError: the bug of rank 1\n")
    assert [printed.count(word) for word in ("Traceback", "rank 0", "programs.py")] == [1, 0, 1]


def test_a_rank_that_says_nothing_has_failed(capfd: pytest.CaptureFixture[str]) -> None:
    """One that is killed: see tests/test_failures.py."""
    assert failed(capfd, programs.leave_silently, 1) == (
        "\nrank 0 failed; the run has been ended.\nIt exited with status 0 before it was done.\n"
    )


def test_a_users_mistake_that_a_rank_finds_stays_one(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as error:
        launch(programs.user_error, Settings(1, device="cpu", master_port=0))
    assert str(error.value) == "--model x: no such model; --model gpt2 works"
    assert capfd.readouterr().err == ""


# ------------------------------------------------------------------ which of several is the cause


class FakeRanks:
    """What a parent has of its ranks: pipes to talk into, processes that are none."""

    def __init__(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launcher, "GRACE", 0.2)
        self.ours, self.theirs = zip(*(Pipe() for _ in range(number)), strict=True)
        self.processes: list[Any] = [
            SimpleNamespace(exitcode=None, join=lambda *_: None, pid=os.getpid())
            for _ in range(number)
        ]

    def watch(self) -> Failure | None:
        """What the parent makes of it."""
        return watch(self.processes, self.ours, timeout=0.2)


def test_a_death_is_the_cause_of_a_connection_that_was_lost_before_it_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = FakeRanks(3, monkeypatch)
    ranks.theirs[0].send(Failure(0, "lost", is_consequence=True))
    ranks.theirs[2].send(Failure(2, "lost", is_consequence=True))
    os.write(ranks.theirs[1].fileno(), struct.pack("!i", 100) + b"half of a report")
    ranks.theirs[1].close()
    ranks.processes[1].exitcode = -signal.SIGKILL
    assert ranks.watch() == Failure(1, "It was ended by SIGKILL.\n")


@pytest.mark.parametrize("done", [None, Failure(0, "lost", is_consequence=True)])
def test_a_rank_that_does_not_answer_is_why_others_have_waited(
    monkeypatch: pytest.MonkeyPatch, done: Failure | None
) -> None:
    """One that is stopped, say."""
    ranks = FakeRanks(2, monkeypatch)
    ranks.theirs[0].send(done)
    assert ranks.watch() == Failure(1, f"It does not answer.\n{done.text if done else ''}")
    for pipe in ranks.theirs:
        pipe.send(None)
    assert ranks.watch() is None


GLOO = RuntimeError(
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
)


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [
        (GLOO, None, True),
        (RuntimeError("Application timeout caused pair closure"), None, True),
        (dist.DistNetworkError("recv failed"), None, True),
        (PeerError("stage 0 waited for gradients of stage 1: it has ended"), None, True),
        (ValueError("the bug"), None, False),
        (GLOO, ValueError("no result"), True),
        (ValueError("the bug"), GLOO, False),
    ],
    ids=repr,
)
def test_what_began_an_error_says_whether_it_is_a_consequence(
    first: Exception, then: Exception | None, expected: bool
) -> None:
    try:
        try:
            raise first
        except Exception as error:
            if then is not None:
                raise then from error
            raise
    except Exception as error:
        assert is_consequence(error) is expected


# ------------------------------------------------------------------------ rank 0 works alone


def _alone(rank: int, world_size: int, mark: Path, fails: bool) -> str:
    """How it ends, and whether rank 0's work was done then."""

    def work() -> None:
        time.sleep(0.5)  # the other is there long before
        mark.touch()
        if fails:
            raise RunError("the disk is full")

    try:
        on_main(World(rank, world_size), work)
    except RunError as error:
        return str(error)
    return "done" if mark.exists() else "early"


def test_others_wait_for_rank_0(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(_alone, tmp_path / "a", False) == ["done", "done"]
    assert ranks.run(_alone, tmp_path / "b", True) == ["the disk is full", "done"]


# ----------------------------------------------------------- interfaces, ports, cores, devices


def test_ranks_of_one_machine_stay_on_loopback_and_those_of_several_where_they_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    stay_on_interface_to("localhost")
    chosen = [os.environ[f"{library}_SOCKET_IFNAME"] for library in ("GLOO", "NCCL")]
    assert chosen == ["eth7", loopback]
    stay_on_interface_to("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == loopback


def test_the_default_port_is_used_where_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher.DEFAULT_PORT == 11868
    with listen(0) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(launcher, "DEFAULT_PORT", port)
    with listen() as first, listen() as second:
        assert first.getsockname() == ("127.0.0.1", port)
        assert second.getsockname()[0] == "127.0.0.1"
        assert second.getsockname()[1] != port


def test_a_port_that_cannot_be_had_is_a_users_mistake() -> None:
    with listen(0) as taken:
        for port in (taken.getsockname()[1], -1, 65536):
            with pytest.raises(UserError) as error:
                launch(programs.leave, Settings(1, device="cpu", master_port=port))
            said = f"--master_port {port}: cannot listen on 127.0.0.1:{port} ("
            assert str(error.value).startswith(said)
            assert str(error.value).endswith("); without the option a free port is chosen")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no such thing on this system")
@pytest.mark.parametrize(
    ("slices", "each", "expected"),
    [
        (3, None, [[2], [3], [5]]),
        (9, None, [[2], [3], [5], [7], [7], [5], [3], [2], [2]]),
        (2, None, [[2, 3], [5, 7]]),
        (2, 3, [[2, 3, 5], [7, 2, 3]]),
        (2, 8, [[2, 3, 5, 7], [2, 3, 5, 7]]),
    ],
)
def test_cores_are_dealt_out_in_consecutive_slices_to_and_fro(
    monkeypatch: pytest.MonkeyPatch, slices: int, each: int | None, expected: list[list[int]]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7})
    assert [core_slice(i, slices, each) for i in range(slices)] == expected


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert str(choose_device("auto", 1, 2)) == "cpu"
    assert choose_backend("auto", 2) == "gloo"
    with pytest.raises(UserError, match=r"^--device cuda: no GPU .*--device cpu works"):
        choose_device("cuda", 0, 2)
    with pytest.raises(UserError, match=r"^--device mps with 2 ranks: .*--world_size 1, or --dev"):
        choose_device("mps", 0, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(choose_device("auto", r, 3)) for r in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [choose_backend("auto", n) for n in (1, 2, 3)] == ["nccl", "nccl", "gloo"]
    assert str(choose_device("cpu", 1, 2)) == "cpu"
    assert choose_backend("cpu", 2) == "gloo"
