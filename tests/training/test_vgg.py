"""VGG16: its shape is the published one, its weights depend on seed and name, and it can learn."""

from __future__ import annotations

import math
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from training.vgg import initialize_vgg_parameter, picture_loss, vgg16, vgg_layers

CONVOLUTIONS = [
    "conv1_1", "conv1_2", "conv2_1", "conv2_2", "conv3_1", "conv3_2", "conv3_3",
    "conv4_1", "conv4_2", "conv4_3", "conv5_1", "conv5_2", "conv5_3",
]  # fmt: skip


def initialized(width: int, seed: int = 0, num_classes: int = 10) -> nn.Sequential:
    net = vgg16(num_classes, width)
    for name, p in net.named_parameters():
        initialize_vgg_parameter(name, p, seed)
    return net


def test_shapes_are_those_of_the_paper() -> None:
    with torch.device("meta"):
        net = vgg16()
    channels = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    want: dict[str, tuple[int, ...]] = {}
    for i, name in enumerate(CONVOLUTIONS):
        want[f"{name}.weight"] = (channels[i + 1], channels[i], 3, 3)
        want[f"{name}.bias"] = (channels[i + 1],)
    for name, out in (("fc6", 512), ("fc7", 512), ("fc8", 10)):
        want |= {f"{name}.weight": (out, 512), f"{name}.bias": (out,)}
    assert {name: tuple(p.shape) for name, p in net.named_parameters()} == want
    assert sum(p.numel() for p in net.parameters()) == 15_245_130  # 14,714,688 in convolutions


def test_an_output_is_of_its_picture_alone() -> None:
    """Nothing in it depends on the batch: what makes micro-batches and ranks comparable."""
    net = initialized(width=4).double()
    x = torch.randn(6, 3, 32, 32, dtype=torch.float64)
    whole = net(x)
    assert whole.shape == (6, 10)
    parts = torch.cat([net(x[:1]), net(x[1:4]), net(x[4:])])
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


def test_layers_are_the_network_in_sixteen_pieces() -> None:
    net = initialized(width=4)
    layers = [cast(nn.Sequential, layer) for layer in vgg_layers(net)]
    assert [type(layer[0]).__name__ for layer in layers] == ["Conv2d"] * 13 + ["Linear"] * 3
    assert sum(len(layer) for layer in layers) == len(net)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(nn.Sequential(*layers)(x), net(x))
    mine = [p for layer in layers for p in layer.parameters()]
    assert [id(p) for p in mine] == [id(p) for p in net.parameters()]


def test_weights_depend_on_seed_and_name_alone() -> None:
    first, again, other = (dict(initialized(4, seed).named_parameters()) for seed in (3, 3, 4))
    weights = [name for name in first if name.endswith("weight")]
    assert [name for name in first if not torch.equal(first[name], again[name])] == []
    assert [name for name in weights if torch.equal(first[name], other[name])] == []
    same_shape = [first[f"conv5_{i}.weight"] for i in (1, 2, 3)]
    assert not torch.equal(same_shape[0], same_shape[1])
    alone = torch.empty(32, 32, 3, 3)
    initialize_vgg_parameter("conv5_2.weight", alone, 3)
    assert torch.equal(alone, same_shape[1])


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
    """Also where the last layer has as many outputs as inputs."""
    net = initialized(width=16, num_classes=num_classes)
    x = torch.randn(40, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(40) % num_classes
    loss = picture_loss(net(x), labels).item() / 40
    assert loss == pytest.approx(math.log(num_classes), abs=0.3)


def test_the_loss_is_a_sum_over_pictures_also_in_bfloat16() -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, math.log(3)]])
    labels = torch.tensor([1, 0])
    want = math.log(2) + math.log(4)
    assert picture_loss(logits, labels).item() == pytest.approx(want)
    low: Tensor = picture_loss(logits.bfloat16(), labels)
    assert low.dtype == torch.float32
    assert low.item() == pytest.approx(want, rel=4e-3)
