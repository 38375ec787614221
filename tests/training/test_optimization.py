"""Updates of the weights: the schedule, the time of steps, and what all ranks do about a NaN."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.equivalence.problems import Sentences
from tests.remote import on_ranks
from training.check import plain_rate
from training.launch.errors import RunError, UserError
from training.launch.world import World
from training.loop import train
from training.optimization import (
    GlobalOptimizer,
    Recipe,
    check_schedule,
    clip_factor,
    decay_steps_of,
    decays,
    make_optimizer,
    usual_warmup,
)
from training.options import Options
from training.results import Totals
from training.tasks.task import Step
from training.tasks.vgg import vgg16

INF, NAN = math.inf, math.nan


def recipe_of(rate: float, per_epoch: int, steps: int, **options: Any) -> Recipe:
    """The recipe of a run of so many steps."""
    return Recipe(Options(learning_rate=rate, num_batches=steps, **options), per_epoch)


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (2, 1), (5, 2), (16, 8), (40, 20), (41, 20), (9999, 20)]
)
def test_a_run_warms_up_for_half_of_it_at_most(steps: int, warmup: int) -> None:
    """If nobody says for how many steps."""
    assert usual_warmup(Options(num_batches=steps), 7) == warmup
    check_schedule(Options(num_batches=steps, warmup_steps=warmup), 7)


def test_the_warm_up_ends_before_the_run_does() -> None:
    """Two epochs of five steps."""
    check_schedule(Options(n_epochs=2, warmup_steps=9), 5)
    with pytest.raises(UserError, match=r"^--warmup_steps 10: .* --warmup_steps 0 to 9 works$"):
        check_schedule(Options(n_epochs=2, warmup_steps=10), 5)
    stable = Options(n_epochs=2, warmup_steps=4, lr_scheduler="wsd", decay_steps=6)
    check_schedule(stable, 5)
    with pytest.raises(UserError, match=r"^--decay_steps 7: .* --decay_steps 1 to 6 works$"):
        check_schedule(replace(stable, decay_steps=7), 5)


def test_wsd_decays_for_a_fifth_of_the_run() -> None:
    """If nobody says for how many steps; rounded up."""
    decays_for = [decay_steps_of(Options(num_batches=n), 7) for n in (1, 5, 6, 10, 100)]
    assert decays_for == [1, 1, 2, 2, 20]


@pytest.mark.parametrize(
    ("lr_scheduler", "warmup", "lowest", "decay", "rates"),
    [
        ("constant", 4, 0, None, [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]),
        ("linear", 0, 0, None, [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]),
        ("linear", 4, 4, None, [2.0, 4.0, 6.0, 8.0, 8.0, 7.0, 6.0, 5.0, 4.0]),
        ("cosine", 6, 0, None, [*(8 * k / 6 for k in range(1, 7)), 8.0, 4.0, 0.0]),
        ("cosine", 6, 2, None, [*(8 * k / 6 for k in range(1, 7)), 8.0, 5.0, 2.0]),
        ("wsd", 2, 0, 4, [4.0, 8.0, 8.0, 8.0, 8.0, 4.0, 8 - 32**0.5, 8 - 48**0.5, 0.0]),
        ("wsd", 0, 3, None, [*[8.0] * 7, 8 - 12.5**0.5, 3.0]),  # a fifth of the run: two steps
    ],
)
def test_learning_rates(
    lr_scheduler: str, warmup: int, lowest: float, decay: int | None, rates: list[float]
) -> None:
    """Eight steps, and what a ninth would have. No step is lost to a rate of 0. The reference of
    the equivalence tests has the same by other formulas."""
    recipe = recipe_of(
        8.0, 4, 8, lr_scheduler=lr_scheduler, warmup_steps=warmup, min_lr=lowest, decay_steps=decay
    )
    for found in (recipe.learning_rate_at, lambda k: plain_rate(recipe.args, k, 8)):
        assert [found(k) for k in range(9)] == pytest.approx(rates, rel=1e-15, abs=1e-14)


def test_matrices_decay_and_vectors_do_not() -> None:
    """Of every model: the rule goes by names, since of a shard nothing else is left."""
    routed = Sentences(experts=2).task(World(), torch.float32).skeleton()
    models: list[Any] = [vgg16(width=4), routed.to_empty(device="cpu")]
    recipe = recipe_of(1.0, 1, 1, weight_decay=0.5)
    for model in models:
        named = [*model.named_parameters()]
        biases_of_experts = {name for name, _ in named if name.endswith("bias")}
        by_shape = [p.dim() > 1 and name not in biases_of_experts for name, p in named]
        assert [decays(name) for name, _ in named] == by_shape and True in by_shape
        decaying, others = make_optimizer(recipe.args, named).param_groups
        assert (decaying["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
        assert len(decaying["params"]) == sum(by_shape) and others["params"]


def test_only_a_norm_above_the_limit_is_clipped() -> None:
    factors = [clip_factor(norm, 2.0) for norm in (0.5, 2.0, 8.0)]
    assert factors == pytest.approx([1.0, 1.0, 0.25], rel=1e-6) and clip_factor(8.0, None) == 1.0


@pytest.mark.parametrize(
    ("gradient", "norm"), [([3.0, 4.0], 5.0), ([3e19], 3e19), ([1e-30], 1e-30)]
)
def test_norms_are_squared_in_float64(gradient: list[float], norm: float) -> None:
    """In float32, their type, the second square would be infinite, and the third 0."""
    p = nn.Parameter(torch.zeros(len(gradient)))
    p.grad = torch.tensor(gradient)
    optimizers = GlobalOptimizer([torch.optim.SGD([p], lr=1.0)], recipe_of(1.0, 1, 1))
    optimizers.step(torch.tensor(3.0), 2)
    assert optimizers.norm == pytest.approx(norm, rel=1e-6, abs=0) and optimizers.loss == 1.5


def make(recipe: Recipe, *sizes: int, **more: Any) -> tuple[list[nn.Parameter], GlobalOptimizer]:
    """Parameters of ones in float64, an SGD with momentum for each."""
    parameters = [nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in sizes]
    sgd = [torch.optim.SGD([p], lr=recipe.args.learning_rate, momentum=0.5) for p in parameters]
    return parameters, GlobalOptimizer(sgd, recipe, **more)


def feed(parameters: list[nn.Parameter], value: float) -> None:
    for p in parameters:
        p.grad = torch.full_like(p, value)


def test_a_step_that_is_left_out_has_a_number_but_no_effect() -> None:
    """Momentum and weights know nothing of it; the schedule goes on, also after a resume. Without
    a target there is nothing to learn, which is no failure, whatever --on_nan says. (That a run of
    such steps ends: tests/project/test_resume.py.)"""
    recipe = recipe_of(1.0, 8, 8, lr_scheduler="linear", on_nan="skip")
    parameters, optimizers = make(recipe, 1)
    plain = nn.Parameter(torch.ones(1, dtype=torch.float64))
    sgd = torch.optim.SGD([plain], lr=1.0, momentum=0.5)
    no_target = "epoch 1, step 3 of 8: the batch has no target token; the step was skipped"
    bad, in_a_row = (NAN, 1, None), []
    for value, targets, rate in ((1.0, 1, 1.0), bad, (0.0, 0, None), bad, (5.0, 1, 0.5)):
        feed(parameters, value)
        said = optimizers.step(torch.tensor(value), targets)
        assert (said is None) == (rate is not None)
        assert targets or said == no_target
        if rate is not None:
            plain.grad = torch.tensor([value], dtype=torch.float64)
            sgd.param_groups[0]["lr"] = rate
            sgd.step()
        assert parameters[0].tolist() == plain.tolist()
        before, optimizers = optimizers, GlobalOptimizer(optimizers.optimizers, recipe)
        optimizers.steps, optimizers.in_a_row = before.steps, before.in_a_row
        in_a_row.append(optimizers.in_a_row)
    assert (optimizers.steps, in_a_row) == (5, [0, 1, 0, 1, 0])


def test_an_epoch_counts_steps_but_not_what_is_done_after_them() -> None:
    """Neither the loss nor the targets of a step that was left out count."""
    (parameter,), optimizers = make(recipe_of(1.0, 9, 9, on_nan="skip"), 1)
    feed([parameter], 0.0)
    losses = iter([2.0, NAN, 0.5])
    model: Any = SimpleNamespace(backward=lambda _: torch.tensor(next(losses)))
    start = time.perf_counter()
    steps = [Step([], [], 4 + k, 7, 5) for k in range(3)]
    totals = train(model, optimizers, steps, "", after_step=lambda *_: time.sleep(0.05))
    assert 0 < totals.seconds <= time.perf_counter() - start - 3 * 0.05
    assert replace(totals, seconds=0.0) == Totals(2.5, 4 + 6, 21, 15, 0.0, skipped=1, steps=3)


ROWS = [  # of two ranks: losses, and gradients
    ((1.0, 1.0), (1.0, 1.0)),
    ((1.0, NAN), (1.0, 1.0)),
    ((1.0, 1.0), (INF, 1.0)),
    ((NAN, INF), (NAN, 1.0)),
    ((1.0, 1.0), (1.0, 1.0)),
]


@on_ranks(2)
def test_ranks_leave_out_the_same_steps(rank: int, world_size: int) -> None:
    """Whatever only one of them can see; and if they stop, both do. Each rank's gradient is a part
    here, as of shards: the norm of 8 ones is sqrt(8), clipped to 1; two steps of 0.5, and half of
    the first once more."""
    recipe = recipe_of(0.5, 4, 4, max_grad_norm=1.0, on_nan="skip")
    parameters, optimizers = make(recipe, 2, 2, world=World(rank, world_size))
    reasons = []
    for losses, gradients in ROWS:
        feed(parameters, gradients[rank])
        said = optimizers.step(torch.tensor(losses[rank]), 1)
        reasons.append(said and said.split(": ")[1].split(";")[0])
    assert reasons == [
        None,
        "the loss of rank 1 is nan",
        "the norm of the gradient is inf, though the loss is finite",
        "the loss of rank 0 is nan",
        None,
    ]
    weights = parameters[0].tolist()
    assert weights == pytest.approx([1 - 2.5 * 0.5 / math.sqrt(8)] * 2, rel=1e-5)
    recipe.args.on_nan = "stop"
    with pytest.raises(RunError, match=r"^epoch 2, step 2 of 4: the loss of rank 1 is nan"):
        optimizers.step(torch.tensor(NAN if rank else 1.0), 1)


def test_the_next_batch_is_made_after_backward_and_before_the_gradients_are_averaged() -> None:
    """While a GPU computes what the host has launched."""
    (parameter,), optimizers = make(recipe_of(1.0, 9, 9), 1)
    feed([parameter], 0.0)
    done: list[str] = []

    def steps() -> Iterator[Step]:
        for k in range(2):
            done.append(f"batch {k}")
            yield Step([], [], 1, 1, 1)

    def backward(_: Step) -> Any:
        done.append("backward")
        return torch.tensor(1.0)

    model: Any = SimpleNamespace(backward=backward, module=None)
    train(
        model, optimizers, steps(), "", average_gradients_fn=lambda _: done.append("average"),
        before_step=lambda: done.append("seed"), after_step=lambda *_: done.append("save"),
    )  # fmt: skip
    first = ["batch 0", "seed", "backward", "batch 1", "average", "save"]
    assert done == [*first, "seed", "backward", "average", "save"]
