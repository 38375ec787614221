"""A data-parallel step and a sharded one, beside PyTorch's.

Two ranks, one core each. All contestants live in the same two processes, with the same batches and
optimizer, and take turns.

- gpt2-mini: gradients averaged per parameter, flat, or in buckets; DistributedDataParallel, also
  with gradients as views of its buckets. `alone` is rank 0 with one core and no second rank. `no
  exchange` is both ranks without any averaging: the most that the hardware gives to two processes
  at once, and so an upper bound for any scheme.
- 6 blocks of width 512: ZeRO 1, 2 and 3, buckets, and PyTorch's fully_shard (FSDP2). Then ZeRO 3,
  buckets and FSDP2 each run a few steps in two processes of their own, and memory is counted: the
  bytes of parameters, gradients and optimizer state that a rank holds between steps, and the peak
  resident memory beyond what the process had before the model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2LMHeadModel

from benchmarks.harness import Row, agree, alternate, ratio_of, summarize, write_rows
from benchmarks.plain_gpt2 import build_model
from data_parallel.buckets import GradientBuckets, SummedBucket, in_backward_order
from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.gradients import average_gradients, average_gradients_flat
from data_parallel.zero1 import ShardedOptimizer
from runtime.communicator import Communicator
from training.launch.launch import launch
from training.launch.world import World
from training.options import Options
from training.tasks.gpt2 import Sequences, gpt2_config, gpt2_layers, initializer, loss_of_targets

ROUNDS, MEMORY_STEPS, MIB = 9, 3, 2**20
SEQUENCES, LENGTH, VOCAB = 32, 32, 4096  # 1,024 positions per rank and step
CONFIG = partial(gpt2_config, "gpt2-mini", VOCAB, 128, dropout=0.0)
LARGE = {"n_layer": 6, "n_embd": 512, "n_head": 8}
REPLICATED = ("DDP", "DDP as view", "per parameter", "flat", "buckets")
SHARDED = ("FSDP2", "zero 1", "zero 2", "zero 3", "buckets")
WEIGHED = ("FSDP2", "zero 3", "buckets")
SETTINGS = Options(world_size=2, device="cpu", cores_per_rank=1)


def batches(rank: int) -> list[tuple[Sequences, Tensor]]:
    """Inputs and targets. As in training, half of the positions are targets."""
    generator = torch.Generator().manual_seed(rank)
    made = []
    for _ in range(4):
        ids = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=generator)
        weights = torch.zeros(SEQUENCES, LENGTH, dtype=torch.long)
        weights[:, LENGTH // 2 :] = 1
        made.append((Sequences(ids[:, :-1].contiguous(), weights), ids[:, 1:][weights != 0]))
    return made


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Every contestant's optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


class Contestant:
    """Its own model, trained in its own way."""

    def __init__(self, name: str, sizes: dict[str, int], rank: int) -> None:
        self.batches, self.taken = batches(rank), 0
        self.loss = torch.zeros(())
        self.targets = SEQUENCES * LENGTH / 2  # of this rank; each contestant averages over ranks
        self.fsdp: FullyShardedDataParallel | None = None
        self.finish: Callable[[], None] = lambda: None
        self.shards: list[Tensor] = []
        config = CONFIG(**sizes)
        if name in ("zero 2", "zero 3"):
            with torch.device("meta"):
                model = GPT2LMHeadModel(config)
            self.fsdp = FullyShardedDataParallel(
                gpt2_layers(model), adamw, zero=int(name[-1]), init=initializer(config, seed=0),
                names={p: name for name, p in model.named_parameters()},
            )  # fmt: skip
            return
        whole = build_model(config, seed=0)
        self.net = net = nn.Sequential(*gpt2_layers(whole))
        self.forward: nn.Module = net
        if name.startswith("DDP"):
            self.forward = DistributedDataParallel(net, gradient_as_bucket_view="view" in name)
        elif name == "FSDP2":
            for block in list(net)[1:-1]:
                fully_shard(block)
            fully_shard(net)
        elif name == "buckets":
            ranks = Communicator(dist.group.WORLD)
            groups = in_backward_order(net.parameters())
            buckets = GradientBuckets([SummedBucket(group, ranks, divisor=2) for group in groups])
            buckets.watch()
            self.finish = buckets.finish
        elif name == "flat":
            self.finish = partial(average_gradients_flat, net)
        elif name == "per parameter":
            self.finish = partial(average_gradients, net)
        if name == "zero 1":
            ranks = Communicator(dist.group.WORLD)
            sharded = ShardedOptimizer(dict(whole.named_parameters()), adamw, ranks)
            sharded.buckets.watch()
            self.optimizer, self.finish = sharded.optimizer, sharded.buckets.finish
            self.shards = [x.tensor for x in sharded.slices]
            self.targets *= 2  # its gradients are summed
        else:
            self.optimizer = adamw(list(net.parameters()))

    def step(self) -> None:
        """A step of training."""
        x, target = self.batches[self.taken % len(self.batches)]
        self.taken += 1
        if self.fsdp is not None:
            scale = 1 / (2 * self.targets)
            self.loss = 2 * self.fsdp.train_step([x], [target], loss_of_targets, scale)
            self.fsdp.optimizer_step()
            return
        self.optimizer.zero_grad()
        loss = loss_of_targets(self.forward(x), target) / self.targets
        loss.backward()
        self.finish()
        self.optimizer.step()
        self.loss = loss.detach() * self.targets / (SEQUENCES * LENGTH / 2)

    def state_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state on this rank. FSDP2's tensors report
        the size of the whole, but hold a part."""
        if self.fsdp is not None:
            return sum(self.fsdp.held_bytes().values())
        held: list[Tensor] = [t for state in self.optimizer.state.values() for t in state.values()]
        parameters = list(self.net.parameters())
        held += parameters
        held += [p.grad for p in [*parameters, *self.shards] if p.grad is not None]
        return sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in held)


def _speed(world: World, sizes: dict[str, int], names: tuple[str, ...], out: Path) -> None:
    extra = () if sizes else ("no exchange", "alone")
    contestants = {name: Contestant(name, sizes, world.rank) for name in (*names, *extra)}

    def turn(name: str) -> None:
        if name != "alone" or world.is_main:
            contestants[name].step()
        dist.barrier()

    seconds = alternate({name: partial(turn, name) for name in contestants}, ROUNDS)
    losses = {}
    for name in names:
        loss = contestants[name].loss.clone()
        dist.all_reduce(loss)
        losses[name] = loss.item()
    agree(losses)
    if world.is_main:
        torch.save(seconds, out)


def _memory(world: World, name: str, out: Path) -> None:
    """Bytes held between steps; the peak memory of the process beyond what it had before."""
    before = psutil.Process().memory_info().rss
    contestant = Contestant(name, LARGE, world.rank)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    for _ in range(MEMORY_STEPS):
        contestant.step()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024
    both = torch.tensor([float(contestant.state_bytes()), float(peak - before)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    if world.is_main:
        torch.save(both, out)


def speeds(seconds: dict[str, list[float]], baselines: dict[str, float]) -> list[Row]:
    """A row per contestant, compared with the first one; and our best compared with further
    baselines, each with the goal of the ratio."""
    first, ours = next(iter(seconds)), "zero 3" if "zero 3" in seconds else "buckets"

    def row(name: str, against: str, goal: float | None = None) -> Row:
        ranks = 1 if name == "alone" else 2
        value, spread = summarize([ranks * SEQUENCES * LENGTH / s for s in seconds[name]])
        ratio = ratio_of(seconds[against], seconds[name])
        said = "of 2x alone" if against == "alone" else against
        return Row(name, value, spread, "positions/s", ratio, said, goal)

    rows = [row(name, first) for name in seconds]
    return rows + [row(ours, against, goal) for against, goal in baselines.items()]


def run() -> list[Row]:
    """Times and weighs all contestants and prints their table."""
    held, peak = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"
        launch(_speed, SETTINGS, {}, REPLICATED, out)
        rows = speeds(torch.load(out, weights_only=True),
                      {"DDP": 1.03, "DDP as view": 1.02, "alone": 0.92})  # fmt: skip
        launch(_speed, SETTINGS, LARGE, SHARDED, out)
        rows += speeds(torch.load(out, weights_only=True), {"FSDP2": 1.18})
        for name in WEIGHED:
            launch(_memory, SETTINGS, name, out)
            held[name], peak[name] = torch.load(out, weights_only=True).tolist()
    for name in WEIGHED:
        goals = (0.5, 0.88) if name == "zero 3" else (None, None)
        for what, sizes, baseline, goal in (
            ("parameters + gradients + optimizer", held, "buckets", goals[0]),
            ("peak resident", peak, "FSDP2", goals[1]),
        ):
            value = sizes[name] / MIB
            # The goal is at most this share of the baseline's memory, plus a tenth for layers of
            # different sizes. A row has least ratios, so both are inverted.
            ratio = sizes[baseline] / sizes[name]
            least = goal and 1 / (1.1 * goal)
            rows.append(Row(f"{name}, {what}", value, (value, value), "MiB", ratio,
                            f"less than {baseline}", least))  # fmt: skip
    title = "Data-parallel step of gpt2-mini, and sharded step of 6 blocks of width 512, 2 ranks"
    write_rows("data_parallel", title, rows)
    return rows


if __name__ == "__main__":
    run()
