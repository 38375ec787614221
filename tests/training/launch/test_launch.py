"""Ranks are started, know each other, listen on loopback alone, and never outlive a failure."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from runtime.cores import core_slice, cpu_quota, pin, quota_note
from tests.ranks import Ranks, under_torchrun
from tests.remote import on_ranks
from tests.training import programs
from tests.warm import run_warm
from training.launch import launch as launcher
from training.launch.errors import RunError, UserError, format_error
from training.launch.last_actions import LastAction
from training.launch.launch import watch
from training.launch.meeting import agree_on_backend, host_store, listen, meet, stay_on_interface_to
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


def test_a_failure_ends_the_run_with_the_one_traceback_that_matters(tmp_path: Path) -> None:
    """It leaves no process. A rank that is killed: see tests/test_failures.py."""
    ended = run_warm([programs.__file__, "raise_on_one"], tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith("\nrank 1 failed; the run has been ended.\nTraceback ")
    words = ("Traceback", "\nValueError: the bug of rank 1\n", "programs.py", "failed")
    assert [ended.stderr.count(word) for word in words] == [1] * 4


# Which failure is printed


def at(when: float) -> tuple[float, str]:
    """The report of a rank that failed at that time."""
    return when, f"failed at {when}\n"


def die(pipe: Any) -> None:
    """As a rank that is killed while it reports."""
    os.write(pipe.fileno(), struct.pack("!i", 100) + b"half of a report")
    pipe.close()


DONE = (2.0, None)


@pytest.mark.parametrize(
    ("reports", "code", "who", "said"),
    [
        ((DONE, None, DONE), -signal.SIGTERM, 1, "It was killed by SIGTERM."),
        (
            (DONE, None, DONE),
            -signal.SIGKILL,
            1,
            "It was killed by SIGKILL. Perhaps memory ran out: then the system does that.",
        ),
        ((DONE, None, DONE), 0, 1, "It exited with status 0 before it was done."),
        ((DONE, None, DONE), None, 1, "It does not answer."),  # it is stopped, say
        # All are there when the program looks: the first in time, and not the lowest rank.
        ((at(3.0), at(2.5), at(2.75)), None, 1, "failed at 2.5"),
        ((at(1.0), at(2.0), DONE), None, 0, "failed at 1.0"),
        # A rank that died says nothing: it is why the others have failed.
        ((at(1.0), None, at(1.5)), -signal.SIGKILL, 1, "It was killed by SIGKILL."),
    ],
)
def test_the_first_failure_is_told_above_what_all_did_last(
    monkeypatch: pytest.MonkeyPatch, reports: Any, code: int | None, who: int, said: str
) -> None:
    monkeypatch.setattr(launcher, "GONE", 0.2)
    ours, theirs = zip(*(Pipe() for _ in range(3)), strict=True)
    processes = [SimpleNamespace(exitcode=code, join=lambda _: None) for _ in range(3)]
    for pipe, report in zip(theirs, reports, strict=True):
        if report is not None:
            pipe.send(report)
        elif code is not None:
            threading.Timer(0.05, die, [pipe]).start()  # the others have said something before
    lines = str(watch(processes, ours, 0.2, [*(LastAction * 3)()])).splitlines()
    assert lines[0] == f"rank {who} failed; the run has been ended."
    assert lines[1].startswith(said) and lines[2].startswith("rank  last action  ")


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
    assert format_error(error.value).startswith("It ran out of memory. These need less")
    assert format_error(RuntimeError("it forgot")) == "RuntimeError: it forgot\n"


def _alone(rank: int, world_size: int, mark: Path, fails: bool) -> str:
    """How it ends, and whether rank 0's work was done then."""

    def work() -> None:
        time.sleep(0.2)  # the other is there long before
        mark.touch()
        if fails:
            raise RunError("the disk is full")

    try:
        World(rank, world_size).on_main(work)
    except RunError as error:
        return str(error)
    return "done" if mark.exists() else "early"


def test_others_wait_for_rank_0(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(_alone, tmp_path / "a", False) == ["done", "done"]
    assert ranks.run(_alone, tmp_path / "b", True) == 2 * ["the disk is full"]


@on_ranks(2)
def test_what_ranks_do_apart_has_a_group_of_its_own(rank: int, world_size: int) -> None:
    """They may do it while they do something else together."""
    apart = World(rank, world_size).apart(30.0)
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called:
        apart.on_main(lambda: None)
    groups = {call.kwargs.get("group", call.args[-1]) for call in called.mock_calls}
    assert groups == {apart.group} != {None}


def test_ranks_of_one_machine_stay_on_loopback_and_those_of_several_where_they_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    for chosen in (None, "eth7"):  # by the user
        if chosen:
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
        else:
            monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        stay_on_interface_to("127.0.0.1")
        assert os.environ["GLOO_SOCKET_IFNAME"] == chosen or loopback
        assert os.environ["NCCL_SOCKET_IFNAME"] == f"={loopback}"
    # On Debian a machine's own name is 127.0.1.1: the others do not reach it over loopback.
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    stay_on_interface_to("127.0.1.1")
    assert os.environ.get("GLOO_SOCKET_IFNAME") != loopback


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


CGROUPS = {
    # /proc/self/cgroup; the files of limits; cores
    "2": ("0::/a/b", {"a/b/cpu.max": "60000 100000", "a/cpu.max": "max 100000"}, 0.6),
    "2, above": ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2.5),
    "2, in a container": ("0::/", {"cpu.max": "150000 100000"}, 1.5),
    "2, none": ("0::/a", {"a/cpu.max": "max 100000"}, math.inf),
    "1": (
        "2:cpu,cpuacct:/docker/x\n1:memory:/y\n0::/",
        {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 0.5,
    ),
    "1, none": ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "9"}, math.inf),
    "another system": (None, {}, math.inf),
}  # fmt: skip


@pytest.mark.parametrize("case", CGROUPS)
def test_the_quota_of_a_container(case: str, tmp_path: Path) -> None:
    processes, limits, quota = CGROUPS[case]
    if processes is not None:
        (tmp_path / "cgroup").write_text(f"{processes}\n")
    for name, limit in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{limit}\n")
    assert cpu_quota(tmp_path / "cgroup", tmp_path) == quota


@pytest.mark.parametrize(
    ("quota", "expected"),
    [(0.6, [[2], [2]]), (2.0, [[2], [3]]), (2.5, [[2], [3]]), (9.0, [[2, 3], [5, 7]])],
)
def test_a_quota_counts_as_so_many_cores_and_takes_none_of_them(
    quota: float, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All containers of a host would crowd on the same ones."""
    pinned = Mock()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7})
    monkeypatch.setattr(os, "sched_setaffinity", pinned)
    monkeypatch.setattr("runtime.cores.cpu_quota", lambda: quota)
    assert [core_slice(i, 2) for i in range(2)] == expected
    pin([2])
    assert pinned.call_count == 0
    said = [f"This container may use the time of {quota:g} of 4 cores: its quota counts."]
    assert quota_note() == (said if quota < 4 else [])


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert str(choose_device("auto", 1)) == "cpu"
    with pytest.raises(UserError, match=r"^--device cuda: no GPU .*--device cpu works"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(choose_device("auto", r)) for r in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert str(choose_device("cpu", 1)) == "cpu"


@pytest.fixture
def second_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """This process is rank 3 of 4, of which each host has two."""
    (tmp_path / "0").mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "1" / "error.json"))
    for name in ("_end_with_parent", "set_handlers"):  # of the process that runs tests
        monkeypatch.setattr(launcher, name, lambda *_: None)
    with under_torchrun(3, 4, 1, each=2):
        yield


@pytest.mark.usefixtures("second_host")
@pytest.mark.parametrize(("device", "taken"), [("cuda", torch.device("cuda", 1)), ("cpu", [5, 7])])
def test_a_rank_of_the_second_host_takes_what_its_own_host_has(
    device: Any, taken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host has three GPUs, or four cores."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7})
    seen = Mock(side_effect=RunError)
    monkeypatch.setattr(torch.accelerator, "set_device_index", seen)
    monkeypatch.setattr(launcher, "pin", seen)
    with pytest.raises(RunError):
        launcher._join_torchrun(launcher.Job(print, Options(device=device), ()))
    assert seen.mock_calls == [call(taken)]


@pytest.mark.usefixtures("second_host")
def test_a_rank_of_the_second_host_fails_above_the_actions_of_its_own_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which are in a file that the ranks of this host alone share."""

    def fail(world: World, *_: object) -> None:
        world.last.note("forward")
        raise ValueError("a bug")

    said, left = Mock(), Mock()
    for name, mock in (("_run_rank", fail), ("say", said), ("leave", left)):
        monkeypatch.setattr(launcher, name, mock)
    launcher._join_torchrun(launcher.Job(print, Options(), ()))
    (error,), (actions,) = (call.args for call in said.mock_calls)
    assert error.startswith("\nrank 3 failed; torchrun ends the others.\nTraceback")
    rows = [row.split()[:2] for row in actions.splitlines()[1:]]
    assert rows == [["2", "not"], ["3", "forward"]]
    left.assert_called_once_with("", 1)


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


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(RunError, match=r"^rank 0 has waited 0.1 s .* ranks 1, 2 of 3 did not come"):
        agree_on_backend(store, 0, 3, "")


# Under torchrun

TORCHRUN = {
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "2",
    "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The environment of a rank, and the socket at which its store answers or not."""
    with listen() as listener, under_torchrun(1):
        for name, value in {**TORCHRUN, "MASTER_PORT": listener.getsockname()[1]}.items():
            monkeypatch.setenv(name, str(value))
        yield listener


def test_a_restarted_rank_finds_nothing_of_the_attempt_before(
    torchrun: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one host, whose ranks count their attempts alike."""
    _agent = host_store(torchrun, 10.0)
    meet(10.0).set("address", "old")
    assert meet(10.0).check(["address"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not meet(10.0).check(["address"])


@pytest.mark.usefixtures("torchrun")
def test_several_hosts_may_not_restart_in_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their counts of attempts differ."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    with pytest.raises(UserError, match=r"^torchrun --max-restarts 2 on 3 hosts: .* export TORCH"):
        meet(10.0)


HANGS = """
import sys
from training.launch import launch
from training.launch.meeting import meet
from training.launch.world import World
from training.options import Options

job = launch.Job(print, Options(device="cpu", timeout=0.5), ())
launch._run_rank(World(1, 2), job, lambda: meet(60.0))
"""


@pytest.mark.usefixtures("torchrun")
def test_a_store_that_is_stopped_ends_the_ranks(tmp_path: Path) -> None:
    """Its system accepts connections, and it never answers."""
    (tmp_path / "hangs.py").write_text(HANGS)
    assert run_warm([str(tmp_path / "hangs.py")], tmp_path).returncode == -signal.SIGALRM
