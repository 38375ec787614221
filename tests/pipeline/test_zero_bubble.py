"""Backward in two halves: the same gradients, to the bit, and the memory that zb promises."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.partition import place
from pipeline.pipe import Pipe
from pipeline.stage import Stage
from tests.pipeline.pipeline_models import (
    assert_close,
    assert_same_bits,
    batch,
    cut,
    square_error,
)
from tests.pipeline.test_gpt2_pipeline import by_name, gpt2, sentences
from training.model import gpt2_layers, loss_of_targets


def step(pipe: Pipe, schedule: str, m: int) -> Tensor:
    ids, labels, weights = sentences()
    return pipe.train_step(
        (ids, weights), (labels, weights), loss_of_targets, schedule,
        num_microbatches=m, scale=1 / weights.sum(),
    )  # fmt: skip


def pipe_of(model: Any, n: int) -> Pipe:
    sizes = {1: [8], 2: [5, 3], 3: [1, 3, 4]}[n]
    module, replicas = place(gpt2_layers(model), sizes, [f"cpu:{s}" for s in range(n)])
    return Pipe(module, replicas=replicas)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_bits_are_those_of_1f1b_with_dropout_too_and_those_of_a_second_run(n: int) -> None:
    runs = []
    for schedule in ("1f1b", "zb", "zb"):
        model = gpt2(0.1).train()
        with pipe_of(model, n) as pipe:
            torch.manual_seed(5)
            loss = step(pipe, schedule, 4)
        runs.append(by_name(model) | {"loss": loss})
    assert_same_bits(runs[1], runs[0])
    assert_same_bits(runs[2], runs[0])


def test_under_autocast_the_bits_are_those_of_1f1b_under_autocast() -> None:
    runs = []
    for schedule in ("1f1b", "zb"):
        model = gpt2().float()
        with pipe_of(model, 2) as pipe, torch.autocast("cpu", torch.bfloat16):
            loss = step(pipe, schedule, 4)
        runs.append(by_name(model) | {"loss": loss})
    assert {gradient.dtype for name, gradient in runs[1].items() if name != "loss"} == {
        torch.float32
    }
    assert_same_bits(runs[1], runs[0])


class Odd(nn.Module):
    """Weights used twice, by products and otherwise; frozen ones; x of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4)
        self.partly, self.bare = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.frozen.requires_grad_(False)
        self.partly.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.twice(x)
        h = self.twice(self.twice(x).tanh()) * self.twice.bias + shift
        h = self.partly(self.frozen(h)).unsqueeze(1).expand(-1, 3, -1).sigmoid()
        h = F.linear(h, self.bare.weight, bias=None) @ self.bare.weight
        return h.mean(1)


@pytest.mark.parametrize("autocast", [False, True])
def test_weights_used_twice_frozen_or_not_by_a_product_alone(autocast: bool) -> None:
    runs, x = [], batch(8)[0]
    for schedule in ("1f1b", "zb"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(Odd(), nn.Tanh(), Odd())
        model = model if autocast else model.double()
        with (
            Pipe(cut(model, (1, 2))) as pipe,
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            pipe.train_step(x.to(model[0].bare.weight.dtype), x, square_error, schedule, 3)
        runs.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert all(gradient is not None for gradient in runs[0].values())
    if autocast:  # a weight's uses are summed in bf16 by autograd, partly in float32 here: 2^-8
        for name, gradient in runs[0].items():
            difference = (runs[1][name] - gradient).abs().max()
            assert difference <= 2**-6 * gradient.abs().max(), name
    else:  # three terms of one weight may be added in another order
        assert_close(runs[1], runs[0])


def test_a_half_frees_what_the_other_does_not_need() -> None:
    """After I only x and dy of products are held, after W nothing: the caches are empty."""
    saved: list[weakref.ref[Tensor]] = []

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            token = h.clone()
            saved.append(weakref.ref(token))
            ctx.save_for_backward(token)
            return h * 2

        @staticmethod
        def backward(_: Any, g: Tensor) -> Tensor:
            return g * 2

    class Keep(nn.Module):
        def forward(self, h: Tensor) -> Any:
            return Save.apply(h)

    stage = Stage(0, nn.Sequential(nn.Linear(4, 3).double(), Keep()), torch.device("cpu"))
    output = stage.forward(0, batch(8)[0])
    assert [token() is None for token in saved] == [False]
    products = stage._kept[0].graphs[0].products
    gc.disable()  # references alone must do
    try:
        assert stage.backward_input(0, [torch.ones_like(output)]) == [None]
        assert [token() for token in saved] == [None]
        held = [weakref.ref(products[0].x), weakref.ref(products[0].dy)]
        assert (stage.alive, len(products), stage.gradients) == (1, 1, [None, None])
        stage.backward_weight(0)
        assert [token() for token in held] == [None, None]
    finally:
        gc.enable()
    assert (stage.alive, stage.peak_alive) == (0, 1)
    assert all(gradient is not None for gradient in stage.gradients)


def test_halves_out_of_order_say_so() -> None:
    stage = Stage(0, nn.Sequential(nn.Linear(4, 3).double()), torch.device("cpu"))
    with pytest.raises(RuntimeError, match="micro-batch 0 has no weight gradients to come"):
        stage.backward_weight(0)
    output = stage.forward(0, batch(8)[0])
    with pytest.raises(RuntimeError, match="no weight gradients to come on stage 0"):
        stage.backward_weight(0)
    stage.backward_input(0, [torch.ones_like(output)])
    with pytest.raises(RuntimeError, match="micro-batch 0 holds no graph on stage 0"):
        stage.backward_input(0, [torch.ones_like(output)])
