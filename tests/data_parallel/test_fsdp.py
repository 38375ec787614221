"""Sharded training is the training of one process, whatever layers hand on; or it is refused.

That it is so for every stage of ZeRO, division of a batch and optimizer, the rows of
tests/equivalence/table.py and the random models of tests/fuzz say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from data_parallel.fsdp import FullyShardedDataParallel
from tests.data_parallel.sharded_models import (
    DTYPE,
    SGD,
    batch,
    fill,
    filled,
    loss_of,
    one_process,
    same,
    sharded,
    whole,
)
from tests.ranks import Ranks


def _buffers(rank: int, _: int) -> list[tuple[dict[str, Tensor], bool]]:
    """With values on the first rank and others on the second; and filled by name."""
    found = []
    for device in ("cpu", "meta"):
        layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(DTYPE).to(device)
        if device == "cpu":
            for _name, b in layers.named_buffers():
                b.add_(rank + 1)
        FullyShardedDataParallel(layers, SGD, init=fill)
        found.append((dict(layers.named_buffers()), all(p.is_meta for p in layers.parameters())))
    return found


def test_buffers_are_those_of_rank_0_or_filled_by_name(ranks: Ranks) -> None:
    """And a rank keeps no parameter whole."""
    names = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    for (given, first_empty), (filled_in, second_empty) in ranks.run(_buffers):
        assert first_empty and second_empty
        assert list(given) == list(filled_in) == names
        assert [b.tolist() for b in given.values()] == [[1.0] * 3, [2.0] * 3, 1]
        want = torch.empty(3, dtype=DTYPE)
        fill("1.running_mean", want)
        assert torch.equal(filled_in["1.running_mean"], want)


def _by_hand(rank: int, _: int) -> list[Any]:
    """The calls of the course, without train_step; an evaluation in between."""
    fsdp = sharded()
    x, target = batch(0, slice(0, 7) if rank == 0 else slice(7, 12))
    with torch.no_grad():
        before = fsdp.forward(batch(0)[0])  # the whole batch, on both
        idle = fsdp.forward(None)
    fsdp.backward(loss_of(fsdp.forward(x), target))
    gradients = whole(fsdp, "gradients")
    fsdp.optimizer_step()
    fsdp.optimizer_step()  # without gradients: nothing happens
    return [before, idle, gradients, whole(fsdp, "parameters")]


def test_forward_backward_step(ranks: Ranks) -> None:
    found = ranks.run(_by_hand)
    (want,), (gradients,), weights = one_process(1)
    same(found[0][2], gradients)
    same(found[0][3], weights)
    for before, idle, *_ in found:
        assert idle is None and not before.requires_grad
        assert torch.allclose(before, want, rtol=1e-12, atol=1e-12)


# Layers that hand on more than a tensor of their own


class Own(nn.Module):
    """Returns its parameter itself, and writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.mul_(2), self.weight


class Matrix(nn.Module):
    """Multiplies by the weight of an embedding, and looks nothing up in it: it is not gathered
    again for backward, and what that needs of it is kept instead."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table.weight


@dataclass
class Closed:
    """Torch cannot look inside."""

    hidden: Any
    skip: Any


class Put(nn.Module):
    """Hands on its input, too, in some container."""

    def __init__(self, box: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.box, self.linear = box, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.box(torch.tanh(self.linear(x)), x)


class Take(nn.Module):
    def forward(self, box: Any) -> Tensor:
        if isinstance(box, BaseModelOutput):
            box = (box.last_hidden_state, *(box.hidden_states or ()))
        hidden, skip = (box.hidden, box.skip) if isinstance(box, Closed) else box
        return hidden * skip


class Leave(nn.Linear):
    """Leaves its output where another layer finds it."""

    left: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        Leave.left = super().forward(x)
        return Leave.left


class Find(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert Leave.left is not None
        return super().forward(x) + Leave.left


class View(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y[:, :1]


class Write(nn.Module):
    def forward(self, box: Any) -> Tensor:
        y, first = box
        return y.mul_(2) + first


class WriteToSaved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x))
        return y.mul_(2)  # backward of tanh needs y


def _output(hidden: Tensor, skip: Tensor) -> BaseModelOutput:
    return BaseModelOutput(hidden, hidden_states=(skip,))


LAYERS: Mapping[str, Callable[[], list[nn.Module]]] = {
    "parameter": lambda: [Own(), Take()],
    "matrix": lambda: [Matrix(), nn.Linear(3, 1, bias=False)],
    "tuple": lambda: [Put(lambda hidden, skip: (hidden, skip)), Take()],
    "BaseModelOutput": lambda: [Put(_output), Take()],
    "closed": lambda: [Put(Closed), Take()],
    "attribute": lambda: [Leave(3, 3), Find(3, 3)],
    "view": lambda: [View(3, 3), Write()],
    "saved": lambda: [WriteToSaved(3, 3)],
}
REFUSED = {
    "closed": "layer 2 (Take) uses a tensor",
    "attribute": "layer 2 (Find) uses a tensor",
    "view": "layer 2 (Write) changes a tensor in place that shares memory",
    "saved": "a (2, 3) tensor that backward needs has been modified in place",
}


def _model(kind: str) -> Any:
    return filled(nn.Sequential(nn.Linear(3, 3), *LAYERS[kind]()))


def _input(rank: int) -> Tensor:
    return torch.full((2, 3), 1.0 + rank, dtype=DTYPE)


def _trained(rank: int, _: int, kind: str) -> dict[str, Tensor] | str:
    """Gradients; or why there are none."""
    fsdp = FullyShardedDataParallel(_model(kind), SGD)
    try:
        fsdp.backward(fsdp.forward(_input(rank)).sum())
    except (RuntimeError, ValueError) as error:
        return str(error)
    return whole(fsdp, "gradients")


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind not in REFUSED])
def test_what_layers_may_hand_on(ranks: Ranks, kind: str) -> None:
    model = _model(kind)
    for rank in range(2):
        model(_input(rank)).sum().backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    same(ranks.run(_trained, kind)[0], want)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_wrong_without_a_word_is_refused(ranks: Ranks, kind: str) -> None:
    for message in ranks.run(_trained, kind):
        assert message.startswith(REFUSED[kind])
        assert "gradient would be lost" in message or kind not in ("closed", "attribute")


def _mistakes(_: int, _world: int) -> list[str]:
    def make(*layers: nn.Module, **options: Any) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(layers, SGD, **options)

    first, x = make(nn.Linear(2, 2), zero=1), [torch.ones(1, 2)]
    first.train_step(x, x, lambda output, _: output.sum())
    mistakes: list[Callable[[], object]] = [
        lambda: first.train_step(x, x, lambda output, _: output.sum()),
        lambda: make(nn.Linear(2, 2)).backward(None),
        lambda: make(nn.Linear(2, 2, device="meta")),
        lambda: make(nn.Tanh()),
    ]
    said = []
    for mistake in mistakes:
        with pytest.raises((RuntimeError, ValueError)) as error:
            mistake()
        said.append(str(error.value))
    return said


def test_mistakes(ranks: Ranks) -> None:
    want = [
        "with zero 1, optimizer_step must follow the last backward",
        "backward needs a forward in grad mode before it, one for each",
        "on the meta device a model needs init, which fills it by name",
        "the layers have no parameter that requires a gradient",
    ]
    assert ranks.run(_mistakes) == [want] * 2
