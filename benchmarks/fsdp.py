"""A sharded step: zero 1, 2 and 3, data parallelism, and PyTorch's fully_shard (FSDP2).

Two ranks, one core each. All contestants live in the same two processes, with the same model,
batches and optimizer, and take turns. Then each has its own two processes for a few steps, and
memory is counted: the bytes of parameters, gradients and optimizer state that a rank holds between
steps, and the peak resident memory beyond what the process had before the model. The buffers that
layers borrow stay between steps: they are in the second number, not in the first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.harness import Row, agree, alternate, ratio_of, summarize, write_rows
from benchmarks.plain_gpt2 import build_model
from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.gradients import GradientBuckets
from data_parallel.zero1 import ShardedOptimizer
from runtime.communicator import Communicator
from tests.ranks import sharing
from training.launch.launch import launch
from training.launch.world import World
from training.layouts.layout import state_bytes
from training.options import Options
from training.tasks.gpt2 import Sequences, gpt2_config, gpt2_layers, initializer, loss_of_targets

TITLE = "Sharded step, GPT-2 with 6 blocks of width 512, 2 ranks with a core each"
ROUNDS, STEPS = 7, 1
SEQUENCES, LENGTH, VOCAB = 32, 32, 4096  # 1,024 positions per rank and step
MEMORY_STEPS = 3
MIB = 2**20

Batch = tuple[Sequences, Tensor]


def _config() -> GPT2Config:
    return gpt2_config("gpt2-mini", VOCAB, 128, dropout=0.0, n_layer=6, n_embd=512, n_head=8)


def _batches(rank: int) -> list[Batch]:
    """As in training: half of the positions are targets."""
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(4):
        ids = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=generator)
        weights = torch.zeros(SEQUENCES, LENGTH, dtype=torch.long)
        weights[:, LENGTH // 2 :] = 1
        batches.append((Sequences(ids[:, :-1], weights), ids[:, 1:][weights != 0]))
    return batches


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


class _Contestant:
    """Its own model, trained in its own way."""

    def __init__(self, rank: int) -> None:
        self.batches = _batches(rank)
        self.taken = 0
        self.loss = torch.zeros(())
        self.targets = 2 * SEQUENCES * LENGTH / 2  # of both ranks

    def steps(self) -> None:
        """STEPS steps of training."""
        for _ in range(STEPS):
            x, target = self.batches[self.taken % len(self.batches)]
            self.taken += 1
            self.loss = self.step(x, target)

    def step(self, x: Sequences, target: Tensor) -> Tensor:
        """One step; returns this rank's part of the loss."""
        raise NotImplementedError

    def state_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state on this rank."""
        raise NotImplementedError


class _Zero1(_Contestant):
    """Whole replicas, of whose parameters each rank updates a part."""

    def __init__(self, _name: str, rank: int) -> None:
        super().__init__(rank)
        model = build_model(_config(), seed=0)
        self.model = nn.Sequential(*gpt2_layers(model))
        self.sharded = ShardedOptimizer(
            dict(model.named_parameters()),
            _optimizer,
            Communicator(dist.group.WORLD),
            lambda _: None,
        )

    def step(self, x: Sequences, target: Tensor) -> Tensor:
        self.sharded.optimizer.zero_grad()
        loss = loss_of_targets(self.model(x), target) / self.targets
        loss.backward()
        self.sharded.reduce()
        self.sharded.optimizer.step()
        return loss.detach()

    def state_bytes(self) -> int:
        held = state_bytes(self.model.parameters(), [self.sharded.optimizer])
        gradients = state_bytes(self.sharded.shards.values())["gradients"]
        return sum(held.values()) + gradients


class _Zero2Or3(_Contestant):
    def __init__(self, name: str, rank: int) -> None:
        super().__init__(rank)
        with torch.device("meta"):
            model = GPT2LMHeadModel(_config())
        self.fsdp = FullyShardedDataParallel(
            gpt2_layers(model),
            _optimizer,
            names={p: name for name, p in model.named_parameters()},
            init=initializer(_config(), seed=0),
            zero=int(name[len("zero ")]),
        )

    def step(self, x: Sequences, target: Tensor) -> Tensor:
        loss = self.fsdp.train_step([x], [target], loss_of_targets, 1 / self.targets)
        self.fsdp.optimizer_step()
        return loss

    def state_bytes(self) -> int:
        return sum(self.fsdp.held_bytes().values())


class _Torch(_Contestant):
    """Whole replicas with averaged gradients, or FSDP2: the same loop."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__(rank)
        model = build_model(_config(), seed=0)
        self.average: Callable[[], None] = lambda: None
        self.model: nn.Module = nn.Sequential(*gpt2_layers(model))
        if name == "FSDP2":
            for block in list(self.model)[1:-1]:
                fully_shard(block)
            fully_shard(self.model)
        else:
            self.average = GradientBuckets(self.model.parameters()).finish
        self.parameters = list(self.model.parameters())
        self.optimizer = _optimizer(self.parameters)

    def step(self, x: Sequences, target: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = loss_of_targets(self.model(x), target) / (self.targets / 2)
        loss.backward()
        self.average()
        self.optimizer.step()
        return loss.detach() / 2

    def state_bytes(self) -> int:
        state = [t for s in self.optimizer.state.values() for t in s.values()]
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return sum(_local_bytes(t) for t in [*self.parameters, *gradients, *state])


def _local_bytes(tensor: Tensor) -> int:
    """Bytes held here: FSDP2's tensors report the size of the whole but hold a part."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.nbytes


CONTESTANTS: dict[str, Callable[[str, int], _Contestant]] = {
    "zero 1": _Zero1, "zero 2": _Zero2Or3, "zero 3": _Zero2Or3, "zero 3, gloo": _Zero2Or3,
    "DDP buckets": _Torch, "FSDP2": _Torch,
}  # fmt: skip
NAMES = tuple(CONTESTANTS)


def _contestant(name: str, rank: int) -> _Contestant:
    with sharing("gloo" not in name):
        return CONTESTANTS[name](name, rank)


def _speed(world: World, out: Path) -> None:
    contestants = {name: _contestant(name, world.rank) for name in NAMES}

    def turn(name: str) -> None:
        contestants[name].steps()
        dist.barrier()

    seconds = alternate({name: lambda name=name: turn(name) for name in NAMES}, ROUNDS)  # type: ignore[misc]
    losses = {}
    for name in NAMES:
        loss = contestants[name].loss.clone()
        dist.all_reduce(loss)
        losses[name] = loss.item()
    agree(losses)
    if world.is_main:
        torch.save(seconds, out)


def _memory(world: World, name: str, out: Path) -> None:
    """Bytes held between steps; the peak memory of the process beyond what it had before."""
    before = psutil.Process().memory_info().rss
    contestant = _contestant(name, world.rank)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    for _ in range(MEMORY_STEPS):
        contestant.steps()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024
    both = torch.tensor([float(contestant.state_bytes()), float(peak - before)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    if world.is_main:
        torch.save(both, out)


def _layer_bytes() -> int:
    """Bytes of the largest layer: a block, or the tied embedding."""
    with torch.device("meta"):
        layers = gpt2_layers(GPT2LMHeadModel(_config()))
    return max(sum(p.nbytes for p in layer.parameters()) for layer in layers)


def run() -> list[Row]:
    """Times and weighs all contestants and prints their table."""
    settings = Options(world_size=2, device="cpu", cores_per_rank=1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"
        launch(_speed, settings, out)
        seconds = torch.load(out, weights_only=True)
        held, peak = {}, {}
        for name in NAMES:
            launch(_memory, settings, name, out)
            held[name], peak[name] = torch.load(out, weights_only=True).tolist()
    positions = 2 * SEQUENCES * LENGTH * STEPS
    rows = []
    for name in NAMES:
        value, spread = summarize([positions / s for s in seconds[name]])
        goal = 1.0 if name == "zero 3" else None
        ratio = ratio_of(seconds["FSDP2"], seconds[name])
        rows.append(Row(name, value, spread, "positions/s", ratio, "FSDP2", goal))
    allowed = held["DDP buckets"] / 2 + _layer_bytes()
    for name in NAMES:
        value, goal = held[name] / MIB, 1.0 if name == "zero 3" else None
        rows.append(
            Row(f"{name}, parameters + gradients + optimizer", value, (value, value), "MiB",
                allowed / held[name], "under half of DDP's + a layer", goal)
        )  # fmt: skip
    for name in NAMES:
        value, goal = peak[name] / MIB, 1.0 if name == "zero 3" else None
        rows.append(
            Row(f"{name}, peak resident", value, (value, value), "MiB",
                peak["FSDP2"] / peak[name], "under FSDP2's", goal)
        )  # fmt: skip
    write_rows("fsdp", TITLE, rows)
    return rows


if __name__ == "__main__":
    run()
