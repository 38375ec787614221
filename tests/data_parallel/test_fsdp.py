"""Sharded training is the training of one process, and no rank holds more than it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("zero", [1, 2, 3])
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


def _named_buffers(_: int, _world: int) -> tuple[list[str], str]:
    """A model whose layers are called otherwise than where they stand."""
    model = nn.ModuleDict({"head": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)}).to("meta")
    layers, asked = [model["norm"], model["head"]], []

    def init(name: str, tensor: Tensor) -> None:
        asked.append(name)
        tensor.zero_()

    parameters: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    buffers = {b: name for name, b in model.named_buffers()}
    error = _error_of(
        lambda: FullyShardedDataParallel(layers, OPTIMIZERS["sgd"], names=parameters, init=init)
    )
    FullyShardedDataParallel(layers, OPTIMIZERS["sgd"], names=parameters | buffers, init=init)
    return asked, error


def test_buffers_have_the_names_that_are_given(ranks: Ranks) -> None:
    buffers = [f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    for asked, error in ranks.run(_named_buffers):
        assert asked[-3:] == buffers
        assert error.startswith("ValueError: buffer 0.running_mean of the layers is on the meta ")


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


def _dropout(rank: int, _: int) -> tuple[Tensor, Tensor]:
    layers = [nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1)]
    fsdp = FullyShardedDataParallel(
        [layer.to(DTYPE).to("meta") for layer in layers],
        lambda shards: torch.optim.SGD(shards, lr=0.1),
        init=fill,
    )
    torch.manual_seed(rank)
    output = fsdp.forward(torch.ones(1, 4, dtype=DTYPE))
    torch.manual_seed(rank)
    for layer in layers:
        layer.to_empty(device="cpu")
    for name, p in nn.Sequential(*layers).named_parameters():
        fill(name, p)
    return output.detach(), nn.Sequential(*layers)(torch.ones(1, 4, dtype=DTYPE)).detach()


def test_dropout_draws_from_the_generator_of_each_rank(ranks: Ranks) -> None:
    (first, want), (second, _) = ranks.run(_dropout)
    assert torch.equal(first, want)
    assert not torch.equal(first, second)


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


class _ScalesLater(nn.Module):
    """Adds its parameter in its first forward, and multiplies with it in those that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 5.0, dtype=DTYPE))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight if self.calls > 1 else x + self.weight


def _later(_: int, _world: int) -> dict[str, Tensor]:
    ends = [nn.Linear(n, m, bias=False, dtype=DTYPE) for n, m in ((2, 3), (3, 1))]
    for end in ends:
        nn.init.ones_(end.weight)
    layers = [ends[0], _ScalesLater(), ends[1]]
    fsdp = FullyShardedDataParallel(layers, lambda shards: torch.optim.SGD(shards, lr=0.1))
    for _step in range(2):
        fsdp.zero_grad()
        fsdp.backward(fsdp.forward(torch.ones(1, 2, dtype=DTYPE)).sum())
    return whole(fsdp, "gradients")


def test_what_backward_did_not_need_at_first_it_may_need_later(ranks: Ranks) -> None:
    """Such a parameter is not gathered again for backward: its values are kept instead."""
    first, _ = ranks.run(_later)
    assert {n: g.flatten().tolist() for n, g in first.items()} == {
        "0.weight": [10.0] * 6, "1.weight": [4.0] * 3, "2.weight": [20.0] * 3,
    }  # fmt: skip


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
        _error_of(lambda: make([meta], names=dict.fromkeys(meta.parameters(), "a"))),
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
        "ValueError: two parameters are named a: each needs a name of its own",
    ]
    for got in ranks.run(_mistakes):
        assert [g[: len(w)] for g, w in zip(got, want, strict=True)] == want
