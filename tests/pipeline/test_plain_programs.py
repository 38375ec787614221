"""What runs in plain PyTorch either runs in a pipeline and gives the same, or is refused by name.

In-place operations, values that are not tensors, hooks: none may change a result in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from pipeline.microbatch import MicroBatches
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.processes.links import PeerError
from pipeline.processes.process import ProcessPipe
from pipeline.replicas import place_layers
from tests.odd_layers import ODD, Again, linear, sparse_and_tied
from tests.pipeline.pipeline_models import (
    CPU,
    STEPS,
    Call,
    Step,
    assert_close,
    cut,
    gradients,
    in_one_process,
    one_f_one_b,
    square_error,
)
from tests.remote import on_ranks


def sequences() -> tuple[Tensor, Tensor]:
    """x and target, [B, T, C] = [8, 3, 4]."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, 8, 3, 4, dtype=torch.float64, generator=generator)
    return x, y


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


def skipping() -> list[nn.Module]:
    """A layer leaves its input behind for a later one."""
    left: list[Tensor] = []

    def leave(h: Tensor) -> Tensor:
        left[:] = [h]
        return h.tanh()

    return [linear(), Call(leave), linear(), Call(lambda h: h + left[0])]


def handing_on(wrap: Callable[[Tensor], Any]) -> list[nn.Module]:
    return [linear(), Call(wrap), Call(lambda v: v["last_hidden_state"]), linear()]


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


class Kept(torch.autograd.Function):
    """Makes a graph of its own, and differentiates it by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear, *parameters: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.y = layer(x)
        ctx.inputs = x, *parameters
        y: Tensor = ctx.y.detach()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, *others = torch.autograd.grad(ctx.y, ctx.inputs, dy, True, allow_unused=True)
        return dx, None, *others


class InFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Kept.apply(x, self.fc, *self.fc.parameters())
        return y


class WrittenTo(nn.Module):
    """The results of a product have hooks, and are written to between these."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        for factor in (2, 5):
            if y.requires_grad:
                y.register_hook(lambda g, factor=factor: factor * g)
            y.mul_(3)
        return x + y


def written_to() -> list[nn.Module]:
    """Rows, T C and with no other dimension; with a bias, which makes rows T C a view, or not."""
    apart, joined = (Call(lambda x: x.flatten(0, 1)), Call(lambda x: x.view(-1, 3, 4)))
    layers = [WrittenTo(bias) for bias in (False, True) * 2]
    return [linear(), *layers[:2], apart, *layers[2:], joined, linear()]


Case = tuple[Callable[[], list[nn.Module]], tuple[int, ...] | None]  # None: in the middle
SAME: dict[str, Case] = {
    "relu": (lambda: [linear(), nn.ReLU(inplace=True), linear(), nn.ReLU(inplace=True)], (2, 2)),
    "one tensor twice, in place": (
        lambda: [linear(), Call(lambda x: (x, x)), Call(twice_in_place), linear()], (2, 2),
    ),
    "memory shared and written to within a stage": (lambda: sharing(lambda h: h[..., :1]), (2, 3)),
    "the first stage in place": (first_in_place, (2, 1)),
    "a registered pytree": (
        lambda: handing_on(lambda x: BaseModelOutput(last_hidden_state=x)), (2, 2),
    ),
    "an object without tensors": (
        lambda: handing_on(lambda x: {"last_hidden_state": x, "more": SimpleNamespace(name="a")}),
        (2, 2),
    ),
    "a graph inside a function": (lambda: [linear(), InFunction(), nn.Tanh(), InFunction()], None),
    "results with hooks, written to": (written_to, None),
    "what nobody needs": (lambda: [Fork(), Call(join), linear()], (1, 2)),
    "an attribute within a stage": (lambda: [*skipping(), linear()], (4, 1)),
    "a sparse embedding, tied within a stage": (sparse_and_tied, (4, 1)),
    **{name: (layers, None) for name, layers in ODD.items()},
}  # fmt: skip


def trains_as_in_plain_pytorch(name: str, devices: Sequence[str] = CPU) -> None:
    layers, sizes = SAME[name]
    x, y = sequences()
    for step in STEPS:
        torch.manual_seed(0)
        model = nn.Sequential(*layers()).double()
        half = len(model) // 2
        expected = in_one_process(deepcopy(model), x.clone(), y)
        placed, _ = place_layers([*model], sizes or (half, len(model) - half), devices)
        with Pipe(placed, split_size=2) as pipe:
            loss = step(pipe, x, y)
        trained = {name for name, p in model.named_parameters() if p.requires_grad} | {"loss"}
        nothing = {name for name, value in expected.items() if value is None}
        assert {name for name in nothing & trained if "unused" not in name} == set()
        assert_close(gradients(model) | {"loss": loss}, expected)


@pytest.mark.parametrize("name", SAME)
def test_it_trains_as_in_plain_pytorch(name: str) -> None:
    trains_as_in_plain_pytorch(name)


@dataclass
class Plain:
    hidden: Tensor


def anothers_parameter() -> list[nn.Module]:
    first = linear()
    return [first, nn.Tanh(), Call(lambda h: h @ first.weight), nn.Tanh()]


def anothers_layer() -> list[nn.Module]:
    first = nn.Linear(4, 4, bias=False)
    return [first, nn.Tanh(), Call(lambda h: first(h)), nn.Tanh()]


def anothers_bias() -> list[nn.Module]:
    first, second = linear(), linear()
    mixed = Call(lambda h: torch.func.functional_call(second, {"bias": first.bias}, (h,)))
    mixed.fc = second
    return [first, nn.Tanh(), mixed, nn.Tanh()]


def later() -> list[nn.Module]:
    """Another's parameter, not yet in the first micro-batch."""
    first, calls = linear(), count()
    return [first, nn.Tanh(), Call(lambda h: h @ first.weight if next(calls) else h), nn.Tanh()]


class Overwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()

    def forward(self, x: Tensor) -> Tensor:
        h = x.sin()
        y = self.fc(h)
        return y + h.mul_(2)


def drawn_again() -> Again:
    """With other masks than in the forward: silently wrong gradients."""
    layer = Again()
    layer.layers[1] = nn.Dropout(0.5)
    return layer


SHARED = "layer {} hands on tensors that share memory, such as a tensor and a view of it: a write"
STRANGE = (
    r"layer {} uses a tensor that requires grad and is neither part of its input nor one of its "
    r"parameters: its gradient would be lost\. Let the layers before hand it on, in tuples, .*; or "
    "make it a parameter of the layer"
)
REFUSED: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...], str]] = {
    "a dataclass": (
        lambda: [linear(), Call(Plain), Call(attrgetter("hidden")), linear()], (2, 2),
        STRANGE.format(r"2 \(Call\)"),
    ),
    "memory of two": (
        lambda: sharing(lambda h: h[..., :1]), (3, 2), SHARED.format(r"2 \(Call\)"),
    ),
    "memory of two, detached": (
        lambda: sharing(lambda h: h.detach()), (4, 1), SHARED.format(r"3 \(Identity\)"),
    ),
    "a sparse tensor": (
        lambda: [linear(), Call(Tensor.to_sparse), Call(Tensor.to_dense), linear()], (2, 2),
        r"layer 1 \(Call\) hands on a tensor that is not dense \(torch",
    ),
    "an attribute": (skipping, (2, 2), STRANGE.format(r"3 \(Call\)")),
    "another's parameter": (anothers_parameter, (2, 2), STRANGE.format(r"2 \(Call\)")),
    "another's parameter, later": (later, (2, 2), STRANGE.format(r"2 \(Call\)")),
    "another's layer": (anothers_layer, (2, 2), STRANGE.format(r"2 \(Call\)")),
    "another's bias": (anothers_bias, (2, 2), STRANGE.format(r"2 \(Call\)")),
    "a write to what a product needs": (
        lambda: [linear(), Overwritten()], (1, 1),
        r"^a \(\d+, 4\) tensor that the backward of a product needs has been modified by an inpl",
    ),
    "a checkpoint with reentry": (
        lambda: [linear(), Again(use_reentrant=True)], (1, 1),
        "When use_reentrant=True, torch.utils.checkpoint is incompatible",
    ),
    "a checkpoint that draws": (
        lambda: [linear(), drawn_again()], (1, 1), "do not checkpoint inside a Pipe",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ["scale", "the input"])
def test_what_a_step_is_given_may_not_require_grad(what: str) -> None:
    first = linear().double()
    x, y = sequences()
    both = nn.Sequential(linear(), linear()).double()
    pipes: tuple[Pipe | ProcessPipe, ...] = ProcessPipe(both, [2]), Pipe(cut(both, (1, 1)))
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


def test_a_checkpoint_that_draws_later_is_refused_in_the_next_step() -> None:
    """As dropout that is switched on after the first steps."""
    layer = drawn_again()
    dropout: Any = layer.layers[1]
    dropout.p = 0.0
    model = nn.Sequential(linear(), layer).double()
    with Pipe(cut(model, (1, 1)), split_size=8) as pipe:
        for _ in range(3):
            one_f_one_b(pipe, *sequences())
        dropout.p = 0.5
        with pytest.warns(UserWarning, match="by a layer that drew nothing before"):
            one_f_one_b(pipe, *sequences())
        with pytest.raises(RuntimeError, match="do not checkpoint inside a Pipe"):
            one_f_one_b(pipe, *sequences())


def apart() -> nn.Sequential:
    def write_to_one(v: tuple[Tensor, Tensor]) -> Tensor:
        h, other = v
        product = other * other.exp()
        return product + h.mul_(2)

    torch.manual_seed(0)
    return nn.Sequential(*sharing(lambda h: h + 1, write_to_one)).double()


@on_ranks(2)
def test_of_two_tensors_in_a_message_one_is_written_to_and_the_other_saved(
    rank: int, _: int
) -> None:
    wanted = in_one_process(apart(), *sequences())
    with ProcessPipe(apart(), [3, 2]) as pipe:
        loss = pipe.train_step(*sequences(), square_error, "1f1b", 4)
        found = gradients(pipe) | ({"loss": loss} if rank else {})
    assert_close(found, {name: wanted[name] for name in found})


def norm_twice() -> nn.Sequential:
    """On both stages."""
    norm = nn.BatchNorm1d(3)
    return nn.Sequential(norm, linear(), norm).double()


@pytest.mark.parametrize("num_microbatches", [1, 2])
@on_ranks(2)
def test_averages_are_kept_by_no_two_ranks(rank: int, _: int, num_microbatches: int) -> None:
    model, (x, y) = norm_twice(), sequences()
    with ProcessPipe(model, [2, 1]) as pipe:
        pipe.module.eval()
        for _evaluation in range(3):  # do not count as the steps that are checked
            pipe.forward(x)
        pipe.module.train()
        said = "a BatchNorm1d on several stages changes its buffer running_mean in forward, .* each"
        first, second = (f"{said}|waiting for gradients", f"^{said}")  # the other may have ended
        with pytest.raises((ValueError, PeerError), match=(first, second)[rank]):
            pipe.train_step(x, y, square_error, "1f1b", num_microbatches)


def test_threads_that_write_to_averages_in_any_order_are_refused() -> None:
    """With one micro-batch their order is that of the stages."""
    x, y = sequences()
    model, plain = norm_twice(), norm_twice()
    plain.load_state_dict(model.state_dict())
    wanted = in_one_process(plain, x, y)
    with Pipe(cut(model, (2, 1)), split_size=4) as pipe:
        loss = pipe.train_step(x, y, square_error, num_microbatches=1)
        assert_close(gradients(model) | {"loss": loss}, wanted)
        assert_close(model.state_dict(), dict(plain.state_dict()))
        with pytest.raises(ValueError, match="a BatchNorm1d on several stages changes its buffer"):
            pipe(x)


def test_evaluations_do_not_count_as_steps_that_are_checked() -> None:
    """Without `eval()`, too: nothing here depends on it."""
    model = nn.Sequential(*anothers_parameter()).double()
    with Pipe(cut(model, (2, 2)), split_size=8) as pipe:
        for _ in range(3):
            with torch.no_grad():
                pipe(sequences()[0])
        with pytest.raises(RuntimeError, match=STRANGE.format(r"2 \(Call\)")):
            pipe(sequences()[0])


def test_a_first_weight_may_be_written_to_before_backward() -> None:
    """Nothing is differentiated by the batch, so its backward does not need the weight."""
    x, y = sequences()
    model = nn.Sequential(linear(), nn.Tanh(), nn.LayerNorm(4)).double()
    wanted = in_one_process(deepcopy(model), x, y)
    with Pipe(cut(model, (1, 2)), split_size=8) as pipe:
        loss = square_error(pipe(x), y)
        with torch.no_grad():
            next(model.parameters()).zero_()
        loss.backward()
    assert_close(gradients(model) | {"loss": loss.detach()}, wanted)


@on_ranks(2)
def test_stages_in_processes_are_looked_at_too(rank: int, _: int) -> None:
    wrong = nn.Sequential(*sharing(lambda h: h.detach())).double()
    kind, said = ((ValueError, SHARED.format(r"2 \(Call\)")), (PeerError, "stage 0"))[rank]
    with ProcessPipe(wrong, [3, 2]) as pipe, pytest.raises(kind, match=said):
        pipe.train_step(*sequences(), square_error, "1f1b", 4)


def nested() -> nn.Sequential:
    inner = nn.Sequential(linear(), nn.Sequential(nn.Tanh(), linear()))
    return nn.Sequential(WithDevice(inner, "cpu:0"), WithDevice(linear(), "cpu:1")).double()


def refused(holder: nn.Module) -> Any:
    said = f"^a {type(holder).__name__} has a hook that would never run"
    return pytest.raises(ValueError, match=said)


def test_a_hook_on_what_a_pipe_takes_apart_is_refused_by_name() -> None:
    model = nested()
    with Pipe(model, split_size=4) as pipe:
        holders = [model.get_submodule(name) for name in ("0", "0.module", "0.module.1")]
        for holder in (model, *holders, pipe.partitions[1]):
            for register in (holder.register_forward_hook, holder.register_full_backward_hook):
                handle: Any = register(lambda *_: None)
                for step in STEPS[:2]:
                    with refused(holder):
                        step(pipe, *sequences())
                handle.remove()
        one_f_one_b(pipe, *sequences())
    for name in ("layers.0", "module"):
        with ProcessPipe(nested(), [2]) as processes:
            holder = attrgetter(name)(processes)
            holder.register_forward_hook(lambda *_: None)
            with refused(holder):
                one_f_one_b(processes, *sequences())
