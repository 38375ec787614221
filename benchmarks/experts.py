"""Experts: their matrix products computed in several ways; a step with all experts on each rank, or
half of them.

- The first matrix of 8 experts, of which 2 see a position, forward and backward, on one core: a
  product for each expert, as in this project; torch's grouped product; all experts padded to the
  busiest, in a batched product; and a plain matrix with as many operations. Experts are chosen at
  random, as by an untrained router, or one takes half of all rows.
- A step of gpt2-mini with 8 experts on two ranks with a core each: all experts on both, or half on
  each, so that rows travel but fewer gradients do; and what a rank holds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import Row, agree, alternate, ratio_of, summarize, use_cores, write_rows
from experts.layer import Segmented, StackedLinear
from experts.routing import Balance
from runtime.axes import ranks_of
from runtime.mesh import make_mesh
from training.launch.launch import launch
from training.launch.world import World
from training.layouts.layout import Setup
from training.layouts.stages import Staged
from training.options import Options
from training.tasks.experts import LanguageWithExperts
from training.tasks.gpt2 import Sequences, gpt2_config, initializer
from training.tasks.task import Step

TITLE = "8 experts, of which 2 see a position; gpt2-mini, a core per rank"
ROUNDS = 15
EXPERTS, TOP_K, WIDTH, POSITIONS = 8, 2, 256, 384
B, T, VOCABULARY = 16, 48, 4096
CONFIG = partial(gpt2_config, "gpt2-mini", VOCABULARY, T, dropout=0.0)
MIB = 2**20


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-4, fused=True)


# The products


def _products(world: World, busiest: float, out: Path) -> None:
    """Seconds of each way. `busiest`: the part of the rows that one expert takes."""
    use_cores([0])
    torch.manual_seed(world.rank)
    rows = POSITIONS * TOP_K
    rest = torch.full((EXPERTS - 1,), (1 - busiest) / (EXPERTS - 1))
    shares = torch.cat([torch.tensor([busiest]), rest])
    counts = shares.multinomial(rows, replacement=True).bincount(minlength=EXPERTS).tolist()
    layer = StackedLinear(torch.empty(WIDTH, 4 * WIDTH), EXPERTS)
    nn.init.normal_(layer.weight, 0, 0.02)
    nn.init.zeros_(layer.bias)
    plain = nn.Linear(WIDTH, 4 * WIDTH * TOP_K)
    x, dy = torch.randn(rows, WIDTH, requires_grad=True), torch.randn(rows, 4 * WIDTH)
    x_plain = torch.randn(POSITIONS, WIDTH, requires_grad=True)
    of_expert = torch.arange(EXPERTS).repeat_interleave(torch.tensor(counts))
    ends = torch.tensor(counts).cumsum(0).int()

    def ours() -> Tensor:
        return layer(x, Segmented([*enumerate(counts)]))

    def grouped() -> Tensor:
        return torch._grouped_mm(x, layer.weight, offs=ends) + layer.bias[of_expert]

    def padded() -> Tensor:
        whole = nn.utils.rnn.pad_sequence(list(x.split(counts)), batch_first=True)
        products = torch.baddbmm(layer.bias[:, None], whole, layer.weight)
        return torch.cat([y[:n] for y, n in zip(products, counts, strict=True)])

    results: dict[str, Tensor] = {}

    def turn(name: str, way: Callable[[], Tensor]) -> None:
        x.grad = layer.weight.grad = layer.bias.grad = plain.weight.grad = plain.bias.grad = None
        y = way()
        y.backward(dy.view_as(y))
        results[name] = y.detach()

    ways = {
        "a product per expert": ours, "grouped": grouped, "padded": padded,
        "plain": lambda: plain(x_plain),
    }  # fmt: skip
    seconds = alternate({name: partial(turn, name, way) for name, way in ways.items()}, ROUNDS)
    for name in ("grouped", "padded"):
        torch.testing.assert_close(results[name], results["a product per expert"])
    if world.is_main:
        torch.save(seconds, out)


# A step


class _Task(LanguageWithExperts):
    """The project's own task, without a text."""

    def __init__(self, world: World) -> None:
        self.args = Options(experts=EXPERTS, top_k=TOP_K)
        self.device, self.pretrained, self.config = world.device, None, CONFIG()
        self._initialize = initializer(self.config, seed=0)


class _Contestant:
    """A layout in which `ep` ranks share the experts."""

    def __init__(self, world: World, ep: int) -> None:
        mesh = make_mesh(ranks_of({"dp": world.world_size, "ep": ep}), 300.0)
        args = Options(strategy="ddp", num_microbatches=2)
        self.model = Staged(_Task(world), world, Setup(args, _adamw), mesh)
        generator = torch.Generator().manual_seed(world.rank)
        ids = torch.randint(VOCABULARY, (2, B // 2, T + 1), generator=generator)
        whole = torch.full((B // 2,), T)
        self.inputs = [
            Sequences(
                part[:, :-1], torch.arange(B // 2 * T), torch.arange(B // 2),
                balance=Balance(whole, whole, torch.zeros(())),
            )
            for part in ids
        ]  # fmt: skip
        self.labels = [part[:, 1:].flatten() for part in ids]

    def step(self) -> float:
        (optimizer,) = self.model.optimizers
        optimizer.zero_grad()
        count = B * T * dist.get_world_size()
        loss = self.model.backward(Step(self.inputs, self.labels, count, B * T, B * T))
        optimizer.step()
        return loss.item() / count


def _steps(world: World, out: Path) -> None:
    contestants = {f"ep {ep}": _Contestant(world, ep) for ep in (1, world.world_size)}
    losses: dict[str, float] = {}

    def turn(name: str) -> None:
        losses[name] = contestants[name].step()
        dist.barrier()

    seconds = alternate({name: partial(turn, name) for name in contestants}, ROUNDS)
    agree(losses, 1e-3)  # after all updates
    held = {}
    for name, contestant in contestants.items():
        parameters = contestant.model.pipe.named_parameters()
        experts = sum(16 * p.numel() for n, p in parameters.items() if ".experts." in n)
        held[f"held, {name}"] = [sum(contestant.model.state_bytes().values()), experts]
    if world.is_main:
        torch.save(seconds | held, out)


def run() -> list[Row]:
    """Prints the table."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"

        def on(ranks: int, function: Callable[..., None], *args: Any) -> Any:
            settings = Options(world_size=ranks, device="cpu", cores_per_rank=1)
            launch(function, settings, *args, out)
            return torch.load(out, weights_only=True)

        def add(seconds: dict[str, list[float]], against: str, what: str) -> None:
            for name, values in seconds.items():
                value, spread = summarize([1000 * s for s in values])
                ratio = ratio_of(seconds[against], values)
                rows.append(Row(f"{what}, {name}", value, spread, "ms", ratio, against))

        for busiest in (1 / EXPERTS, 0.5):
            add(on(1, _products, busiest), "plain", f"busiest expert {busiest:.0%}")
        found = on(2, _steps)
        add({name: found[name] for name in ("ep 1", "ep 2")}, "ep 1", "a step")
        for k, what in enumerate(("held", "held of experts")):
            for name in ("ep 1", "ep 2"):
                one, this = (found[f"held, {which}"][k] / MIB for which in ("ep 1", name))
                rows.append(Row(f"{what}, {name}", this, (this, this), "MiB", one / this, "ep 1"))
    write_rows("experts", TITLE, rows)
    return rows


if __name__ == "__main__":
    run()
