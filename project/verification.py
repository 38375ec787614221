"""Trains a strategy and compares it with what it must equal, on the ranks that it needs.

Problem: nearly a hundred strategies and layouts, on one to three processes each. A process needs
seconds to import its libraries, so ranks are started once per world size and given all strategies
of that size, one after the other. Every rank compares what it holds; the row says the worst.

How large may a difference be? Rounding alone: with u the unit roundoff (1.1e-16, 6e-8), the
longest chain of roundings behind a gradient is some 1,300 (dot products over 16 to 64 features and
the softmax in six layers, twice for the backward; a sum over 100 target tokens). They are as good
as random, so a gradient is off by sqrt(1300) u of its size (seen: 2e-15, 1e-6). AdamW turns that
into at most lr / eps times the absolute error: with gradients of 0.1 and weights of 0.1,
1e-3 / 1e-4 * 2e-7 = 2e-6 per step in float32, and in ten steps, if all had one sign, 2e-5, which is
2e-4 of a weight; of random signs, 6e-5. Hence 1e-4 in float32. In float64 the same is 1e-13, and
the bound is 1e-10: far below any wrong factor. Errors of more steps add up, so the bound grows with
their number.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from project.trajectory import KINDS, NONE, Difference, Trajectory, compare, largest
from project.utils import train
from project.verified import Given, Problem, Strategy, Trainer, find
from training.data import Step
from training.launch import Settings, World, choose_device, launch
from training.record import write_json

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4}  # relative, of ten steps
References = Mapping[Problem, Trajectory]


@dataclass(frozen=True)
class Row:
    """What came out of one strategy. `failure`: in words; empty where all is well."""

    strategy: str
    steps: int
    bound: float
    loss: Difference = NONE
    gradient: Difference = NONE
    weight: Difference = NONE
    failure: str = ""
    seconds: float = 0.0


Show = Callable[[Row], None]


def record(trainer: Trainer, n_steps: int, world: World) -> Trajectory:
    """Trains `n_steps` steps, over as many epochs as they take, in the programs' own loop."""
    found = Trajectory(initial=trainer.weights(trainer.model))
    sums: list[tuple[Tensor, int]] = []

    def backward(step: Step) -> Tensor:
        loss = trainer.backward(step)
        sums.append((loss.detach().double().cpu(), step.target_tokens))
        return loss

    optimizers = trainer.optimizer
    update = optimizers.step

    def step(loss: Tensor, target_tokens: int) -> str | None:
        found.gradients.append(trainer.gradients(trainer.model))
        return update(loss, target_tokens)

    optimizers.step = step  # type: ignore[method-assign]

    every = (step for epoch in count() for step in trainer.loader.steps(epoch))
    train(
        trainer.model, optimizers, islice(every, n_steps), backward, "",
        rank=1,  # only rank 0 has a progress bar
        average_gradients_fn=trainer.average,
    )  # fmt: skip
    losses = torch.stack([loss for loss, _ in sums]).to(world.device)
    if world.world_size > 1:
        dist.all_reduce(losses)
    tokens = torch.tensor([tokens for _, tokens in sums])
    found.losses = (losses.cpu() / tokens).tolist()
    found.weights = trainer.weights(trainer.model)
    return found


def train_strategy(
    strategy: Strategy,
    initial: Trajectory,
    world: World,
    n_steps: int,
    dtype: torch.dtype,
    seed: int,
) -> Trajectory:
    """One run of a strategy on this rank, from the weights of a reference."""
    trainer = strategy.build(Given(strategy.problem, world, dtype, initial.initial))
    torch.manual_seed(seed * 100_003 + world.rank)  # dropout differs between the ranks
    try:
        return record(trainer, n_steps, world)
    finally:
        trainer.close()


def check(
    strategy: Strategy, reference: Trajectory, world: World, n_steps: int, dtype: torch.dtype
) -> Row:
    """Trains a strategy and compares it; all ranks call this together and get the same row."""
    start = time.perf_counter()
    bound = 0.0 if strategy.same_bits else BOUNDS[dtype] * max(1.0, n_steps / 10)
    found = train_strategy(strategy, reference, world, n_steps, dtype, 0)
    failure = ""
    if strategy.same_bits:
        if found.losses == reference.losses:
            failure = "dropout changes nothing"
        wanted = train_strategy(strategy, reference, world, n_steps, dtype, 0)
        other = train_strategy(strategy, reference, world, 1, dtype, 1)
        if other.losses[0] == found.losses[0]:
            failure = "another seed changes nothing"
    else:
        wanted = reference
    every = [compare(found, wanted)]
    if world.world_size > 1:
        every *= world.world_size
        dist.all_gather_object(every, every[0])
    worst = {
        kind: largest(
            Difference(ds[kind].value, ds[kind].where + f" (rank {r})" * (len(every) > 1))
            for r, ds in enumerate(every)
        )
        for kind in KINDS
    }
    for kind, difference in worst.items():
        if not difference.value <= bound and not failure:
            failure = f"{kind} of {difference.where}: off by {difference.value:.1e}"
    return Row(strategy.name, n_steps, bound, **worst, failure=failure,
               seconds=time.perf_counter() - start)  # fmt: skip


def check_all(
    chosen: Sequence[Strategy],
    references: References,
    n_steps: int,
    dtype: torch.dtype,
    device: str,
    show: Show,
) -> list[Row]:
    """The rows of the chosen strategies; `show` is called with each as soon as it is there, by the
    process that has it."""
    rows: list[Row] = []
    for W in sorted({strategy.world_size for strategy in chosen}):
        names = [strategy.name for strategy in chosen if strategy.world_size == W]
        if W == 1:
            world = World(device=choose_device(device, 0, 1))
            rows += [_check_here(name, references, world, n_steps, dtype, show) for name in names]
        else:
            settings = Settings(W, device, master_port=0, timeout=60.0)
            rows += _check_on_ranks(names, settings, (references, n_steps, dtype, show))
    return rows


def _check_here(
    name: str,
    references: References,
    world: World,
    n_steps: int,
    dtype: torch.dtype,
    show: Show,
) -> Row:
    strategy = find(name)
    try:
        row = check(strategy, references[strategy.without_dropout], world, n_steps, dtype)
    except Exception as error:
        traceback.print_exc()
        row = Row(name, n_steps, 0.0, failure=f"{type(error).__name__}: {error}")
    show(row)
    return row


def _check_on_ranks(
    names: list[str], settings: Settings, work: tuple[References, int, torch.dtype, Show]
) -> list[Row]:
    """A strategy that ends its ranks is a failure; the ones after it get new ranks."""
    rows: list[Row] = []
    with TemporaryDirectory(prefix="verify-") as folder:
        while rest := names[len(rows) :]:
            crashed = False
            try:
                launch(_rank, settings, rest, Path(folder), *work)
            except SystemExit as end:
                if end.code != 1:  # not a rank's failure: somebody wants this process to end
                    raise
                crashed = True
            for name in rest:
                path = Path(folder) / f"{name}.json"
                if path.is_file():
                    rows.append(read_row(path.read_text(encoding="utf-8")))
            if crashed:
                rows.append(Row(names[len(rows)], work[1], 0.0, failure="a rank ended, see above"))
                work[-1](rows[-1])
    return rows


def _rank(
    world: World,
    names: list[str],
    folder: Path,
    references: References,
    n_steps: int,
    dtype: torch.dtype,
    show: Show,
) -> None:
    for name in names:
        strategy = find(name)
        row = check(strategy, references[strategy.without_dropout], world, n_steps, dtype)
        if world.is_main:
            write_json(folder / f"{name}.json", asdict(row))
            show(row)


def read_row(text: str) -> Row:
    """The row that `asdict` and JSON made text of."""
    values: dict[str, Any] = json.loads(text)
    return Row(**{**values, **{kind: Difference(**values[kind]) for kind in KINDS}})
