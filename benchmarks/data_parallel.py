"""A data-parallel step: three ways to average gradients, and PyTorch's DistributedDataParallel.

Two ranks, one core each. All contestants live in the same two processes, with the same model,
batches and optimizer, and take turns. `alone` is rank 0 with one core and no second rank. `no
exchange` is both ranks without any averaging: the most that the hardware gives to two processes at
once, and so the bound of any scheme.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Row, agree, alternate, ratio_of, summarize, write_rows
from benchmarks.plain_gpt2 import build_model
from data_parallel.gradients import GradientBuckets, average_gradients, average_gradients_flat
from tests.ranks import sharing
from training.launch.launch import launch
from training.launch.world import World
from training.options import Options
from training.tasks.gpt2 import Sequences, gpt2_config, gpt2_layers, loss_of_targets

TITLE = "Data-parallel step, gpt2-mini, 2 ranks with a core each"
ROUNDS, STEPS = 11, 2
SEQUENCES, LENGTH, VOCAB = 32, 32, 4096  # 1,024 positions per rank and step


class _LossModel(nn.Module):
    """The model with its loss, as DistributedDataParallel wants it: in one forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.layers = nn.Sequential(*gpt2_layers(model))

    def forward(self, ids: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return loss_of_targets(self.layers(Sequences(ids, weights)), labels[weights != 0])


Batch = tuple[Tensor, Tensor, Tensor]


def _batches(rank: int) -> list[Batch]:
    """Ids, labels and weights. As in training, half of the positions are targets."""
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(4):
        ids = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=generator)
        weights = torch.zeros(SEQUENCES, LENGTH, dtype=torch.long)
        weights[:, LENGTH // 2 :] = 1
        batches.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weights))
    return batches


class _Contestant:
    """Its own model, trained with one way of averaging."""

    def __init__(self, name: str, model: Any, batches: list[Batch]) -> None:
        self.model: nn.Module = _LossModel(copy.deepcopy(model))
        self.average: Callable[[], None] = lambda: None
        inner = self.model
        if name == "overlap":
            self.average = GradientBuckets(inner.parameters()).finish
        elif name == "overlap, gloo":
            with sharing(False):
                self.average = GradientBuckets(inner.parameters()).finish
        elif name == "flat":
            self.average = lambda: average_gradients_flat(inner)
        elif name == "per_parameter":
            self.average = lambda: average_gradients(inner)
        elif name.startswith("DDP"):
            self.model = DistributedDataParallel(inner, gradient_as_bucket_view="view" in name)
        self.optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3, fused=True)
        self.batches = batches
        self.taken = 0
        self.loss = 0.0

    def steps(self) -> None:
        """STEPS steps of training."""
        for _ in range(STEPS):
            batch = self.batches[self.taken % len(self.batches)]
            self.taken += 1
            self.optimizer.zero_grad()
            loss = self.model(*batch) / batch[2].sum()
            loss.backward()
            self.average()
            self.optimizer.step()
            self.loss = loss.item()


AVERAGING = ("DDP", "DDP as view", "per_parameter", "flat", "overlap, gloo", "overlap")


def _rank(world: World, out: Path) -> None:
    config = gpt2_config("gpt2-mini", VOCAB, 128, dropout=0.0)
    model = build_model(config, seed=0)
    batches = _batches(world.rank)
    names = (*AVERAGING, "no exchange", "alone")
    contestants = {name: _Contestant(name, model, batches) for name in names}

    def turn(name: str) -> None:
        if name != "alone" or world.is_main:
            contestants[name].steps()
        dist.barrier()

    seconds = alternate({name: lambda name=name: turn(name) for name in names}, ROUNDS)  # type: ignore[misc]
    agree({name: contestants[name].loss for name in AVERAGING})
    if world.is_main:
        torch.save(seconds, out)


def run() -> list[Row]:
    """Times all contestants and prints their table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.pt"
        launch(_rank, Options(world_size=2, device="cpu", cores_per_rank=1), out)
        seconds = torch.load(out, weights_only=True)
    positions = SEQUENCES * LENGTH * STEPS
    rows = []
    for name in (*AVERAGING, "no exchange", "alone"):
        ranks = 1 if name == "alone" else 2
        value, spread = summarize([ranks * positions / s for s in seconds[name]])
        ours = name == "overlap"
        rows.append(
            Row(name, value, spread, "positions/s", ratio_of(seconds["DDP"], seconds[name]),
                "DDP", 1.0 if ours else None)
        )  # fmt: skip
    best_ddp = ratio_of(seconds["DDP as view"], seconds["overlap"])
    value, spread = summarize([2 * positions / s for s in seconds["overlap"]])
    rows.append(Row("overlap", value, spread, "positions/s", best_ddp, "DDP as view", 1.0))
    for name, goal in (("overlap", 0.92), ("no exchange", None)):
        value, spread = summarize([2 * positions / s for s in seconds[name]])
        scaling = ratio_of(seconds["alone"], seconds[name])
        rows.append(
            Row(f"{name}, 1 to 2 ranks", value, spread, "positions/s", scaling, "of 2x alone", goal)
        )
    write_rows("data_parallel", TITLE, rows)
    return rows


if __name__ == "__main__":
    run()
