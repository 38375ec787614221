"""Measures this computer as a machine whose GPUs are its cores: a rank for each.

Matrix products of several shapes give FLOP/s and what a call costs; adding vectors gives bytes per
second; an all-reduce between two processes over shared memory gives the links. Under a minute.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

SIZES = (64, 128, 256, 512, 1024)  # of square products
MESSAGES = (1, 64, 4096)  # KiB that two ranks add up


def seconds(work: Callable[[], object], at_least: float = 0.2) -> float:
    """Of one call, the fastest of three rounds."""
    work()
    rounds, found = 1, list[float]()
    while len(found) < 3:
        begin = time.perf_counter()
        for _ in range(rounds):
            work()
        spent = time.perf_counter() - begin
        if spent < at_least / 3:
            rounds *= 2
        else:
            found.append(spent / rounds)
    return min(found)


def _exchange(rank: int, store: str, path: str) -> None:
    """One of two ranks: rank 0 writes the seconds of each message."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = []
    for size in MESSAGES:
        values = torch.zeros(size * 256)
        begin = time.perf_counter()
        for _ in range(20):
            dist.all_reduce(values)
        found.append((time.perf_counter() - begin) / 20)
    if rank == 0:
        Path(path).write_text(repr(found), "utf-8")
    dist.destroy_process_group()


def calibrate() -> dict[str, Any]:
    """The figures of a machine file."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        squares = [torch.randn(n, n) for n in SIZES]
        taken = [seconds(lambda a=a: a @ a) for a in squares]  # type: ignore[misc]
        vector = torch.randn(1 << 24)
        added = seconds(lambda: vector.add_(1.0))
        call = seconds(lambda: squares[0][0, :8] + 1.0)
    finally:
        torch.set_num_threads(threads)
    flops = max(2.0 * n**3 / t for n, t in zip(SIZES, taken, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        result = f"{folder}/seconds"
        spawn(_exchange, (f"{folder}/store", result), nprocs=2)
        sums = [float(text) for text in Path(result).read_text("utf-8")[1:-1].split(",")]
    sizes = 1024.0 * np.array(MESSAGES)  # a ring of two sends as many bytes as there are
    slope, latency = np.polyfit(sizes, sums, 1)
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    per_second = float(1 / slope / 1e9) if slope > 0 else 10.0
    return {
        "source": "measured by plan.py calibrate", "gpus_per_node": cores,
        "memory_gb": round(memory / cores, 2), "tflops": {"fp32": round(flops / 1e12, 4)},
        "memory_gbs": round(2 * vector.nbytes / added / 1e9, 2), "link_gbs": round(per_second, 2),
        "network_gbs": 1.25, "matmul_efficiency": 1.0, "memory_efficiency": 1.0,
        "kernel_us": round(max(0.0, call) * 1e6, 2), "host_us": 0.0, "link_efficiency": 1.0,
        "link_us": round(max(float(latency) / 2, 1e-6) * 1e6, 1), "network_efficiency": 0.8,
        "network_us": 50.0, "collective_us": 0.0, "message_us": round(float(sums[0]) * 1e6, 1),
        "step_ms": 1.0, "overlap": 1, "reserve_gb": 0.3, "attention": "unfused", "balance": "auto",
        "gathered": "again",
    }  # fmt: skip
