"""Cutting a model: by device, and by cost."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import cast

import pytest
import torch
from torch import nn

from pipeline.partition import WithDevice, _split_module, balance, measure_costs
from tests.pipeline.pipeline_models import Call


def split(model: nn.Sequential) -> tuple[list[nn.Sequential], list[str]]:
    partitions, devices = _split_module(model)
    assert isinstance(partitions, nn.ModuleList)
    return cast("list[nn.Sequential]", list(partitions)), [str(device) for device in devices]


@pytest.mark.a4_2_1
@pytest.mark.a5_2_1
def test_consecutive_layers_of_a_device_form_a_partition() -> None:
    model = nn.Sequential(
        WithDevice(nn.Conv2d(10, 20, 5), "cpu:0"),
        WithDevice(nn.Conv2d(20, 64, 5), "cpu:0"),
        WithDevice(nn.Conv2d(64, 128, 5), "cpu:1"),
    )
    partitions, devices = split(model)
    assert devices == ["cpu:0", "cpu:1"]
    assert [len(partition) for partition in partitions] == [2, 1]
    assert partitions[1][0] is model[2].module


@pytest.mark.a4_2_1
@pytest.mark.a5_2_1
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_layers_on_gpus_need_no_with_device() -> None:
    model = nn.Sequential(
        nn.Conv2d(10, 20, 5).to("cuda:0"),
        WithDevice(nn.Dropout(0.5), "cuda:0"),
        nn.Conv2d(20, 64, 5).to("cuda:1"),
    )
    partitions, devices = split(model)
    assert [len(partition) for partition in partitions] == [2, 1]
    assert [str(next(p.parameters()).device) for p in partitions] == devices


def test_layers_without_parameters_stay_with_the_layer_before() -> None:
    relu = nn.ReLU()  # one object, twice in the model
    model = nn.Sequential(
        nn.Flatten(), WithDevice(nn.Linear(2, 2), "cpu:0"), relu,
        WithDevice(nn.Linear(2, 2), "cpu:1"), relu,
    )  # fmt: skip
    partitions, devices = split(model)
    assert devices == ["cpu:0", "cpu:1"]
    names = [[type(layer).__name__ for layer in partition] for partition in partitions]
    assert names == [["Flatten", "Linear", "ReLU"], ["Linear", "ReLU"]]


def test_nested_sequentials_are_taken_apart() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 2)))
    model = nn.Sequential(WithDevice(inner, "cpu:0"), nn.Sequential(WithDevice(nn.Tanh(), "cpu:1")))
    partitions, devices = split(model)
    assert [len(partition) for partition in partitions] == [3, 1]
    assert devices == ["cpu:0", "cpu:1"]


def test_with_device_is_transparent_outside_a_pipe() -> None:
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    assert torch.equal(WithDevice(layer, "cpu:1")(x), layer(x))


def test_what_cannot_be_cut_says_so() -> None:
    split = nn.Linear(2, 2)
    split.bias = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match=r"Linear has parameters on cpu and meta: .*to\('cpu'\)"):
        _split_module(nn.Sequential(split))
    with pytest.raises(ValueError, match="the module is empty"):
        _split_module(nn.Sequential())
    with pytest.raises(TypeError, match=r"cut from an nn.Sequential, not from Linear"):
        _split_module(nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("costs", [[3, 1, 4, 1, 5, 9, 2, 6], [1, 1, 1, 1, 1, 1, 1, 8], [5, 5]])
def test_balance_finds_the_best_of_all_cuts(costs: list[float]) -> None:
    for n in range(1, len(costs) + 1):
        best = min(
            max(sum(costs[a:b]) for a, b in zip((0, *c), (*c, len(costs)), strict=True))
            for c in combinations(range(1, len(costs)), n - 1)
        )
        sizes = balance(costs, n)
        ends = [sum(sizes[:s]) for s in range(n + 1)]
        assert len(sizes) == n
        assert min(sizes) > 0
        assert ends[-1] == len(costs)
        assert max(sum(costs[a:b]) for a, b in pairwise(ends)) == best


def test_more_stages_than_layers_says_so() -> None:
    with pytest.raises(ValueError, match="3 stages for 2 layers: every stage needs a layer"):
        balance([1.0, 1.0], 3)


def test_measured_costs_tell_a_heavy_layer_and_touch_no_gradient() -> None:
    """The last layer has 8000 times the work of the first: no load of the machine hides that."""
    layers = [nn.Linear(16, 16), Call(torch.tanh), nn.Linear(16, 128_000)]
    costs = measure_costs(layers, torch.randn(64, 16), lambda output: output.sum())
    assert len(costs) == 3
    assert costs[2] > costs[0] > 0
    assert [p.grad for layer in layers for p in layer.parameters()] == [None] * 4
