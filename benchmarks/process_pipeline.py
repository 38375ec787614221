"""A pipeline step over GPT-2 blocks in two processes, a core each: this project's and PyTorch's.

Blocks, batch and loss are those of the benchmark `pipeline`, for all:

- gpipe, 1f1b, zb: this project's ProcessPipe;
- torch gpipe, 1f1b, zb: `torch.distributed.pipelining` with the same schedules (its zero bubble is
  ScheduleInterleavedZeroBubble with one stage per rank, which is not the same list as ZB-H1, so it
  has no goal);

and, in fewer rounds:

- gradients last: the list of whole backwards, in which the weights' gradients are computed before
  the activations' are sent, as PyTorch does;
- threads: the same lists run by `Pipe` in one process, for comparison.

Weights are not updated: every step computes the same loss and gradients, which are compared.

Then the peak resident memory of a rank in a step of micro-batches of one example, in which the
gradients of a stage's parameters outweigh its activations: of PyTorch, which differentiates a stage
in one call; and of ProcessPipe, which does so layer by layer, with whole backwards and by default,
where it sends gradients of inputs before it computes those of weights.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from benchmarks.harness import Row, agree, alternate, ratio_of, summarize, use_cores, write_rows
from benchmarks.pipeline import BATCH, BLOCKS, LENGTH, WIDTH, K, make_blocks, square_error
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.processes.process import ProcessPipe
from pipeline.schedules.catalogue import SCHEDULES as WHOLE
from training.launch.launch import launch
from training.launch.world import World
from training.options import Options

MICROBATCHES, ROUNDS, FEWER_ROUNDS = (4, 8), 5, 3
SCHEDULES = ("gpipe", "1f1b", "zb")
HALF = BLOCKS // K
VARIANTS = ("", "gradients last, ")
TORCH, LAST, DEFAULT = "torch", "gradients last", "ours"


def _torch_schedule(part: nn.Module, rank: int, schedule: str, m: int) -> Any:
    stage = PipelineStage(part, rank, K, torch.device("cpu"))
    options: Any = {"loss_fn": square_error, "scale_grads": False}
    if schedule == "zb":
        return ScheduleInterleavedZeroBubble([stage], m, **options)
    return {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule](stage, m, **options)


class _Bench:
    """The contestants of one rank. Threads live on rank 0, while rank 1 waits."""

    def __init__(self, world: World, cores: Sequence[int]) -> None:
        self.world, self.cores = world, list(cores)
        self.own = self.cores[world.rank : world.rank + 1]
        self.x, self.y = torch.randn(2, BATCH, LENGTH, WIDTH).unbind(0)
        self.losses: dict[str, float] = {}
        self.gradients: dict[str, list[Tensor]] = {}
        use_cores(self.own)
        self.pipes = {}
        for name in VARIANTS:
            self.pipes[name] = ProcessPipe(make_blocks(), [HALF] * K)
        self.part = make_blocks()[HALF * world.rank : HALF * (world.rank + 1)]
        use_cores(self.cores)
        placed = [WithDevice(b, f"cpu:{i // HALF}") for i, b in enumerate(make_blocks())]
        self.threads = Pipe(nn.Sequential(*placed), BATCH)

    def contestants(self) -> dict[str, Callable[[], None]]:
        """Ours and PyTorch's, as steps that all ranks call."""
        turns: dict[str, Callable[[], None]] = {}
        for m in MICROBATCHES:
            for schedule in SCHEDULES:
                name = f"{schedule}, M={m}"
                turns[name] = self._ours("", name, schedule, m)
                turns[f"torch {name}"] = self._torch(f"torch {name}", schedule, m)
        return turns

    def variants(self) -> dict[str, Callable[[], None]]:
        """Other ways to run 1F1B; `plain` is the one above."""
        turns: dict[str, Callable[[], None]] = {}
        m = MICROBATCHES[-1]
        for variant in VARIANTS:
            name = f"{variant or 'plain, '}1f1b, M={m}"
            turns[name] = self._ours(variant, name, "1f1b", m)
        turns[f"threads, 1f1b, M={m}"] = self._threads(f"threads, 1f1b, M={m}", "1f1b", m)
        return turns

    def _note(self, name: str, loss: float, module: nn.Module) -> None:
        dist.barrier()
        self.losses[name] = loss
        if name not in self.gradients:  # in the round that is not timed
            self.gradients[name] = [p.grad.clone() for p in module.parameters()]  # type: ignore[union-attr]

    def _ours(self, variant: str, name: str, schedule: str, m: int) -> Callable[[], None]:
        pipe, order = self.pipes[variant], WHOLE[schedule] if "last" in variant else schedule

        def turn() -> None:
            use_cores(self.own)
            pipe.module.zero_grad()
            loss = pipe.train_step(self.x, self.y, square_error, order, m)
            self._note(name, loss.item(), pipe.module)

        return turn

    def _threads(self, name: str, schedule: str, m: int) -> Callable[[], None]:
        def turn() -> None:
            if self.world.is_main:
                use_cores(self.cores)
                self.threads.zero_grad()
                loss = self.threads.train_step(self.x, self.y, square_error, schedule, m)
                self._note(name, loss.item(), self.threads)
            else:
                dist.barrier()

        return turn

    def _torch(self, name: str, schedule: str, m: int) -> Callable[[], None]:
        run = _torch_schedule(self.part, self.world.rank, schedule, m)

        def turn() -> None:
            use_cores(self.own)
            self.part.zero_grad()
            losses: list[Tensor] = []
            if self.world.is_main:
                run.step(self.x)
            else:
                run.step(target=self.y, losses=losses)
            total = torch.stack([x.detach() for x in losses]).sum() if losses else torch.zeros(())
            dist.all_reduce(total)
            self._note(name, total.item(), self.part)

        return turn

    def check(self) -> None:
        """Raises AssertionError if a contestant's loss or gradients are not the plain ones.

        The tolerance is that of benchmarks/pipeline.py.
        """
        agree(self.losses)
        blocks = make_blocks()
        square_error(blocks(self.x), self.y).backward()
        plain = [p.grad for p in blocks.parameters()]
        own = plain[len(plain) // K * self.world.rank :][: len(plain) // K]
        for name, gradients in self.gradients.items():
            wanted = plain if name.startswith("threads") else own
            for k, (got, want) in enumerate(zip(gradients, wanted, strict=True)):
                assert want is not None
                difference = ((got - want).abs().max() / want.abs().max()).item()
                assert difference < 1e-3, f"{name}: gradient {k} is off by {difference:.1e}"


def _rank(world: World, cores: Sequence[int], out: Path) -> None:
    torch.manual_seed(1)  # the same batch on both ranks
    bench = _Bench(world, cores)
    seconds = alternate(bench.contestants(), ROUNDS) | alternate(bench.variants(), FEWER_ROUNDS)
    bench.check()
    if world.is_main:
        torch.save(seconds, out)
    bench.threads.close()
    for pipe in bench.pipes.values():
        pipe.close()
    dist.barrier()


def _peak_memory(world: World, which: str, out: Path) -> None:
    """Writes this rank's peak memory in a step, in KB, model and libraries included."""
    torch.manual_seed(1)
    x, y = torch.randn(2, BATCH, LENGTH, WIDTH).unbind(0)
    if which == TORCH:
        module: nn.Module = make_blocks()[HALF * world.rank : HALF * (world.rank + 1)]
        run = _torch_schedule(module, world.rank, "1f1b", BATCH)
        step = partial(run.step, x) if world.is_main else partial(run.step, target=y)
    else:
        blocks = make_blocks()
        for k, block in enumerate(blocks):
            if k // HALF != world.rank:  # only the shapes of other ranks' blocks are needed
                blocks[k] = block.to("meta")
        pipe = ProcessPipe(blocks, [HALF] * K)
        module = pipe.module
        order = "1f1b" if which == DEFAULT else WHOLE["1f1b"]
        step = partial(pipe.train_step, x, y, square_error, order, BATCH)
    for _step in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        module.zero_grad()
        step()
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    (out / f"{which}-{world.rank}").write_text(status["VmHWM"].split()[0])
    dist.barrier()
    if which != TORCH:
        pipe.close()


def run() -> list[Row]:
    """Times all contestants and prints their table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        cores = sorted(os.sched_getaffinity(0))[:K]
        settings = Options(world_size=K, device="cpu", cores_per_rank=1)
        launch(_rank, settings, cores, out / "seconds.pt")
        seconds = torch.load(out / "seconds.pt", weights_only=True)
        peaks = {}
        for which in (TORCH, LAST, DEFAULT):
            launch(_peak_memory, settings, which, out)
            peaks[which] = [int((out / f"{which}-{r}").read_text()) / 1024 for r in range(K)]
    rows = _rows(seconds)
    for which, found in peaks.items():
        name = f"peak resident memory, 1f1b, M={BATCH}, {which}"
        ratio = max(peaks[TORCH]) / max(found)
        rows.append(Row(name, max(found), (min(found), max(found)), "MB", ratio, "less than torch"))
    title = (
        f"Pipeline step in processes, {BLOCKS} GPT-2 blocks of width {WIDTH}, batch {BATCH} x "
        f"{LENGTH}, {K} ranks with a core each"
    )
    write_rows("process_pipeline", title, rows)
    return rows


def _rows(seconds: dict[str, list[float]]) -> list[Row]:
    rows = []

    def add(name: str, against: str, goal: float | None = None) -> None:
        value, spread = summarize(seconds[name])
        ratio = ratio_of(seconds[against], seconds[name])
        rows.append(Row(name, value, spread, "s", ratio, against, goal))

    for m in MICROBATCHES:
        for schedule in SCHEDULES:
            name = f"{schedule}, M={m}"
            add(f"torch {name}", f"torch {name}")
            add(name, f"torch {name}", None if schedule == "zb" else 1.05)
        add(f"zb, M={m}", f"torch 1f1b, M={m}")
    m = MICROBATCHES[-1]
    for variant in ("plain, ", *VARIANTS[1:], "threads, "):
        add(f"{variant}1f1b, M={m}", f"plain, 1f1b, M={m}")
    return rows


if __name__ == "__main__":
    run()
