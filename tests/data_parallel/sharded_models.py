"""A small model in layers, its plain training on one process, and the same sharded."""

from __future__ import annotations

import zlib
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from data_parallel.fsdp import FullyShardedDataParallel
from tests.pipeline.pipeline_models import take_gradients

DTYPE = torch.float64
HALVES = (slice(0, 5), slice(5, 12))  # of a batch, by rank
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Block(nn.Module):
    """A residual of odd width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.wide, self.narrow = nn.Linear(6, 37), nn.Linear(37, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Head(nn.Module):
    """A product with another layer's weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight  # a parameter

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def fill(name: str, tensor: Tensor) -> None:
    """Values that depend on the name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.empty(tensor.shape, dtype=DTYPE).normal_(0, 0.4, generator=generator)
    if tensor.is_complex():
        values = torch.complex(values, values.sin())
    with torch.no_grad():
        tensor.copy_(values)


def filled(model: nn.Module) -> Any:
    """The same in float64, with values by name; complex ones stay complex."""
    for name, p in model.double().named_parameters():
        fill(name, p)
    return model


def tied(device: str = "cpu") -> nn.Sequential:
    """Its first and last layer share a weight."""
    with torch.device(device):
        embedding = nn.Embedding(11, 6)
        model = nn.Sequential(embedding, Block(), Block(), Head(embedding.weight)).to(DTYPE)
    return model if device == "meta" else filled(model)


def sharded(**options: Any) -> FullyShardedDataParallel:
    """The same model, made on the meta device."""
    return FullyShardedDataParallel(tied("meta"), SGD, init=fill, **options)


def batch(step: int, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """A part of the inputs and targets of a global batch of 12; -100 is no target."""
    ids = torch.randint(11, (12, 6), generator=torch.Generator().manual_seed(step))
    target = ids[:, 1:].clone()
    for row in range(12):  # ranks have different numbers of targets
        target[row, : row % 4] = -100
    return ids[part, :-1], target[part]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Its part of the mean over the 42 targets of a global batch."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") / 42


@cache
def one_process(steps: int) -> tuple[list[Tensor], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Plain PyTorch, every batch as a whole: for each step the outputs before it and its gradients;
    and in the end the weights."""
    model, outputs, every = tied(), [], []
    optimizer = SGD(model.parameters())
    for step in range(steps):
        x, target = batch(step)
        output = model(x)
        loss_of(output, target).backward()
        outputs.append(output.detach())
        optimizer.step()
        every.append(take_gradients(model))
    return outputs, every, {n: p.detach() for n, p in model.named_parameters()}


def whole(fsdp: FullyShardedDataParallel, what: str) -> dict[str, Tensor]:
    """All parameters, gathered, or all gradients, put together from the ranks' parts. All ranks
    must call it."""
    layers = range(len(fsdp.layers))
    if what == "parameters":
        return {n: p.clone() for k in layers for n, p in fsdp.gather_param_data(k).items()}
    parts = [part for k in layers for part in fsdp.get_local_grad_shard(k)]
    mine = [part._replace(tensor=part.tensor.clone()) for part in parts]  # not the whole shard
    every: list[Any] = [None] * dist.get_world_size(fsdp.group)
    dist.all_gather_object(every, mine, fsdp.group)
    found: dict[str, Tensor] = {}
    for name, shape, start, part, _ in chain(*every):
        flat = found.setdefault(name, part.new_full(shape, torch.nan)).view(-1)
        flat[start : start + len(part)] = part
    return found
