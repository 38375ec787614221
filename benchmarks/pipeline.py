"""A pipeline step over GPT-2 blocks, on two ranks with a core each: one or two stages per rank.

Every transport runs its schedules on the same blocks, batch and loss:

- threads: `Pipe`, a worker thread per stage, in one process. `sequential` is model parallelism, in
  which one stage computes at a time: the baseline. `pipe(x)` is `Pipe.forward` and `.backward()`;
- processes: `ProcessPipe`, a rank per stage;
- torch: `torch.distributed.pipelining`, a rank per stage;
- one device, all cores: no pipeline, every operator on all cores. This cuts the work finer than any
  pipeline does, and is what a pipeline has to beat on a laptop.

For every number of micro-batches the table has our best beside PyTorch's best. Weights are not
updated: every step computes the same loss and gradients, which are compared.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from benchmarks.harness import Row, agree, alternate, ratio_of, summarize, use_cores, write_rows
from pipeline.pipe import Pipe
from pipeline.processes.process import ProcessPipe
from pipeline.replicas import place_layers
from pipeline.schedules.catalogue import ranks_of_stages
from training.launch.launch import launch
from training.launch.world import World
from training.options import Options

K, ROUNDS = 2, 3
BLOCKS, WIDTH, BATCH, LENGTH = 4, 512, 32, 128
USUAL, FURTHER = (4, 8), (2, 16)  # numbers of micro-batches: for all schedules, for the best
TABLE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "threads": (("gpipe", "1f1b", "zb", "zbv", "pipe(x)"), ()),
    "processes": (("gpipe", "1f1b", "zb", "interleaved", "zbv"), ("zb", "zbv")),
    "torch": (
        ("gpipe", "1f1b", "interleaved", "interleaved zb", "zbv"),
        ("1f1b", "interleaved zb", "zbv"),
    ),
}
TORCH: dict[str, Any] = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B,
    "interleaved zb": ScheduleInterleavedZeroBubble, "zbv": ScheduleZBVZeroBubble,
}  # fmt: skip
GOAL = 0.95  # of the ideal of K stages and M micro-batches, K*M / (M+K-1)


class Block(nn.Module):
    """A block that returns a tensor under every version of transformers."""

    def __init__(self, config: GPT2Config, index: int) -> None:
        super().__init__()
        self.block = GPT2Block(config, layer_idx=index)

    def forward(self, x: Tensor) -> Tensor:
        """As the block's."""
        out = self.block(x)
        return out[0] if isinstance(out, tuple) else out


def square_error(output: Tensor, target: Tensor) -> Tensor:
    """A loss that is summed over the examples."""
    return (output - target).square().sum()


def make_blocks() -> nn.Sequential:
    """The same blocks, every time."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=WIDTH, n_head=8, resid_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa",
        activation_function="gelu_pytorch_tanh",
    )  # fmt: skip
    return nn.Sequential(*(Block(config, i) for i in range(BLOCKS)))


def ranks_of(schedule: str) -> list[int]:
    """The rank of each stage. PyTorch's interleaved zero bubble has interleaved stages."""
    return ranks_of_stages(schedule.removesuffix(" zb"), K)


class _Bench:
    """The contestants of one rank. Threads live on rank 0, while rank 1 waits."""

    def __init__(self, world: World, cores: Sequence[int]) -> None:
        self.world, self.cores = world, list(cores)
        self.x, self.y = torch.randn(2, BATCH, LENGTH, WIDTH).unbind(0)
        self.blocks, self.torch_blocks = make_blocks(), make_blocks()
        self.losses: dict[str, float] = {}
        self.pipes: dict[tuple[str, int], Any] = {}  # by transport and number of stages
        self._plain()
        self.expected = [[p.grad.clone() for p in b.parameters() if p.grad is not None]
                         for b in self.blocks]  # fmt: skip

    def contestants(self) -> dict[str, Callable[[], None]]:
        """Every contestant, as a step that all ranks call."""
        turns = {"threads sequential, M=1": self._threads("sequential", 1)}
        turns["one device, all cores"] = self._turn(
            "one device, all cores", dict(enumerate(self.blocks)), self._plain, alone=True
        )
        turns["threads pipe(x), M=1"] = self._threads("pipe(x)", 1)
        steps = {"threads": self._threads, "processes": self._processes, "torch": self._torch}
        for transport, (schedules, further) in TABLE.items():
            for m in (*USUAL, *FURTHER):
                for schedule in schedules if m in USUAL else further:
                    name = f"{transport} {schedule}, M={m}"
                    turns[name] = steps[transport](schedule, m)
        return turns

    def _turn(
        self, name: str, blocks: Mapping[int, nn.Module], step: Callable[[], Tensor], alone: bool
    ) -> Callable[[], None]:
        cores = self.cores if alone else self.cores[self.world.rank : self.world.rank + 1]

        def turn() -> None:
            if self.world.is_main or not alone:
                use_cores(cores)
                for block in blocks.values():
                    block.zero_grad()
                loss = step().item()
                if name not in self.losses:  # in the round that is not timed
                    self.check(name, blocks)
                self.losses[name] = loss
            dist.barrier()

        return turn

    def _of_rank(self, ranks: Sequence[int]) -> list[int]:
        """The numbers of this rank's blocks."""
        size = BLOCKS // len(ranks)
        return [k for k in range(BLOCKS) if ranks[k // size] == self.world.rank]

    def _threads(self, schedule: str, m: int) -> Callable[[], None]:
        ranks = ranks_of("gpipe" if schedule == "pipe(x)" else schedule)
        sizes = [BLOCKS // len(ranks)] * len(ranks)
        if ("threads", len(ranks)) not in self.pipes:
            use_cores(self.cores)
            placed, _ = place_layers(list(make_blocks()), sizes, [f"cpu:{r}" for r in ranks])
            self.pipes["threads", len(ranks)] = Pipe(placed, BATCH, sizes=sizes)
        pipe = self.pipes["threads", len(ranks)]
        blocks = [block for part in pipe.partitions for block in part.children()]

        def step() -> Tensor:
            if schedule != "pipe(x)":
                return pipe.train_step(self.x, self.y, square_error, schedule, m)
            pipe.split_size = BATCH // m
            loss = square_error(pipe(self.x), self.y)
            loss.backward()
            return loss.detach()

        return self._turn(f"threads {schedule}, M={m}", dict(enumerate(blocks)), step, alone=True)

    def _processes(self, schedule: str, m: int) -> Callable[[], None]:
        ranks = ranks_of(schedule)
        key = schedule if len(ranks) > K else "one stage per rank", len(ranks)
        if key not in self.pipes:
            use_cores(self.cores[self.world.rank : self.world.rank + 1])
            sizes = [BLOCKS // len(ranks)] * len(ranks)
            self.pipes[key] = ProcessPipe(make_blocks(), sizes, ranks=ranks)
        pipe = self.pipes[key]
        blocks = {k: pipe.layers[k] for k in self._of_rank(ranks)}

        def step() -> Tensor:
            total = pipe.train_step(self.x, self.y, square_error, schedule, m)
            dist.all_reduce(total)  # the last stage has it
            return total

        return self._turn(f"processes {schedule}, M={m}", blocks, step, alone=False)

    def _torch(self, schedule: str, m: int) -> Callable[[], None]:
        ranks, rank, all_blocks = ranks_of(schedule), self.world.rank, self.torch_blocks
        size = BLOCKS // len(ranks)
        stages: list[Any] = [
            PipelineStage(all_blocks[s * size : (s + 1) * size], s, len(ranks), torch.device("cpu"))
            for s, r in enumerate(ranks)
            if r == rank
        ]
        given: Any = stages if len(ranks) > K else stages[0]
        runner: Any = TORCH[schedule](given, m, loss_fn=square_error, scale_grads=False)

        def step() -> Tensor:
            losses: list[Tensor] = []
            last = {"target": self.y, "losses": losses} if rank == ranks[-1] else {}
            runner.step(*[self.x] * (rank == ranks[0]), **last)
            total = torch.stack([x.detach() for x in losses]).sum() if losses else torch.zeros(())
            dist.all_reduce(total)
            return total

        blocks = {k: all_blocks[k] for k in self._of_rank(ranks)}
        return self._turn(f"torch {schedule}, M={m}", blocks, step, alone=False)

    def _plain(self) -> Tensor:
        loss = square_error(self.blocks(self.x), self.y)
        loss.backward()
        return loss.detach()

    def check(self, name: str, blocks: Mapping[int, nn.Module]) -> None:
        """Raises AssertionError if a contestant's gradients are not the plain ones.

        Differences are relative to the largest element of each tensor: fp32 sums of 4,096 terms of
        similar size, added in different orders, differ by about sqrt(4096) * 6e-8 = 4e-6 of it;
        more if terms cancel.
        """
        for k, block in blocks.items():
            for p, want in zip(block.parameters(), self.expected[k], strict=True):
                assert p.grad is not None
                difference = ((p.grad - want).abs().max() / want.abs().max()).item()
                assert difference < 1e-3, f"{name}: block {k} is off by {difference:.1e}"


def _rank(world: World, cores: Sequence[int], out: Path) -> None:
    torch.manual_seed(1)  # the same batch on both ranks
    bench = _Bench(world, cores)
    seconds = alternate(bench.contestants(), ROUNDS)
    agree(bench.losses)
    if world.is_main:
        torch.save(seconds, out)
    for pipe in bench.pipes.values():
        pipe.close()
    dist.barrier()


def rows_of(seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    """The table: every contestant beside one stage at a time, and the comparisons with goals."""
    rows = []

    def add(name: str, against: str, goal: float | None = None, scale: float = 1.0) -> None:
        value, spread = summarize(seconds[name])
        ratio = ratio_of(seconds[against], seconds[name]) / scale
        of = f"of ideal {scale:.2f}x {against}" if scale != 1 else against
        rows.append(Row(name, value, spread, "s", ratio, of, goal))

    def fastest(m: int, *transports: str) -> str:
        names = [n for n in seconds if n.startswith(transports) and n.endswith(f", M={m}")]
        return min(names, key=lambda name: statistics.median(seconds[name]))

    for name in seconds:
        add(name, "threads sequential, M=1")
    for m in USUAL:
        ideal = K * m / (m + K - 1)
        add(f"threads pipe(x), M={m}", "threads pipe(x), M=1", GOAL, ideal)
        for schedule in ("gpipe", "1f1b"):
            add(f"threads {schedule}, M={m}", "threads sequential, M=1", GOAL, ideal)
        for schedule in ("gpipe", "1f1b", "interleaved", "zbv"):
            add(f"processes {schedule}, M={m}", f"torch {schedule}, M={m}", 1.0)
    for m in sorted((*USUAL, *FURTHER)):
        add(fastest(m, "processes", "threads"), fastest(m, "torch"), 1.03)
    return rows


def run() -> list[Row]:
    """Times all contestants and prints their table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.pt"
        cores = sorted(os.sched_getaffinity(0))[:K]
        launch(_rank, Options(world_size=K, device="cpu", cores_per_rank=1), cores, out)
        rows = rows_of(torch.load(out, weights_only=True))
    title = (
        f"Pipeline step, {BLOCKS} GPT-2 blocks of width {WIDTH}, batch {BATCH} x {LENGTH}, "
        f"{K} ranks with a core each"
    )
    write_rows("pipeline", title, rows)
    return rows


if __name__ == "__main__":
    run()
