"""How the cores of a host are dealt out to its ranks, or those of a process to its workers."""

from __future__ import annotations

import os


def core_slice(index: int, slices: int, cores_each: int | None = None) -> list[int]:
    """The cores of slice `index` of `slices`: this process' cores dealt out in equal, consecutive
    parts; with more slices than cores they share cores in turn. Empty where the system does not
    tell which cores a process may use (macOS)."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    each = cores_each or max(1, len(cores) // slices)
    return [cores[(index * each + i) % len(cores)] for i in range(min(each, len(cores)))]
