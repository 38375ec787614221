"""How the cores of a host are dealt out to its ranks, or those of a process to its workers."""

from __future__ import annotations

import os


def core_slice(index: int, slices: int, cores_each: int | None = None) -> list[int]:
    """The cores of slice `index` of `slices`: this process' cores dealt out in equal, consecutive
    parts. With more slices than cores they are dealt to and fro, as 0 1 1 0: in a mesh a first and
    a last stage then share a core, of which one has work while the other waits. Empty where the
    system does not tell which cores a process may use (macOS)."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    each = cores_each or max(1, len(cores) // slices)
    turn, first = divmod(index * each, len(cores))
    if turn % 2:
        cores.reverse()
    return [cores[(first + i) % len(cores)] for i in range(min(each, len(cores)))]
