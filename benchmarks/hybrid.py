"""Shards inside a host, replicas across: two hosts of two ranks each, joined by a slow link.

The hosts are network namespaces, whose ranks cannot read each other's memory; `tc` narrows the link
between them. It needs root, `ip` and `tc`, so `python -m benchmarks` leaves it out.
The table has the seconds of a step of several micro-batches, and the bytes that one host sends the
other, as its network interface counts them, headers included.

    python -m benchmarks.hybrid
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from data_parallel.buckets import GradientBuckets, SummedBucket, in_backward_order
from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.zero1 import ShardedOptimizer
from runtime.axes import SHARD_AXES
from runtime.communicator import Communicator
from runtime.mesh import make_mesh

from .harness import Row, agree, alternate, ratio_of, summarize, use_cores, write_rows

MBIT = 400  # of the link, each way
WIDTH, LAYERS, ROWS, MICROBATCHES, ROUNDS = 256, 8, 64, 4, 5
TITLE = f"Two hosts of two ranks, a link of {MBIT} Mbit/s, {MICROBATCHES} micro-batches a step"
SENT = Path("/sys/class/net/link0/statistics/tx_bytes")
Step = Callable[[], float]


class Layer(nn.Module):
    """The feed-forward half of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.up(x).relu())
        return y


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def loss_of(y: torch.Tensor, _: Any = None) -> torch.Tensor:
    return y.square().sum() / (WIDTH * ROWS * MICROBATCHES * dist.get_world_size())


def replicated(inputs: list[torch.Tensor], shards: int) -> Step:
    """Data parallelism; with `shards`, ZeRO 1 over groups of this size."""
    model, mesh = layers(), make_mesh({"dp": 4 // max(1, shards), "shards": max(1, shards)}, 60.0)
    if shards:
        ranks = (Communicator(mesh[axes].group) for axes in (SHARD_AXES, ("dp",)))
        communicator, replicas = ranks
        sharded = ShardedOptimizer(
            dict(model.named_parameters()), adamw, communicator, replicas=replicas
        )
        buckets, optimizer = sharded.buckets, sharded.optimizer
    else:
        communicator, groups = Communicator(dist.group.WORLD), in_backward_order(model.parameters())
        buckets = GradientBuckets([SummedBucket(group, communicator) for group in groups])
        optimizer = adamw(model.parameters())
    buckets.watch()

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for x in inputs[:-1]:
            with buckets.no_sync():
                loss = loss_of(model(x))
                loss.backward()
                total += loss.item()
        loss = loss_of(model(inputs[-1]))
        loss.backward()
        buckets.finish()
        optimizer.step()
        return total + loss.item()

    return step


def sharded(inputs: list[torch.Tensor], zero: int, shards: int) -> Step:
    """ZeRO 2 or 3 over groups of `shards` ranks."""
    mesh = make_mesh({"dp": 4 // shards, "shards": shards}, 60.0)
    fsdp = FullyShardedDataParallel(
        layers(), adamw, zero=zero, group=mesh[SHARD_AXES].group,
        replicas=mesh["dp"].group if shards < 4 else None,
    )  # fmt: skip

    def step() -> float:
        loss = fsdp.train_step(inputs, [None] * len(inputs), loss_of)
        fsdp.optimizer_step()
        return loss.item()

    return step


def rank_of_four(rank: int, address: str, out: Path) -> None:
    """What each process does."""
    use_cores([rank % os.cpu_count()])  # type: ignore[operator]
    dist.init_process_group("gloo", f"tcp://{address}:29511", rank=rank, world_size=4)
    torch.manual_seed(rank)
    inputs = [torch.randn(ROWS, WIDTH) for _ in range(MICROBATCHES)]
    steps: dict[str, Step] = {"data parallel": replicated(inputs, 0)}
    for zero in (1, 2, 3):
        for shards in (4, 2):
            name = f"ZeRO {zero}, --shards {shards}"
            make = replicated(inputs, shards) if zero == 1 else sharded(inputs, zero, shards)
            steps[name] = make
    losses, sent = dict[str, float](), dict[str, float]()

    def timed(name: str) -> None:
        dist.barrier()
        before = int(SENT.read_text())
        losses[name] = steps[name]()
        dist.barrier()
        sent[name] = int(SENT.read_text()) - before

    seconds = alternate({name: partial(timed, name) for name in steps}, ROUNDS)
    for name, loss in losses.items():
        total = torch.tensor(loss)
        dist.all_reduce(total)
        losses[name] = total.item()
    if rank == 0:
        agree(losses)
        out.write_text(json.dumps([seconds, sent]))
    dist.barrier()


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """The names of two namespaces, joined by a narrow link."""
    names = [f"bench{i}-{os.getpid()}" for i in range(2)]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        ends = f"ip -n {names[0]} link add link0 type veth peer name link0 netns {names[1]}"
        subprocess.run(ends.split(), check=True)
        narrow = f"tbf rate {MBIT}mbit burst 64kb latency 400ms"
        for i, name in enumerate(names):
            for words in (
                f"ip -n {name} addr add 10.213.8.{i + 1}/24 dev link0",
                f"ip -n {name} link set link0 up",
                f"ip -n {name} link set lo up",
                f"ip netns exec {name} tc qdisc add dev link0 root {narrow}",
            ):
                subprocess.run(words.split(), check=True)
        yield names
    finally:
        for name in names:
            with suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], check=False)


def run() -> list[Row]:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder, two_hosts() as names:
        out = Path(folder) / "out.json"
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", names[rank // 2], "env", "GLOO_SOCKET_IFNAME=link0",
                 sys.executable, "-m", "benchmarks.hybrid", str(rank), "10.213.8.1", str(out)]
            )
            for rank in range(4)
        ]  # fmt: skip
        try:
            if any(process.wait(350) for process in ranks):
                raise SystemExit("a rank failed")
        finally:
            for process in ranks:
                process.kill()
        seconds, sent = json.loads(out.read_text())
    rows: list[Row] = []
    for name, values in seconds.items():
        value, spread = summarize([1000 * s for s in values])
        ratio = ratio_of(seconds["data parallel"], values)
        rows.append(Row(name, value, spread, "ms", ratio, "data parallel"))
    for name, number in sent.items():
        mb, most = number / 1e6, sent["data parallel"] / 1e6
        rows.append(Row(f"{name}, over the link", mb, (mb, mb), "MB", most / mb, "data parallel"))
    write_rows("hybrid", TITLE, rows)
    return rows


if __name__ == "__main__":
    if sys.argv[1:]:
        rank_of_four(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    else:
        run()
