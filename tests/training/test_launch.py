"""Ranks are started, know each other, listen on loopback alone, and never outlive a failure."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import struct
import time
from dataclasses import replace
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
from training.shared_cores import core_notes, sharing
from training.world import World, choose_backend, choose_device, on_main

# A run


def test_ranks_know_their_place_and_listen_on_loopback_alone(
    tmp_path: Path,
) -> None:
    """With more work than a pipe holds."""
    launch(programs.describe, Settings(2, device="cpu", timeout=60), tmp_path, "x" * 1_000_000)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    place = ["rank", "world_size", "local_rank", "device", "is_main", "sum"]
    assert [[rank[key] for key in place] for rank in ranks] == [
        [0, 2, 0, "cpu", True, 3],
        [1, 2, 1, "cpu", False, 3],
    ]
    # torch's own store would listen on every interface.
    assert [set(rank["listening"]) for rank in ranks] == [{"127.0.0.1"}] * 2
    used = {ip for rank in ranks for ip in rank["all ips"]}
    assert used <= {"127.0.0.1", "::ffff:127.0.0.1"}
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    expected = [cores[:half], cores[half : 2 * half]] if half else [cores, cores]
    assert [rank["cores"] for rank in ranks] == expected
    assert [rank["threads"] for rank in ranks] == [len(each) for each in expected]
    if platform.libc_ver()[0] == "glibc":  # ranks keep freed memory, but for large blocks
        assert [rank["returned"] for rank in ranks] == [[False, True]] * 2


def test_a_rank_that_raises_ends_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    """It leaves no process. A rank that is killed: see tests/test_failures.py."""
    before = psutil.Process().children(recursive=True)
    with pytest.raises(SystemExit) as end:
        launch(programs.raise_on_one, Settings(2, device="cpu", timeout=60))
    left = set(psutil.Process().children(recursive=True)) - set(before)
    assert [p for p in left if "spawn_main" in " ".join(p.cmdline())] == []
    printed = capfd.readouterr().err
    assert end.value.code == 1
    assert printed.startswith("\nrank 1 failed; the run has been ended.\nTraceback ")
    assert printed.endswith("\nValueError: the bug of rank 1\n")
    assert [printed.count(word) for word in ("Traceback", "rank 0", "programs.py")] == [1, 0, 1]


def test_a_users_mistake_that_a_rank_finds_stays_one(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as error:
        launch(programs.user_error, Settings(1, device="cpu"))
    assert str(error.value) == "--model x: no such model; --model gpt2 works"
    assert capfd.readouterr().err == ""


# Which of several is the cause


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a parent has of three ranks: pipes to talk into, processes that are none."""
    monkeypatch.setattr(launcher, "GRACE", 0.2)
    ours, theirs = zip(*(Pipe() for _ in range(3)), strict=True)
    none: Any = {"exitcode": None, "join": lambda *_: None, "pid": os.getpid()}
    processes = [SimpleNamespace(**none) for _ in range(3)]
    return SimpleNamespace(
        theirs=theirs, processes=processes, watch=lambda: watch(processes, ours, 0.2, [])
    )


LOST = Failure(0, "lost", is_consequence=True)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-signal.SIGKILL, "It was killed by SIGKILL.\n"),
        (0, "It exited with status 0 before it was done.\n"),
    ],
)
def test_a_death_is_the_cause_of_a_connection_that_was_lost_before_it_was_seen(
    three: SimpleNamespace, code: int, said: str
) -> None:
    three.theirs[0].send(LOST)
    three.theirs[2].send(replace(LOST, rank=2))
    os.write(three.theirs[1].fileno(), struct.pack("!i", 100) + b"half of a report")
    three.theirs[1].close()
    three.processes[1].exitcode = code
    assert three.watch() == Failure(1, said)


@pytest.mark.parametrize("report", [None, LOST])
def test_a_rank_that_does_not_answer_is_why_others_have_waited(
    three: SimpleNamespace, report: Failure | None
) -> None:
    """One that is stopped, say."""
    three.theirs[0].send(report)
    assert three.watch() == Failure(1, f"It does not answer.\n{'lost' if report else ''}")
    for pipe in three.theirs:
        pipe.send(None)
    assert three.watch() is None


GLOO = RuntimeError(
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
)


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([GLOO], True),
        ([RuntimeError("Application timeout caused pair closure")], True),
        ([dist.DistNetworkError("recv failed")], True),
        ([PeerError("stage 0 waited for gradients of stage 1: it has ended")], True),
        ([ValueError("the bug")], False),
        ([GLOO, ValueError("no result")], True),
        ([ValueError("the bug"), GLOO], False),
    ],
    ids=repr,
)
def test_what_began_an_error_says_whether_it_is_a_consequence(
    errors: list[Exception], expected: bool
) -> None:
    first, *then = errors
    try:
        try:
            raise first
        except Exception as error:
            raise (then[0] if then else error)  # noqa: B904 (the context is what is looked at)
    except Exception as error:
        assert is_consequence(error) is expected


# Rank 0 works alone


def _alone(rank: int, world_size: int, mark: Path, fails: bool) -> str:
    """How it ends, and whether rank 0's work was done then."""

    def work() -> None:
        time.sleep(0.2)  # the other is there long before
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


# Interfaces, ports, cores, devices


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
    # On Debian a machine's own name is 127.0.1.1: the others do not reach it over loopback.
    for library in ("GLOO", "NCCL"):
        monkeypatch.delenv(f"{library}_SOCKET_IFNAME")
    debian = (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 1))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [debian])
    stay_on_interface_to("this-machine")
    assert os.environ.get("GLOO_SOCKET_IFNAME") != loopback


def test_a_given_port_is_used_or_said_to_be_taken() -> None:
    with listen() as first, listen() as second:
        ports = [sock.getsockname()[1] for sock in (first, second)]
        assert [sock.getsockname()[0] for sock in (first, second)] == ["127.0.0.1"] * 2
        assert len({0, *ports}) == 3
        with pytest.raises(UserError) as error:
            launch(programs.user_error, Settings(1, device="cpu", master_port=ports[0]))
        said = str(error.value)
        assert said.startswith(f"--master_port {ports[0]}: Address already in use")
        assert said.endswith("; without the option a free port is chosen")
    with pytest.raises(UserError, match=r"^--master_port 99999: ports go from 0 to 65535; "):
        listen(99999)
    with listen(ports[0]) as again:
        assert again.getsockname()[1] == ports[0]


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


def test_workers_that_share_cores_are_said_to() -> None:
    note = "want {} CPU cores and share 2: they take turns, and steps take longer."
    assert sharing([("a", [0, 1]), ("a", [1, 0])]) == ["2 ranks " + note.format(4)]
    assert sharing([("a", [i % 2]) for i in range(3)], "stages") == ["3 stages " + note.format(3)]
    assert sharing([("a", [0]), ("a", [1])]) == []
    assert sharing([("a", [0, 1]), ("b", [0, 1])]) == []  # two hosts
    assert sharing([("a", []), ("a", [])]) == []  # the system does not tell
    assert core_notes(World()) == []
    assert core_notes(World(0, 2, 0, torch.device("meta"))) == []


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert str(choose_device("auto", 1, 2)) == "cpu"
    assert choose_backend("auto", 2) == "gloo"
    with pytest.raises(UserError, match=r"^--device cuda: no GPU .*--device cpu works"):
        choose_device("cuda", 0, 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"^--device mps: it takes an Apple GPU, and one rank"):
        choose_device("mps", 0, 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(choose_device("auto", r, 3)) for r in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [choose_backend("auto", n) for n in (1, 2, 3)] == ["nccl", "nccl", "gloo"]
    assert str(choose_device("cpu", 1, 2)) == "cpu"
    assert choose_backend("cpu", 2) == "gloo"
