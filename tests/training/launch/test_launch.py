"""Ranks are started, know each other, listen on loopback alone, and never outlive a failure."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from threading import enumerate as enumerate_threads
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from runtime.cores import core_slice
from tests.ranks import Ranks
from tests.training import programs
from tests.warm import run_warm
from training.launch import launch as launcher
from training.launch.distributed import make_world
from training.launch.errors import RunError, UserError, format_error, handled
from training.launch.launch import RankError, launch, terminal_ignored, watch
from training.launch.meeting import agree_on_backend, fresh_part, listen, meet, stay_on_interface_to
from training.launch.world import World, choose_device
from training.options import Options


def test_ranks_know_their_place_and_listen_on_loopback_alone(tmp_path: Path) -> None:
    """With more work than a pipe holds."""
    ended = run_warm([programs.__file__, "describe", str(tmp_path), "x" * 1_000_000], tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    for rank, mine in enumerate([cores[:half], cores[half : 2 * half]] if half else [cores] * 2):
        known = json.loads((tmp_path / f"{rank}.json").read_text())
        assert known["place"] == [rank, 2, rank, "cpu", rank == 0]
        assert known["sum"] == 3
        assert (known["cores"], known["threads"]) == (mine, len(mine))
        # torch's own store would listen on every interface.
        assert {"127.0.0.1"} <= set(known["ips"]) <= {"127.0.0.1", "::ffff:127.0.0.1"}
        if platform.libc_ver()[0] == "glibc":  # ranks keep freed memory, but for large blocks
            assert known["returned"] == [False, True]


def test_ctrl_c_while_a_process_is_started_is_heard_afterwards() -> None:
    """But never by that process."""
    blocks = "import signal; assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])"
    with handled([signal.SIGINT], signal.default_int_handler):
        with pytest.raises(KeyboardInterrupt), terminal_ignored():
            os.kill(os.getpid(), signal.SIGINT)
            status = subprocess.run([sys.executable, "-c", blocks]).returncode
        assert status == 0
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize(
    ("name", "who", "said"),
    [
        ("raise_on_one", "rank 1", "Traceback "),
        ("kill_starter", launcher.STARTER, "It was killed by SIGKILL."),
    ],
)
def test_a_failure_ends_the_run_with_the_one_traceback_that_matters(
    name: str, who: str, said: str, tmp_path: Path
) -> None:
    """It leaves no process. A rank that is killed: see tests/test_failures.py."""
    ended = run_warm([programs.__file__, name], tmp_path)
    printed = ended.stderr
    assert ended.returncode == 1
    assert printed.startswith(f"\n{who} failed; the run has been ended.\n{said}")
    times = int(said == "Traceback ")
    words = ("Traceback", "\nValueError: the bug of rank 1\n", "programs.py", "failed")
    assert [printed.count(word) for word in words] == [times, times, times, 1]


# Which failure is printed


LOST = RankError.of("rank 0", "lost\n")


@pytest.mark.parametrize(
    ("others", "code", "who", "said"),
    [
        (None, -signal.SIGTERM, 1, "It was killed by SIGTERM."),
        (
            None,
            -signal.SIGKILL,
            1,
            "It was killed by SIGKILL. Perhaps memory ran out: then the system does that.",
        ),
        (None, 0, 1, "It exited with status 0 before it was done."),
        (None, None, 1, "It does not answer."),  # it is stopped, say, and others are done
        (LOST, None, 0, "lost"),  # the first in time; they have waited for it
    ],
)
def test_the_first_failure_is_told_above_what_all_did_last(
    monkeypatch: pytest.MonkeyPatch, others: RankError | None, code: int | None, who: int, said: str
) -> None:
    monkeypatch.setattr(launcher, "GRACE", 0.2)
    ours, theirs = zip(*(Pipe() for _ in range(3)), strict=True)
    processes = [SimpleNamespace(exitcode=code, join=lambda _: None) for _ in range(3)]
    theirs[0].send(others)
    theirs[2].send(others)
    if code is not None:
        os.write(theirs[1].fileno(), struct.pack("!i", 100) + b"half of a report")
        theirs[1].close()
    lines = str(watch(processes, ours, 0.2, [])).splitlines()
    assert lines[:2] == [f"rank {who} failed; the run has been ended.", said]
    assert lines[2].startswith("rank  last action  ")


@pytest.mark.parametrize(
    "fails",
    [
        lambda: torch.empty(1 << 60, dtype=torch.uint8),
        lambda: np.empty(1 << 60, np.uint8),
        lambda: exec("raise torch.OutOfMemoryError('CUDA out of memory.')"),
        lambda: exec("raise OSError(12, 'Cannot allocate memory')"),
    ],
    ids=["torch", "numpy", "GPU", "system"],
)
def test_too_little_memory_is_said_in_a_sentence(fails: Callable[[], object]) -> None:
    """Above the traceback, and above no other one."""
    with pytest.raises(BaseException) as error:
        fails()
    assert format_error(error.value).startswith("It ran out of memory. A smaller --batch_size")
    assert format_error(RuntimeError("it forgot")) == "RuntimeError: it forgot\n"


def _alone(rank: int, world_size: int, mark: Path, fails: bool) -> str:
    """How it ends, and whether rank 0's work was done then."""

    def work() -> None:
        time.sleep(0.2)  # the other is there long before
        mark.touch()
        if fails:
            raise RunError("the disk is full")

    try:
        make_world(rank, world_size).on_main(work)
    except RunError as error:
        return str(error)
    return "done" if mark.exists() else "early"


def test_others_wait_for_rank_0(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(_alone, tmp_path / "a", False) == ["done", "done"]
    assert ranks.run(_alone, tmp_path / "b", True) == ["the disk is full", "done"]


def _apart(rank: int, world_size: int) -> None:
    apart = make_world(rank, world_size).apart(30.0)
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called:
        apart.on_main(lambda: None)
        apart.agreement().end()
    groups = {call.kwargs.get("group", call.args[-1]) for call in called.mock_calls}
    assert groups == {apart.group} != {None}


def test_what_ranks_do_apart_has_a_group_of_its_own(ranks: Ranks) -> None:
    """They may do it while they do something else together."""
    ranks.run(_apart)


def test_ranks_of_one_machine_stay_on_loopback_and_those_of_several_where_they_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    for host, gloo in (("localhost", "eth7"), ("127.0.0.1", loopback)):
        stay_on_interface_to(host)
        assert os.environ["GLOO_SOCKET_IFNAME"] == gloo
        assert os.environ["NCCL_SOCKET_IFNAME"] == f"={loopback}"
    # On Debian a machine's own name is 127.0.1.1: the others do not reach it over loopback.
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    debian = (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 1))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [debian])
    stay_on_interface_to("this-machine")
    assert os.environ.get("GLOO_SOCKET_IFNAME") != loopback


def test_a_given_port_is_used_or_said_to_be_taken() -> None:
    with listen() as taken:
        port = taken.getsockname()[1]
        said = f"^--master_port {port}: Address already in use.*; without the option a free port "
        with pytest.raises(UserError, match=said):
            launch(programs.user_error, Options(world_size=1, device="cpu", master_port=port))
    with listen(port) as again:
        assert again.getsockname() == ("127.0.0.1", port)
    with pytest.raises(UserError, match=r"^--master_port 99999: ports go from 0 to 65535; "):
        listen(99999)


def test_cores_are_dealt_out_in_consecutive_slices_to_and_fro(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7})
    for slices, each, expected in (
        (3, None, [[2], [3], [5]]),
        (9, None, [[2], [3], [5], [7], [7], [5], [3], [2], [2]]),
        (2, None, [[2, 3], [5, 7]]),
        (2, 3, [[2, 3, 5], [7, 2, 3]]),
        (1, 8, [[2, 3, 5, 7]]),
    ):
        assert [core_slice(i, slices, each) for i in range(slices)] == expected


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert str(choose_device("auto", 1, 2)) == "cpu"
    with pytest.raises(UserError, match=r"^--device cuda: no GPU .*--device cpu works"):
        choose_device("cuda", 0, 2)
    with pytest.raises(UserError, match=r"^--device mps: it takes an Apple GPU, and one rank"):
        choose_device("mps", 0, 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(choose_device("auto", r, 3)) for r in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert str(choose_device("cpu", 1, 2)) == "cpu"
    old = Mock(side_effect=RuntimeError("the driver is too old\nand more"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", old)
    with pytest.raises(UserError, match=r"^torch cannot .*\(the driver is too old\); --dev"):
        launcher._run_rank(World(), Options(), None, print, ())


def agreed(*gpus: str) -> list[str]:
    """The backend on ranks with these GPUs."""
    store, n = dist.HashStore(), len(gpus)  # type: ignore[attr-defined]
    with ThreadPoolExecutor(n) as threads:
        agree = threads.map(lambda rank: agree_on_backend(store, rank, n, gpus[rank]), range(n))
        return list(agree)


def test_hosts_agree_on_a_backend() -> None:
    """Gloo, if one rank has no GPU, or two have the same."""
    assert agreed("a", "b") == ["cpu:gloo,cuda:nccl"] * 2
    assert agreed("a", "b", "") == agreed("a", "b", "a") == ["gloo"] * 3
    assert agreed("", "") == ["gloo"] * 2


# Ranks of one attempt meet in a store that others have left their words in


def meet_all(store: Any, late: int, world_size: int = 3) -> list[Any]:
    """What each rank is given; one comes when the others have read what was left of it."""

    def come(rank: int) -> Any:
        time.sleep(0.2 * (rank == late))
        return fresh_part(store, rank, world_size, 10.0)

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(come, range(world_size)))


@pytest.mark.parametrize("late", [0, 2])
def test_every_attempt_has_a_part_of_its_own(late: int) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    for attempt, world_size in enumerate((3, 3, 2, 3)):  # a host leaves, and comes back
        parts = meet_all(store, late, world_size)
        assert [part.check(["address"]) for part in parts] == [False] * world_size
        parts[0].set("address", str(attempt))
        assert [part.get("address") for part in parts] == [str(attempt).encode()] * world_size


def test_who_is_missing_is_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(RunError, match=r"^rank 0 has waited 0.1 s .* ranks 1, 2 of 3 did not come"):
        fresh_part(store, 0, 3, 0.1)
    began = time.monotonic() - 9.95  # the store itself came late
    with pytest.raises(RunError, match=r"^rank 0 has waited 10 s .* ranks 1, 2 of 3 did not come"):
        fresh_part(store, 0, 3, 10.0, began)
    meet_all(store, late=0)  # now all were there once
    for rank, missing in ((0, "ranks 1, 2"), (1, "rank 0")):
        with pytest.raises(RunError, match=f"and {missing} of 3 did not come: look at their hosts"):
            fresh_part(store, rank, 3, 0.1)


@pytest.mark.usefixtures("capfd")  # torch prints that the store is gone
def test_a_store_that_is_stopped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its system accepts connections, and it never answers."""
    before = set(enumerate_threads())
    with listen() as stopped:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(stopped.getsockname()[1]))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        with pytest.raises(RunError, match=r"^rank 1 has waited 0.1 s .* look at its host, 127\.0"):
            meet(1, 2, 0.1)
    for asking in {*enumerate_threads()} - before:
        asking.join()
