"""The best schedules of this project and of PyTorch, in two processes with a core each.

Blocks, batch and loss are those of the benchmark `pipeline`. With a stage of two blocks per rank:

- zb: this project's `ProcessPipe`; torch 1f1b: `torch.distributed.pipelining`'s Schedule1F1B;

and with two stages of a block:

- zbv: this project's `ProcessPipe`, and its `Pipe` (threads); interleaved;
- torch interleaved, interleaved zb, zbv: ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble and
  ScheduleZBVZeroBubble.

For every number of micro-batches the table has our best beside PyTorch's best. For zbv and
interleaved it also has the idle share of a rank in a recorded step, beside the idle share of the
schedule if every action took its mean time and transfers took none. Weights are not updated: every
step computes the same loss and gradients, which are compared.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.harness import Row, agree, alternate, ratio_of, summarize, use_cores, write_rows
from benchmarks.pipeline import BATCH, BLOCKS, LENGTH, WIDTH, K, make_blocks, square_error
from pipeline.pipe import Pipe
from pipeline.processes.process import ProcessPipe
from pipeline.replicas import place_layers
from pipeline.schedules.catalogue import ranks_of_stages
from project.figures.compared import compare
from training.launch.launch import launch
from training.launch.world import World
from training.options import Options
from training.timeline import Event

MICROBATCHES, ROUNDS, RECORDED = (2, 4, 8, 16), 3, 3
USUAL = (4, 8)  # the numbers with which OTHERS are timed, too
OURS = ("zb", "zbv", "interleaved")
OTHERS = ("interleaved", "torch interleaved", "threads, zbv")
TORCH = {
    "torch 1f1b": ("1f1b", Schedule1F1B),
    "torch interleaved": ("interleaved", ScheduleInterleaved1F1B),
    "torch interleaved zb": ("interleaved", ScheduleInterleavedZeroBubble),
    "torch zbv": ("zbv", ScheduleZBVZeroBubble),
}
AGAINST = {"interleaved": ("torch interleaved",), "zbv": ("torch zbv", "torch interleaved zb")}
Recorded = list[tuple[str, int, int, float, float]]


class _Bench:
    """The contestants of one rank. Threads live on rank 0, while rank 1 waits."""

    def __init__(self, world: World, cores: Sequence[int]) -> None:
        self.world, self.cores = world, list(cores)
        self.own = self.cores[world.rank : world.rank + 1]
        self.x, self.y = torch.randn(2, BATCH, LENGTH, WIDTH).unbind(0)
        self.losses: dict[str, float] = {}
        self.gradients: dict[str, list[tuple[int, Tensor]]] = {}  # with the number of the block
        self.blocks = make_blocks()
        use_cores(self.own)
        self.pipes = {}
        for name in OURS:
            ranks = ranks_of_stages(name, K)
            sizes = [BLOCKS // len(ranks)] * len(ranks)
            self.pipes[name] = ProcessPipe(make_blocks(), sizes, ranks=ranks)
        ranks, sizes = ranks_of_stages("zbv", K), [1] * BLOCKS
        placed, _ = place_layers(list(make_blocks()), sizes, [f"cpu:{r}" for r in ranks])
        use_cores(self.cores)
        self.threads = Pipe(placed, BATCH, sizes=sizes)

    def contestants(self) -> dict[str, Callable[[], None]]:
        """Every contestant, as a step that all ranks call."""
        turns: dict[str, Callable[[], None]] = {}
        for m in MICROBATCHES:
            turns |= {f"{name}, M={m}": self._ours(name, m) for name in OURS}
            turns |= {f"{name}, M={m}": self._torch(name, m) for name in TORCH}
            turns[f"threads, zbv, M={m}"] = self._in_threads(m)
            if m not in USUAL:
                for name in OTHERS:
                    del turns[f"{name}, M={m}"]
        return turns

    def _note(self, name: str, loss: float, blocks: dict[int, nn.Module]) -> None:
        dist.barrier()
        self.losses[name] = loss
        if name not in self.gradients:  # in the round that is not timed
            self.gradients[name] = [
                (k, p.grad.clone())  # type: ignore[union-attr]
                for k, block in blocks.items() for p in block.parameters()
            ]  # fmt: skip

    def _mine(self, ranks: Sequence[int]) -> list[int]:
        """The numbers of the blocks of this rank."""
        size = BLOCKS // len(ranks)
        return [k for k in range(BLOCKS) if ranks[k // size] == self.world.rank]

    def _ours(self, name: str, m: int) -> Callable[[], None]:
        pipe = self.pipes[name]
        blocks = {k: pipe.layers[k] for k in self._mine(pipe.ranks)}

        def turn() -> None:
            use_cores(self.own)
            pipe.module.zero_grad()
            loss = pipe.train_step(self.x, self.y, square_error, name, m)
            self._note(f"{name}, M={m}", loss.item(), blocks)

        return turn

    def _in_threads(self, m: int) -> Callable[[], None]:
        pipe = self.threads

        def turn() -> None:
            if self.world.is_main:
                use_cores(self.cores)
                pipe.zero_grad()
                loss = pipe.train_step(self.x, self.y, square_error, "zbv", m)
                layers = [block for part in pipe.partitions for block in part.children()]
                self._note(f"threads, zbv, M={m}", loss.item(), dict(enumerate(layers)))
            else:
                dist.barrier()

        return turn

    def _torch(self, name: str, m: int) -> Callable[[], None]:
        placed, kind = TORCH[name]
        ranks, rank, every = ranks_of_stages(placed, K), self.world.rank, make_blocks()
        blocks, size = {k: every[k] for k in self._mine(ranks)}, BLOCKS // len(ranks)
        stages: list[Any] = [
            PipelineStage(every[s * size : (s + 1) * size], s, len(ranks), torch.device("cpu"))
            for s, r in enumerate(ranks)
            if r == rank
        ]
        many: Any = stages if len(ranks) > K else stages[0]
        run: Any = kind(many, m, loss_fn=square_error, scale_grads=False)

        def turn() -> None:
            use_cores(self.own)
            for block in blocks.values():
                block.zero_grad()
            losses: list[Tensor] = []
            given: dict[str, Any] = (
                {"target": self.y, "losses": losses} if rank == ranks[-1] else {}
            )
            run.step(*[self.x] * (rank == ranks[0]), **given)
            total = torch.stack([x.detach() for x in losses]).sum() if losses else torch.zeros(())
            dist.all_reduce(total)
            self._note(f"{name}, M={m}", total.item(), blocks)

        return turn

    def idle(self, name: str, m: int, threads: bool) -> tuple[float, float]:
        """The mean idle share of the ranks in a recorded step, and the idle share of the schedule
        itself."""
        events: Recorded = []
        pipe: Any = self.threads if threads else self.pipes[name]
        ranks = ranks_of_stages(name, K)
        pipe.recorder = lambda *event: events.append(event)
        if not threads or self.world.is_main:
            use_cores(self.cores if threads else self.own)
            pipe.train_step(self.x, self.y, square_error, name, m)
        pipe.recorder = None
        found = self.world.gather(events)
        rows: dict[str, list[Event]] = {f"rank {r}": [] for r in range(K)}
        for event in (Event(*e) for of_rank in found for e in of_rank):
            rows[f"rank {ranks[event.stage]}"].append(event)
        step = compare(rows, name, list(range(K)))
        return step.bubble, step.predicted.equal().bubble

    def check(self) -> None:
        """Raises AssertionError if a loss or gradient is not the plain one: see pipeline.py."""
        agree(self.losses)
        square_error(self.blocks(self.x), self.y).backward()
        for name, found in self.gradients.items():
            numbers = dict.fromkeys(k for k, _ in found)
            plain = [p.grad for k in numbers for p in self.blocks[k].parameters()]
            for k, ((_, got), want) in enumerate(zip(found, plain, strict=True)):
                assert want is not None
                difference = ((got - want).abs().max() / want.abs().max()).item()
                assert difference < 1e-3, f"{name}: gradient {k} is off by {difference:.1e}"


def _rank(world: World, cores: Sequence[int], out: Path) -> None:
    torch.manual_seed(1)  # the same batch on both ranks
    bench = _Bench(world, cores)
    seconds = alternate(bench.contestants(), ROUNDS)
    bench.check()
    idle = {
        (name, m, threads): [bench.idle(name, m, threads) for _ in range(RECORDED)]
        for m in USUAL
        for name, threads in (("interleaved", False), ("zbv", False), ("zbv", True))
    }
    if world.is_main:
        torch.save((seconds, idle), out)
    bench.threads.close()
    for pipe in bench.pipes.values():
        pipe.close()
    dist.barrier()


def run() -> list[Row]:
    """Times all contestants and prints their table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.pt"
        cores = sorted(os.sched_getaffinity(0))[:K]
        launch(_rank, Options(world_size=K, device="cpu", cores_per_rank=1), cores, out)
        seconds, idle = torch.load(out, weights_only=True)
    rows = []

    def add(name: str, against: str, goal: float | None = None) -> None:
        value, spread = summarize(seconds[name])
        ratio = ratio_of(seconds[against], seconds[name])
        rows.append(Row(name, value, spread, "s", ratio, against, goal))

    def fastest(names: Sequence[str], m: int) -> str:
        found = [f"{name}, M={m}" for name in names if f"{name}, M={m}" in seconds]
        return min(found, key=lambda name: statistics.median(seconds[name]))

    for name in seconds:
        add(name, f"torch 1f1b, {name.rpartition(', ')[2]}")
    for m in USUAL:
        for name, others in AGAINST.items():
            for other in others:
                add(f"{name}, M={m}", f"{other}, M={m}", 1.0)
    for m in MICROBATCHES:
        ours, theirs = fastest(OURS, m), fastest(list(TORCH), m)
        value, spread = summarize(seconds[ours])
        ratio = ratio_of(seconds[theirs], seconds[ours])
        rows.append(Row(f"best: {ours}", value, spread, "s", ratio, f"the best, {theirs}", 1.0))
    for (name, m, threads), found in idle.items():
        measured, own = zip(*filter(None, found), strict=True)
        value, spread = summarize([100 * share for share in measured])
        how = "threads, " if threads else ""
        ideal = f"of {100 * statistics.median(own):.1f} % of the schedule's own"
        ratio = value / (100 * statistics.median(own))
        rows.append(Row(f"idle: {how}{name}, M={m}", value, spread, "%", ratio, ideal))
    title = (
        f"The best schedules, {BLOCKS} GPT-2 blocks of width {WIDTH}, batch {BATCH} x {LENGTH}, "
        f"{K} ranks with a core each"
    )
    write_rows("chunks", title, rows)
    return rows


if __name__ == "__main__":
    run()
