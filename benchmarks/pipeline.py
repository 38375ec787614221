"""A pipeline step over GPT-2 blocks: two stages, a core each.

The same blocks, batch and loss for all:

- model parallel: one stage computes at a time, each on its own core; the baseline;
- gpipe, 1f1b, zb (zero bubble): this project's Pipe, two worker threads;
- pipe(x): `Pipe.forward` and `.backward()`, over twice as many blocks, against the same with one
  micro-batch, in which one stage at a time computes;
- torch gpipe, torch 1f1b: `torch.distributed.pipelining`, two processes;
- autograd-driven: our forward, with the backward left to autograd, as in torchgpipe: on a CPU that
  is one thread. Timed with one core, like a device; and with the backward's operators on all cores,
  which forward may not use: this is no longer a pipeline, but the upper bound of that design;
- one device, all cores: no pipeline, every operator on all cores. It does not compete, since its
  operators are cut finer than any pipeline; it is what a pipeline has to beat on a laptop.

Weights are not updated: every step computes the same loss and gradients, which are compared. More
schedules and numbers of micro-batches: the benchmark `chunks`.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from benchmarks.harness import Row, agree, alternate, ratio_of, summarize, use_cores, write_rows
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.schedules.schedule import clock_cycles
from pipeline.worker import Task
from training.launch.launch import launch
from training.launch.world import World
from training.options import Options

K, MICROBATCHES, ROUNDS = 2, (4, 8), 3
BLOCKS, WIDTH, BATCH, LENGTH = 4, 512, 32, 128
TORCH = {"torch gpipe": ScheduleGPipe, "torch 1f1b": Schedule1F1B}
OURS = ("gpipe", "1f1b", "zb")


class _Block(nn.Module):
    """A block that returns a tensor under every version of transformers."""

    def __init__(self, config: GPT2Config, index: int) -> None:
        super().__init__()
        self.block = GPT2Block(config, layer_idx=index)

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x)
        return out[0] if isinstance(out, tuple) else out


def square_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def make_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=WIDTH, n_head=8, resid_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa",
        activation_function="gelu_pytorch_tanh",
    )  # fmt: skip
    return nn.Sequential(*(_Block(config, i) for i in range(BLOCKS)))


class _Bench:
    """The contestants of one rank. Contestants with threads live on rank 0, while rank 1 waits."""

    def __init__(self, world: World, cores: Sequence[int]) -> None:
        self.world, self.cores = world, list(cores)
        self.x, self.y = torch.randn(2, BATCH, LENGTH, WIDTH).unbind(0)
        self.losses: dict[str, float] = {}
        self.gradients: dict[str, list[Tensor]] = {}
        self.own = self.cores[world.rank : world.rank + 1]
        half = BLOCKS // K
        self.part = make_blocks()[half * world.rank : half * (world.rank + 1)]
        self.blocks = make_blocks()
        use_cores(self.cores)
        placed = [
            WithDevice(copy.deepcopy(b), f"cpu:{i // half}") for i, b in enumerate(self.blocks)
        ]
        self.pipe = Pipe(nn.Sequential(*placed), BATCH)
        twice = [
            WithDevice(block, f"cpu:{i // BLOCKS}")
            for i, block in enumerate([*make_blocks(), *make_blocks()])
        ]
        self.long_pipe = Pipe(nn.Sequential(*twice), BATCH)
        self.halves = [
            nn.Sequential(*p) for p in (list(self.blocks)[:half], list(self.blocks)[half:])
        ]

    def contestants(self) -> dict[str, Callable[[], None]]:
        """Every contestant, as a step that all ranks call."""
        turns: dict[str, Callable[[], None]] = {
            "model parallel": self._ours("sequential", 1),
            "one device, all cores": self._with_threads("one device, all cores", self._plain),
        }
        for m in (1, *MICROBATCHES):
            turns[f"pipe(x), M={m}"] = self._forward_backward(m)
        for m in MICROBATCHES:
            turns |= {f"{name}, M={m}": self._ours(name, m) for name in OURS}
            turns |= {f"{name}, M={m}": self._torch(name, m) for name in TORCH}
            for name, cores in (
                (f"autograd-driven, M={m}", self.cores[:1]),
                (f"autograd-driven, backward on all cores, M={m}", self.cores),
            ):
                turns[name] = self._with_threads(name, partial(self._autograd_driven, m, cores))
        return turns

    def _with_threads(
        self, name: str, step: Callable[[], tuple[Tensor, nn.Module]]
    ) -> Callable[[], None]:
        def turn() -> None:
            if self.world.is_main:
                use_cores(self.cores)
                self._note(name, *step())
            dist.barrier()

        return turn

    def _note(self, name: str, loss: Tensor, model: nn.Module) -> None:
        self.losses[name] = loss.item()
        if name not in self.gradients:  # in the round that is not timed
            self.gradients[name] = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]

    def check(self) -> None:
        """Raises AssertionError if a contestant's loss or gradients are not the plain ones.

        Relative to the largest of each tensor: fp32 sums of 4,096 terms of similar size, in other
        orders, differ by about sqrt(4096) * 6e-8 = 4e-6 of it; more if terms cancel.
        """
        agree(self.losses)
        self.blocks.zero_grad()
        self._plain()
        plain = [p.grad for p in self.blocks.parameters()]
        half = len(plain) // K
        for name, gradients in self.gradients.items():
            torch_s = "torch" in name
            part = plain[half * self.world.rank :][:half] if torch_s else plain
            for k, (got, want) in enumerate(zip(gradients, part, strict=True)):
                assert want is not None
                difference = ((got - want).abs().max() / want.abs().max()).item()
                assert difference < 1e-3, f"{name}: gradient {k} is off by {difference:.1e}"

    def _ours(self, schedule: str, m: int) -> Callable[[], None]:
        name = "model parallel" if schedule == "sequential" else f"{schedule}, M={m}"

        def step() -> tuple[Tensor, nn.Module]:
            self.pipe.zero_grad()
            loss = self.pipe.train_step(
                self.x, self.y, square_error, schedule=schedule, num_microbatches=m
            )
            return loss, self.pipe

        return self._with_threads(name, step)

    def _forward_backward(self, m: int) -> Callable[[], None]:
        def turn() -> None:
            if self.world.is_main:
                use_cores(self.cores)
                self.long_pipe.zero_grad()
                self.long_pipe.split_size = BATCH // m
                square_error(self.long_pipe(self.x), self.y).backward()
            dist.barrier()

        return turn

    def _plain(self) -> tuple[Tensor, nn.Module]:
        self.blocks.zero_grad()
        loss = square_error(self.blocks(self.x), self.y)
        loss.backward()
        return loss.detach(), self.blocks

    def _autograd_driven(self, m: int, cores: Sequence[int]) -> tuple[Tensor, nn.Module]:
        self.blocks.zero_grad()
        batches = list(self.x.split(BATCH // m))
        for clock in clock_cycles(m, K):
            for i, j in clock:
                task = Task(lambda half=self.halves[j], value=batches[i]: half(value))  # type: ignore[misc]
                self.pipe.in_queues[j].put(task)
            for i, j in clock:
                fine, answer = self.pipe.out_queues[j].get()
                assert fine, answer
                batches[i] = answer[1]
        use_cores(cores)
        loss = square_error(torch.cat(batches), self.y)
        loss.backward()
        return loss.detach(), self.blocks

    def _torch(self, name: str, m: int) -> Callable[[], None]:
        use_cores(self.own)
        stage = PipelineStage(self.part, self.world.rank, K, torch.device("cpu"))
        schedule = TORCH[name](stage, m, loss_fn=square_error, scale_grads=False)

        def turn() -> None:
            use_cores(self.own)
            self.part.zero_grad()
            losses: list[Tensor] = []
            if self.world.is_main:
                schedule.step(self.x)
            else:
                schedule.step(target=self.y, losses=losses)
            dist.barrier()
            total = torch.stack([x.detach() for x in losses]).sum() if losses else torch.zeros(())
            dist.all_reduce(total)
            self._note(f"{name}, M={m}", total, self.part)

        return turn


def _rank(world: World, cores: Sequence[int], out: Path) -> None:
    torch.manual_seed(1)  # the same batch on both ranks
    bench = _Bench(world, cores)
    seconds = alternate(bench.contestants(), ROUNDS)
    bench.check()
    if world.is_main:
        torch.save(seconds, out)
    bench.pipe.close()
    bench.long_pipe.close()
    dist.barrier()


def run() -> list[Row]:
    """Times all contestants and prints their table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.pt"
        cores = sorted(os.sched_getaffinity(0))[:K]
        launch(_rank, Options(world_size=K, device="cpu", cores_per_rank=1), cores, out)
        seconds = torch.load(out, weights_only=True)
    rows = []

    def add(name: str, against: str, goal: float | None = None, scale: float = 1.0) -> None:
        value, spread = summarize(seconds[name])
        ratio = ratio_of(seconds[against], seconds[name]) / scale
        of = f"of ideal {scale:.2f}x {against}" if scale != 1 else against
        rows.append(Row(name, value, spread, "s", ratio, of, goal))

    add("model parallel", "model parallel")
    add("one device, all cores", "model parallel")
    for m in MICROBATCHES:
        ideal = K * m / (m + K - 1)
        add(f"pipe(x), M={m}", "pipe(x), M=1", 0.90, ideal)
    for m in MICROBATCHES:
        for name in OURS:
            # The goal is for the bubble of GPipe and 1F1B; zero bubble has a smaller one.
            goal = None if name == "zb" else 0.90
            add(f"{name}, M={m}", "model parallel", goal, K * m / (m + K - 1))
        others = [*TORCH, "autograd-driven", "autograd-driven, backward on all cores"]
        for other in others:
            add(f"{other}, M={m}", "model parallel")
        for name, other in (("gpipe", "torch gpipe"), ("1f1b", "torch 1f1b")):
            add(f"{name}, M={m}", f"{other}, M={m}")
        for other, least in zip(others, (1.05, 1.05, 1.5, None), strict=True):
            add(f"zb, M={m}", f"{other}, M={m}", least)
    title = (
        f"Pipeline step, {BLOCKS} GPT-2 blocks of width {WIDTH}, batch {BATCH} x {LENGTH}, "
        f"{K} stages with a core each"
    )
    write_rows("pipeline", title, rows)
    return rows


if __name__ == "__main__":
    run()
