"""How much memory a process takes."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch


def keep_freed_memory() -> None:
    """Has glibc keep the blocks below 32 MiB that this process frees. It would return many to the
    system after each step and take them back in the next, page by page. Larger ones go back: kept,
    they would be cut up, and the next large block would take new memory (docs/log.md). Not for
    workers that are threads, since each would keep its own."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD


def peak_bytes(device: torch.device) -> int:
    """The peak memory of this process: resident, or allocated on a GPU."""
    if device.type == "cuda":  # torch knows no peak of Apple's
        return torch.accelerator.max_memory_allocated(device)
    if sys.platform == "linux":  # in a child, getrusage's peak starts at its parent's memory
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])  # kB
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
