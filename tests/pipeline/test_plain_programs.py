"""What runs in plain PyTorch either runs in a pipeline and gives the same, or is refused by name.

In-place operations, values that are no tensors, hooks: nothing may change a result in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

from pipeline.microbatch import MicroBatches
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.processes.messages import PeerError
from pipeline.processes.process import ProcessPipe
from tests.fuzz.models import Complex, Dot, Empty
from tests.pipeline.pipeline_models import (
    STEPS,
    Call,
    LookUp,
    Step,
    assert_close,
    cut,
    gradients,
    in_one_process,
    one_f_one_b,
    square_error,
    take_gradients,
)
from tests.ranks import Ranks
from tests.ranks import sharing as allowed


def sequences() -> tuple[Tensor, Tensor]:
    """x and target, [B, T, C] = [8, 3, 4]."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, 8, 3, 4, dtype=torch.float64, generator=generator)
    return x, y


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


class Odd(nn.Module):
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


def twice_in_place(v: tuple[Tensor, Tensor]) -> Tensor:
    a, b = v
    a *= 2
    return a + b


def scale_and_join(v: tuple[Tensor, Tensor]) -> Tensor:
    h, other = v
    h += 1
    h.mul_(2)
    return h.square().sum(-1, keepdim=True) + other.square()


def sharing(
    other: Callable[[Tensor], Any], last: Callable[[Any], Tensor] = scale_and_join
) -> list[nn.Module]:
    pack = Call(lambda h: (h, other(h)))
    return [linear(), nn.LayerNorm(4), pack, nn.Identity(), Call(last)]


class Force(nn.Module):
    """Differentiates inside."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()

    def forward(self, x: Tensor) -> Tensor:
        energy = self.fc(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + self.fc(x) + force


def skipping() -> list[nn.Module]:
    """A layer leaves its input behind for a later one."""
    left: list[Tensor] = []

    def leave(h: Tensor) -> Tensor:
        left[:] = [h]
        return h.tanh()

    return [linear(), Call(leave), linear(), Call(lambda h: h + left[0])]


def hooked() -> list[nn.Module]:
    """Hooks on layers run and change what they change in plain PyTorch."""
    layers: list[Any] = [linear() for _ in range(3)]
    first, inner, last = layers
    first.register_forward_hook(lambda _, __, output: output * 2)
    inner.register_forward_pre_hook(lambda _, given: (given[0] * 3,))
    inner.register_full_backward_hook(lambda _, dx, __: tuple(g * 2 for g in dx))
    last.register_full_backward_pre_hook(lambda _, dy: tuple(g * 2 for g in dy))
    return [first, nn.Sequential(inner), nn.Tanh(), last]


def handing_on(wrap: Callable[[Tensor], Any]) -> list[nn.Module]:
    return [linear(), Call(wrap), Call(lambda v: v["last_hidden_state"]), linear()]


def sparse_and_tied() -> list[nn.Module]:
    """As a matrix the weight has a dense gradient."""
    look_up, head = LookUp(4), nn.Linear(4, 5, bias=False)
    head.weight = look_up.table.weight
    return [linear(), look_up, nn.Tanh(), head, nn.Linear(5, 4)]


class Transforms(nn.Module):
    """torch.func around products with its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda row: self.fc(row).tanh().sum())
        each = torch.vmap(torch.vmap(lambda row: self.fc(row) + slope(row)))(x)
        pulled = torch.func.vjp(self.fc, x)[1](x.sin())[0]
        weights = {name: p * 2 for name, p in self.fc.named_parameters()}
        return each + pulled + torch.func.functional_call(self.fc, weights, (x,))


class Fork(nn.Module):
    """To a tuple: a part that is used, one that is not, integers, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = linear(), linear()

    def forward(self, x: Tensor) -> Any:
        return {"h": self.used(x), "rest": (self.unused(x), (x > 0).sum(-1), None, "constant")}


def join(value: Any) -> Tensor:
    aside, count, nothing, text = value["rest"]
    assert aside.requires_grad and count.dtype == torch.int64
    assert (nothing, text) == (None, "constant")
    return value["h"] * count[..., None]


def first_in_place() -> list[nn.Module]:
    """The micro-batches lie in the memory of one batch, which stays as it is."""
    return [nn.Hardtanh(inplace=True), nn.Conv1d(3, 3, 1), nn.Tanh()]


Case = tuple[Callable[[], list[nn.Module]], tuple[int, ...]]
SAME: dict[str, Case] = {
    "relu": (lambda: [linear(), nn.ReLU(inplace=True), linear(), nn.ReLU(inplace=True)], (2, 2)),
    "one tensor twice, in place": (
        lambda: [linear(), Call(lambda x: (x, x)), Call(twice_in_place), linear()], (2, 2),
    ),
    "memory shared and written to within a stage": (lambda: sharing(lambda h: h[..., :1]), (2, 3)),
    "memory shared and not written to": (
        lambda: sharing(lambda h: h[..., :1], lambda v: v[0].square() + v[1].relu()), (3, 2),
    ),
    "the first stage in place": (first_in_place, (2, 1)),
    "a registered pytree": (
        lambda: handing_on(lambda x: BaseModelOutput(last_hidden_state=x)), (2, 2),
    ),
    "an object without tensors": (
        lambda: handing_on(lambda x: {"last_hidden_state": x, "more": SimpleNamespace(name="a")}),
        (2, 2),
    ),
    "what nobody needs": (lambda: [Fork(), Call(join), linear()], (1, 2)),
    "weights used twice, or frozen": (lambda: [Odd(), nn.Tanh(), Odd()], (1, 2)),
    "an attribute within a stage": (lambda: [*skipping(), linear()], (4, 1)),
    "a force that is learnt": (lambda: [linear(), Force(), nn.Tanh(), Force()], (2, 2)),
    "hooks on layers": (hooked, (2, 2)),
    "a weight of one dimension": (lambda: [Dot(4), nn.Tanh(), Dot(4)], (2, 1)),
    "no features": (lambda: [linear(), Empty(4), linear()], (1, 2)),
    "complex weights": (lambda: [Complex(4), nn.Tanh(), Complex(4)], (1, 2)),
    "torch.func": (lambda: [Transforms(), nn.Tanh(), Transforms()], (1, 2)),
    "a sparse embedding, tied": (sparse_and_tied, (2, 3)),
    "a sparse embedding, tied, in a stage": (sparse_and_tied, (4, 1)),
    "parametrizations": (lambda: [parametrizations.weight_norm(linear()) for _ in "1234"], (2, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_it_trains_as_in_plain_pytorch(name: str) -> None:
    layers, sizes = SAME[name]
    x, y = sequences()
    for step in STEPS:
        torch.manual_seed(0)
        model = nn.Sequential(*layers()).double()
        expected = in_one_process(deepcopy(model), x.clone(), y)
        with Pipe(cut(model, sizes), split_size=2) as pipe:
            loss = step(pipe, x.clone(), y)
        trained = {name for name, p in model.named_parameters() if p.requires_grad} | {"loss"}
        nothing = {name for name, value in expected.items() if value is None}
        assert {name for name in nothing & trained if "unused" not in name} == set()
        assert_close(gradients(model) | {"loss": loss}, expected)


@pytest.mark.parametrize("m", [1, 3])
def test_what_computes_the_input_gets_its_gradient(m: int) -> None:
    """In plain PyTorch the graph reaches beyond the first layer; a leaf of the input is used twice,
    and one needs no gradient."""
    torch.manual_seed(0)
    first, model = linear().double(), nn.Sequential(Call(lambda v: v[0] * v[1] + v[2]), linear())
    x, y = sequences()
    expected = in_one_process(nn.Sequential(model[0], model[1].double()), given(first, x), y)
    expected |= take_gradients(first)
    for schedule in ("gpipe", "1f1b", "zb"):
        with Pipe(cut(model, (1, 1))) as pipe:
            loss = pipe.train_step(
                given(first, x), y, lambda o, t: square_error(o, t) / 2, schedule, m, scale=2.0
            )
        found = {**take_gradients(pipe.partitions[1])}
        found = {f"1.{name.split('.')[-1]}": g for name, g in found.items()}
        assert_close(found | {"loss": loss} | take_gradients(first), expected)


def given(first: nn.Module, x: Tensor) -> Any:
    h = first(x)
    return h, h.sin(), x


@dataclass
class Plain:
    hidden: Tensor


def anothers_parameter() -> list[nn.Module]:
    first = linear()
    return [first, nn.Tanh(), Call(lambda h: h @ first.weight), nn.Tanh()]


def later() -> list[nn.Module]:
    """Another's parameter, not yet in the first micro-batch."""
    first, calls = linear(), count()
    return [first, nn.Tanh(), Call(lambda h: h @ first.weight if next(calls) else h), nn.Tanh()]


def reentrant() -> list[nn.Module]:
    layer, again = linear(), Call(lambda h: checkpoint(layer, h, use_reentrant=True))
    again.layer = layer
    return [linear(), again]


HIDDEN = (
    r"layer 1 \(Call\) hands on a Plain with tensors inside, which the pipeline cannot see, "
    "move or differentiate: return tensors, or tuples, lists and dicts of them"
)
SHARED = "layer 4 (Call) changes a tensor in place that shares memory with another one handed on"
STRANGE = (
    r"layer {} uses a tensor that requires grad and is neither part of its input nor one of its "
    r"parameters: its gradient would be lost\. Let the layers before hand it on, e\.g\. return "
    r"\(output, tensor\), in tuples, .*; or make it a parameter of the layer"
)
REFUSED: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...], str]] = {
    "a dataclass": (
        lambda: handing_on(lambda h: {"flag": True, "last_hidden_state": Plain(h)}), (2, 2), HIDDEN,
    ),
    "memory of two": (
        lambda: sharing(lambda h: h[..., :1]), (3, 2), re.escape(SHARED),
    ),
    "an attribute": (skipping, (2, 2), STRANGE.format(r"3 \(Call\)")),
    "another's parameter": (anothers_parameter, (2, 2), STRANGE.format(r"2 \(Call\)")),
    "another's parameter, later": (later, (2, 2), STRANGE.format(r"2 \(Call\)")),
    "a checkpoint with reentry": (
        reentrant, (1, 1), r"layer 1 \(Call\) uses checkpoint\(use_reentrant=True\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ["scale", "the input"])
def test_a_scale_and_what_a_process_is_given_may_not_require_grad(what: str) -> None:
    first = linear().double()
    x, y = sequences()
    both = nn.Sequential(linear(), linear()).double()
    pipes: Any = (ProcessPipe(both, [2]), *[Pipe(cut(both, (1, 1)))] * (what == "scale"))
    for pipe in pipes:
        with pipe, pytest.raises(RuntimeError, match=rf"^{what} requires grad, and its gradient"):
            if what == "scale":
                pipe.train_step(x, y, square_error, num_microbatches=2, scale=first.bias.sum())
            else:
                pipe.train_step(MicroBatches([first(x)]), MicroBatches([y]), square_error)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_in_silence_is_named(name: str, step: Step) -> None:
    layers, sizes, said = REFUSED[name]
    model = nn.Sequential(*layers()).double()
    # Of several micro-batches the attribute may have another's shape.
    split_size = 8 if name == "an attribute" else 2
    with (
        Pipe(cut(model, sizes), split_size=split_size) as pipe,
        pytest.raises((TypeError, ValueError, RuntimeError), match=said),
    ):
        step(pipe, *sequences())
    assert set(gradients(model).values()) == {None}


def test_a_forward_repeated_in_backward_must_not_draw() -> None:
    """Other masks than in the forward: silently wrong gradients."""
    dropout = nn.Dropout(0.5)
    layer = nn.Sequential(linear(), dropout)
    again = Call(lambda x: checkpoint(layer, x, use_reentrant=False))
    again.layer = layer
    model = nn.Sequential(linear(), again).double()
    x, y = sequences()
    with Pipe(cut(model, (1, 1)), split_size=2) as pipe:
        with pytest.raises(RuntimeError, match="do not checkpoint inside a Pipe"):
            one_f_one_b(pipe, x, y)
        dropout.p = 0.0
        loss = one_f_one_b(pipe, x, y)
    assert_close(take_gradients(model) | {"loss": loss}, in_one_process(model, x, y))


def _between_processes(_: int, __: int, share: bool) -> tuple[str, dict[str, Any]]:
    """What is said of shared memory where only values would differ: the receiver's has others. And
    the gradients where one of two tensors of a message is written to, another saved."""
    torch.manual_seed(0)
    wrong = nn.Sequential(*sharing(lambda h: h.detach())).double()
    said = ""
    with allowed(share), ProcessPipe(wrong, [3, 2], timeout=30) as pipe:
        try:
            pipe.train_step(*sequences(), square_error, "1f1b", 4)
        except (ValueError, PeerError) as error:
            said = f"{type(error).__name__}: {error}"
    with allowed(share), ProcessPipe(apart(), [3, 2], timeout=30) as pipe:
        pipe.train_step(*sequences(), square_error, "1f1b", 4)
        return said, {name: p.grad for name, p in pipe.named_parameters().items()}


def apart() -> nn.Sequential:
    def write_to_one(v: tuple[Tensor, Tensor]) -> Tensor:
        h, other = v
        product = other * other.exp()
        return product + h.mul_(2)

    torch.manual_seed(0)
    return nn.Sequential(*sharing(lambda h: h + 1, write_to_one)).double()


@pytest.mark.parametrize("share", [False, True])
def test_between_processes_too(ranks: Ranks, share: bool) -> None:
    (first, found), (second, others) = ranks.run(_between_processes, share)
    assert first.startswith("PeerError: ")
    assert second.startswith(f"ValueError: {SHARED}")
    assert_close(
        found | others | {"loss": None}, in_one_process(apart(), *sequences()) | {"loss": None}
    )


def nested() -> nn.Sequential:
    inner = nn.Sequential(linear(), nn.Sequential(nn.Tanh(), linear()))
    return nn.Sequential(WithDevice(inner, "cpu:0"), WithDevice(linear(), "cpu:1")).double()


def refused(name: str, holder: nn.Module) -> Any:
    said = rf"^{name} \({type(holder).__name__}\) has a hook that would never run"
    return pytest.raises(ValueError, match=said)


def test_a_hook_on_what_a_pipe_takes_apart_is_refused_by_name() -> None:
    model = nested()
    with Pipe(model, split_size=4) as pipe:
        holders = {name: model.get_submodule(name) for name in ("0", "0._module", "0._module.1")}
        holders |= {"the Sequential": model, "partitions.1": pipe.partitions[1]}
        for name, holder in holders.items():
            for register in (holder.register_forward_hook, holder.register_full_backward_hook):
                handle: Any = register(lambda *_: None)
                for step in STEPS[:2]:
                    with refused(name, holder):
                        step(pipe, *sequences())
                handle.remove()
        one_f_one_b(pipe, *sequences())
    for name in ("layers.0", "module"):
        with ProcessPipe(nested(), [2]) as processes:
            holder = attrgetter(name)(processes)
            holder.register_forward_hook(lambda *_: None)
            with refused(name, holder):
                one_f_one_b(processes, *sequences())
