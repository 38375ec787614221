"""What a run is made of goes into a checkpoint and comes back, at this layout and at others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from training.checkpoint import Checkpoint, Saver
from training.pieces import CheckpointError, Piece, deal, flat_pieces
from training.state import (
    generator_pieces,
    load_generators,
    load_training,
    training_pieces,
    whole_parameters,
)

CPU = [torch.device("cpu")]


class Tied(nn.Module):
    """A tied weight, a dropout, and a parameter that never has a gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.dropout(self.norm(self.embedding(ids))))


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def train(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ids = torch.randint(7, (5,))
        loss = nn.functional.cross_entropy(model(ids), ids)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def save(folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Checkpoint:
    shards = whole_parameters(model)
    pieces = training_pieces(model.parameters(), optimizers, shards) + generator_pieces(0, CPU)
    return Checkpoint(Saver(folder, 1).save("a", pieces, {}))


def state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, object]:
    """Weights and optimizer state by name."""
    found: dict[str, object] = {n: p.tolist() for n, p in model.named_parameters()}
    names = {id(p): n for n, p in model.named_parameters()}
    for optimizer in optimizers:
        for p, slots in optimizer.state.items():
            for slot, value in slots.items():
                found[f"{slot} {names[id(p)]}"] = value.tolist()
    return found


def test_going_on_is_as_if_nothing_had_been(tmp_path: Path) -> None:
    model = Tied(0)
    optimizers = [adamw(list(model.parameters()))]
    train(model, optimizers, 3)
    checkpoint = save(tmp_path, model, optimizers)
    losses = train(model, optimizers, 3)
    draws = torch.rand(3).tolist()

    other = Tied(1)
    others = [adamw(list(other.parameters()))]
    load_training(other.parameters(), others, whole_parameters(other), checkpoint.tensors)
    assert load_generators(0, CPU, checkpoint.tensors)
    assert train(other, others, 3) == losses
    assert torch.rand(3).tolist() == draws
    assert state(other, others) == state(model, optimizers)
    assert len(state(model, optimizers)) == 4 + 3 * 3  # unused has no optimizer state


def test_names_are_those_of_parameters(tmp_path: Path) -> None:
    model = Tied(0)
    optimizers = [adamw(list(model.parameters()))]
    train(model, optimizers, 1)
    stored = save(tmp_path, model, optimizers).tensors
    names = ["embedding.weight", "norm.weight", "norm.bias"]
    expected = {f"optimizer.{slot}.{name}" for name in names for slot in ("exp_avg", "exp_avg_sq",
                "step")}  # fmt: skip
    expected |= {f"model.{name}" for name in [*names, "unused"]} | {"random.0.cpu"}
    assert set(stored._boxes) == expected


def test_an_optimizer_for_each_stage(tmp_path: Path) -> None:
    """One optimizer's state comes back in two, and goes on alike."""
    model = Tied(0)
    optimizers = [adamw(list(model.parameters()))]
    train(model, optimizers, 2)
    checkpoint = save(tmp_path, model, optimizers)
    train(model, optimizers, 2)

    other = Tied(1)
    first, *rest = other.parameters()
    others = [adamw(rest), adamw([first])]
    load_training(other.parameters(), others, whole_parameters(other), checkpoint.tensors)
    assert load_generators(0, CPU, checkpoint.tensors)
    train(other, others, 2)
    assert state(other, others) == state(model, optimizers)


class FlatShard:
    """One of two ranks that each hold half of all parameters, laid end to end."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        self.half = -(-len(flat) // 2)
        self.start = rank * self.half
        self.parameter = nn.Parameter(flat[self.start : self.start + self.half].clone())
        self.layout = [(n, p.shape) for n, p in model.named_parameters()]
        self.optimizer = torch.optim.AdamW([self.parameter], lr=0.1)

    def shards(self, parameter: Tensor, tensor: Tensor) -> list[Piece]:
        assert parameter is self.parameter
        pieces, at = [], 0
        for name, shape in self.layout:
            begin, end = max(at, self.start), min(at + shape.numel(), self.start + len(tensor))
            if begin < end:
                values = tensor[begin - self.start : end - self.start]
                pieces += flat_pieces(name, shape, begin - at, values)
            at += shape.numel()
        return pieces

    def pieces(self) -> list[Piece]:
        return training_pieces([self.parameter], [self.optimizer], self.shards)


def test_shards_of_flat_buffers(tmp_path: Path) -> None:
    """Two ranks with half of everything each write; one with everything, and two again, read."""
    model = Tied(0)
    parts = [FlatShard(model, rank) for rank in range(2)]
    for part in parts:
        part.parameter.grad = torch.rand_like(part.parameter)
        part.optimizer.step()
    held = [piece for part in parts for piece in part.pieces()]
    checkpoint = Checkpoint(Saver(tmp_path, 1).save("a", held, {}))

    others = [FlatShard(Tied(1), rank) for rank in range(2)]
    for other, part in zip(others, parts, strict=True):
        load_training([other.parameter], [other.optimizer], other.shards, checkpoint.tensors)
        assert torch.equal(other.parameter, part.parameter)
        expected = part.optimizer.state[part.parameter]
        found = other.optimizer.state[other.parameter]
        assert {k: v.tolist() for k, v in found.items()} == {
            k: v.tolist() for k, v in expected.items()
        }

    alone = Tied(2)
    optimizer = adamw(list(alone.parameters()))
    load_training(alone.parameters(), [optimizer], whole_parameters(alone), checkpoint.tensors)
    for slot in ("exp_avg", "exp_avg_sq"):
        flat = torch.cat([optimizer.state[p][slot].flatten() for p in alone.parameters()])
        assert torch.equal(flat, torch.cat([p.optimizer.state[p.parameter][slot] for p in parts]))
    assert [float(optimizer.state[p]["step"]) for p in alone.parameters()] == [1.0] * 4
    assert torch.equal(
        torch.cat([p.detach().flatten() for p in alone.parameters()]),
        torch.cat([part.parameter.detach() for part in parts]),
    )


def test_a_flat_buffer_whose_first_parameter_has_no_state(tmp_path: Path) -> None:
    """`unused` had no gradient, so it has no moments; those of the others are not lost."""
    model = Tied(0)
    optimizers = [adamw(list(model.parameters()))]
    train(model, optimizers, 2)
    stored = save(tmp_path, model, optimizers).tensors
    first, second = (FlatShard(Tied(1), rank) for rank in range(2))
    found = []
    for part in (first, second):
        load_training([part.parameter], [part.optimizer], part.shards, stored)
        found.append(part.optimizer.state[part.parameter])
        assert float(found[-1]["step"]) == 2
    assert first.layout[0][0] == "unused"
    for slot in ("exp_avg", "exp_avg_sq"):
        flat = torch.cat([torch.zeros(3)] + [s[slot].flatten() for s in _states(optimizers[0])])
        assert torch.equal(torch.cat([state[slot] for state in found]), flat)


def _states(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """In the order of the parameters; none of those that had no gradient."""
    parameters = optimizer.param_groups[0]["params"]
    return [optimizer.state[p] for p in parameters if p in optimizer.state]


def test_data_parallel_ranks_share_the_writing() -> None:
    model = Tied(0)
    optimizers = [adamw(list(model.parameters()))]
    train(model, optimizers, 1)
    held = training_pieces(model.parameters(), optimizers, whole_parameters(model))
    shares = [deal(held, rank, 3) for rank in range(3)]
    assert sorted(p.name for share in shares for p in share) == sorted(p.name for p in held)
    sizes = [sum(p.tensor.nbytes for p in share) for share in shares]
    assert max(sizes) - min(sizes) <= max(p.tensor.nbytes for p in held)


def test_generators_of_other_ranks(tmp_path: Path) -> None:
    held = [piece for rank in range(2) for piece in _seeded(rank)]
    stored = Checkpoint(Saver(tmp_path, 1).save("a", held, {})).tensors
    for rank in range(2):
        assert load_generators(rank, CPU, stored)
        assert torch.equal(torch.rand(3), _draw(rank))
    before = torch.get_rng_state()
    assert not load_generators(2, CPU, stored)
    assert not load_generators(0, [torch.device("cuda", 0)], stored)
    assert torch.equal(torch.get_rng_state(), before)


def _seeded(rank: int) -> list[Piece]:
    torch.manual_seed(rank)
    return generator_pieces(rank, CPU)


def _draw(rank: int) -> Tensor:
    return torch.rand(3, generator=torch.Generator().manual_seed(rank))


def test_other_optimizers(tmp_path: Path) -> None:
    """No state before the first step; None where there is no momentum yet."""
    model = nn.Linear(2, 2)
    shards = whole_parameters(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert len(training_pieces(model.parameters(), [sgd], shards)) == 2
    model(torch.ones(1, 2)).sum().backward()
    sgd.step()
    pieces = training_pieces(model.parameters(), [sgd], shards)
    stored = Checkpoint(Saver(tmp_path, 1).save("a", pieces, {})).tensors
    other = nn.Linear(2, 2)
    again = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    load_training(other.parameters(), [again], whole_parameters(other), stored)
    assert [again.state[p]["momentum_buffer"].tolist() for p in other.parameters()] == [
        [[1.0, 1.0], [1.0, 1.0]],
        [1.0, 1.0],
    ]


def test_another_model_is_refused(tmp_path: Path) -> None:
    model = Tied(0)
    stored = save(tmp_path, model, []).tensors
    linear = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"holds no model.weight: it is of another model$"):
        load_training(linear.parameters(), [], whole_parameters(linear), stored)
