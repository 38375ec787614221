"""Sharded training is the training of one process, and no rank holds more than it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from data_parallel.fsdp import FullyShardedDataParallel
from tests.data_parallel.sharded_models import (
    DTYPE,
    OPTIMIZERS,
    Result,
    batch,
    build,
    check,
    fill,
    one_process,
    same,
    sharded,
    train,
    whole,
)
from tests.ranks import Ranks

STEPS = 10
# A trained weight that no layer uses counts as zero gradients; plain PyTorch has none.
EXTRA = {"tied": frozenset[str](), "conv": frozenset({"body.7.unused"})}


def _train(_: int, _world: int, kind: str, optimizer: str, options: dict[str, Any]) -> list[Result]:
    return train(sharded(kind, optimizer, **options), kind, range(STEPS))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("kind", "optimizer"), [("tied", "adamw"), ("conv", "sgd")])
def test_two_ranks_are_one_process(
    ranks: Ranks, kind: str, optimizer: str, zero: int, share: bool
) -> None:
    """Every gradient and weight by name, after each of ten steps. Shards cut through parameters,
    the first and last layer share one, ranks have 0 to 3 micro-batches of different sizes."""
    got = ranks.run(_train, kind, optimizer, {"zero": zero, "share_memory": share})
    check(got, one_process(kind, optimizer, STEPS), EXTRA[kind])


@pytest.mark.parametrize(("zero", "share"), [(1, True), (2, False), (3, True), (3, False)])
def test_three_ranks_are_one_process(three_ranks: Ranks, zero: int, share: bool) -> None:
    got = three_ranks.run(_train, "tied", "adamw", {"zero": zero, "share_memory": share})
    check(got, one_process("tied", "adamw", STEPS))


def _from_values(rank: int, _: int) -> tuple[list[Result], list[str]]:
    model = build("tied")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 - rank)  # only rank 0 has the right ones
    optimizer = torch.optim.AdamW
    fsdp = FullyShardedDataParallel(
        nn.Sequential(*model.layers()),
        lambda shards: optimizer(shards, lr=1e-2),
        names={p: n for n, p in model.named_parameters()},
    )
    results = train(fsdp, "tied", range(2))
    return results, [n for n, p in model.named_parameters() if not p.is_meta]


def test_a_model_with_values_is_that_of_rank_0(ranks: Ranks) -> None:
    """And no rank keeps them: the modules are empty afterwards."""
    got = ranks.run(_from_values)
    check([results for results, _ in got], one_process("tied", "adamw", 2))
    assert [full for _, full in got] == [[], []]


def _buffers(rank: int, _: int) -> list[dict[str, Tensor]]:
    """With values on the first rank and others on the second; and filled by name."""
    found = []
    for device in ("cpu", "meta"):
        layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(DTYPE).to(device)
        if device == "cpu":
            for _name, b in layers.named_buffers():
                b.add_(rank + 1)
        FullyShardedDataParallel(layers, OPTIMIZERS["sgd"], init=fill)
        found.append(dict(layers.named_buffers()))
    return found


def test_buffers_are_those_of_rank_0_or_filled_by_name(ranks: Ranks) -> None:
    names = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    for given, filled in ranks.run(_buffers):
        assert list(given) == list(filled) == names
        assert [b.tolist() for b in given.values()] == [[1.0] * 3, [2.0] * 3, 1]
        want = torch.empty(3, dtype=DTYPE)
        fill("1.running_mean", want)
        assert torch.equal(filled["1.running_mean"], want)


def _by_hand(rank: int, _: int) -> list[Any]:
    """The calls of the course, without train_step; an evaluation in between."""
    fsdp = sharded("tied")
    x, target = batch("tied", 0)
    half = slice(0, 7) if rank == 0 else slice(7, 12)
    with torch.no_grad():
        before = fsdp.forward(x)  # the whole batch, on both
        idle = fsdp.forward(None)
    output = fsdp.forward(x[half])
    loss = nn.functional.cross_entropy(
        output.flatten(0, 1), target[half].flatten(), reduction="sum"
    ) / int((target != -100).sum())
    fsdp.backward(loss)
    gradients = whole(fsdp, "gradients")
    fsdp.optimizer_step()
    fsdp.optimizer_step()  # without gradients: nothing happens
    return [before, idle, Result(loss.item(), gradients, whole(fsdp, "parameters"))]


def test_forward_backward_step(ranks: Ranks) -> None:
    got = ranks.run(_by_hand)
    check([[result] for _, _, result in got], one_process("tied", "adamw", 1))
    want = nn.Sequential(*build("tied").layers())(batch("tied", 0)[0])
    for before, idle, _ in got:
        assert idle is None and not before.requires_grad
        assert torch.allclose(before, want, rtol=1e-12, atol=1e-12)


class _Own(nn.Module):
    """Returns its parameter itself, and writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=DTYPE))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.mul_(2), self.weight


class _Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 5.0, dtype=DTYPE))

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return (both[0] * both[1] * self.weight).sum()


def _own(_: int, _world: int) -> dict[str, Tensor]:
    layers = [nn.Linear(2, 3, bias=False, dtype=DTYPE), _Own(), _Sum()]
    with torch.no_grad():
        layers[0].weight.fill_(1)  # type: ignore[operator]
    fsdp = FullyShardedDataParallel(layers, lambda shards: torch.optim.SGD(shards, lr=0.1))
    fsdp.backward(fsdp.forward(torch.ones(1, 2, dtype=DTYPE)))
    return whole(fsdp, "gradients")


def test_a_layer_may_return_its_parameter_and_write_to_its_input(ranks: Ranks) -> None:
    """x = 2 2 2, doubled 4 4 4; their sum with weights 1 and 5; two ranks."""
    first, _ = ranks.run(_own)
    assert {n: g.flatten().tolist() for n, g in first.items()} == {
        "0.weight": [20.0] * 6, "1.weight": [40.0] * 3, "2.weight": [8.0] * 3,
    }  # fmt: skip


class _Matrix(nn.Module):
    """Multiplies by the weight of an embedding, and looks nothing up in it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 3, dtype=DTYPE)
        nn.init.constant_(self.table.weight, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table.weight


def _matrix(_: int, _world: int) -> dict[str, Tensor]:
    ends = [nn.Linear(n, m, False, dtype=DTYPE) for n, m in ((2, 2), (3, 1))]
    layers = [ends[0], _Matrix(), ends[1]]
    for p in nn.ModuleList(ends).parameters():
        nn.init.ones_(p)
    fsdp = FullyShardedDataParallel(layers, OPTIMIZERS["sgd"])
    fsdp.backward(fsdp.forward(torch.ones(1, 2, dtype=DTYPE)).sum())
    return whole(fsdp, "gradients")


def test_an_embedding_may_be_a_matrix(ranks: Ranks) -> None:
    """Its weight is not gathered again for backward: what that needs of it is kept instead."""
    first, _ = ranks.run(_matrix)
    assert {n: g.flatten().tolist() for n, g in first.items()} == {
        "0.weight": [30.0] * 4, "1.table.weight": [4.0] * 6, "2.weight": [40.0] * 3,
    }  # fmt: skip


@dataclass
class Closed:
    """Torch cannot look inside."""

    hidden: Any
    skip: Any


BOXES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda hidden, skip: (hidden, skip),
    "BaseModelOutput": lambda hidden, skip: BaseModelOutput(hidden, hidden_states=(skip,)),
    "Closed": Closed,
}


def _take(box: Any) -> tuple[Tensor, Tensor]:
    if isinstance(box, BaseModelOutput):
        assert box.last_hidden_state is not None and box.hidden_states is not None
        return box.last_hidden_state, box.hidden_states[0]
    return (box.hidden, box.skip) if isinstance(box, Closed) else box


class Put(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.box, self.linear = BOXES[kind], nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.box(torch.tanh(self.linear(x)), x)


class Take(nn.Module):
    def forward(self, box: Any) -> Tensor:
        hidden, skip = _take(box)
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


def _layers(kind: str) -> list[nn.Module]:
    layers: list[nn.Module] = [Leave(3, 3), Find(3, 3)]
    if kind in BOXES:
        layers = [nn.Linear(3, 3), Put(kind), Take()]
    for name, p in nn.Sequential(*layers).to(DTYPE).named_parameters():
        fill(name, p)
    return layers


def _hands_on(rank: int, _: int, kind: str) -> dict[str, Tensor] | str:
    fsdp = FullyShardedDataParallel(_layers(kind), OPTIMIZERS["sgd"])
    try:
        fsdp.backward(fsdp.forward(torch.full((2, 3), 1.0 + rank, dtype=DTYPE)).sum())
    except RuntimeError as error:
        return str(error)
    return whole(fsdp, "gradients")


@pytest.mark.parametrize("kind", ["tuple", "BaseModelOutput"])
def test_layers_may_hand_on_what_torch_can_take_apart(ranks: Ranks, kind: str) -> None:
    model = nn.Sequential(*_layers(kind))
    for rank in range(2):
        model(torch.full((2, 3), 1.0 + rank, dtype=DTYPE)).sum().backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    first, _ = ranks.run(_hands_on, kind)
    same(first, want, 1e-12)


@pytest.mark.parametrize(
    ("kind", "who"), [("Closed", "layer 2 (Take)"), ("attribute", "layer 1 (Find)")]
)
def test_a_gradient_that_would_be_lost_is_an_error(ranks: Ranks, kind: str, who: str) -> None:
    for message in ranks.run(_hands_on, kind):
        assert message.startswith(f"{who} uses a tensor") and "gradient would be lost" in message


class Hide(nn.Module):
    """Hands on a parameter that is not trained, where torch cannot see it."""

    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.Parameter(torch.ones(3, dtype=DTYPE), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return Closed(x, self.skip)


class View(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y[:, :1]


class Write(nn.Module):
    def forward(self, box: Any) -> Tensor:
        y, first = box
        return y.mul_(2) + first


def _would_be_wrong(rank: int, _: int, kind: str) -> str:
    second: list[nn.Module] = (
        [Hide(), Take()] if kind == "Hide" else [View(3, 3).to(DTYPE), Write()]
    )
    layers = [nn.Linear(3, 3).to(DTYPE), *second]
    fsdp = FullyShardedDataParallel(layers, OPTIMIZERS["sgd"])
    x = torch.full((2, 3), 1.0 + rank, dtype=DTYPE)
    with pytest.raises(ValueError) as error:
        fsdp.forward(x)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Hide", "layer 1 (Hide) hands on a parameter inside an object"),
        ("View", "layer 2 (Write) changes a tensor in place that shares memory"),
    ],
)
def test_what_would_be_wrong_without_a_word_is_refused(ranks: Ranks, kind: str, said: str) -> None:
    for message in ranks.run(_would_be_wrong, kind):
        assert message.startswith(said)


class _WritesToSaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=DTYPE))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * self.weight)
        return y.mul_(2)  # backward of tanh needs y


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _mistakes(_: int, _world: int) -> list[str]:
    def make(layers: list[nn.Module], **options: Any) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            layers, lambda shards: torch.optim.SGD(shards, lr=0.1), **options
        )

    fsdp = make([_WritesToSaved()])
    bad = fsdp.forward(torch.ones(3, dtype=DTYPE, requires_grad=True)).sum()
    first = make([nn.Linear(2, 2)], zero=1)
    first.backward(first.forward(torch.ones(1, 2)).sum())
    again = first.forward(torch.ones(1, 2)).sum()
    meta = nn.Linear(2, 2, device="meta")
    return [
        _error_of(lambda: fsdp.backward(bad)),
        _error_of(lambda: first.backward(again)),
        _error_of(lambda: make([nn.Linear(2, 2)]).backward(None)),
        _error_of(lambda: make([meta])),
        _error_of(lambda: make([nn.Linear(2, 2)], zero=4)),
        _error_of(lambda: make([nn.Tanh()])),
        _error_of(lambda: make([nn.Linear(2, 2)], names={})),
    ]


def test_mistakes(ranks: Ranks) -> None:
    want = [
        "RuntimeError: one of the variables needed for gradient computation has been modified by",
        "RuntimeError: backward(last=True) has summed the gradients over the ranks: with zero 1",
        "RuntimeError: backward needs a forward in grad mode before it, one for each",
        "ValueError: 0.weight is on the meta device: give init, a function of (name, tensor)",
        "ValueError: zero 4: 1 shards the optimizer state, 2 gradients too, 3 all",
        "ValueError: the layers have no parameter that requires a gradient",
        "ValueError: a parameter of shape (2, 2) has no name: give the names of all, for example",
    ]
    for got in ranks.run(_mistakes):
        assert [g[: len(w)] for g, w in zip(got, want, strict=True)] == want
