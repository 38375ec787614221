"""Trains a row in the project's own loop, and compares it with what it must equal.

Every rank says which rectangles of which parameters it holds (`LaidOutModel.held`), and
compares these, at every step and by parameter name, with the same rectangles of the reference. A
difference is relative to the largest element of the whole parameter: the sum over all would let
errors cancel, and one scale for all parameters would hide the small ones. Together the ranks must
hold every element; what is not a number is infinitely far off.

How large may a difference be? Rounding alone: with u the unit roundoff (1.1e-16, 6e-8), the longest
chain of roundings behind a gradient is some 1,300 (dot products over 16 to 64 features and the
softmax in six layers, twice for the backward; a sum over 100 target tokens). Roundings are as good
as random, so a gradient is off by sqrt(1300) u of its size (seen: 2e-15, 1e-6). AdamW turns that
into at most lr / eps times the absolute error: with gradients of 0.1 and weights of 0.1,
1e-3 / 1e-4 * 2e-7 = 2e-6 per step in float32, and in ten steps, if all had one sign, 2e-5, which is
2e-4 of a weight; of random signs, 6e-5. Hence 1e-4 in float32. In float64 the same is 1e-13, and
the bound is 1e-10: far below any wrong factor. Errors of more steps add up, so the bound grows with
their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tests.equivalence.plain import Key, Reference
from tests.equivalence.problems import SEED
from tests.equivalence.table import Row
from tests.ranks import end_groups, sharing
from training.launch.world import World
from training.layouts.layout import LaidOutModel, Setup
from training.loop import seed_step, train
from training.optimization import GlobalOptimizer, Recipe, make_optimizer
from training.resume import NO_RESUME, Saving, find_resume
from training.tasks.task import Step, TrainingTask

BOUNDS = {  # relative, of ten steps
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.bfloat16: 0.1,  # autocast: sqrt(1300) * 2^-9, and a step's worth of rounded weights
}
PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}
KINDS = ("loss", "gradient", "weight")

Found = dict[Key, dict[tuple[int, ...], Tensor]]
"""What a rank has of a `Reference`: rectangles, by where in the whole tensor they begin."""


@dataclass(frozen=True)
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


# Training


@dataclass
class Training:
    """A row on this rank, laid out. All ranks call the same methods."""

    world: World
    task: TrainingTask
    model: LaidOutModel
    optimizer: GlobalOptimizer

    def run(self, n_steps: int, after_step: Callable[[Any, float], None] | None = None) -> Found:
        """The next steps, over as many epochs as they take: their losses and gradients, and the
        weights after the last."""
        found: Found = {}
        average = getattr(self.model, "average_gradients", None)

        def note_gradients(module: torch.nn.Module | None) -> None:
            if average is not None:
                average(module)
            step = self.optimizer.steps + 1
            found.update(rectangles(self.model, "gradient", step, lambda p: p.grad))

        def note_loss(totals: Any, seconds: float) -> None:
            loss = torch.tensor(self.optimizer.loss, dtype=torch.float64)
            found["loss", "", self.optimizer.steps] = {(): loss}
            if after_step is not None:
                after_step(totals, seconds)

        train(
            self.model, self.optimizer, islice(self._steps(), n_steps), "", rank=1,  # no bar
            average_gradients_fn=note_gradients, after_step=note_loss,
            before_step=lambda: seed_step(self.model, SEED, self.optimizer.steps),
        )  # fmt: skip
        return found | rectangles(self.model, "weight", 0, Tensor.detach)

    def _steps(self) -> Iterator[Step]:
        model = self.model
        epoch, start = divmod(self.optimizer.steps, self.task.steps_per_epoch)
        while True:
            yield from self.task.steps(
                epoch, model.dp_rank, model.dp_size, model.num_microbatches, start
            )
            epoch, start = epoch + 1, 0


@contextmanager
def laid_out(row: Row, world: World, dtype: torch.dtype) -> Iterator[Training]:
    """A row with nothing done yet."""
    options, task = row.problem.options, row.problem.task(world, dtype)
    asked: dict[str, Any] = {"num_microbatches": row.num_microbatches, "recompute": row.recompute}
    asked["precision"] = PRECISIONS[dtype]
    args = replace(options, **asked)
    setup = Setup(args, partial(make_optimizer, args))
    with sharing(row.share_memory):
        model = row.build(task, world, setup)
        recipe = Recipe(options, task.steps_per_epoch)
        optimizer = model.global_optimizer(recipe)
        try:
            yield Training(world, task, model, optimizer)
        finally:
            model.close()


def trained(row: Row, world: World, dtype: torch.dtype, n_steps: int) -> Found:
    """So many steps of a row."""
    with laid_out(row, world, dtype) as training:
        return training.run(n_steps)


def resumed(rows: Sequence[Row], world: World, dtype: torch.dtype, n_steps: Sequence[int]) -> Found:
    """So many steps of one row after the other, each from the checkpoint of the one before."""
    found: Found = {}
    with TemporaryDirectory() as folder:
        workdir = Path(world.gather(folder)[0])
        for row, n in zip(rows, n_steps, strict=True):
            args = replace(row.problem.options, workdir=workdir, save_every=n, resume=True)
            with laid_out(row, world, dtype) as training:
                saving = Saving(args, training.model, training.optimizer)
                resume = find_resume(args) if found else NO_RESUME
                assert found == {} or resume.checkpoint is not None
                saving.restore(resume)
                before = {key: value for key, value in found.items() if key[0] != "weight"}
                found = before | training.run(n, partial(_save, saving))
            end_groups()
        world.gather(None)  # all have read
    return found


def _save(saving: Saving, totals: Any, _: float) -> None:
    saving.after_step(0, totals)


def rectangles(
    model: LaidOutModel, kind: str, step: int, value: Callable[[Tensor], Tensor | None]
) -> Found:
    """Copies, in the CPU's memory, of `value` of all that this rank holds and that has one."""
    found: Found = {}
    for x in model.held:
        assert x.parameter is not None
        tensor = value(x.parameter)
        if tensor is not None and x.tensor.numel():
            copy = x.of(tensor).detach().cpu().clone()
            found.setdefault((kind, x.name, step), {})[x.offsets] = copy
    return found


# Comparing


def check(row: Row, reference: Reference, world: World, n_steps: int, dtype: torch.dtype) -> Result:
    """Trains a row and compares it; all ranks call this together and get the same result."""
    failure, bound = "", BOUNDS[dtype] * max(1.0, n_steps / 10)
    found = trained(row, world, dtype, n_steps)
    if row.beside == "one process":
        wanted = same_places(reference, found)
    else:
        bound = 0.0
        if row.beside == "uninterrupted run":
            half = n_steps // 2
            wanted = resumed([row, row], world, dtype, [half, n_steps - half])
        else:
            plainly = replace(row, name=row.name.split("-recompute")[0])
            wanted = trained(plainly, world, dtype, n_steps)
    rank = f" (rank {world.rank})" if world.world_size > 1 else ""
    sizes = {key: {at: t.shape for at, t in mine.items()} for key, mine in found.items()}
    by_rank = world.gather((compare(found, wanted, reference, rank), sizes))
    end_groups()  # of the row
    worst = {kind: largest([differences[kind] for differences, _ in by_rank]) for kind in KINDS}
    kind = max(KINDS, key=lambda kind: worst[kind].value)
    if lacking := missing([sizes for _, sizes in by_rank], reference):
        failure = f"{lacking[0]} of {where(lacking)}: not all of it is on some rank"
    elif not worst[kind].value <= bound:
        failure = f"{kind} of {worst[kind].where}: off by {worst[kind].value:.1e}"
    return Result(row.name, n_steps, bound, **worst, failure=failure)


def where(key: Key) -> str:
    """In words."""
    _, name, step = key
    words = (name, f"step {step}" if step else "")
    return ", ".join(word for word in words if word)


def box(offsets: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The place of a rectangle."""
    return tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))


def same_places(reference: Reference, found: Found) -> Found:
    """The rectangles of the reference that a rank has found."""
    return {
        key: {at: whole[box(at, mine.shape)] for at, mine in found.get(key, {}).items()}
        for key, whole in reference.items()
    }


def compare(found: Found, wanted: Found, reference: Reference, rank: str) -> dict[str, Difference]:
    """The largest difference of each kind; the reference says how large a tensor is."""
    assert {name for _, name, _ in found} <= {name for _, name, _ in reference}, "unknown names"
    every: dict[str, list[Difference]] = {kind: [] for kind in KINDS}
    for key, whole in reference.items():
        mine, theirs = found.get(key, {}), wanted.get(key, {})
        finite = whole[whole.isfinite()]
        scale = finite.abs().max().item() if finite.numel() else 0.0
        for at in mine.keys() | theirs.keys():
            value = math.inf
            if at in mine and at in theirs and mine[at].shape == theirs[at].shape:
                value = relative(mine[at], theirs[at], scale)
            every[key[0]].append(Difference(value, where(key) + rank))
    return {kind: largest(differences) for kind, differences in every.items()}


def largest(differences: list[Difference]) -> Difference:
    """The first of the largest ones."""
    return max(differences, key=lambda difference: difference.value, default=Difference())


def relative(mine: Tensor, theirs: Tensor, scale: float) -> float:
    """The largest distance of two elements that are not the same, as a part of `scale`."""
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    distance = (mine.double() - theirs.double()).abs().masked_fill(same, 0.0)
    furthest = distance.max().item() if distance.numel() else 0.0
    if furthest == 0:
        return 0.0
    value = furthest / scale if scale > 0 else math.inf
    return math.inf if math.isnan(value) else value  # no comparison is true of NaN


def missing(by_rank: list[dict[Key, Any]], reference: Reference) -> Key | None:
    """The first tensor of which no rank holds some element; `by_rank`: shapes by offsets."""
    for key, whole in reference.items():
        lacking = torch.ones(whole.shape, dtype=torch.bool)
        for sizes in by_rank:
            for at, shape in sizes.get(key, {}).items():
                lacking[box(at, shape)] = False
        if lacking.any():
            return key
    return None
