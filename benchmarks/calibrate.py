"""Measures this computer as a machine whose GPUs are its cores: a rank for each.

    python -m benchmarks.calibrate machine.yaml       plan.py --machine takes the file, or `this`

All cores measure at the same time, since ranks share the memory's bandwidth and the clock rate:

    matrix products     of a block, forward and backward: FLOP/s
    other kernels       norms, GELU and residuals of a block: the bytes that `planning.passes`
                        counts for them, over their seconds. This is far below the memory's
                        bandwidth: GELU computes for longer than it reads
    all-reduces         of `Communicator`, over shared memory, each after a product: bandwidth and
                        latency of the links
    skew                how much longer work takes if all ranks then wait for the last one, as a
                        share of the work: from one product and from five before an all-reduce
    memory              resident memory of a process that has imported what a rank imports. Pages
                        that forked ranks share count in each of these, too

Each figure is the median over rounds; a round measures all of them. It takes under a minute. The
figures mean nothing on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

from runtime.communicator import Communicator
from runtime.cores import core_slice
from training.results import peak_bytes

BLOCKS = ((1024, 256), (512, 512), (512, 1024))  # positions and width
MESSAGES = (1, 64, 1024, 4096)  # KiB that all ranks add up
MAX_PROCESSES = 8  # on machines with more cores, too
REPEATS = 5  # the speed of a shared machine drifts by a third within seconds


def seconds(work: Callable[[], object]) -> float:
    """Seconds of one call: the second least of five rounds of 20 ms or more, after a barrier, so
    that all ranks begin together. Other work on the machine only makes a round longer."""
    work()
    rounds, found = 1, list[float]()
    dist.barrier()
    while len(found) < 5:
        begin = time.perf_counter()
        for _ in range(rounds):
            work()
        spent = time.perf_counter() - begin
        if spent < 0.02:
            rounds *= 2
        else:
            found.append(spent / rounds)
    return sorted(found)[1]


def _block(positions: int, width: int) -> tuple[float, float, float, float]:
    """FLOPs and seconds of the products of an MLP, forward and backward; bytes, counted as in
    `planning.passes`, and seconds of what lies between the products of a block."""
    x, y = torch.randn(positions, width), torch.randn(positions, 4 * width)
    up, wide = torch.randn(width, 4 * width), torch.randn(positions, 4 * width).requires_grad_()
    there = x.clone().requires_grad_()

    def norm() -> None:
        F.layer_norm(there, (width,)).backward(x)

    def gelu() -> None:
        F.gelu(wide, approximate="tanh").backward(y)

    products = seconds(lambda: x @ up) + seconds(lambda: y @ up.t()) + seconds(lambda: x.t() @ y)
    others = 2 * seconds(norm) + seconds(gelu) + 4 * seconds(lambda: x + x)
    flops, moved = 3 * 2.0 * positions * width * 4 * width, 3 * 4.0 * positions * 25 * width
    return flops, products, moved, others


def _kernel() -> float:
    """Seconds of a kernel on next to no data, with the overhead of modules and autograd. For an MLP
    of a block with its norm `planning.passes` counts 6 kernels forward (2 products, and half of the
    8 others of a block), and 12 backward."""
    norm, up, down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
    few = torch.randn(2, 8, requires_grad=True)

    def mlp() -> None:
        (few + down(F.gelu(up(norm(few)), approximate="tanh"))).sum().backward()

    return seconds(mlp) / 18


def _figures(group: Communicator, vector: torch.Tensor) -> dict[str, float]:
    """What the docstring of the module lists, measured once on one of the ranks."""
    blocks = [_block(*block) for block in BLOCKS]
    added = seconds(lambda: vector.add_(1.0))
    x, y = torch.randn(256, 512), torch.randn(512, 512)  # a product of a millisecond or two
    alone = seconds(lambda: x @ y)
    rates = {}  # of other precisions, over fp32's
    for name, dtype in (("fp64", torch.float64), ("bf16", torch.bfloat16)):
        a, b = x.to(dtype), y.to(dtype)
        rates[name] = alone / seconds(lambda a=a, b=b: a @ b)  # type: ignore[misc]

    def exchanged(kib: int, products: int = 1) -> float:
        """Seconds of some products and an all-reduce."""
        values, begin = torch.zeros(kib * 256), 0.0
        for k in range(105):
            begin = time.perf_counter() if k == 5 else begin
            for _ in range(products):
                x @ y
            group.all_reduce(values)
        return (time.perf_counter() - begin) / 100

    skew = max(0.0, (exchanged(1, 5) - exchanged(1)) / (4 * alone) - 1)
    flops, products, moved, others = map(sum, zip(*blocks, strict=True))
    return {
        "best": max(block[0] / block[1] for block in blocks), "flops": flops / products,
        "added": 2 * vector.nbytes / added, "moved": moved / others, "kernel": _kernel(),
        "skew": skew, **rates,
        **{f"{kib} KiB": exchanged(kib) - (1 + skew) * alone for kib in MESSAGES},
    }  # fmt: skip


def _measure(rank: int, store: str, path: str, ranks: int) -> None:
    """One of the ranks: rank 0 writes the medians."""
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401 (what a rank imports)

    if cores := core_slice(rank, ranks):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    peak = peak_bytes(torch.device("cpu"))
    group, vector = Communicator(dist.group.WORLD), torch.randn(1 << 24)
    rounds = []
    for k in range(REPEATS):
        rounds.append(_figures(group, vector))
        if rank == 0:
            print(f"round {k + 1} of {REPEATS} is measured", file=sys.stderr, flush=True)
    if rank == 0:
        found = {name: median(each[name] for each in rounds) for name in rounds[0]}
        found["peak"] = peak / 2**30
        Path(path).write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


def calibrate() -> dict[str, Any]:
    """The figures of a machine file. Prints its progress to standard error."""
    cores = os.cpu_count() or 1
    ranks = min(max(2, cores), MAX_PROCESSES)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "figures"
        # Ctrl-C is for this process alone, which ends the others.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        args = (f"{folder}/store", str(result), ranks)
        processes = spawn(_measure, args, nprocs=ranks, join=False, daemon=True)
        signal.signal(signal.SIGINT, before)
        while not processes.join():
            pass
        found = json.loads(result.read_text("utf-8"))
    # A ring sends 2 (n-1) / n bytes for each byte that is summed, over 2 (n-1) hops.
    sizes = 1024.0 * np.array(MESSAGES) * 2 * (ranks - 1) / ranks
    slope, latency = np.polyfit(sizes, [found[f"{kib} KiB"] for kib in MESSAGES], 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    hop = max(float(latency), 1e-6) / (2 * (ranks - 1))
    return {
        "source": "measured by benchmarks.calibrate", "gpus_per_node": cores,
        "memory_gb": round(memory / cores, 2), "tflops": {
            name: round(found["best"] / 1e12 * found.get(name, 1.0), 4)
            for name in ("fp64", "fp32", "bf16")
        },
        "memory_gbs": round(found["added"] / 1e9, 2),
        "link_gbs": round(float(1 / slope / 1e9), 2) if slope > 0 else 10.0,
        "network_gbs": 1.25, "matmul_efficiency": round(found["flops"] / found["best"], 3),
        "memory_efficiency": round(found["moved"] / found["added"], 3),
        "kernel_us": round(found["kernel"] * 1e6, 2), "host_us": 0.0, "link_efficiency": 1.0,
        "link_us": round(hop * 1e6, 1), "network_efficiency": 0.8, "network_us": 50.0,
        "slices_us": 0.0, "collective_us": 0.0, "staged_us": 0.0,
        "skew": round(found["skew"], 3), "step_ms": 1.0, "overlap": "nothing",
        "reserve_gb": round(found["peak"], 3), "second_gradient": 0.0,
        "error": 0.0, "measured_nodes": 0,
        "attention": "flash", "loss": "plain", "balance": "auto", "gathered": "again",
    }  # fmt: skip


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibrate", description=__doc__)
    parser.add_argument("file", type=argparse.FileType("w", encoding="utf-8"))
    with parser.parse_args().file as file:
        yaml.safe_dump(calibrate(), file, sort_keys=False)


if __name__ == "__main__":
    main()
