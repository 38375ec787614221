"""Trains a strategy and compares it with what it must equal, on the ranks that it needs.

Problem: more than a hundred strategies and layouts, on one to three processes each. A process needs
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
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from project.problems import Problem
from project.session import gather_over_ranks
from project.trainers import Given, Trainer
from project.trajectory import (
    KINDS,
    NONE,
    Difference,
    Tensors,
    Trajectory,
    compare,
    held,
    largest,
)
from project.utils import sum_over_ranks, train
from project.verified import Strategy, find
from training.checkpoint import Checkpoint, Saver
from training.launch import Settings, World, choose_device, launch
from training.pieces import deal
from training.record import write_json
from training.seeds import stream
from training.state import (
    Shards,
    generator_pieces,
    load_generators,
    load_training,
    training_pieces,
    whole_parameters,
)

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


def record(trainer: Trainer, world: World, start: int, stop: int) -> Trajectory:
    """Trains steps `start` to `stop`, over as many epochs as they take, in the programs' loop."""
    found = Trajectory(initial=trainer.held_weights())
    sums: list[Tensor] = []
    tokens: list[int] = []
    update = trainer.optimizer.step

    def note(loss: Tensor, target_tokens: int) -> str | None:
        sums.append(loss.double().cpu())
        tokens.append(target_tokens)
        found.gradients.append(trainer.held_gradients())
        return update(loss, target_tokens)

    trainer.optimizer.step = note  # type: ignore[method-assign]
    every = (step for epoch in count() for step in trainer.loader.steps(epoch))
    train(
        trainer.model, trainer.optimizer, islice(every, start, stop), trainer.backward, "",
        rank=1,  # only rank 0 has a progress bar
        average_gradients_fn=trainer.average,
    )  # fmt: skip
    total = sum_over_ranks([loss.item() for loss in sums], world.device)
    found.losses = [loss / n for loss, n in zip(total, tokens, strict=True)]
    found.weights = trainer.held_weights()
    return found


@dataclass(frozen=True)
class Run:
    """A strategy to be trained on this rank, from given weights."""

    strategy: Strategy
    initial: Tensors
    world: World
    dtype: torch.dtype

    @contextmanager
    def trainer(self) -> Iterator[Trainer]:
        """The strategy, with nothing done yet."""
        trainer = self.strategy.build(
            Given(self.strategy.problem, self.world, self.dtype, self.initial)
        )
        try:
            yield trainer
        finally:
            trainer.close()

    def train(self, n_steps: int, seed: int = 0) -> Trajectory:
        """So many steps. The seed is that of dropout, which differs between the ranks."""
        with self.trainer() as trainer:
            torch.manual_seed(stream(seed, "dropout", self.world.rank, 0))
            return record(trainer, self.world, 0, n_steps)

    def train_interrupted(self, n_steps: int) -> Trajectory:
        """The same; but half-way it is saved, and a new trainer goes on from what was saved."""
        half, world = n_steps // 2, self.world
        with TemporaryDirectory() as mine, self.trainer() as trainer:
            folder = Path(gather_over_ranks(mine, world.world_size)[0])
            torch.manual_seed(stream(0, "dropout", world.rank, 0))
            found = record(trainer, world, 0, half)
            held = training_pieces(*_of(trainer))
            held = deal(held, world.rank, world.world_size)
            held += generator_pieces(world.rank, [world.device])
            saver = Saver(folder, 1, world.rank, lambda v: gather_over_ranks(v, world.world_size))
            saved = Checkpoint(saver.save("half", held, {"steps": trainer.optimizer.steps}))
            torch.manual_seed(1_000)
            with self.trainer() as other:
                load_training(*_of(other), saved.tensors)
                load_generators(world.rank, [world.device], saved.tensors)
                other.optimizer.steps = saved.state["steps"]
                rest = record(other, world, half, n_steps)
            gather_over_ranks("", world.world_size)  # all have read
        return Trajectory(
            found.losses + rest.losses,
            found.gradients + rest.gradients,
            found.initial,
            rest.weights,
        )


def _of(trainer: Trainer) -> tuple[Iterable[Tensor], Sequence[torch.optim.Optimizer], Shards]:
    model = trainer.model
    return model.parameters(), trainer.optimizer.optimizers, whole_parameters(model)


def check(
    strategy: Strategy, reference: Trajectory, world: World, n_steps: int, dtype: torch.dtype
) -> Row:
    """Trains a strategy and compares it; all ranks call this together and get the same row."""
    begin = time.perf_counter()
    run = Run(strategy, reference.initial, world, dtype)
    found, wanted, failure = run.train(n_steps), reference, ""
    bound = BOUNDS[dtype] * max(1.0, n_steps / 10)
    if strategy.beside != "one process":
        bound, failure = 0.0, _idle(run, found, reference)
        again = strategy.beside == "second run"
        wanted = run.train(n_steps) if again else run.train_interrupted(n_steps)
    every = gather_over_ranks((compare(found, wanted), held(found)), world.world_size)
    worst = {
        kind: largest(
            Difference(found[kind].value, found[kind].where + f" (rank {r})" * (len(every) > 1))
            for r, (found, _) in enumerate(every)
        )
        for kind in KINDS
    }
    missing = sorted(set(wanted.weights) - set().union(*(names for _, names in every)))
    kind = max(KINDS, key=lambda kind: worst[kind].value)
    if missing:
        failure = f"gradient of {missing[0]}: on no rank"
    elif not worst[kind].value <= bound:
        failure = f"{kind} of {worst[kind].where}: off by {worst[kind].value:.1e}"
    seconds = time.perf_counter() - begin
    return Row(strategy.name, n_steps, bound, **worst, failure=failure, seconds=seconds)


def _idle(run: Run, found: Trajectory, reference: Trajectory) -> str:
    """Whether dropout does nothing: then the same bits say little."""
    if found.losses == reference.losses:
        return "dropout changes nothing"
    if run.train(1, seed=1).losses[0] == found.losses[0]:
        return "the seed of dropout changes nothing"
    return ""


def check_all(
    chosen: Sequence[Strategy],
    references: References,
    n_steps: int,
    dtype: torch.dtype,
    device: str,
    show: Show,
) -> list[Row]:
    """The rows of the chosen strategies; `show` is called with each as soon as it is there, by the
    process that has it. Those of one process are checked beside the others: ranks that wait for
    each other leave the cores idle for a third of the time."""
    rows: list[Row] = []
    alone = [strategy.name for strategy in chosen if strategy.world_size == 1]
    world = World(device=choose_device(device, 0, 1))

    def check_alone() -> None:
        torch.set_num_threads(1)  # each thread has its own number
        for name in alone:
            rows.append(_check_here(name, references, world, n_steps, dtype, show))

    beside = threading.Thread(target=check_alone, name="one process", daemon=True)
    beside.start()
    of_ranks: list[Row] = []
    for W in sorted({strategy.world_size for strategy in chosen} - {1}):
        names = [strategy.name for strategy in chosen if strategy.world_size == W]
        settings = Settings(W, device, master_port=0, timeout=60.0)
        of_ranks += _check_on_ranks(names, settings, (references, n_steps, dtype, show))
    beside.join()
    if len(rows) < len(alone):
        raise RuntimeError(f"{alone[len(rows)]} was not checked to its end, see above")
    return rows + of_ranks


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
        row = check(strategy, references[strategy.problem.without_dropout], world, n_steps, dtype)
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
        row = check(strategy, references[strategy.problem.without_dropout], world, n_steps, dtype)
        if world.is_main:
            write_json(folder / f"{name}.json", asdict(row))
            show(row)


def read_row(text: str) -> Row:
    """The row that `asdict` and JSON made text of."""
    values: dict[str, Any] = json.loads(text)
    for kind in KINDS:
        found = values[kind]
        value = math.inf if found["value"] is None else found["value"]  # JSON has no infinity
        values[kind] = Difference(value, found["where"])
    return Row(**values)
