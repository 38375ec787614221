"""What a dry forward finds is what a forward makes, for any shape, and it touches nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.analysis import Analysis, analyze_communication_with_partitions, describe
from tests.pipeline.pipeline_models import Call
from tests.pipeline.test_gpt2_pipeline import gpt2
from training.model import gpt2_layers

CPU = torch.device("cpu")


def _gpt2_parts(meta: bool) -> list[nn.Sequential]:
    with torch.device("meta" if meta else "cpu"):
        layers = gpt2_layers(gpt2(0.1).train())
    return [nn.Sequential(*layers[:1]), nn.Sequential(*layers[1:3]), nn.Sequential(*layers[3:])]


def _input(B: int, T: int) -> Any:
    return torch.zeros(B, T, dtype=torch.long), torch.ones(B, T, dtype=torch.float64)


def _made(parts: list[nn.Sequential], value: Any) -> list[Any]:
    found = []
    for part in parts:
        value = part(value)
        found.append(describe(value))
    return found


def test_gpt2_s_messages_in_words() -> None:
    first, second = analyze_communication_with_partitions(_gpt2_parts(True)[:2], _input(3, 5), CPU)
    for message in (first, second):
        assert [(kind.shape, kind.dtype, kind.requires_grad) for kind in message.tensors] == [
            ((3, 5, 16), torch.float64, True),
            ((3, 5), torch.float64, False),
        ]


class Narrow(nn.Module):
    """Its output has autocast's type, unlike a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, value: Any) -> Any:
        return self.layer(value[0]), value[1]


@pytest.mark.parametrize("autocast", [False, True])
def test_any_shape_is_found_with_two_dry_forwards_or_three(autocast: bool) -> None:
    """The sizes of 16 and 2 are those of the width and the heads: no size is mistaken for one."""
    real = _gpt2_parts(False)[:2]
    if autocast:
        real = [part.float() for part in real]
        real[1].append(Narrow())
    analysis = Analysis(real, CPU)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for B, T in [(4, 8), (4, 8), (3, 5), (1, 16), (16, 2), (2, 2), (13, 13), (5, 8), (1, 1)]:
            assert analysis.messages(_input(B, T)) == _made(real, _input(B, T)), (B, T)
    assert analysis.dry_forwards <= 3
    if autocast:
        assert analysis.messages(_input(4, 8))[1].tensors[0].dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert analysis.messages(_input(4, 8))[1].tensors[0].dtype == torch.bfloat16


def _strided(x: Any) -> Any:
    return x[:, ::2]


def _flat(x: Any) -> Any:
    return x.flatten()


def _of_constant_size(x: Any) -> Any:
    return x.sum(0)[:1] + torch.zeros(13)


@pytest.mark.parametrize(("function", "most"), [(_strided, 6), (_flat, 6), (_of_constant_size, 2)])
def test_sizes_that_are_no_size_of_the_input(function: Callable[[Any], Any], most: int) -> None:
    """Half a length, a product of two: found, with a dry forward per shape. 13 is one of the primes
    that stand for sizes, and here a constant."""
    parts = [nn.Sequential(Call(function))]
    analysis = Analysis(parts, CPU)
    shapes = [(4, 8), (3, 5), (4, 9), (13, 13)]
    for B, T in shapes:
        x = torch.ones(B, T)
        assert analysis.messages(x) == _made(parts, x)
    assert analysis.dry_forwards <= most + 1
    exact = Analysis(parts, CPU, generalize=False)
    for B, T in shapes:
        assert exact.messages(torch.ones(B, T)) == _made(parts, torch.ones(B, T))
    assert exact.dry_forwards == 4


def test_a_size_that_is_a_prime_and_a_constant_too() -> None:
    """A first length of 13, which could stand for any, beside features that are always 13."""
    parts = [nn.Sequential(nn.Linear(13, 13), Call(lambda x: (x, x.new_zeros(17))))]
    analysis = Analysis(parts, CPU)
    for B, T in [(2, 13), (2, 5), (2, 13), (4, 8), (13, 13)]:
        x = torch.ones(B, T, 13)
        assert analysis.messages(x) == _made(parts, x), (B, T)
    assert analysis.dry_forwards <= 3


def test_what_is_frozen_later_is_found() -> None:
    parts = [nn.Sequential(nn.Linear(3, 3))]
    analysis, x = Analysis(parts, CPU), torch.ones(2, 3)
    for wanted in (True, False, True):
        parts[0].requires_grad_(wanted)
        assert analysis.messages(x) == _made(parts, x)
        assert analysis.messages(x)[0].tensors[0].requires_grad is wanted
    assert analysis.dry_forwards == 2


def test_nothing_is_drawn_changed_or_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    analyze_communication_with_partitions([model], torch.ones(3, 4), CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())


def test_a_shape_that_depends_on_contents_is_named() -> None:
    parts = _gpt2_parts(True)
    with pytest.raises(ValueError, match=r"stage 2 \(Head\) .* only the last stage may, so cut"):
        analyze_communication_with_partitions(parts, _input(3, 5), CPU)


def test_training_and_evaluation_may_hand_on_other_shapes() -> None:
    class Shorter(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :2] if self.training else x

    part = nn.Sequential(Shorter())
    for generalize in (True, False):
        analysis = Analysis([part], CPU, generalize)
        x = torch.zeros(4, 6)
        for training in (True, False, True):
            part.train(training)
            assert analysis.messages(x) == _made([part], x)


def test_a_list_may_be_longer_for_a_larger_batch() -> None:
    part = nn.Sequential(Call(lambda x: list(x.split(2))))
    analysis = Analysis([part], CPU)
    for size in (4, 7, 2):
        x = torch.zeros(size, 3)
        assert analysis.messages(x) == _made([part], x)
