"""A pipeline step over GPT-2 blocks: two stages, a core each.

The same blocks, batch and loss for all:

- model parallel: one stage computes at a time, each on its own core; the baseline;
- gpipe, 1f1b, zb (zero bubble): this project's Pipe, two worker threads;
- torch gpipe, torch 1f1b: `torch.distributed.pipelining`, two processes;
- autograd-driven: our forward, and the backward left to autograd, as torchgpipe does: on CPU that
  is one thread, with the intra-op threads of one device;
- one device, all cores: no pipeline at all, every operator on all cores. No contestant of the
  others, for its operators are cut finer than any pipeline; it says what a laptop has to beat.

Nothing is updated: every step computes the same loss and gradients, and those are compared.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from benchmarks.harness import Row, agree, alternate, ratio_of, summarize, write_rows
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.schedule import clock_cycles
from pipeline.worker import Task
from training.launch import Settings, World, launch

K, MICROBATCHES, ROUNDS = 2, (2, 4, 8, 16), 5
BLOCKS, WIDTH, BATCH, LENGTH = 4, 512, 32, 128
TORCH = {"torch gpipe": ScheduleGPipe, "torch 1f1b": Schedule1F1B}
OURS = {"gpipe": "torch gpipe", "1f1b": "torch 1f1b", "zb": "torch 1f1b"}  # and whom it faces


class _Block(nn.Module):
    """A block that returns a tensor under every version of transformers."""

    def __init__(self, config: GPT2Config, index: int) -> None:
        super().__init__()
        self.block = GPT2Block(config, layer_idx=index)

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x)
        return out[0] if isinstance(out, tuple) else out


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def _blocks() -> nn.Sequential:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=WIDTH, n_head=8, resid_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa",
        activation_function="gelu_pytorch_tanh",
    )  # fmt: skip
    return nn.Sequential(*(_Block(config, i) for i in range(BLOCKS)))


class _Bench:
    """The contestants of one rank. Those with threads live on rank 0, while rank 1 waits."""

    def __init__(self, world: World, cores: Sequence[int]) -> None:
        self.world, self.cores = world, list(cores)
        self.x, self.y = torch.randn(2, BATCH, LENGTH, WIDTH).unbind(0)
        self.results: dict[str, float] = {}
        self.norms: dict[str, float] = {}
        self.own = self.cores[world.rank : world.rank + 1]
        half = BLOCKS // K
        self.part = _blocks()[half * world.rank : half * (world.rank + 1)]
        self.blocks = _blocks()
        self._set_cores(self.cores)
        placed = [
            WithDevice(copy.deepcopy(b), f"cpu:{i // half}") for i, b in enumerate(self.blocks)
        ]
        self.pipe = Pipe(nn.Sequential(*placed), BATCH)
        self.halves = [
            nn.Sequential(*p) for p in (list(self.blocks)[:half], list(self.blocks)[half:])
        ]

    @staticmethod
    def _set_cores(cores: Sequence[int]) -> None:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))

    def contestants(self) -> dict[str, Callable[[], None]]:
        """Every contestant, as a step that all ranks call."""
        turns: dict[str, Callable[[], None]] = {
            "model parallel": self._ours("sequential", 1),
            "one device, all cores": self._with_threads("one device, all cores", self._plain),
        }
        for m in MICROBATCHES:
            turns |= {f"{name}, M={m}": self._ours(name, m) for name in OURS}
            turns |= {f"{name}, M={m}": self._torch(name, m) for name in TORCH}
            name = f"autograd-driven, M={m}"
            turns[name] = self._with_threads(name, lambda m=m: self._autograd_driven(m))  # type: ignore[misc]
        return turns

    def _with_threads(
        self, name: str, step: Callable[[], tuple[Tensor, Any]]
    ) -> Callable[[], None]:
        def turn() -> None:
            if self.world.is_main:
                self._set_cores(self.cores)
                loss, parameters = step()
                self._note(name, loss, parameters)
            dist.barrier()

        return turn

    def _note(self, name: str, loss: Tensor, parameters: Any) -> None:
        self.results[name] = loss.item()
        gradients = [p.grad for p in parameters]
        self.norms[name] = torch._foreach_norm(gradients)[0].item() if gradients else 0.0

    def _ours(self, schedule: str, m: int) -> Callable[[], None]:
        name = "model parallel" if schedule == "sequential" else f"{schedule}, M={m}"

        def step() -> tuple[Tensor, Any]:
            self.pipe.zero_grad()
            loss = self.pipe.train_step(
                self.x, self.y, _loss, schedule=schedule, num_microbatches=m
            )
            return loss, self.pipe.parameters()

        return self._with_threads(name, step)

    def _plain(self) -> tuple[Tensor, Any]:
        self.blocks.zero_grad()
        loss = _loss(self.blocks(self.x), self.y)
        loss.backward()
        return loss.detach(), self.blocks.parameters()

    def _autograd_driven(self, m: int) -> tuple[Tensor, Any]:
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
        self._set_cores(self.cores[:1])  # a device of one core runs it all
        loss = _loss(torch.cat(batches), self.y)
        loss.backward()
        return loss.detach(), self.blocks.parameters()

    def _torch(self, name: str, m: int) -> Callable[[], None]:
        self._set_cores(self.own)
        stage = PipelineStage(self.part, self.world.rank, K, torch.device("cpu"))
        schedule = TORCH[name](stage, m, loss_fn=_loss, scale_grads=False)

        def turn() -> None:
            self._set_cores(self.own)
            self.part.zero_grad()
            losses: list[Tensor] = []
            if self.world.is_main:
                schedule.step(self.x)
            else:
                schedule.step(target=self.y, losses=losses)
            dist.barrier()
            total = torch.stack([x.detach() for x in losses]).sum() if losses else torch.zeros(())
            dist.all_reduce(total)
            self._note(f"{name}, M={m}", total, self.part.parameters())

        return turn


def _rank(world: World, cores: Sequence[int], out: Path) -> None:
    torch.manual_seed(1)  # the same batch on both ranks
    bench = _Bench(world, cores)
    seconds = alternate(bench.contestants(), ROUNDS)
    if world.is_main:
        agree(bench.results)
        agree(bench.norms, 1e-3)  # of the gradient of the first parameter, the last one computed
        torch.save(seconds, out)
    bench.pipe.close()
    dist.barrier()


def ideal(name: str, m: int) -> float:
    """Speed-up of K equal stages with m micro-batches over one stage at a time.

    A backward costs two forwards; zero bubble fills two thirds of the others' bubble (m >= K).
    """
    work, bubble = 3 * m, (K - 1) * (1 if name == "zb" else 3)
    return K * work / (work + bubble)


def run() -> list[Row]:
    """Times all contestants and prints their table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.pt"
        cores = sorted(os.sched_getaffinity(0))[:K]
        launch(_rank, Settings(world_size=K, device="cpu", cores_per_rank=1), cores, out)
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
        for name in OURS:
            add(f"{name}, M={m}", "model parallel", 0.90 if m in (4, 8) else None, ideal(name, m))
        for name, other in OURS.items():
            add(f"{name}, M={m}", f"{other}, M={m}", 1.05)
        for name in ("1f1b", "zb"):
            add(f"{name}, M={m}", f"autograd-driven, M={m}", 1.5)
        add(f"zb, M={m}", f"1f1b, M={m}")
    title = (
        f"Pipeline step, {BLOCKS} GPT-2 blocks of width {WIDTH}, batch {BATCH} x {LENGTH}, "
        f"{K} stages with a core each"
    )
    write_rows("pipeline", title, rows)
    return rows


if __name__ == "__main__":
    run()
