"""Muon's update: beside torch's own in one process, and with its products dealt out over two ranks.

The update alone, without forward and backward, of gpt2-mini. One process, one core: the matrices of
its blocks, query, key and value apart, so that both compute the same. torch's products are in bf16
whatever the type of the weights, so ours are in bf16, too, in the row beside it. Two ranks, a core
each: the whole update (check, momentum, exchange, products, weights) after a backward, and AdamW's
under the same layout.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Row, agree, alternate, ratio_of, summarize, use_cores, write_rows
from project.train import lay_out
from training.launch.launch import launch
from training.launch.world import World
from training.layouts.layout import Held, Setup
from training.layouts.replicated import Replicated
from training.muon import Muon
from training.optimization import Recipe, make_optimizer
from training.options import Options
from training.tasks.gpt2 import PRESETS, Sequences, gpt2_config, initializer
from training.tasks.language import LanguageTask
from training.tasks.task import Step

TITLE = "an update by Muon, gpt2-mini, a core per rank"
ROUNDS = 7
VOCABULARY, POSITIONS, RATE = 4096, 64, 1e-3
WAYS: dict[str, dict[str, Any]] = {  # of two ranks, by their options
    "each rank all": {},
    "data parallel": {"strategy": "ddp"},
    "ZeRO 1": {"strategy": "fsdp", "zero": 1},
    "ZeRO 3": {"strategy": "fsdp", "zero": 3},
}


class _Task(LanguageTask):
    """The project's own task, without a text."""

    def __init__(self, world: World) -> None:
        self.args, self.device, self.pretrained = Options(), world.device, None
        self.config = gpt2_config("gpt2-mini", VOCABULARY, POSITIONS, dropout=0.0)
        self._initialize = initializer(self.config, seed=0)


class _Contestant:
    """A model, and its updates."""

    def __init__(self, world: World, optimizer: Any, options: dict[str, Any]) -> None:
        args = Options(
            optimizer=optimizer, learning_rate=RATE, momentum=0.95, world_size=2,
            **{"dp": 2, "cp": 1, "pp": 1, "tp": 1, "ep": 1, "chunks": 1} | options,
        )  # fmt: skip
        setup, task = Setup(args, partial(make_optimizer, args)), _Task(world)
        alone = not options  # on each of the ranks
        self.model = Replicated(task, World(), setup) if alone else lay_out(task, world, setup)
        self.optimizer = self.model.global_optimizer(Recipe(args, 1))
        ids = torch.randint(VOCABULARY, (1, POSITIONS + 1), generator=torch.Generator())
        self.x = Sequences(ids[:, :-1], torch.arange(POSITIONS))
        self.labels, self.ranks = ids[0, 1:], 1 if alone else 2

    def step(self, world: World) -> tuple[float, float]:
        """The mean loss of a step, and the seconds of its update."""
        self.optimizer.zero_grad()
        count = self.ranks * POSITIONS  # the same sequence on each
        loss = self.model.backward(Step([self.x], [self.labels], count, count, count))
        self.model.average_gradients(self.model.module)
        world.gather(None)
        start = time.perf_counter()
        self.optimizer.step(loss, count)
        return self.optimizer.loss, time.perf_counter() - start


def _updates(world: World, out: Path) -> None:
    seconds: dict[str, list[float]] = {}
    contestants = {
        (optimizer, way): _Contestant(world, optimizer, options)
        for optimizer in ("muon", "adamw")
        for way, options in WAYS.items()
    }
    losses: dict[str, dict[str, float]] = {"muon": {}, "adamw": {}}
    for round_ in range(ROUNDS + 1):
        for (optimizer, way), contestant in contestants.items():
            losses[optimizer][way], duration = contestant.step(world)
            if round_:
                seconds.setdefault(f"{optimizer}, {way}", []).append(duration)
    for of_optimizer in losses.values():
        agree(of_optimizer)
    if world.is_main:
        torch.save(seconds, out)


def _beside_torch() -> dict[str, list[float]]:
    """Seconds of updates of equal matrices."""
    width, blocks = PRESETS["gpt2-mini"]["n_embd"], PRESETS["gpt2-mini"]["n_layer"]
    torch.manual_seed(0)
    shapes = [*[(width, width)] * 4, (width, 4 * width), (4 * width, width)] * blocks
    weights = [torch.randn(shape) for shape in shapes]
    gradients = [torch.randn(shape) for shape in shapes]

    def parameters() -> list[nn.Parameter]:
        made = [nn.Parameter(weight.clone()) for weight in weights]
        for p, gradient in zip(made, gradients, strict=True):
            p.grad = gradient.clone()
        return made

    def ours(dtype: torch.dtype) -> Muon:
        muon = Muon(parameters(), [{"params": []}], RATE, 0.1, 0.95, dtype)
        matrices: list[Any] = muon.param_groups[0]["params"]
        held = [Held.whole(f"{k}.c_fc.weight", p) for k, p in enumerate(matrices)]
        muon.arrange(held, torch.device("cpu"))
        return muon

    optimizers: dict[str, torch.optim.Optimizer] = {
        "torch.optim.Muon, bf16": torch.optim.Muon(
            parameters(), RATE, 0.1, 0.95, adjust_lr_fn="match_rms_adamw"
        ),
        "muon, bf16": ours(torch.bfloat16),
        "muon, fp32": ours(torch.float32),
        "AdamW": torch.optim.AdamW(parameters(), RATE, fused=True),
    }
    updates: dict[str, Any] = {name: optimizer.step for name, optimizer in optimizers.items()}
    seconds = alternate(updates, ROUNDS)

    def moved(optimizer: torch.optim.Optimizer) -> Tensor:
        after = zip(optimizer.param_groups[0]["params"], weights, strict=True)
        return torch.cat([(p.detach() - weight).flatten() for p, weight in after])

    theirs, own, _, _ = map(moved, optimizers.values())
    assert (theirs - own).norm() < 0.02 * theirs.norm(), "they update differently"
    return seconds


def run() -> list[Row]:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"
        launch(_updates, Options(world_size=2, device="cpu", cores_per_rank=1), out)
        on_two = torch.load(out, weights_only=True)
    use_cores([0])
    alone = _beside_torch()
    rows = []
    for seconds, against, goals in (
        (alone, "torch.optim.Muon, bf16", {"muon, bf16": 1.0}),
        (on_two, "muon, each rank all", {"muon, data parallel": 1.5}),
    ):
        for name, values in seconds.items():
            value, spread = summarize([1000 * s for s in values])
            ratio = ratio_of(seconds[against], values)
            rows.append(Row(name, value, spread, "ms", ratio, against, goals.get(name)))
    write_rows("optimizer", TITLE, rows)
    return rows


if __name__ == "__main__":
    run()
