"""The formulas of docs/mathematics.md beside what this machine does: bytes on the wire, bytes held,
bubbles, seconds.

Bytes sent are counted by the kernel, per rank (wire.py); bytes held are the tensors'; bubbles and
seconds are of real steps, so this wants a quiet machine with two cores. The document shows the
table that this prints.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.harness import RESULTS, Row
from benchmarks.wire import bytes_sent
from data_parallel.gradients import GradientBuckets
from pipeline.dataflow import Channel
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from planning.cost import (
    FP32,
    Link,
    all_reduce_bytes,
    all_reduce_seconds,
    boundary_bytes,
    held_microbatches,
    pipeline_bubble,
    reduce_scatter_bytes,
    zero,
)
from training.breakdown import bubble, in_step, settled, steps_of
from training.launch import Settings, World, launch
from training.timeline import Timeline, by_worker, read_timelines

TITLE = "Predicted and measured"
WORLDS = (2, 3)
NUMEL = 3 * 2**20  # floats in a collective: divisible by 2 and 3
STAGES, MICROBATCHES = 2, (4, 8)
SEQUENCES, POSITIONS, WIDTH, LAYERS = 32, 128, 512, 8
STEPS = 13


@dataclass(frozen=True)
class Claim:
    """What a formula says. `predicted` may need a measured number first, and is then None."""

    what: str
    formula: str
    predicted: float | None
    unit: str


def claims() -> dict[str, Claim]:
    """All rows of the table, by name, with what is predicted."""
    found: dict[str, Claim] = {}
    size = 4 * NUMEL
    for w in WORLDS:
        for name, predicted in {
            "all_reduce": all_reduce_bytes(size, w),
            "all_gather": reduce_scatter_bytes(size, w),
            "reduce_scatter": reduce_scatter_bytes(size, w),
        }.items():
            factor = "2 (W-1)/W" if name == "all_reduce" else "(W-1)/W"
            what = f"a rank sends, {name.replace('_', '-')} of {size / 1e6:.2f} MB, W={w}"
            found[f"{name} {w}"] = Claim(what, f"{factor} G", predicted, "MB")
    parameters = sum(p.numel() for p in _layers().parameters())
    g = 4 * parameters
    found["step"] = Claim(
        f"a rank sends, data-parallel step, {parameters / 1e6:.2f} M parameters, W=2",
        "2 (W-1)/W G", all_reduce_bytes(g, 2), "MB",
    )  # fmt: skip
    found["held"] = Claim(
        "a rank holds, the same with AdamW", "(4+4+8) P", zero(0, parameters, 2, FP32).total, "MB"
    )
    found["seconds"] = Claim(
        f"all-reduce of {size / 1e6:.2f} MB, W=2, at the link's measured rate",
        "2(W-1) a + 2 (W-1)/W G/b", None, "ms",
    )  # fmt: skip
    found["boundary"] = Claim(
        f"cross the boundary, {SEQUENCES} x {POSITIONS} x {WIDTH} floats, M={MICROBATCHES[0]}",
        "2 B T H e", 2 * boundary_bytes(SEQUENCES, POSITIONS, WIDTH, 4), "MB",
    )  # fmt: skip
    for name in ("gpipe", "1f1b"):
        for m in MICROBATCHES:
            predicted = float(100 * pipeline_bubble(STAGES, m))
            found[f"bubble {name} {m}"] = Claim(
                f"idle, {name}, n={STAGES}, M={m}", "(n-1)/(M+n-1)", predicted, "%"
            )
        m = MICROBATCHES[-1]
        found[f"alive {name}"] = Claim(
            f"micro-batches held by stage 0, {name}, M={m}",
            {"gpipe": "M", "1f1b": "min(M, n-s)"}[name],
            held_microbatches(name, STAGES, m, 0),
            "",
        )  # fmt: skip
    return found


class _Residual(nn.Module):
    """The feed-forward half of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x), approximate="tanh"))


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(_Residual() for _ in range(LAYERS)))


def _counted(collective: Callable[[], Any]) -> int:
    """Bytes that this rank sends for it, less those of the barriers around it."""
    dist.barrier()
    start = bytes_sent()
    dist.barrier()
    before = bytes_sent()
    collective()
    dist.barrier()
    return bytes_sent() - before - (before - start)


def _wire(world: World, out: Path) -> None:
    """On each rank; rank 0 writes the means over the ranks."""
    warnings.simplefilter("ignore", FutureWarning)  # of collectives that are to get other names
    flat, w = torch.ones(NUMEL), world.world_size
    part, whole = torch.ones(NUMEL // w), torch.empty(NUMEL)
    sent = {
        "all_reduce": _counted(lambda: dist.all_reduce(flat)),
        "all_gather": _counted(lambda: dist.all_gather_into_tensor(whole, part)),
        "reduce_scatter": _counted(lambda: dist.reduce_scatter_tensor(part, whole)),
    }
    found = {f"{name} {w}": float(value) for name, value in sent.items()}
    if w == 2:
        found |= _data_parallel_step() | _all_reduce_time(world, flat)
    everyone: list[Any] = [None] * w
    dist.all_gather_object(everyone, found)
    if world.is_main:
        means = {key: statistics.fmean(f[key] for f in everyone) for key in found}
        out.write_text(json.dumps(means))


def _data_parallel_step() -> dict[str, float]:
    model = _layers()
    buckets = GradientBuckets(model, share_memory=False)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        buckets.finish()
        optimizer.step()

    sent = _counted(step)
    tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    for state in optimizer.state.values():
        tensors += [t for t in state.values() if isinstance(t, Tensor)]
    return {"step": sent, "held": sum(t.nbytes for t in tensors)}


def _all_reduce_time(world: World, flat: Tensor, repeats: int = 41) -> dict[str, float]:
    """The link's latency and bandwidth, both directions in use at once as in a ring, and the time
    of an all-reduce."""
    received = torch.empty_like(flat)

    def exchange(message: Tensor) -> None:
        sending = dist.isend(message, 1 - world.rank)
        dist.recv(received[: len(message)], 1 - world.rank)
        assert sending is not None
        sending.wait()

    def seconds(action: Callable[[], Any]) -> float:
        taken = []
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            action()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    latency = seconds(lambda: exchange(flat[:1]))
    half = flat[: NUMEL // 2]  # what a step of the ring sends with two ranks
    bandwidth = half.nbytes / (seconds(lambda: exchange(half)) - latency)
    return {
        "seconds": seconds(lambda: dist.all_reduce(flat)),
        "predicted seconds": all_reduce_seconds(flat.nbytes, 2, Link(bandwidth, latency)),
    }


def _pipeline(folder: Path) -> dict[str, float]:
    """Stages of one process, a thread and a core each."""
    half = LAYERS // STAGES
    layers = [WithDevice(layer, f"cpu:{i // half}") for i, layer in enumerate(_layers())]
    x, y = torch.randn(2, SEQUENCES, POSITIONS, WIDTH).unbind(0)
    found: dict[str, float] = {}
    with Pipe(nn.Sequential(*layers)) as pipe:
        for name in ("gpipe", "1f1b"):
            for m in MICROBATCHES:
                pipe.recorder = timeline = Timeline(workers="stage")
                for k in range(STEPS):
                    timeline.step(k)
                    pipe.train_step(x, y, _squares, schedule=name, num_microbatches=m)
                timeline.write(folder)
                workers = by_worker(read_timelines(folder))
                shares = [bubble(in_step(workers, k)) for k in settled(steps_of(workers))]
                found[f"bubble {name} {m}"] = 100 * statistics.median(shares)
            found[f"alive {name}"] = pipe.peak_alive[0]
        found["boundary"] = boundary_traffic(
            lambda: pipe.train_step(x, y, _squares, num_microbatches=MICROBATCHES[0])
        )
    return found


def boundary_traffic(step: Callable[[], Any]) -> int:
    """Bytes of all tensors that the stages of one process hand each other during the step."""
    handed: list[int] = []
    put = Channel.put

    def counting(self: Channel, i: int, value: Any) -> None:
        handed.extend(t.nbytes for t in pytree.tree_leaves(value) if isinstance(t, Tensor))
        put(self, i, value)

    Channel.put = counting  # type: ignore[method-assign]
    try:
        step()
    finally:
        Channel.put = put  # type: ignore[method-assign]
    return sum(handed)


def _squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def measure() -> dict[str, float]:
    """What this machine does, by the names of the claims."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for w in WORLDS:
            out = Path(folder) / f"wire{w}.json"
            launch(_wire, Settings(world_size=w, device="cpu", cores_per_rank=1), out)
            found |= json.loads(out.read_text())
        found |= _pipeline(Path(folder))
    return found


_SCALE = {"MB": 1e-6, "ms": 1e3, "%": 1.0, "": 1.0}


def format_line(claim: Claim, predicted: float, measured: float) -> str:
    """A line of the table."""
    scale, digits = _SCALE[claim.unit], {"MB": 3, "ms": 2, "%": 1, "": 0}[claim.unit]
    numbers = (f"{value * scale:>9,.{digits}f} {claim.unit:<2}" for value in (predicted, measured))
    return (
        f"{claim.what:<60} {claim.formula:<25}"
        + " ".join(numbers)
        + (f" {measured / predicted:>6.2f}")
    )


HEADER = f"{'':<60} {'formula':<25}{'predicted':>12} {'measured':>12}  ratio"


def run() -> list[Row]:
    """Measures everything, prints the table, and writes it as JSON."""
    measured, rows = measure(), []
    print(TITLE, "-" * len(TITLE), HEADER, sep="\n")
    for key, claim in claims().items():
        predicted = claim.predicted or measured["predicted seconds"]
        print(format_line(claim, predicted, measured[key]))
        value = measured[key]
        rows.append(
            Row(claim.what, value, (value, value), claim.unit, value / predicted, "of the formula")
        )
    print(flush=True)
    RESULTS.mkdir(exist_ok=True)
    content = {key: {"measured": value} for key, value in measured.items()}
    (RESULTS / "mathematics.json").write_text(json.dumps(content, indent=2) + "\n")
    return rows


if __name__ == "__main__":
    run()
