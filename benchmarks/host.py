"""Processor time of the host for a micro-batch: a GPU that computes faster would wait for it.

Twelve blocks of width 8 compute next to nothing, so what is left is Python and torch's calls. A
step is a forward and backward of 4 micro-batches. The time is that of one process, with all its
threads, per micro-batch; with several ranks it is the first one's. It is the least of many steps,
since a busy machine only adds to it; contestants take turns. Gradients are not compared: the tests
do that.

The ratio is the plain layers' time over a contestant's: a goal of 1.3 times the plain time is 0.77.
The spread is from the least to the median; every 16th step is checked (runtime/guards.py), and
takes longer.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.gradients import DistributedDataParallel
from pipeline.pipe import Pipe
from pipeline.processes.process import ProcessPipe
from pipeline.replicas import place_layers
from training.launch.launch import launch
from training.launch.world import World
from training.options import Options

from .harness import Row, write_rows

BLOCKS, WIDTH, LENGTH, M = 12, 8, 4, 4
ROUNDS = 32  # of all in turns; two of them are checked
GOALS = {"Pipe": 1.3, "ProcessPipe": 1.3, "DDP": 1.05, "FSDP": 2.5}


class Block(nn.Module):
    """One tensor in, one out, on every version of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.block = GPT2Block(
            GPT2Config(
                n_embd=WIDTH, n_head=1, n_positions=LENGTH, resid_pdrop=0.0, attn_pdrop=0.0,
                attn_implementation="sdpa",
            ),
            layer_idx=0,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        return y if isinstance(y, Tensor) else y[0]


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def square_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def contestants(world: World) -> dict[str, Callable[[], Any]]:
    """A step of each, by name. With one rank, pipes have one stage; with two ranks, two."""
    x, y = torch.randn(2, M, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    n = world.world_size
    sizes = [BLOCKS // n] * n
    steps: dict[str, Callable[[], Any]] = {}

    def micro_batches(
        model: Callable[[Tensor], Tensor],
        local: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Callable[[], None]:
        """A step; all micro-batches but the last run under `local`, where nothing is sent."""

        def step() -> None:
            for i, (part, target) in enumerate(zip(x.split(1), y.split(1), strict=True)):
                with local() if i + 1 < M else nullcontext():
                    square_error(model(part), target).backward()

        return step

    steps["plain"] = micro_batches(blocks())
    pipe = ProcessPipe(blocks(), sizes)
    steps["ProcessPipe"] = lambda: pipe.train_step(x, y, square_error, "1f1b", M)
    if n == 1:
        ours = DistributedDataParallel(blocks())
        torchs_ddp = TorchDDP(blocks())
        sharded = FullyShardedDataParallel(blocks(), partial(torch.optim.SGD, lr=0.0))

        def ddp() -> None:
            micro_batches(ours, ours.no_sync)()
            ours.average_gradients()

        def fsdp() -> None:
            sharded.train_step(x.split(1), y.split(1), square_error)
            sharded.finish_gradients()

        threads = Pipe(place_layers([*blocks()], [BLOCKS], ["cpu:0"])[0])
        steps["Pipe"] = lambda: threads.train_step(x, y, square_error, "1f1b", M)
        steps |= {"DDP": ddp, "FSDP": fsdp}
        steps["torch DDP"] = micro_batches(torchs_ddp, torchs_ddp.no_sync)
        model: Any = blocks()
        for block in model:
            fully_shard(block)
        steps["torch fully_shard"] = micro_batches(fully_shard(model))
    own = nn.Sequential(*[*blocks()][world.rank * sizes[0] :][: sizes[0]])
    schedule = Schedule1F1B(
        PipelineStage(own, world.rank, n, torch.device("cpu")), M,
        loss_fn=square_error, scale_grads=False,
    )  # fmt: skip
    if n == 2:
        threads = Pipe(place_layers([*blocks()], sizes, ["cpu:0", "cpu:1"])[0])
        if world.is_main:
            steps["Pipe"] = lambda: threads.train_step(x, y, square_error, "1f1b", M)

    def torchs() -> None:
        first, last = world.rank == 0, world.rank == n - 1
        schedule.step(*[x] * first, **({"target": y, "losses": []} if last else {}))

    steps["torch pipelining"] = torchs
    return steps


def _rank(world: World, out: Path) -> None:
    torch.set_num_threads(1)
    steps = contestants(world)
    milliseconds: dict[str, list[float]] = {name: [] for name in steps}
    for k in range(ROUNDS + 1):
        for name, step in steps.items():
            if name not in ("plain", "Pipe") and world.world_size > 1:
                dist.barrier()  # else a wait for a slower rank would count as processor time
            start = time.process_time()
            step()
            if k:
                milliseconds[name].append((time.process_time() - start) * 1000 / M)
    if world.is_main:
        torch.save(milliseconds, out)
    if world.world_size > 1:
        dist.barrier()


def rows_of(milliseconds: dict[str, list[float]], where: str, stages: int) -> list[Row]:
    """The rows of one run. With several stages, a rank has a part of the blocks, but a Pipe all."""
    rows, plain = [], min(milliseconds["plain"])
    for name, values in milliseconds.items():
        share = 1 if name in ("plain", "Pipe") else stages
        least = min(values)
        spread = (least, statistics.median(values))
        goal = 1 / GOALS[name] if name in GOALS and stages == 1 else None
        rows.append(
            Row(f"{name}, {where}", least, spread, "ms", plain / share / least, "of plain", goal)
        )
    return rows


def run() -> list[Row]:
    """Prints the table: the least, and [least .. median]."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"
        for n, where in ((1, "one rank"), (2, "two stages")):
            launch(_rank, Options(world_size=n, device="cpu", cores_per_rank=1), out)
            rows += rows_of(torch.load(out, weights_only=True), where, n)
    title = f"Host, per micro-batch, forward and backward of {BLOCKS} blocks of width {WIDTH}"
    write_rows("host", title, rows)
    return rows


if __name__ == "__main__":
    run()
