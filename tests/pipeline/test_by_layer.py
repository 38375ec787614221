"""A graph per layer: the bits of a graph per stage, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.live_bytes import LiveBytes
from pipeline.stage import Stage
from tests.pipeline.pipeline_models import Call, assert_same_bits, batch, square_error
from tests.pipeline.test_gpt2_pipeline import gpt2, sentences
from training.model import gpt2_layers, loss_of_targets

CPU = torch.device("cpu")


def _run(stage: Stage, x: list[Any], loss: Any, halves: bool) -> list[Tensor | None]:
    for i, part in enumerate(x):
        stage.forward(i, part, lambda output, i=i: loss(output, i))  # type: ignore[misc]
    for i in range(len(x)):
        one = [torch.ones((), dtype=torch.float64)]
        if halves:
            stage.backward_input(i, one)
        else:
            stage.backward(i, one)
    for i in range(len(x) if halves else 0):
        stage.backward_weight(i)
    assert stage.alive == 0
    return stage.gradients


@pytest.mark.parametrize("halves", [False, True])
def test_the_bits_are_those_of_a_graph_per_stage(halves: bool) -> None:
    """All of GPT-2 on one stage: the embedding's weight is used by the first layer and the last."""
    ids, labels, weights = sentences()
    cut = [(ids[k : k + 2], weights[k : k + 2], labels[k : k + 2]) for k in (0, 2, 4)]

    def loss(output: Tensor, i: int) -> Tensor:
        return loss_of_targets(output, (cut[i][2], cut[i][1]))

    found = []
    for by_layer in (False, True):
        model = gpt2(0.1).train()
        torch.manual_seed(3)
        stage = Stage(0, nn.Sequential(*gpt2_layers(model)), CPU, by_layer=by_layer)
        gradients = _run(stage, [(a, b) for a, b, _ in cut], loss, halves)
        assert sum(g is not None for g in gradients) == len(list(model.parameters()))
        found.append({str(k): g for k, g in enumerate(gradients)})
    assert_same_bits(found[1], found[0])


def test_a_parameter_that_layers_share_and_that_is_another_s_gradient() -> None:
    """y = x + p: the gradients of p, of q and of x are one tensor, and sums are written to."""

    class Add(nn.Module):
        def __init__(self, *terms: nn.Parameter) -> None:
            super().__init__()
            self.terms = nn.ParameterList(terms)

        def forward(self, x: Tensor) -> Tensor:
            for p in self.terms:
                x = x + p
            return x

    x, _ = batch(4)
    p, q = (nn.Parameter(torch.zeros(4, 4, dtype=torch.float64)) for _ in "pq")
    for by_layer in (False, True):
        stage = Stage(0, nn.Sequential(Add(p, q), Call(torch.sin), Add(p)), CPU, by_layer=by_layer)
        for i in range(3):
            output = stage.forward(i, x.clone().requires_grad_())
            dy = torch.ones_like(output)
            (dx,) = stage.backward(i, [dy])
            assert dx is not None and torch.equal(dx, x.cos())  # p and q are 0
            assert torch.equal(dy, torch.ones_like(dy))
        totals = dict(zip(stage.parameters, stage.gradients, strict=True))
        torch.testing.assert_close(totals[p], 3 * (x.cos() + 1), rtol=0, atol=1e-14)
        torch.testing.assert_close(totals[q], 3 * x.cos(), rtol=0, atol=1e-14)


WIDTH, LAYERS, ROWS = 64, 8, 4
WEIGHT = WIDTH * WIDTH * 8  # bytes
OUTPUT = ROWS * WIDTH * 8


class _Dense(nn.Module):
    """A product that the halved backward does not see, so that all of it is autograd's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _peak_of_backward(by_layer: bool) -> int:
    """In the second micro-batch, when all totals exist."""
    model = nn.Sequential(*(_Dense() for _ in range(LAYERS)))
    stage = Stage(0, model, CPU, by_layer=by_layer)
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    one = [torch.ones((), dtype=torch.float64)]
    stage.forward(0, x, lambda y: square_error(y, x))
    stage.backward(0, one)
    live = LiveBytes()
    with live:
        stage.forward(1, x, lambda y: square_error(y, x))
        live.peak = live.now
        stage.backward(1, one)
    return live.peak


def test_backward_by_layer_holds_the_weight_gradients_of_one_layer_at_a_time() -> None:
    """In one graph those of all eight, until its end. Activations are small here: at most two per
    layer, and five for the loss."""
    assert _peak_of_backward(False) >= LAYERS * WEIGHT
    assert _peak_of_backward(True) <= 2 * WEIGHT + (2 * LAYERS + 5) * OUTPUT
