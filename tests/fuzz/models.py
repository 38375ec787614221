"""Random models: layers one after the other, each handing one value to the next.

A value is a tensor h, B C, B T C or B C H W, or a container of h, a second tensor and a note (None,
a flag, a number). Models end in a tensor, or in a dict that also has a number per micro-batch: the
sum of these is part of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.data_parallel.sharded_models import DTYPE, fill
from tests.pipeline.pipeline_models import Call

WORDS = 7


class Named(NamedTuple):
    h: Any
    other: Any
    note: Any


@dataclass
class Record:
    """Not a pytree unless someone registers it."""

    h: Any
    other: Any
    note: Any


WRAP: dict[str, Callable[[Any, Any, Any], Any]] = {
    "tuple": lambda h, other, note: (h, other, note),
    "list": lambda h, other, note: [h, [other, (note,)]],
    "dict": lambda h, other, note: {"h": h, "other": other, "note": note},
    "Named": Named,
    "Record": Record,
    "SimpleNamespace": lambda h, other, note: SimpleNamespace(h=h, other=other, note=note),
}
OPAQUE = ("Record", "SimpleNamespace")  # containers that may be refused, by name


def unwrap(value: Any) -> tuple[Any, Any, Any]:
    """The three parts of a container, of whatever kind."""
    if isinstance(value, list):
        return value[0], value[1][0], value[1][1][0]
    if isinstance(value, tuple):
        return value[0], value[1], value[2]
    get = value.__getitem__ if isinstance(value, dict) else value.__getattribute__
    return get("h"), get("other"), get("note")


def part(value: Any, start: int, stop: int) -> Any:
    """Some examples of a batch, copied."""
    if isinstance(value, Tensor):
        return value[start:stop].clone()
    h, other, note = unwrap(value)
    wrap = WRAP[type(value).__name__]
    return wrap(h[start:stop].clone(), other[start:stop].clone(), note)


OTHERS: dict[str, Callable[[Tensor, nn.Parameter], Tensor]] = {
    "skip": lambda h, _: h * 0.5,
    "same": lambda h, _: h,
    "view": lambda h, _: h[..., :1],
    "detached": lambda h, _: h.detach(),
    "constant": lambda h, _: torch.tensor(0.5, dtype=h.dtype, device=h.device),
    "gate": lambda _, gate: gate,
}


class Pack(nn.Module):
    """h to a container; what else is in it: see OTHERS."""

    def __init__(self, kind: str, what: str, note: Any) -> None:
        super().__init__()
        self.kind, self.what, self.note = kind, what, note
        self.gate = nn.Parameter(torch.ones(1))

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.what}, note={self.note}"

    def forward(self, h: Tensor) -> Any:
        return WRAP[self.kind](h, OTHERS[self.what](h, self.gate), self.note)


class Within(nn.Module):
    """A layer that works on h in a container."""

    def __init__(self, kind: str, layer: nn.Module) -> None:
        super().__init__()
        self.kind, self.layer = kind, layer

    def forward(self, value: Any) -> Any:
        h, other, note = unwrap(value)
        return WRAP[self.kind](self.layer(h), other, note)


def unpack(value: Any) -> Tensor:
    """A container to h."""
    h, other, note = unwrap(value)
    return h + (other.sum(-1, keepdim=True) if other.dim() else other) * (note or 0.5)


class Residual(nn.Module):
    """y += x, in place."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y += x
        return y


class Shift(nn.Module):
    """Writes to its input."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        x += self.by
        return x


WAYS = ("linear", "without bias", "transposed", "addmm")


class Products(nn.Module):
    """A weight in several products: as it is, again, and transposed; rows by torch.addmm."""

    def __init__(self, features: int, ways: list[str]) -> None:
        super().__init__()
        self.ways = ways
        self.weight = nn.Parameter(torch.ones(features, features))
        self.bias = nn.Parameter(torch.ones(features))

    def extra_repr(self) -> str:
        return ", ".join(self.ways)

    def forward(self, x: Tensor) -> Tensor:
        for way in self.ways:
            if way == "addmm":
                x = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(x.shape)
            else:
                weight = self.weight.t() if way == "transposed" else self.weight
                x = F.linear(x, weight, None if way == "without bias" else self.bias)
        return x


class Attention(nn.Module):
    """Causal, of one head, with a buffer: positions are added."""

    positions: Tensor

    def __init__(self, features: int, p: float) -> None:
        super().__init__()
        self.p, self.project = p, nn.Linear(features, 3 * features)
        self.register_buffer("positions", torch.ones(64, features))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x + self.positions[: x.size(1)]).unsqueeze(1).chunk(3, dim=-1)
        p = self.p if self.training else 0.0
        return x + F.scaled_dot_product_attention(q, k, v, None, p, is_causal=True).squeeze(1)


class Head(nn.Module):
    """A product with another layer's weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight  # a parameter

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@dataclass(frozen=True)
class Plan:
    """What is drawn of a model before its layers. ``inputs``: the container of several inputs;
    ``containers``: those that layers may hand on; ``number``: of each micro-batch, its kind."""

    seed: str
    domain: str  # flat, sequence, ids or image
    inputs: str | None
    dropout: float
    containers: tuple[str, ...]
    number: str | None

    def build(self, device: str = "cpu") -> nn.Sequential:
        """The model, always the same; its values depend on the names alone."""
        rng = Random(self.seed)
        with torch.device(device), torch.random.fork_rng(devices=[]):
            model = nn.Sequential(*_layers(rng, self))
            if rng.random() < 0.2:
                model[-1].register_parameter("unused", nn.Parameter(torch.ones(3)))
            model.to(DTYPE)
        first = rng.randint(1, len(model)) if rng.random() < 0.2 else 0
        frozen = set(model[:first].parameters())
        for p in model.parameters():
            p.requires_grad_(p not in frozen and rng.random() < 0.85)
        if device == "cpu":
            for name, t in [*model.named_parameters(), *model.named_buffers()]:
                fill(name, t)
        return model

    def input(self, seed: int, batch: int, length: int) -> Any:
        """A batch: B C, B T C, or words B T, or B C H W; with ``inputs`` a container."""
        generator = torch.Generator().manual_seed(seed)
        shapes = {"flat": (4,), "sequence": (length, 4), "ids": (length,), "image": (4, 5, length)}
        shape = (batch, *shapes[self.domain])
        h = torch.randn(shape, dtype=DTYPE, generator=generator)
        h = h.abs().mul(3).long().clamp(max=WORDS - 1) if self.domain == "ids" else h
        ones = [1] * (2 if self.domain == "ids" else h.dim() - 1)  # broadcasts, once embedded
        other = torch.randn(batch, *ones, dtype=DTYPE, generator=generator)
        return h if self.inputs is None else WRAP[self.inputs](h, other, 0.3)


def _layer(rng: Random, C: int, plan: Plan) -> tuple[nn.Module, int]:
    """A layer for C features, and the features of its output."""
    p, out, bias = plan.dropout, rng.choice((4, 5, 6, 8)), rng.random() < 0.7
    made: list[Callable[[], nn.Module]]
    if plan.domain == "image":
        out = rng.choice((2, 4))
        made = [
            lambda: nn.Conv2d(C, out, 3, padding=1, bias=bias), lambda: nn.GroupNorm(2, C),
            lambda: nn.ReLU(inplace=True), lambda: nn.Hardtanh(inplace=True),
            lambda: nn.MaxPool2d(3, 1, 1), lambda: nn.Dropout2d(p), lambda: Shift(1),
        ]  # fmt: skip
    else:
        made = [
            lambda: nn.Linear(C, out, bias), lambda: nn.Linear(C, out), lambda: nn.LayerNorm(C),
            lambda: rng.choice((nn.Tanh(), nn.GELU(), nn.Softmax(-1), nn.Identity())),
            lambda: rng.choice((nn.ReLU(True), nn.LeakyReLU(0.2, True), nn.ELU(inplace=True))),
            lambda: Residual(C), lambda: Shift(C),
            lambda: Products(C, rng.choices(WAYS, k=rng.randint(1, 3))),
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(C, C)),
            lambda: nn.Sequential(nn.Linear(C, C), nn.ReLU(inplace=True)),
            lambda: rng.choice((nn.Dropout, nn.AlphaDropout))(p, inplace=bias),
        ]  # fmt: skip
    if plan.domain in ("sequence", "ids"):
        made += [
            lambda: Attention(C, p),
            lambda: nn.TransformerEncoderLayer(C, 1, 6, p, batch_first=True),
            lambda: Call(lambda x: x.mean(1, keepdim=True).expand_as(x)),
            lambda: Call(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
        ]  # fmt: skip
    layer = rng.choice(made)()
    return layer, out if type(layer) in (nn.Conv2d, nn.Linear) else C


def _layers(rng: Random, plan: Plan) -> list[nn.Module]:
    C, layers = 4, list[nn.Module]()
    embedding = nn.Embedding(WORDS, C, padding_idx=rng.choice((None, 0)))
    if plan.domain == "ids":
        layers.append(Within(plan.inputs, embedding) if plan.inputs else embedding)
    layers += [Call(unpack)] if plan.inputs else []
    for _ in range(rng.randint(3, 8)):
        layer, out = _layer(rng, C, plan)
        if plan.containers and rng.random() < 0.4:
            kind = rng.choice(plan.containers)
            pack = Pack(kind, rng.choice(tuple(OTHERS)), rng.choice((None, 0.25, True)))
            layers += [pack, *([Within(kind, layer)] if out == C else []), Call(unpack)]
            continue
        layers.append(layer)
        C = out
        again = [m for m in layers if type(m) is nn.Linear and m.in_features == C]
        if again and rng.random() < 0.15:  # its weight, or the same layer, again
            other = rng.choice(again)
            layers.append(rng.choice((other, Head(other.weight))))
            C = other.out_features
            layers += [nn.LayerNorm(C)]
    if plan.domain == "ids" and rng.random() < 0.7:
        layers += [nn.Linear(C, 4), Head(embedding.weight)]  # as a language model
    else:
        layers.append(nn.Conv2d(C, 2, 1) if plan.domain == "image" else nn.Linear(C, 3))
    if plan.number is not None:
        detached = plan.number == "detached"
        layers.append(
            Call(lambda h: {"y": h, "number": (h.detach() if detached else h).tanh().sum()})
        )
    return layers


def loss_of(output: Any, target: Tensor) -> Tensor:
    """The sum over the examples of a micro-batch. ``target``: B."""
    y, number = (output["y"], output["number"]) if isinstance(output, dict) else (output, 0.0)
    return (y.flatten(1).tanh() - target[:, None]).square().sum() + number
