"""Random models: layers one after the other, of tensors B C, B T C or B C H W."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.data_parallel.sharded_models import DTYPE, Head, fill
from tests.pipeline.pipeline_models import Call

# Of odd layers at a model's begin, in plain PyTorch, too.
warnings.filterwarnings("ignore", "None of the inputs have requires_grad|Full backward hook is fir")

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
    """Hands h on together with itself: the layer behind, `_add`, puts the two together."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(h)), h


class Odd(nn.Module):
    """What few models do. ``refused``: by family of strategies, the error that it may be, instead
    of the right gradient."""

    refused: Mapping[str, str] = {}


class Reverse(Odd):
    """A backward that is no derivative."""

    refused: Mapping[str, str] = {"traced": "the backward of a torch.autograd.Function would be"}

    def forward(self, x: Tensor) -> Tensor:
        return _Reverse.apply(x)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(_: Any, g: Tensor) -> Tensor:
        return -2 * g


class Hooks(Odd):
    """A hook on a tensor, made in forward."""

    refused: Mapping[str, str] = {"traced": "a hook on a tensor would be lost"}

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        if y.requires_grad:
            y.register_hook(lambda g: 3 * g)
        return y


class Hooked(Odd):
    """Hooks on the backward of a module inside."""

    refused: Mapping[str, str] = {"traced": "has a hook on its backward, which would never run"}

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.linear.register_full_backward_hook(lambda _, dx, __: _all_twice(dx))
        self.linear.register_full_backward_pre_hook(lambda _, dy: _all_twice(dy))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def _all_twice(gradients: Any) -> Any:
    return tuple(map(_twice, gradients))


def _twice(g: Tensor | None) -> Any:
    return None if g is None else 2 * g


class Modes(Odd):
    """A dropout in evaluation mode, in a model in training mode."""

    refused: Mapping[str, str] = {"traced": "is in evaluation, the model in training"}

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.dropout.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x)


class Complex(Odd):
    """Complex weights in both kinds of products."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(torch.complex(x, x.cos()))
        z = torch.addmm(self.linear.bias, z.reshape(-1, z.size(-1)), self.linear.weight)
        return torch.view_as_real(z.view(x.shape)).sum(-1).tanh()


class Dot(Odd):
    """A weight of one dimension."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.weight, self.bias)[..., None]


class Empty(Odd):
    """Products with no features in, or out."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.ones(0, features))
        self.all = nn.Parameter(torch.ones(features, 0))
        self.bias = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * F.linear(F.linear(x, self.none), self.all, self.bias)


class Again(Odd):
    """Computed again in backward."""

    def __init__(self, features: int, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, features), nn.Tanh())
        self.use_reentrant = use_reentrant
        # A trace keeps what the checkpoint forgot, and torch refuses a later write to it.
        self.refused = {"traced": "modified by an inplace operation"}
        if use_reentrant:
            said = r"uses checkpoint\(use_reentrant=True\)"
            traced = "the backward of a torch.autograd.Function would be"
            self.refused = {"pipe": said, "fsdp": said, "traced": traced}

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=self.use_reentrant)


class Borrows(Odd):
    """Uses another layer's weight, in micro-batches that have a large number."""

    refused: Mapping[str, str] = {
        "pipe": "uses a tensor that requires grad and is neither part of its input nor",
        "fsdp": "",  # the other layer's weights are not there: torch says that they are meta
        "traced": "asks for the values of a tensor",
    }

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other = [other]  # not a submodule

    def forward(self, x: Tensor) -> Tensor:
        large = x > 0.5
        return x + large * self.other[0].weight.sum() if large.any() else x


def _odd(rng: Random, C: int, layers: Sequence[nn.Module]) -> nn.Module:
    """One of them, for C features in the last dimension."""
    linears = [m for m in layers if type(m) is nn.Linear]
    made: list[Callable[[], nn.Module]] = [
        Reverse, Hooks, Modes, lambda: Hooked(C), lambda: Complex(C), lambda: Dot(C),
        lambda: Empty(C), lambda: Again(C, rng.random() < 0.3),
        lambda: Borrows(rng.choice(linears)) if linears else Reverse(),
    ]  # fmt: skip
    return rng.choice(made)()


def refusals(model: nn.Module, family: str) -> list[str]:
    """What a strategy of this family ("pipe", "fsdp", "traced") may say of the model, as regular
    expressions."""
    odd = [m for m in model.modules() if isinstance(m, Odd)]
    found = [m.refused[family] for m in odd if m.refused.get(family)]
    if family == "fsdp" and any(p._backward_hooks for p in model.parameters()):
        found.append("has a hook on its gradient, which would never run")
    if family == "traced":  # sizes that the example did not have
        found.append("the trace holds only where")
    return found


def _other_strides(x: Tensor) -> Tensor:
    """A copy of the same values. (`contiguous` makes none of a micro-batch of one example.)"""
    return x.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)


def _add(pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0] + pair[1]


def build(name: str, domain: str, device: str) -> nn.Sequential:
    """The model of that name, always the same; its values depend on its parameters' names alone."""
    rng = Random(f"model {name}")
    with torch.device(device), torch.random.fork_rng(devices=[]):
        model = nn.Sequential(*_layers(rng, domain))
        if rng.random() < 0.2:
            model[-1].register_parameter("unused", nn.Parameter(torch.ones(3)))
        model.double()  # complex weights stay complex
    first = rng.randint(1, len(model)) if rng.random() < 0.2 else 0
    frozen = set(model[:first].parameters())
    for p in model.parameters():
        p.requires_grad_(p not in frozen and rng.random() < 0.85)
        if p.requires_grad and rng.random() < 0.03:
            p.register_hook(_twice)
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
            lambda: [Skip(C), Call(_add)],
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
        if domain != "image" and rng.random() < 0.25:
            layers.append(_odd(rng, C, layers))
            continue
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
    """The sum over the examples of a micro-batch. ``target``: B."""
    return (output.flatten(1).tanh() - target[:, None]).square().sum()
