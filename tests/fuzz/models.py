"""Random models: layers one after the other, of tensors B C, B T C or B C H W.

tests/odd_layers.py has layers that do what few models do (hooks, checkpoints, complex weights)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.data_parallel.sharded_models import DTYPE, Head, fill
from tests.pipeline.pipeline_models import Call

WORDS = 7
DOMAINS = ("flat", "sequence", "ids", "image")


class Shift(nn.Module):
    """Writes to its input."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        x += self.by
        return x


class Products(nn.Module):
    """A weight in several products: as it is, transposed, and in rows by torch.addmm."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features, features))
        self.bias = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight, self.bias)
        rows = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
        return F.linear(rows.view(x.shape), self.weight.t())


class Skip(nn.Module):
    """Hands h on together with itself: the layer behind, `sum`, puts the two together."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(h)), h


def _other_strides(x: Tensor) -> Tensor:
    """A copy of the same values. (`contiguous` makes none of a micro-batch of one example.)"""
    return x.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)


def build(name: str, domain: str, device: str) -> nn.Sequential:
    """The model of that name, always the same; its values depend on its parameters' names alone."""
    rng = Random(f"model {name}")
    with torch.device(device), torch.random.fork_rng(devices=[]):
        model = nn.Sequential(*_layers(rng, domain))
        if rng.random() < 0.2:
            model[-1].register_parameter("unused", nn.Parameter(torch.ones(3)))
        model.double()
    first = rng.randint(1, len(model)) if rng.random() < 0.2 else 0
    frozen = set(model[:first].parameters())
    for p in model.parameters():
        p.requires_grad_(p not in frozen and rng.random() < 0.85)
    if device == "cpu":
        for full_name, t in [*model.named_parameters(), *model.named_buffers()]:
            fill(full_name, t)
    return model


def make_input(domain: str, seed: int, batch: int, length: int) -> Tensor:
    """A batch: B C, B T C, or words B T, or B C H W."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"flat": (4,), "sequence": (length, 4), "ids": (length,), "image": (4, 5, length)}
    shape = (batch, *shapes[domain])
    if domain == "ids":
        return torch.randint(WORDS, shape, generator=generator)
    return torch.randn(shape, dtype=DTYPE, generator=generator)


def _layer(rng: Random, C: int, domain: str) -> list[nn.Module]:
    """A layer for C features; or two that belong together."""
    out, bias = rng.choice((4, 5, 6, 8)), rng.random() < 0.7
    made: list[Callable[[], Any]]
    if domain == "image":
        out = rng.choice((2, 4))
        made = [
            lambda: nn.Conv2d(C, out, 3, padding=1, bias=bias), lambda: nn.GroupNorm(2, C),
            lambda: nn.ReLU(inplace=True), lambda: nn.MaxPool2d(3, 1, 1), lambda: Shift(1),
        ]  # fmt: skip
    else:
        made = [
            lambda: nn.Linear(C, out, bias), lambda: nn.Linear(C, out), lambda: nn.LayerNorm(C),
            lambda: rng.choice((nn.Tanh(), nn.GELU(), nn.Softmax(-1), nn.Identity())),
            lambda: rng.choice((nn.ReLU(True), nn.ELU(inplace=True))),
            lambda: Shift(C), lambda: Products(C),
            lambda: nn.Sequential(nn.Linear(C, C), nn.ReLU(inplace=True)),
            lambda: [Skip(C), Call(sum)],
        ]  # fmt: skip
    if domain in ("sequence", "ids"):
        made += [
            lambda: nn.TransformerEncoderLayer(C, 1, 6, 0.0, batch_first=True),
            lambda: Call(_other_strides),
        ]  # fmt: skip
    layer = rng.choice(made)()
    return layer if isinstance(layer, list) else [layer]


def _layers(rng: Random, domain: str) -> list[nn.Module]:
    C = 4
    embedding = nn.Embedding(WORDS, C, padding_idx=rng.choice((None, 0)), sparse=rng.random() < 0.2)
    layers: list[nn.Module] = [embedding] if domain == "ids" else []
    for _ in range(rng.randint(3, 8)):
        layers += _layer(rng, C, domain)
        if isinstance(layers[-1], nn.Linear):
            C = layers[-1].out_features
        elif isinstance(layers[-1], nn.Conv2d):
            C = layers[-1].out_channels
        again = [m for m in layers if type(m) is nn.Linear and m.in_features == C]
        if again and rng.random() < 0.15:  # its weight, or the same layer, again
            other = rng.choice(again)
            C = other.out_features
            layers += [rng.choice((other, Head(other.weight))), nn.LayerNorm(C)]
    if domain == "ids" and rng.random() < 0.7:
        return [*layers, nn.Linear(C, 4), Head(embedding.weight)]  # as a language model
    return [*layers, nn.Conv2d(C, 2, 1) if domain == "image" else nn.Linear(C, 3)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The sum over the examples of a micro-batch. `target`: B."""
    return (output.flatten(1).tanh() - target[:, None]).square().sum()
