"""Cuts a model into stages: by the devices of its layers, or into stages of equal cost.

`_split_module` joins consecutive layers of one device to a partition. A layer's device is the
device of its parameters, or is given by `WithDevice`. Logical devices `cpu:0`, `cpu:1` need
`WithDevice`, since a tensor moved to them reports `cpu`.

A pipeline is as fast as its slowest stage, so `balance` cuts n contiguous stages with the least
maximal cost: exact, by dynamic programming over (layers, stages), O(n L^2).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from runtime.guards import tensors_of
from runtime.linear import WeightsMayWait

from .stage import Stage


class WithDevice(nn.Module):
    """A layer with the device to run it on: `WithDevice(nn.Dropout(), 'cpu:1')`."""

    def __init__(self, module: nn.Module, device: torch.device | str) -> None:
        super().__init__()
        self.module = module
        self.device = torch.device(device)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


def _retrieve_device(module: nn.Module) -> torch.device | None:
    """The one device of all parameters and buffers; None if there are none."""
    devices = [*{t.device: None for t in (*module.parameters(), *module.buffers())}]
    if len(devices) > 1:
        raise ValueError(
            f"{type(module).__name__} has parameters on {' and '.join(map(str, devices))}: a layer "
            f"runs on one device, e.g. module.to('{devices[0]}')"
        )
    return devices[0] if devices else None


def _split_module(modules: nn.Sequential) -> tuple[nn.ModuleList, list[torch.device]]:
    """Cuts a Sequential where the device changes: (partitions, their devices).

    Nested Sequentials are flattened. A layer without parameters and without `WithDevice` stays
    with the previous layer (the first layer: with the next). A layer that `WithDevice` places on a
    GPU is moved there.
    """
    layers = [(layer, _placed(layer, device)) for layer, device in flatten(modules)]
    first = next((device for _, device in layers if device is not None), torch.device("cpu"))
    partitions: list[list[nn.Module]] = []
    devices: list[torch.device] = []
    for layer, device in layers:
        if not devices or device not in (None, devices[-1]):  # a new partition
            partitions.append([])
            devices.append(device or first)
        partitions[-1].append(layer)
    return nn.ModuleList(nn.Sequential(*layers) for layers in partitions), devices


def split_into(modules: nn.Sequential, sizes: Sequence[int]) -> list[nn.Sequential]:
    """`sizes[s]` layers for each stage s; a nested Sequential counts as one layer and is then
    flattened. ValueError unless the sizes add up to the layers."""
    parts = [flatten(nn.Sequential(*part)) for part in by_stage([*modules], sizes)]
    return [nn.Sequential(*(layer for layer, _ in part)) for part in parts]


def by_stage(layers: Sequence[nn.Module], sizes: Sequence[int]) -> list[Sequence[nn.Module]]:
    """The next `sizes[s]` layers for each stage s."""
    if sum(sizes) != len(layers) or min(sizes, default=0) < 1:
        raise ValueError(
            f"sizes {list(sizes)} for {len(layers)} layers: one number per stage, each at least "
            "1, which add up to the layers"
        )
    return [layers[end - n : end] for n, end in zip(sizes, accumulate(sizes), strict=True)]


def flatten(
    modules: nn.Sequential, inherited: torch.device | None = None
) -> Iterator[tuple[nn.Module, torch.device | None]]:
    """The layers of nested Sequentials, each with its device from `WithDevice`, if any.

    Every runtime numbers the layers this way; the number of a layer seeds its dropout.
    """
    for layer in modules:  # not named_children(), which skips a repeated layer
        device = inherited
        while isinstance(layer, WithDevice):
            device = device or layer.device  # the outermost wins
            layer = layer.module
        # A subclass may have its own forward; an empty Sequential is a layer, the identity.
        if type(layer) is nn.Sequential and len(layer) > 0:
            yield from flatten(layer, device)
        else:
            yield layer, device


def _placed(layer: nn.Module, device: torch.device | None) -> torch.device | None:
    """The device of a layer, which is moved there if `WithDevice` names a GPU."""
    if device is not None and device.type != "cpu":
        layer.to(device)
    return device or _retrieve_device(layer)


def holders(modules: nn.Sequential) -> list[nn.Module]:
    """The modules that `flatten` takes apart, which a pipeline never calls: Sequentials and
    `WithDevice` wrappers."""
    called = {m for layer, _ in flatten(modules) for m in layer.modules()}
    return [m for m in modules.modules() if m not in called]


def balance(costs: Sequence[float], num_stages: int) -> list[int]:
    """Layers per stage that minimize the largest sum of `costs` in a stage."""
    L = len(costs)
    if not 1 <= num_stages <= L:
        raise ValueError(
            f"{num_stages} stages for {L} layers: every stage needs a layer, so 1 to {L} stages"
        )
    before = [0.0, *accumulate(costs)]  # before[k]: cost of the first k layers

    @cache
    def best(k: int, n: int) -> tuple[float, list[int]]:
        """Returns the cost of the costliest stage, and all sizes, of the best cut of the first k
        layers into n stages."""
        if n == 1:
            return before[k], [k]

        def costliest(c: int) -> float:
            """The cost of the costliest stage, with c layers before the last stage."""
            return max(best(c, n - 1)[0], before[k] - before[c])

        cut = min(range(n - 1, k), key=costliest)  # a layer per stage at least
        return costliest(cut), [*best(cut, n - 1)[1], k - cut]

    return best(L, num_stages)[1]


def measure_costs(
    layers: Sequence[nn.Module],
    sample: Any,
    loss_fn: Callable[[Any], Tensor],
    filled: Callable[[nn.Module], nn.Module] = lambda layer: layer,
) -> list[float]:
    """Seconds of forward and backward of each layer, the least of three after a warm-up. `.grad`
    does not change. The clock is read after waiting for the GPU.

    Args:
        sample: a micro-batch.
        loss_fn: of the output; it counts towards the last layer.
        filled: gives a layer memory, for as long as it is measured.
    """
    rounds = []
    for _ in range(1 + 3):  # over all layers: a short disturbance spoils one round of a few
        value, times = sample, []
        for k, layer in enumerate(layers):
            is_last = k + 1 == len(layers)
            value, seconds = _forward_backward(filled(layer), value, loss_fn if is_last else None)
            times.append(seconds)
        rounds.append(times)
    return [min(times) for times in zip(*rounds[1:], strict=True)]  # without the warm-up


def _forward_backward(
    layer: nn.Module, value: Any, loss_fn: Callable[[Any], Any] | None
) -> tuple[Any, float]:
    """One forward and backward, as a stage runs them; returns the detached output, the next layer's
    input, and the seconds."""
    device = next(t.device for t in (*layer.parameters(), *tensors_of(value)))
    start = time.perf_counter()
    stage = Stage(1, nn.Sequential(layer), device, checked=False)
    if loss_fn is not None:
        stage.tail = lambda _, output: loss_fn(output)
    with WeightsMayWait([layer]):
        with torch.enable_grad():
            output = stage.forward(0, value)
        ends = pytree.tree_leaves(output)
        stage.backward(0, [torch.ones_like(t) if isinstance(t, Tensor) else None for t in ends])
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return output, time.perf_counter() - start
