"""Layers that do what few models do: every strategy trains them as plain PyTorch does.

They take and return tensors with `FEATURES` in the last dimension; the test chooses the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.pipeline.pipeline_models import Call

FEATURES = 4


def linear() -> nn.Linear:
    return nn.Linear(FEATURES, FEATURES)


def in_one_memory() -> nn.Sequential:
    """The weight of one is a view of the other's."""
    one, other = linear(), linear()
    other.weight.data = one.weight.data.t()
    return nn.Sequential(one, other)


class TwiceAndFrozen(nn.Module):
    """Weights used twice, by products and otherwise; frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.frozen, self.partly, self.bare = (linear() for _ in range(4))
        self.frozen.requires_grad_(False)
        self.partly.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.twice(x)
        h = self.twice(self.twice(x).tanh()) * self.twice.bias + shift
        h = self.partly(self.frozen(h)).sigmoid()
        return F.linear(h, self.bare.weight, bias=self.bare.bias * 2) @ self.bare.weight


class Force(nn.Module):
    """Differentiates inside."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()

    def forward(self, x: Tensor) -> Tensor:
        energy = self.fc(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + self.fc(x) + force


class Transforms(nn.Module):
    """torch.func around products with its weights. B T C."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda row: self.fc(row).tanh().sum())
        each = torch.vmap(torch.vmap(lambda row: self.fc(row) + slope(row)))(x)
        pulled = torch.func.vjp(self.fc, x)[1](x.sin())[0]
        weights = {name: p * 2 for name, p in self.fc.named_parameters()}
        return each + pulled + torch.func.functional_call(self.fc, weights, (x,))


class Complex(nn.Module):
    """Complex weights in both kinds of products."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(torch.complex(x, x.cos()))
        z = torch.addmm(self.linear.bias, z.reshape(-1, z.size(-1)), self.linear.weight)
        return torch.view_as_real(z.view(x.shape)).sum(-1).tanh()


class Dot(nn.Module):
    """A weight of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(FEATURES)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.weight, self.bias)[..., None]


class Empty(nn.Module):
    """Products with no features in, or out. Without a bias all weights together have no element."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.ones(0, FEATURES))
        self.all = nn.Parameter(torch.ones(FEATURES, 0))
        self.bias = nn.Parameter(torch.ones(FEATURES)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return x - F.linear(F.linear(x, self.none), self.all, self.bias)


class Spread(nn.Module):
    """Biases that are spread over features and rows, and an input that is given by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.row = linear(), linear()
        self.one.bias = nn.Parameter(torch.ones(1))
        self.row.bias = nn.Parameter(torch.rand(1, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.row(input=self.one(x).tanh())


class LookUp(nn.Module):
    """Its weight's gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, FEATURES, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table((x.sum(-1) > 0).long())


class SometimesWhole(nn.Module):
    """The gradients of its tables are sparse or dense, as the micro-batch has it, one so and one
    otherwise. Their rows are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Embedding(5, FEATURES, sparse=True) for _ in "12")

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.sum(-1) > 0).long()
        table, matrix = (self.one, self.other) if x.sum() > 0 else (self.other, self.one)
        return x * table(ids) * (F.one_hot(ids, 5).to(x.dtype) @ matrix.weight)


def sparse_and_tied() -> list[nn.Module]:
    """As a matrix the weight has a dense gradient."""
    look_up, head = LookUp(), nn.Linear(FEATURES, 5, bias=False)
    head.weight = look_up.table.weight
    return [linear(), look_up, nn.Tanh(), head, nn.Linear(5, FEATURES)]


class Reverse(torch.autograd.Function):
    """A backward that is no derivative."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(_: Any, g: Tensor) -> Tensor:
        return -2 * g


def hook_in_forward(x: Tensor) -> Tensor:
    y = x.sin()
    if y.requires_grad:
        y.register_hook(lambda g: 3 * g)
    return y


def hooked() -> list[nn.Module]:
    """Hooks on layers, and on what they consist of."""
    layers: list[Any] = [linear() for _ in range(3)]
    first, inner, last = layers
    first.register_forward_hook(lambda _, __, output: output * 2)
    inner.register_forward_pre_hook(lambda _, given: (given[0] * 3,))
    inner.register_full_backward_hook(lambda _, dx, __: tuple(g * 2 for g in dx))
    last.register_full_backward_pre_hook(lambda _, dy: tuple(g * 2 for g in dy))
    return [first, nn.Sequential(inner), nn.Tanh(), last]


class Again(nn.Module):
    """Runs its layers again in backward, of which one is frozen."""

    def __init__(self, use_reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(), nn.Tanh(), linear())
        self.layers[2].requires_grad_(False)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.layers, x.sin(), use_reentrant=self.use_reentrant)


ODD: Mapping[str, Callable[[], list[nn.Module]]] = {
    "weights used twice, or frozen": lambda: [TwiceAndFrozen(), nn.Tanh(), TwiceAndFrozen()],
    "a force that is learnt": lambda: [linear(), Force(), nn.Tanh(), Force()],
    "torch.func": lambda: [Transforms(), nn.Tanh(), Transforms()],
    "complex weights": lambda: [Complex(), nn.Tanh(), Complex()],
    "a weight of one dimension": lambda: [Dot(), nn.Tanh(), Dot()],
    "spread biases, and names": lambda: [Spread(), nn.Tanh(), Spread()],
    "no features": lambda: [linear(), Empty(bias=True), Empty(bias=False), linear()],
    "a sparse embedding, twice": lambda: [LookUp(), linear(), LookUp()],
    "a sparse embedding, at times whole": lambda: [SometimesWhole(), linear()],
    "a sparse embedding, tied": sparse_and_tied,
    "parametrizations": lambda: [parametrizations.weight_norm(linear()) for _ in "1234"],
    "a backward of its own": lambda: [linear(), Call(Reverse.apply), linear()],
    "a hook on a tensor": lambda: [linear(), Call(hook_in_forward), linear()],
    "hooks on layers": hooked,
    "a dropout in evaluation": lambda: [linear(), nn.Dropout(0.5).eval(), linear()],
    "computed again": lambda: [Again(), nn.Tanh(), Again()],
}

# The device without hardware has neither sparse tensors nor torch.func's.
ON_DEVICES = [name for name in ODD if "sparse" not in name and name != "torch.func"]
