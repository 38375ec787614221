"""Layers on the devices of one process, and what they share.

A parameter on several stages (tied weights) gets one gradient: the sum, in the order of the stages.
If its stages are on different GPUs, each has a copy; `replicas` maps a copy to the original.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from runtime.graph import Gradients, memory_of

from .partition import WithDevice, _split_module, by_stage, split_into
from .stage import Stage

Replicas = Mapping[nn.Parameter, nn.Parameter]  # copy -> original


def split_by_sizes(
    modules: nn.Sequential, sizes: Sequence[int]
) -> tuple[nn.ModuleList, list[torch.device]]:
    """Like `_split_module`, but cut by `sizes` like `split_into`; a stage is on the device of its
    first layer."""
    parts = [_split_module(nn.Sequential(*part)) for part in by_stage([*modules], sizes)]
    return nn.ModuleList(split_into(modules, sizes)), [devices[0] for _, devices in parts]


def place_layers(
    layers: Sequence[nn.Module], sizes: Sequence[int], devices: Sequence[str | torch.device]
) -> tuple[nn.Sequential, dict[nn.Parameter, nn.Parameter]]:
    """Puts `sizes[s]` layers on `devices[s]`; returns the Sequential for a `Pipe`, and replicas.

    A parameter shared by stages on different GPUs stays on the first of these stages; the others
    get a copy, put into their layers in place: `replicas[copy]` is the original.
    """
    home: dict[nn.Parameter, torch.device] = {}  # of each parameter, its first stage's
    replicas: dict[nn.Parameter, nn.Parameter] = {}
    placed: list[nn.Module] = []
    for stage, name in zip(by_stage(layers, sizes), devices, strict=True):
        device = torch.device(name)  # may be logical: cpu:1
        physical = memory_of(device)
        copies: dict[nn.Parameter, nn.Parameter] = {}  # original -> copy, for this stage
        for layer in stage:
            for module in layer.modules():
                for key, parameter in list(module._parameters.items()):
                    if parameter is not None and home.setdefault(parameter, physical) != physical:
                        if parameter not in copies:
                            copies[parameter] = _copy(parameter, physical)
                        module._parameters[key] = copies[parameter]
            # after the swap: `to` would move the original, too
            placed.append(WithDevice(layer.to(physical), device))
        replicas.update((copy, original) for original, copy in copies.items())
    return nn.Sequential(*placed), replicas


def _copy(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to(device, copy=True), parameter.requires_grad)


def gradients_by_stage(stages: Sequence[Stage], replicas: Replicas) -> list[Gradients]:
    """Takes the sums from the stages: for each stage those of its own parameters; then, as the last
    entry, those of tied parameters."""
    own: list[Gradients] = []
    for stage in stages:
        taken = ((replicas.get(p, p), gradient) for p, gradient in stage.take_gradients().items())
        own.append({p: gradient.to(p.device) for p, gradient in taken})  # from a copy's GPU
    stages_of = Counter(p for gradients in own for p in gradients)  # per original, its stages
    tied: Gradients = {}
    for gradients in own:  # in the order of the stages
        for p in [p for p in gradients if stages_of[p] > 1]:
            gradient = gradients.pop(p).to_dense()  # an embedding's may be sparse, a head's is not
            tied[p] = tied[p] + gradient if p in tied else gradient
    return [*own, tied]
