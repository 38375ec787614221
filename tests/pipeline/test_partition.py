"""Cutting a model: by device, and by cost."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.partition import WithDevice, _split_module, balance, measure_costs
from tests.pipeline.pipeline_models import Call


def split(model: nn.Sequential) -> tuple[list[list[str]], list[str]]:
    """Types of layers by partition, and devices."""
    partitions, devices = _split_module(model)
    assert isinstance(partitions, nn.ModuleList)
    parts: Any = partitions
    names = [[type(layer).__name__ for layer in partition] for partition in parts]
    return names, [str(device) for device in devices]


def linear() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.mark.a4_2_1
@pytest.mark.a5_2_1
def test_consecutive_layers_of_a_device_form_a_partition() -> None:
    model = nn.Sequential(
        WithDevice(nn.Conv2d(10, 20, 5), "cpu:0"),
        WithDevice(nn.Conv2d(20, 64, 5), "cpu:0"),
        WithDevice(nn.Conv2d(64, 128, 5), "cpu:1"),
    )
    assert split(model) == ([["Conv2d", "Conv2d"], ["Conv2d"]], ["cpu:0", "cpu:1"])
    last: Any = _split_module(model)[0][1]
    assert last[0] is model[2].module


def test_layers_on_real_devices_need_no_with_device() -> None:
    model = nn.Sequential(linear(), nn.Dropout(0.5), linear().to("meta"))
    assert split(model) == ([["Linear", "Dropout"], ["Linear"]], ["cpu", "meta"])


RELU = nn.ReLU()  # one object, twice in the model
TANH = nn.Sequential(WithDevice(nn.Tanh(), "cpu:1"))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (
            [
                nn.Flatten(),
                WithDevice(linear(), "cpu:0"),
                RELU,
                WithDevice(linear(), "cpu:1"),
                RELU,
            ],
            [["Flatten", "Linear", "ReLU"], ["Linear", "ReLU"]],
        ),
        (
            [WithDevice(nn.Sequential(linear(), nn.Sequential(nn.ELU(), linear())), "cpu:0"), TANH],
            [["Linear", "ELU", "Linear"], ["Tanh"]],
        ),
    ],
)
def test_layers_without_parameters_and_nested_sequentials(
    layers: list[nn.Module], expected: list[list[str]]
) -> None:
    assert split(nn.Sequential(*layers)) == (expected, ["cpu:0", "cpu:1"])


def test_what_cannot_be_cut_says_so() -> None:
    two_devices = nn.Linear(2, 2)
    two_devices.bias = nn.Parameter(torch.empty(2, device="meta"))
    module: Any
    for module, said in (
        (nn.Sequential(two_devices), r"Linear has parameters on cpu and meta: .*to\('cpu'\)"),
        (nn.Sequential(), "the module is empty"),
        (linear(), r"cut from an nn.Sequential, not from Linear"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            _split_module(module)
    with pytest.raises(ValueError, match="3 stages for 2 layers: every stage needs a layer"):
        balance([1.0, 1.0], 3)


@pytest.mark.parametrize("costs", [[3, 1, 4, 1, 5, 9, 2, 6], [1, 1, 1, 1, 1, 1, 1, 8], [5, 5]])
def test_balance_finds_the_best_of_all_cuts(costs: list[float]) -> None:
    for n in range(1, len(costs) + 1):
        best = min(
            max(sum(costs[a:b]) for a, b in pairwise((0, *c, len(costs))))
            for c in combinations(range(1, len(costs)), n - 1)
        )
        sizes = balance(costs, n)
        ends = [sum(sizes[:s]) for s in range(n + 1)]
        assert (len(sizes), ends[-1]) == (n, len(costs))
        assert min(sizes) > 0
        assert max(sum(costs[a:b]) for a, b in pairwise(ends)) == best


def test_measured_costs_tell_a_heavy_layer_and_touch_no_gradient() -> None:
    """The last layer has 8000 times the work of the first: no load of the machine hides that."""
    layers = [nn.Linear(16, 16), Call(torch.tanh), nn.Linear(16, 128_000)]
    costs = measure_costs(layers, torch.randn(64, 16), lambda output: output.sum())
    assert len(costs) == 3
    assert costs[2] > costs[0] > 0
    assert [p.grad for layer in layers for p in layer.parameters()] == [None] * 4
