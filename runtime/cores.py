"""Deals the cores of a host out to its ranks, or the cores of a process to its workers.

A container may be allowed less time than that of the cores it sees: its cgroup has a quota, such as
`docker run --cpus 2` sets, which `os.sched_getaffinity` does not report. More threads than the
quota make each other wait, so the quota counts as that many cores, rounded up.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")


def core_slice(index: int, slices: int, cores_each: int | None = None) -> list[int]:
    """The cores of slice `index`, where this process' cores are cut into `slices` equal,
    consecutive parts. If there are more slices than cores, cores are assigned in snake order
    (0 1 1 0), so that in a mesh the first and the last stage share a core: one of them works while
    the other waits. Empty if the system does not report which cores a process may use (macOS)."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    cores = cores[: math.ceil(min(cpu_quota(), len(cores)))]
    each = cores_each or max(1, len(cores) // slices)
    turn, first = divmod(index * each, len(cores))  # which pass over the cores, and where in it
    if turn % 2:
        cores.reverse()
    return [cores[(first + i) % len(cores)] for i in range(min(each, len(cores)))]


def pin(cores: list[int]) -> None:
    """Pins the calling thread to these cores. Not under a quota, which grants time on any core:
    pinned, all containers of a host would crowd on its first cores."""
    if cpu_quota() == math.inf:
        with contextlib.suppress(OSError):  # a sandbox may forbid it: slower, not wrong
            os.sched_setaffinity(0, cores)  # 0: the calling thread


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """Inside `with` the calling thread, and threads that it starts, may use all cores of the parent
    process, whose other children wait meanwhile."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    pin([*os.sched_getaffinity(os.getppid())])
    try:
        yield
    finally:
        pin([*own])


def quota_note() -> list[str]:
    """A line that says how many cores' time this process has, if that is fewer than it sees."""
    seen, quota = os.cpu_count() or 1, cpu_quota()
    if hasattr(os, "sched_getaffinity"):
        seen = len(os.sched_getaffinity(0))
    if quota >= seen:
        return []
    return [f"This container may use the time of {quota:g} of {seen} cores: its quota counts."]


def cpu_quota(processes: Path = Path("/proc/self/cgroup"), cgroups: Path = CGROUPS) -> float:
    """How many cores' time the cgroups of this process allow it; infinity without a limit. A limit
    holds for a group and for all below it. In a container the group's name may be one that exists
    only on the host: names that are not found are skipped."""
    quotas = [math.inf]
    with contextlib.suppress(OSError):
        for line in processes.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = cgroups / controllers if controllers else cgroups
            for group in (name, *map(str, PurePosixPath(name).parents)):
                quotas.append(_quota_of(root / group.lstrip("/"), controllers))
    return min(quotas)


def _quota_of(group: Path, controllers: str) -> float:
    """The limit of one group, by the files of cgroup 2 (without controllers), or of cgroup 1."""
    try:
        if controllers:
            quota, period = (
                (group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        else:
            quota, period = (group / "cpu.max").read_text().split()  # or "max 100000"
        return int(quota) / int(period) if int(quota) > 0 else math.inf  # -1: none
    except (OSError, ValueError):  # no such file
        return math.inf
