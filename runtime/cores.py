"""Deals the cores of a host out to its ranks, or the cores of a process to its workers."""

from __future__ import annotations

import os


def core_slice(index: int, slices: int, cores_each: int | None = None) -> list[int]:
    """The cores of slice `index`: this process' cores in `slices` equal, consecutive parts. With
    more slices than cores they are assigned boustrophedon (0 1 1 0), so that in a mesh the first
    and the last stage share a core: one of them works while the other waits. Empty if the system
    does not report which cores a process may use (macOS)."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    each = cores_each or max(1, len(cores) // slices)
    turn, first = divmod(index * each, len(cores))  # how often through all cores, and where
    if turn % 2:
        cores.reverse()
    return [cores[(first + i) % len(cores)] for i in range(min(each, len(cores)))]
