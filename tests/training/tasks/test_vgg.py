"""VGG16: its shape is the published one, its weights depend on seed and name, and it can learn."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from training.tasks.gpt2 import loss_of_targets
from training.tasks.vgg import initialize_vgg_parameter, vgg16, vgg_layers


def initialized(width: int, seed: int = 0, num_classes: int = 10) -> nn.Sequential:
    net = vgg16(num_classes, width)
    for name, p in net.named_parameters():
        initialize_vgg_parameter(name, p, seed)
    return net


def test_shapes_are_those_of_the_paper_in_sixteen_layers() -> None:
    with torch.device("meta"):
        net = vgg16()
    channels = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    names = [f"conv{stage}_{i + 1}" for stage, n in enumerate((2, 2, 3, 3, 3), 1) for i in range(n)]
    want: dict[str, tuple[int, ...]] = {}
    for name, inputs, outputs in zip(names, channels[:-1], channels[1:], strict=True):
        want |= {f"{name}.weight": (outputs, inputs, 3, 3), f"{name}.bias": (outputs,)}
    for name, outputs in (("fc6", 512), ("fc7", 512), ("fc8", 10)):
        want |= {f"{name}.weight": (outputs, 512), f"{name}.bias": (outputs,)}
    assert {name: tuple(p.shape) for name, p in net.named_parameters()} == want
    assert sum(p.numel() for p in net.parameters()) == 15_245_130  # 14,714,688 in convolutions
    layers = [list(layer.children()) for layer in vgg_layers(net)]
    assert [type(layer[0]).__name__ for layer in layers] == ["Conv2d"] * 13 + ["Linear"] * 3
    assert [module for layer in layers for module in layer] == list(net)


def test_weights_depend_on_seed_and_name_alone() -> None:
    first, other = (dict(initialized(4, seed).named_parameters()) for seed in (3, 4))
    weights = [name for name in first if name.endswith("weight")]
    assert [name for name in weights if torch.equal(first[name], other[name])] == []
    assert not torch.equal(first["conv5_1.weight"], first["conv5_2.weight"])
    alone = torch.empty(32, 32, 3, 3)
    initialize_vgg_parameter("conv5_2.weight", alone, 3)
    assert torch.equal(alone, first["conv5_2.weight"])


def test_layers_with_as_many_outputs_as_inputs_start_near_the_identity() -> None:
    near = [
        name
        for name, p in initialized(width=16).named_parameters()
        if name.endswith("weight")
        and p.shape[0] == p.shape[1]
        and (p if p.dim() == 2 else p[:, :, 1, 1]).diagonal().mean().item() == pytest.approx(1, 0.1)
    ]
    square = ["1_2", "2_2", "3_2", "3_3", "4_2", "4_3", "5_1", "5_2", "5_3"]
    assert near == [*(f"conv{i}.weight" for i in square), "fc6.weight", "fc7.weight"]


@pytest.mark.parametrize("num_classes", [10, 128])
def test_the_first_loss_is_that_of_guessing(num_classes: int) -> None:
    """A sum over pictures. Also where the last layer has as many outputs as inputs, and in bf16."""
    net = initialized(width=16, num_classes=num_classes)
    logits = net(torch.randn(40, 3, 32, 32, generator=torch.Generator().manual_seed(1)))
    for values in (logits, logits.bfloat16()):
        loss = loss_of_targets(values, torch.arange(40) % num_classes)
        assert loss.dtype == torch.float32
        assert loss.item() / 40 == pytest.approx(math.log(num_classes), abs=0.3)
