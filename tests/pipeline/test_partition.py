"""Cutting a model: by device, and by cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.partition import WithDevice, _split_module, balance, measure_costs
from tests.odd_layers import linear
from tests.pipeline.pipeline_models import Call

RELU = nn.ReLU()
CONVOLUTIONS = [WithDevice(nn.Conv2d(10, 10, 5), f"cpu:{k}") for k in (0, 0, 1)]
NESTED = [
    WithDevice(nn.Sequential(linear(), nn.Sequential(nn.ELU(), linear())), "cpu:0"),
    nn.Sequential(WithDevice(RELU, "cpu:1")),
]
# One without parameters stays with the one before it, the first with the next; one appears twice.
SOME_WITH = [nn.Flatten(), WithDevice(linear(), "cpu:0"), RELU, WithDevice(linear(), "cpu:1"), RELU]
WITHOUT = [linear(), nn.Dropout(), linear().to("meta")]  # where the parameters are
AND_BACK = [*WITHOUT, linear()]


@pytest.mark.a4_2_1
@pytest.mark.a5_2_1
@pytest.mark.parametrize(
    ("layers", "expected", "devices"),
    [
        (CONVOLUTIONS, "Conv2d Conv2d, Conv2d", "cpu:0, cpu:1"),
        (NESTED, "Linear ELU Linear, ReLU", "cpu:0, cpu:1"),
        (SOME_WITH, "Flatten Linear ReLU, Linear ReLU", "cpu:0, cpu:1"),
        (WITHOUT, "Linear Dropout, Linear", "cpu, meta"),
        (AND_BACK, "Linear Dropout, Linear, Linear", "cpu, meta, cpu"),
    ],
)
def test_consecutive_layers_of_a_device_form_a_partition(
    layers: list[nn.Module], expected: str, devices: str
) -> None:
    parts: Any
    parts, found = _split_module(nn.Sequential(*layers))
    names = [" ".join(type(layer).__name__ for layer in part) for part in parts]
    assert isinstance(parts, nn.ModuleList)
    assert (", ".join(names), ", ".join(map(str, found))) == (expected, devices)


def test_what_cannot_be_cut_says_so() -> None:
    two_devices = nn.Linear(2, 2)
    two_devices.bias = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match=r"Linear has parameters on cpu and meta: .*to\('cpu'\)"):
        _split_module(nn.Sequential(two_devices))
    with pytest.raises(ValueError, match="3 stages for 2 layers: every stage needs a layer"):
        balance([1.0, 1.0], 3)


@pytest.mark.parametrize(
    "costs", [[3, 1, 4, 1, 5, 9, 2, 6], [1, 1, 1, 1, 1, 1, 1, 8], [8, 1, 1, 1]]
)
def test_balance_finds_the_best_of_all_cuts(costs: list[float]) -> None:
    def costliest(ends: Sequence[int]) -> float:
        return max(sum(costs[a:b]) for a, b in pairwise(ends))

    for n in range(1, len(costs) + 1):
        cuts = combinations(range(1, len(costs)), n - 1)
        sizes = balance(costs, n)
        assert (len(sizes), sum(sizes), min(sizes) > 0) == (n, len(costs), True)
        best = min(costliest((0, *cut, len(costs))) for cut in cuts)
        assert costliest([0, *accumulate(sizes)]) == best


def test_measured_costs_tell_a_heavy_layer_and_touch_no_gradient() -> None:
    """The last layer has 8000 times the work of the first: no load of the machine hides that."""
    layers = [nn.Linear(16, 16), Call(torch.tanh), nn.Linear(16, 128_000)]
    costs = measure_costs(layers, torch.randn(64, 16), lambda output: output.sum())
    assert len(costs) == 3
    assert costs[2] > costs[0] > 0
    assert [p.grad for layer in layers for p in layer.parameters()] == [None] * 4
