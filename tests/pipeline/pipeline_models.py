"""Small models for the tests of the pipeline, and how to cut and compare them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.partition import WithDevice

CPU = ("cpu:0", "cpu:1")
DEVICES = [CPU]
if torch.cuda.device_count() > 0:
    DEVICES.append(("cpu:0", "cuda:0"))
if torch.cuda.device_count() > 1:
    DEVICES.append(("cuda:0", "cuda:1"))


def tower(seed: int = 0) -> nn.Sequential:
    """Six layers, 4 -> 3 features, float64."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 6), nn.Linear(6, 3)
    ).double()


def cut(
    model: nn.Sequential, sizes: Sequence[int] = (2, 4), devices: Sequence[str] = CPU
) -> nn.Sequential:
    """The same layers, ``sizes[s]`` of them on ``devices[s]``."""
    layers = iter(model)
    return nn.Sequential(
        *(
            WithDevice(next(layers), device)
            for size, device in zip(sizes, devices, strict=True)
            for _ in range(size)
        )
    )


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(size, 4, dtype=torch.float64, generator=generator)
    return x, torch.randn(size, 3, dtype=torch.float64, generator=generator)


def square_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """By name; `zero` starts anew."""
    return {name: p.grad for name, p in model.named_parameters()}


def take_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    result = gradients(model)
    for p in model.parameters():
        p.grad = None
    return result


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Float64, sums of at most a few hundred terms near 1 in another order: 1e-12 is ample."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        other = found[name]
        if value is None or other is None:
            assert value is other, name
        else:
            difference = (other.cpu() - value.cpu()).abs().max()
            assert difference <= 1e-12 * max(1.0, value.abs().max()), name


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert different == []


def pipe_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("pipe-"))


class Call(nn.Module):
    """A layer without parameters that calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)
