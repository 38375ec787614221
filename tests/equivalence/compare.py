"""Trains a row in the product's own loop, and compares it with what it must equal.

Every rank says which rectangles of which parameters it holds (`LaidOutModel.held`, `.pieces`), and
compares these, at every step and by parameter name, with the same rectangles of the reference. A
difference is relative to the largest element of the whole parameter: the sum over all would let
errors cancel, and one scale for all parameters would hide the small ones. Together the ranks must
hold every element; what is not a number is infinitely far off.

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

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from project.train import TrainOptions
from tests.equivalence.plain import Reference
from tests.equivalence.problems import EPS, LEARNING_RATE, SEED
from tests.equivalence.table import Row
from training.layout import LaidOutModel, Plan
from training.loop import seeded, train
from training.optimization import Optimizers
from training.saving import NO_RESUME, Saving, find_resume
from training.task import Step, Task
from training.world import World, gather_over_ranks

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4}  # relative, of ten steps
KINDS = ("loss", "gradient", "weight")

Place = tuple[str, tuple[int, ...]]  # a parameter's name, and where in it a rectangle begins
Rectangles = dict[Place, Tensor]


@dataclass
class Trajectory:
    """What a rank has of a run: losses of the global batches, and copies of its rectangles of the
    gradients that the optimizer was given at each step, and of the weights after the last."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Rectangles] = field(default_factory=list)
    weights: Rectangles = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class Difference:
    """The largest difference of a kind, relative, and where it is."""

    value: float = 0.0
    where: str = ""


@dataclass(frozen=True)
class Result:
    """What came out of a row. `failure`: in words; empty where all is well."""

    name: str
    steps: int
    bound: float = 0.0
    loss: Difference = Difference()
    gradient: Difference = Difference()
    weight: Difference = Difference()
    failure: str = ""
    seconds: float = 0.0


# Training


@dataclass
class Training:
    """A row on this rank, laid out. All ranks call the same methods."""

    world: World
    task: Task
    model: LaidOutModel
    optimizer: Optimizers

    def run(
        self, n_steps: int, after_step: Callable[[Any, float], None] | None = None
    ) -> Trajectory:
        """The next steps, over as many epochs as they take."""
        found, average = Trajectory(), getattr(self.model, "average_gradients", None)

        def note_gradients(module: torch.nn.Module | None) -> None:
            if average is not None:
                average(module)
            found.gradients.append(rectangles(self.model, lambda p: p.grad))

        def note_loss(totals: Any, seconds: float) -> None:
            found.losses.append(self.optimizer.loss)
            if after_step is not None:
                after_step(totals, seconds)

        steps = seeded(self._steps(), self.model, SEED, self.optimizer.steps)
        steps = islice(steps, n_steps)
        train(
            self.model, self.optimizer, steps, "", rank=1,  # no bar
            average_gradients_fn=note_gradients, after_step=note_loss,
        )  # fmt: skip
        found.weights = rectangles(self.model, Tensor.detach)
        return found

    def _steps(self) -> Iterator[Step]:
        model = self.model
        epoch, start = divmod(self.optimizer.steps, self.task.steps_per_epoch)
        while True:
            yield from self.task.steps(
                epoch, model.part, model.parts, model.num_microbatches, start
            )
            epoch, start = epoch + 1, 0


@contextmanager
def laid_out(row: Row, world: World, dtype: torch.dtype) -> Iterator[Training]:
    """A row with nothing done yet."""

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(parameters), LEARNING_RATE, eps=EPS, fused=True)

    task = row.problem.task(world, dtype)
    precision = "fp64" if dtype == torch.float64 else "fp32"
    plan = Plan(adamw, precision, row.num_microbatches, recompute=row.recompute)
    model = row.build(task, world, plan)
    optimizer = Optimizers(
        model.optimizers, row.problem.recipe, world, counted=model.counted, run=model.run
    )
    try:
        yield Training(world, task, model, optimizer)
    finally:
        model.close()


def trained(row: Row, world: World, dtype: torch.dtype, n_steps: int) -> Trajectory:
    """So many steps of a row."""
    with laid_out(row, world, dtype) as training:
        return training.run(n_steps)


def interrupted(row: Row, world: World, dtype: torch.dtype, n_steps: int) -> Trajectory:
    """The same; but half-way it is saved, and another resumes it."""
    half = n_steps // 2
    with TemporaryDirectory() as folder:
        workdir = Path(gather_over_ranks(folder, world)[0])
        args = replace(
            TrainOptions(), workdir=workdir, save_every=half, resume=True, seed=SEED,
            num_batches=n_steps,
        )  # fmt: skip

        def saving(training: Training) -> Saving:
            return Saving(world, args, training.task, training.model, training.optimizer)

        with laid_out(row, world, dtype) as first:
            saver = saving(first)
            saver.restore(NO_RESUME)
            found = first.run(half, lambda totals, _: saver.after_step(0, totals))
        with laid_out(row, world, dtype) as second:
            resume = find_resume(args, second.task.fingerprints()["train"])
            assert resume.checkpoint is not None
            saving(second).restore(resume)
            rest = second.run(n_steps - half)
        gather_over_ranks(None, world)  # all have read
    return Trajectory(found.losses + rest.losses, found.gradients + rest.gradients, rest.weights)


# Comparing


def rectangles(model: LaidOutModel, value: Callable[[Tensor], Tensor | None]) -> Rectangles:
    """Copies, in the CPU's memory, of `value` of all that this rank holds and that has one."""
    values = [(p, value(p)) for p in model.held()]
    pieces = [piece for p, t in values if t is not None for piece in model.pieces(p, t)]
    return {(x.name, tuple(x.offsets)): x.tensor.detach().cpu().clone() for x in pieces}


def check(row: Row, reference: Reference, world: World, n_steps: int, dtype: torch.dtype) -> Result:
    """Trains a row and compares it; all ranks call this together and get the same result."""
    begin, failure = time.perf_counter(), ""
    found, bound = trained(row, world, dtype, n_steps), BOUNDS[dtype] * max(1.0, n_steps / 10)
    if row.beside == "one process":
        worst = compare(found, like(found, reference), reference)
    else:
        bound = 0.0
        again = interrupted if row.beside == "resumed run" else trained
        other = replace(row, recompute="never") if row.beside == "nothing recomputed" else row
        worst = compare(found, again(other, world, dtype, n_steps), reference)
    by_rank = gather_over_ranks((worst, held(found, reference)), world)
    for kind in KINDS:
        rank, worst[kind] = max(
            ((r, differences[kind]) for r, (differences, _) in enumerate(by_rank)),
            key=lambda item: item[1].value,
        )
        if worst[kind].where and len(by_rank) > 1:
            worst[kind] = replace(worst[kind], where=f"{worst[kind].where} (rank {rank})")
    kind = max(KINDS, key=lambda kind: worst[kind].value)
    if lacking := missing([boxes for _, boxes in by_rank], reference.weights):
        failure = f"gradient of {lacking}: not all of it is on some rank"
    elif not worst[kind].value <= bound:
        failure = f"{kind} of {worst[kind].where}: off by {worst[kind].value:.1e}"
    return Result(
        row.name, n_steps, bound, **worst, failure=failure, seconds=time.perf_counter() - begin
    )


def like(found: Trajectory, reference: Reference) -> Trajectory:
    """The same rectangles of the reference; of a step that must be left out, what was found."""

    def part(place: Place, mine: Tensor, whole: Mapping[str, Tensor]) -> Tensor:
        name, offsets = place
        box = tuple(slice(o, o + n) for o, n in zip(offsets, mine.shape, strict=True))
        return whole[name][box] if name in whole else mine.new_empty(0)

    def parts(mine: Rectangles, whole: Mapping[str, Tensor] | None) -> Rectangles:
        if whole is None:
            return mine
        return {place: part(place, tensor, whole) for place, tensor in mine.items()}

    steps = zip(found.gradients, reference.gradients, strict=True)
    gradients = [parts(mine, whole) for mine, whole in steps]
    return Trajectory(reference.losses, gradients, parts(found.weights, reference.weights))


def compare(found: Trajectory, wanted: Trajectory, reference: Reference) -> dict[str, Difference]:
    """The largest difference of each kind; the reference says how large a parameter is."""
    steps = zip(found.gradients, wanted.gradients, reference.gradients, strict=True)
    gradients = [
        difference(mine, theirs, whole, f", step {k}")
        for k, (mine, theirs, whole) in enumerate(steps, 1)
        if whole is not None
    ]
    pair = [torch.tensor(run.losses, dtype=torch.float64) for run in (found, wanted)]
    losses = [
        Difference(relative(mine, theirs, theirs.abs().item()), f"step {k}")
        for k, (mine, theirs) in enumerate(zip(*pair, strict=True), 1)
    ]
    return {
        "loss": largest(losses),
        "gradient": largest(gradients),
        "weight": difference(found.weights, wanted.weights, reference.weights),
    }


def difference(
    found: Rectangles, wanted: Rectangles, whole: Mapping[str, Tensor], when: str = ""
) -> Difference:
    """The largest difference of rectangles at the same places."""
    differences = []
    for place in found.keys() | wanted.keys():
        name, mine, theirs = place[0], found.get(place), wanted.get(place)
        if mine is None or theirs is None or mine.shape != theirs.shape or name not in whole:
            differences.append(Difference(math.inf, f"{name} at {place[1]}, not expected{when}"))
            continue
        finite = whole[name][whole[name].isfinite()]
        scale = finite.abs().max().item() if finite.numel() else 0.0
        differences.append(Difference(relative(mine, theirs, scale), name + when))
    return largest(differences)


def relative(mine: Tensor, theirs: Tensor, scale: float) -> float:
    """The largest distance of two elements that are not the same, as a part of `scale`."""
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    distance = (mine.double() - theirs.double()).abs().masked_fill(same, 0.0)
    furthest = distance.max().item() if distance.numel() else 0.0
    if furthest == 0:
        return 0.0
    value = furthest / scale if scale > 0 else math.inf
    return math.inf if math.isnan(value) else value  # max() would pass over NaN


def largest(differences: list[Difference]) -> Difference:
    """The first of the largest ones."""
    return max(differences, key=lambda difference: difference.value, default=Difference())


def held(found: Trajectory, reference: Reference) -> dict[Place, tuple[int, ...]]:
    """The places of which this rank has a weight, and a gradient at every step; and their sizes."""
    steps = zip(found.gradients, reference.gradients, strict=True)
    taken = [gradients.keys() for gradients, whole in steps if whole is not None]
    places = set(found.weights).intersection(*taken)
    return {place: tuple(found.weights[place].shape) for place in places}


def missing(by_rank: list[dict[Place, tuple[int, ...]]], whole: Mapping[str, Tensor]) -> str:
    """The first parameter of which no rank holds some element; empty if there is none."""
    for name, parameter in whole.items():
        lacking = torch.ones(parameter.shape, dtype=torch.bool)
        for boxes in by_rank:
            for (of, offsets), sizes in boxes.items():
                if of == name:
                    ends = (o + n for o, n in zip(offsets, sizes, strict=True))
                    lacking[tuple(map(slice, offsets, ends))] = False
        if lacking.any():
            return name
    return ""
