"""Small models in layers, their plain training on one process, and the sharded one beside it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_parallel.fsdp import FullyShardedDataParallel

DTYPE = torch.float64
EXAMPLES = 12
MICRO_BATCHES = (slice(0, 5), slice(5, 7), slice(7, 12))
# By step, the rank that has each micro-batch. In the first rank 0 has none, later the others.
OWNERS = {
    2: [(1, 1, 1), (0, 0, 1), (1, 0, 1), (0, 0, 0)],
    3: [(1, 2, 1), (0, 1, 2), (2, 2, 2), (0, 0, 1)],
}


class Result(NamedTuple):
    """Of a step: the loss before it, its gradients, the weights after it."""

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


class Embed(nn.Module):
    def __init__(self, wte: nn.Embedding, wpe: nn.Embedding) -> None:
        super().__init__()
        self.wte, self.wpe = wte, wpe

    def forward(self, ids: Tensor) -> Tensor:
        return self.wte(ids) + self.wpe.weight[: ids.size(1)]


class Block(nn.Module):
    """A residual of odd width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.wide, self.narrow = nn.Linear(6, 37), nn.Linear(37, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Head(nn.Module):
    def __init__(self, norm: nn.LayerNorm, wte: nn.Embedding) -> None:
        super().__init__()
        self.norm, self.weight = norm, wte.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


class Tied(nn.Module):
    """A language model whose first and last layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, 6), nn.Embedding(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(6)

    def layers(self) -> list[nn.Module]:
        return [Embed(self.wte, self.wpe), *self.blocks, Head(self.norm, self.wte)]


class Conv(nn.Module):
    """Layers without parameters, one of them in place; a frozen layer; a weight nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(5, 7, 3), nn.ReLU(inplace=True), nn.Flatten(),
            nn.Linear(28, 9), nn.Linear(9, 10),
        )  # fmt: skip
        self.body[6].requires_grad_(False)
        self.body[7].register_parameter("unused", nn.Parameter(torch.empty(3)))

    def layers(self) -> list[nn.Module]:
        return list(self.body)


MODELS: dict[str, Callable[[], Any]] = {"tied": Tied, "conv": Conv}


def fill(name: str, tensor: Tensor) -> None:
    """Values that depend on the name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.empty(tensor.shape, dtype=DTYPE).normal_(0, 0.4, generator=generator)
    with torch.no_grad():
        tensor.copy_(values)


def build(kind: str, device: str = "cpu") -> Any:
    with torch.device(device):
        model = MODELS[kind]().to(DTYPE)
    if device == "cpu":
        for name, p in model.named_parameters():
            fill(name, p)
    return model


def batch(kind: str, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a global batch; -100 is no target."""
    generator = torch.Generator().manual_seed(step)
    if kind == "conv":
        x = torch.empty(EXAMPLES, 3, 8, 8, dtype=DTYPE).normal_(generator=generator)
        return x, torch.randint(10, (EXAMPLES,), generator=generator)
    ids = torch.randint(11, (EXAMPLES, 6), generator=generator)
    target = ids[:, 1:].clone()
    for row in range(EXAMPLES):  # ranks have different numbers of targets
        target[row, : row % 4] = -100
    return ids[:, :-1], target


def summed_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


def scale(target: Tensor) -> float:
    return 1 / int((target != -100).sum())


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@cache
def one_process(kind: str, optimizer: str, steps: int) -> list[Result]:
    """Plain PyTorch, every batch as a whole."""
    model = build(kind)
    trainer = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    results = []
    for step in range(steps):
        x, target = batch(kind, step)
        loss = summed_loss(nn.Sequential(*model.layers())(x), target) * scale(target)
        trainer.zero_grad()
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        trainer.step()
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        results.append(Result(loss.item(), gradients, weights))
    return results


def sharded(kind: str, optimizer: str = "adamw", **options: Any) -> FullyShardedDataParallel:
    """The same model on the meta device, sharded."""
    model = build(kind, "meta")
    names = {p: n for n, p in model.named_parameters()}
    make = OPTIMIZERS[optimizer]
    return FullyShardedDataParallel(model.layers(), make, names=names, init=fill, **options)


def my_part(
    kind: str, step: int, rank: int, world_size: int
) -> tuple[list[Tensor], list[Tensor], float]:
    """A rank's micro-batches: inputs, targets, and the scale of the loss."""
    x, target = batch(kind, step)
    owners = OWNERS[world_size][step % 4]
    mine = [part for part, owner in zip(MICRO_BATCHES, owners, strict=True) if owner == rank]
    return [x[part] for part in mine], [target[part] for part in mine], scale(target)


def train(fsdp: FullyShardedDataParallel, kind: str, steps: range) -> list[Result]:
    """Some steps; on rank 0 the whole gradients and weights, on the others nothing of them."""
    results = []
    for step in steps:
        x, target, factor = my_part(kind, step, fsdp.rank, fsdp.world_size)
        loss = fsdp.train_step(x, target, summed_loss, factor).item()
        gradients = whole(fsdp, "gradients")
        fsdp.optimizer_step()
        results.append(Result(loss, gradients, whole(fsdp, "parameters")))
    return results


def whole(fsdp: FullyShardedDataParallel, what: str) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in fsdp.gather(what) if t is not None}


def same(
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    tolerance: float,
    extra: frozenset[str] = frozenset(),
) -> None:
    """The same names, and values within `tolerance` of the largest; `extra` are to be zero."""
    assert set(got) == set(want) | extra
    for name, tensor in got.items():
        reference = want.get(name, torch.zeros_like(tensor))
        worst = (tensor - reference).abs().max().item()
        assert worst <= tolerance * reference.abs().max().item(), (name, worst)


def check(
    results: list[list[Result]], want: list[Result], extra: frozenset[str] = frozenset()
) -> None:
    """Losses add up over ranks; gradients by name after every step; weights too.

    With eps = 1.1e-16 and sums of less than 1e3 terms of like size a gradient is off by less than
    1e-12 of its largest. AdamW turns an error d of a gradient g into lr * d / |g|: 1e-9 of the
    weights, whose largest are about 1, has room for g a thousandth of the largest.
    """
    assert [len(steps) for steps in results] == [len(want)] * len(results)
    for step, reference in enumerate(want):
        total = sum(of_rank[step].loss for of_rank in results)
        assert abs(total - reference.loss) <= 1e-12 * abs(reference.loss), step
        same(results[0][step].gradients, reference.gradients, 1e-9 if step else 1e-12, extra)
        same(results[0][step].weights, reference.weights, 1e-9 if step else 1e-11)
