"""Layers that hand on more than a tensor: the gradients are right, or it is an error. Never zero.

A layer's input and output are taken apart by torch.utils._pytree. What that does not know stays
closed, and so does what a layer leaves in an attribute.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from data_parallel.ddp import DistributedDataParallel
from data_parallel.fsdp import FullyShardedDataParallel
from tests.data_parallel.sharded_models import DTYPE, OPTIMIZERS, fill, same, whole
from tests.pipeline.pipeline_models import Call
from tests.ranks import Ranks

WIDTH = 3
Pair = namedtuple("Pair", ["last_hidden_state", "skip"])


@dataclass
class Plain:
    last_hidden_state: Any
    skip: Any


@dataclass
class Slotted:
    __slots__ = ("last_hidden_state", "skip")
    last_hidden_state: Any
    skip: Any


class Mine(dict[str, Any]):
    pass


CLOSED: dict[str, Callable[..., Any]] = {
    "Plain": Plain,
    "Slotted": Slotted,
    "SimpleNamespace": SimpleNamespace,
    "Mine": Mine,
    "UserDict": UserDict,
    "BatchEncoding": lambda **fields: BatchEncoding(fields),
}
OPEN: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Pair": Pair,
    "BaseModelOutput": lambda last_hidden_state, skip: BaseModelOutput(
        last_hidden_state, hidden_states=(skip,)
    ),
}
BOXES = CLOSED | OPEN


def _take(box: Any) -> tuple[Tensor, Tensor]:
    if isinstance(box, BaseModelOutput):
        assert box.last_hidden_state is not None and box.hidden_states is not None
        return box.last_hidden_state, box.hidden_states[0]
    get = box.__getitem__ if hasattr(box, "keys") else lambda name: getattr(box, name)
    return get("last_hidden_state"), get("skip")


class Put(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return BOXES[self.kind](last_hidden_state=torch.tanh(self.linear(x)), skip=x)


class Take(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, box: Any) -> Tensor:
        hidden, skip = _take(box)
        output: Tensor = self.linear(hidden) + skip
        return output


class Leave(nn.Module):
    """Leaves what it computes where another layer finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.left: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.left[:] = [self.linear(x)]
        return self.left[0]


class Find(nn.Module):
    def __init__(self, left: list[Tensor]) -> None:
        super().__init__()
        self.linear, self.left = nn.Linear(WIDTH, WIDTH), left

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x) + self.left[0]
        return output


PAIRS: dict[str, Callable[[Tensor], Any]] = {
    "one tensor twice": lambda h: (h, h),
    "apart": lambda h: (h, h.clone()),
    "a view": lambda h: (h, h[:]),
}


def _write(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    h, other = pair
    h.mul_(2)
    return h, other


def _layers(kind: str) -> list[nn.Module]:
    first: nn.Module = nn.Linear(WIDTH, WIDTH)
    rest: list[nn.Module] = [Put(kind), Take()] if kind in BOXES else []
    if kind == "attribute":
        first = Leave()
        rest = [nn.Tanh(), Find(first.left)]
    if kind in PAIRS:
        rest = [Call(PAIRS[kind]), Call(_write), Call(torch.stack), nn.Linear(WIDTH, WIDTH)]
    if kind.startswith("last "):
        rest = [Put(kind.removeprefix("last "))]
    model = nn.Sequential(first, *rest).to(DTYPE)
    for name, p in model.named_parameters():
        fill(name, p)
    return list(model)


def _sum(output: Any) -> Tensor:
    hidden, skip = (output, output) if isinstance(output, Tensor) else _take(output)
    return (hidden * skip).sum()


def _input(rank: int) -> Tensor:
    return torch.full((2, WIDTH), 1.0 + rank, dtype=DTYPE)


def _fsdp(rank: int, _: int, kind: str) -> dict[str, Tensor] | str:
    fsdp = FullyShardedDataParallel(_layers(kind), OPTIMIZERS["sgd"])
    try:
        fsdp.backward(_sum(fsdp.forward(_input(rank))))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return whole(fsdp, "gradients")


def _ddp(rank: int, _: int, kind: str) -> dict[str, Tensor]:
    model = DistributedDataParallel(nn.Sequential(*_layers(kind)))
    _sum(model(_input(rank))).backward()
    model.average_gradients()
    return {n: 2 * p.grad for n, p in model.module.named_parameters() if p.grad is not None}


def _one_process(kind: str) -> dict[str, Tensor]:
    model = nn.Sequential(*_layers(kind))
    for rank in range(2):
        _sum(model(_input(rank))).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


ALL = [prefix + kind for prefix in ("", "last ") for kind in BOXES] + ["attribute"]


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind.removeprefix("last ") in OPEN])
def test_containers_that_torch_can_take_apart(ranks: Ranks, kind: str) -> None:
    first, _ = ranks.run(_fsdp, kind)
    same(first, _one_process(kind), 1e-12)


LOST = (
    "{} uses a tensor{} that requires grad and is neither part of its input nor one of its "
    "parameters: its gradient would be lost. Let the layers before hand it on, e.g. return "
    "(output, tensor), in tuples, lists, dicts or what is registered with torch.utils._pytree; or "
    "make it a parameter of the layer"
)


@pytest.mark.parametrize("kind", CLOSED)
def test_a_container_that_it_cannot(ranks: Ranks, kind: str) -> None:
    """As the input of a layer, and as the output of the last."""
    of_layer = LOST.format("layer 2 (Take)", f" inside {kind}")
    assert ranks.run(_fsdp, kind) == [of_layer] * 2
    of_loss = LOST.format("the loss after layer 1 (Put)", "")
    assert ranks.run(_fsdp, f"last {kind}") == [of_loss] * 2


class Frozen(nn.Module):
    """Hands on a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=x, skip=self.skip)


def _hidden_parameter(rank: int, _: int) -> str:
    layers = [nn.Linear(WIDTH, WIDTH), Frozen(), Take()]
    fsdp = FullyShardedDataParallel(nn.Sequential(*layers).to(DTYPE), OPTIMIZERS["sgd"])
    with pytest.raises(ValueError) as error:
        fsdp.forward(_input(rank).detach())
    return str(error.value)


def test_a_parameter_inside_one_is_named(ranks: Ranks) -> None:
    """Its memory would hold another layer's by the time it is read."""
    want = (
        "layer 1 (Frozen) hands on a parameter inside SimpleNamespace, and its memory is about to "
        "be used again: return it in a tuple, list or dict, or a copy"
    )
    assert ranks.run(_hidden_parameter) == [want] * 2


def test_a_skip_through_an_attribute(ranks: Ranks) -> None:
    assert ranks.run(_fsdp, "attribute") == [LOST.format("layer 2 (Find)", "")] * 2


@pytest.mark.parametrize("kind", ["one tensor twice", "apart"])
def test_a_layer_may_write_to_one_of_two(ranks: Ranks, kind: str) -> None:
    first, _ = ranks.run(_fsdp, kind)
    same(first, _one_process(kind), 1e-12)


def test_a_layer_that_writes_to_a_view_is_named(ranks: Ranks) -> None:
    for message in ranks.run(_fsdp, "a view"):
        assert message.startswith("layer 2 (Call) changes a tensor in place that shares memory")


@pytest.mark.parametrize("kind", ALL)
def test_whole_replicas_take_all_of_them(ranks: Ranks, kind: str) -> None:
    for found in ranks.run(_ddp, kind):
        same(found, _one_process(kind), 1e-12)
