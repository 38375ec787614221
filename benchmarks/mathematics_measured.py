"""The measurements for docs/mathematics.md: bytes sent and held, bubbles, seconds.

The models are stacks of feed-forward halves of blocks, large enough that headers do not matter.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.formulas import Link, all_reduce_seconds
from benchmarks.wire import bytes_sent
from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.gradients import GradientBuckets
from data_parallel.zero1 import ShardedOptimizer
from pipeline.executor import Channel
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.processes.process import ProcessPipe
from pipeline.schedules.catalogue import SCHEDULES
from project.figures.runs import Run, bubbles, in_step, steps_of
from runtime.communicator import Communicator
from tests.ranks import sharing
from training.launch.launch import launch
from training.launch.world import World
from training.layouts.layout import state_bytes
from training.options import Options
from training.timeline import Timeline

WORLDS = (2, 3)
NUMEL = 3 * 2**20  # floats in a collective: divisible by 2 and 3
STAGES, MICROBATCHES = 2, (4, 8)
SEQUENCES, POSITIONS, WIDTH, LAYERS = 32, 128, 512, 8
STEPS = 13


class Residual(nn.Module):
    """The feed-forward half of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x), approximate="tanh"))


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual() for _ in range(LAYERS)))


def _counted(collective: Callable[[], Any]) -> int:
    """Bytes that this rank sends for a collective, without the barriers around it."""
    gc.collect()  # a connection that closes meanwhile would take its bytes along
    dist.barrier()
    start = bytes_sent()
    dist.barrier()
    before = bytes_sent()
    collective()
    dist.barrier()
    return bytes_sent() - before - (before - start)


def _wire(world: World, out: Path) -> None:
    """Measures on each rank; rank 0 writes the means over the ranks."""
    warnings.simplefilter("ignore", FutureWarning)  # some collectives will be renamed
    flat, w = torch.ones(NUMEL), world.world_size
    part, whole = torch.ones(NUMEL // w), torch.empty(NUMEL)
    sent = {
        "all_reduce": _counted(lambda: dist.all_reduce(flat)),
        "all_gather": _counted(lambda: dist.all_gather_into_tensor(whole, part)),
        "reduce_scatter": _counted(lambda: dist.reduce_scatter_tensor(part, whole)),
    }
    found = {f"{name} {w}": float(value) for name, value in sent.items()}
    if w == 2:
        found |= _data_parallel_step() | _all_reduce_time(world, flat) | _pipeline_step()
        found |= _sharded_update_step() | _sharded_step(2) | _sharded_step(3)
    everyone: list[Any] = [None] * w
    dist.all_gather_object(everyone, found)
    if world.is_main:
        means = {key: statistics.fmean(f[key] for f in everyone) for key in found}
        out.write_text(json.dumps(means))


def _data_parallel_step() -> dict[str, float]:
    model = make_layers()
    with sharing(False):
        buckets = GradientBuckets(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        buckets.finish()
        optimizer.step()

    sent = _counted(step)
    held = sum(state_bytes(model.parameters(), [optimizer]).values())
    return {"sent 0": sent, "held 0": held}


def _sharded_update_step() -> dict[str, float]:
    """Of ZeRO-1."""
    model, ranks = make_layers(), Communicator(dist.group.WORLD)
    with sharing(False):
        ranks.all_reduce(torch.ones(1))  # finds out what the ranks share
    sharded = ShardedOptimizer(
        dict(model.named_parameters()), torch.optim.AdamW, ranks, lambda _: None
    )
    x = torch.randn(4, WIDTH)

    def step() -> None:
        model(x).sum().backward()
        sharded.reduce()
        sharded.optimizer.step()

    sent = _counted(step)
    model(x).sum().backward()  # before the update every rank has all gradients
    held = sum(state_bytes(model.parameters(), [sharded.optimizer]).values())
    return {"sent 1": sent, "held 1": held}


def _sharded_step(stage: int) -> dict[str, float]:
    with sharing(False):
        fsdp = FullyShardedDataParallel(make_layers(), torch.optim.AdamW, zero=stage)
    x = torch.randn(4, WIDTH)

    def step() -> None:
        fsdp.backward(fsdp.forward(x).sum())
        fsdp.optimizer_step()

    step()  # the first backward gathers everything; in it ranks agree on what later ones need
    sent = _counted(step)
    held = 0

    def note() -> None:
        nonlocal held
        held = sum(fsdp.held_bytes().values())

    # Before the update, which uses the gradients up.
    fsdp.optimizer.register_step_pre_hook(lambda *_: note())
    step()
    return {f"sent {stage}": sent, f"held {stage}": held}


def _pipeline_step() -> dict[str, float]:
    x, y = torch.randn(2, SEQUENCES, POSITIONS, WIDTH).unbind(0)
    with ProcessPipe(make_layers(), (LAYERS // 2, LAYERS // 2)) as pipe:
        m = MICROBATCHES[0]
        sent = _counted(lambda: pipe.train_step(x, y, _squares, num_microbatches=m))
    return {"sent pipeline": sent}


def _all_reduce_time(world: World, flat: Tensor, repeats: int = 41) -> dict[str, float]:
    """The time of an all-reduce, and its prediction from the link's latency and bandwidth, measured
    with both directions in use, as in a ring."""
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
    """Measures stages in one process, with a thread and a core each."""
    half = LAYERS // STAGES
    layers = [WithDevice(layer, f"cpu:{i // half}") for i, layer in enumerate(make_layers())]
    x, y = torch.randn(2, SEQUENCES, POSITIONS, WIDTH).unbind(0)
    found: dict[str, float] = {}
    with Pipe(nn.Sequential(*layers)) as pipe:
        for name in ("gpipe", "1f1b"):
            for m in MICROBATCHES:
                pipe.recorder = timeline = Timeline(workers="stage")
                for _ in range(STEPS):
                    timeline.begin_step()
                    pipe.train_step(x, y, _squares, SCHEDULES[name], num_microbatches=m)
                timeline.save(folder)
                workers = Run(folder).timeline
                idle = [bubbles(in_step(workers, k)).values() for k in steps_of(workers)]
                found[f"bubble {name} {m}"] = 100 * statistics.median(map(statistics.fmean, idle))
            found[f"alive {name}"] = pipe.peak_alive[0]
        found["boundary"] = boundary_traffic(
            lambda: pipe.train_step(x, y, _squares, num_microbatches=MICROBATCHES[0])
        )
    return found


def boundary_traffic(step: Callable[[], Any]) -> int:
    """Bytes of all tensors that the stages of one process pass to each other during the step."""
    handed: list[int] = []
    put = Channel.put

    def counting(self: Channel, i: int, value: Any) -> None:
        if threading.current_thread() is not threading.main_thread():  # that one feeds the batch
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
    """The measured values of this machine, by the names of the claims."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for w in WORLDS:
            out = Path(folder) / f"wire{w}.json"
            launch(_wire, Options(world_size=w, device="cpu", cores_per_rank=1), out)
            found |= json.loads(out.read_text())
        found |= _pipeline(Path(folder))
    return found
