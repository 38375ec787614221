"""What runs in plain PyTorch either runs in a pipeline and gives the same, or is refused by name.

In-place operations, values that are no tensors, hooks: nothing may change a result in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from pipeline.messages import PeerError
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.process import ProcessPipe
from tests.pipeline.pipeline_models import Call, assert_close, cut, gradients, square_error
from tests.ranks import Ranks

Step = Callable[[Pipe, Tensor, Tensor], Any]


def forward_backward(pipe: Pipe, x: Tensor, y: Tensor) -> Tensor:
    loss = square_error(pipe(x), y)
    loss.backward()
    return loss.detach()


def one_f_one_b(pipe: Pipe, x: Tensor, y: Tensor) -> Tensor:
    return pipe.train_step(x, y, square_error, "1f1b", 4)


def zb(pipe: Pipe, x: Tensor, y: Tensor) -> Tensor:
    return pipe.train_step(x, y, square_error, "zb", 4)


STEPS: list[Step] = [forward_backward, one_f_one_b, zb]


def sequences() -> tuple[Tensor, Tensor]:
    """x and target, [B, T, C] = [8, 3, 4]."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, 8, 3, 4, dtype=torch.float64, generator=generator)
    return x, y


def assert_trains_as_plain(model: nn.Sequential, sizes: tuple[int, ...], step: Step) -> None:
    x, y = sequences()
    plain = deepcopy(model)
    expected = square_error(plain(x.clone()), y)
    expected.backward()
    with Pipe(cut(model, sizes), split_size=2) as pipe:
        loss = step(pipe, x.clone(), y)
    assert all(g is not None for g in gradients(plain).values())
    assert_close(gradients(model) | {"loss": loss}, gradients(plain) | {"loss": expected.detach()})


# In place


class AddInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        y += x
        return y


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(
        4, 2, 8, dropout=0.0, activation=nn.ReLU(inplace=True), batch_first=True
    )


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("layers", [
    lambda: [nn.Linear(4, 4), AddInPlace(), nn.Linear(4, 4), AddInPlace()],
    lambda: [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True)],
    lambda: [nn.Linear(4, 4), nn.Dropout(0.0, inplace=True), nn.Linear(4, 4), nn.Tanh()],
    lambda: [nn.Linear(4, 4), nn.Hardtanh(inplace=True), nn.Linear(4, 4),
             Call(lambda x: x.mul_(2))],
    lambda: [nn.Linear(4, 4), transformer(), transformer(), nn.Linear(4, 4)],
])  # fmt: skip
def test_what_a_product_made_may_be_changed_in_place(
    layers: Callable[[], list[nn.Module]], step: Step
) -> None:
    torch.manual_seed(0)
    assert_trains_as_plain(nn.Sequential(*layers()).double(), (2, 2), step)


# The same tensor twice


def test_one_tensor_handed_on_twice() -> None:
    for step in STEPS:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 4), Call(lambda x: (x, x)), Call(lambda v: v[0] * v[1]), nn.Linear(4, 4)
        ).double()
        assert_trains_as_plain(model, (2, 2), step)


def _twice(v: tuple[Tensor, Tensor]) -> Tensor:
    a, b = v
    a *= 2
    return a + b


def twice_in_place() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), Call(lambda x: (x, x)), Call(_twice), nn.Linear(4, 4)
    ).double()


@pytest.mark.parametrize("step", STEPS)
def test_one_tensor_handed_on_twice_and_changed_in_place(step: Step) -> None:
    assert_trains_as_plain(twice_in_place(), (2, 2), step)


# Two tensors in one memory


def _scale_and_join(v: tuple[Tensor, Tensor]) -> Tensor:
    h, other = v
    h += 1
    h.mul_(2)
    return h.square().sum(-1, keepdim=True) + other.square()


def sharing(other: Callable[[Tensor], Any], last: Callable[[Any], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    pack = Call(lambda h: (h, other(h)))
    layers = [nn.Linear(4, 4), nn.LayerNorm(4), pack, nn.Identity(), Call(last)]
    return nn.Sequential(*layers).double()


SHARED = "layer 4 (Call) changes a tensor in place that shares memory with another one handed on"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("sizes", [(3, 2), (4, 1)])
def test_a_layer_that_writes_to_memory_of_two_is_named(sizes: tuple[int, ...], step: Step) -> None:
    """Also where both have come through another layer."""
    model = sharing(lambda h: h[..., :1], _scale_and_join)
    with Pipe(cut(model, sizes), 2) as pipe, pytest.raises(ValueError) as error:
        step(pipe, *sequences())
    assert str(error.value).startswith(SHARED)


@pytest.mark.parametrize("step", STEPS)
def test_memory_that_nobody_writes_to_may_be_shared(step: Step) -> None:
    """And within a stage it may be written to."""
    assert_trains_as_plain(sharing(lambda h: h[..., :1], _scale_and_join), (2, 3), step)
    model = sharing(lambda h: h[..., :1], lambda v: v[0].square() + v[1].relu())
    assert_trains_as_plain(model, (3, 2), step)
    assert_trains_as_plain(sharing(Tensor.clone, _scale_and_join), (3, 2), step)


def _shared_between_processes(_: int, __: int, by_layer: bool, share_memory: bool) -> str:
    model = sharing(lambda h: h.detach(), _scale_and_join)  # the receiver's would have other values
    pipe = ProcessPipe(model, [3, 2], by_layer=by_layer, share_memory=share_memory, timeout=30)
    with pipe:
        try:
            pipe.train_step(*sequences(), square_error, "1f1b", 4)
        except (ValueError, PeerError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("share_memory", [False, True])
@pytest.mark.parametrize("by_layer", [False, True])
def test_between_processes_it_is_named_too_where_only_values_differ(
    ranks: Ranks, by_layer: bool, share_memory: bool
) -> None:
    first, second = ranks.run(_shared_between_processes, by_layer, share_memory)
    assert first.startswith("PeerError: ")
    assert second.startswith(f"ValueError: {SHARED}")


def _write_to_one(v: tuple[Tensor, Tensor]) -> Tensor:
    h, other = v
    product = other * other.exp()
    return product + h.mul_(2)


def _not_shared_between_processes(_: int, __: int) -> dict[str, Any]:
    with ProcessPipe(sharing(lambda h: h + 1, _write_to_one), [3, 2], timeout=30) as pipe:
        pipe.train_step(*sequences(), square_error, "1f1b", 4)
        return {name: p.grad for name, p in pipe.named_parameters().items()}


def test_tensors_of_one_message_are_apart(ranks: Ranks) -> None:
    """To write to one is not to write to another that autograd has saved."""
    plain = sharing(lambda h: h + 1, _write_to_one)
    x, y = sequences()
    square_error(plain(x), y).backward()
    assert_close(ranks.run(_not_shared_between_processes)[0], gradients(plain))


# The first layer


def conv(first: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(first, nn.Conv1d(3, 3, 1), nn.Tanh()).double()


@pytest.mark.parametrize("step", STEPS)
def test_the_first_layer_may_write_to_its_micro_batch(step: Step) -> None:
    """Micro-batches lie in the memory of one batch, which stays as it is."""
    assert_trains_as_plain(conv(nn.Hardtanh(inplace=True)), (1, 2), step)
    assert_trains_as_plain(conv(nn.Hardtanh(inplace=True)), (2, 1), step)


# Values whose tensors are not seen


@dataclass
class Plain:
    hidden: Tensor


class Dict(dict[str, Any]):
    pass


WRAPS: dict[str, Callable[[Tensor], Any]] = {
    "Plain": Plain,
    "Dict": lambda h: Dict(hidden=h),
    "BatchEncoding": lambda h: BatchEncoding({"hidden": h}),
}


class Wrap(nn.Module):
    """Hands its output on in an object of the type ``kind``, beside a tensor and a flag."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Any:
        return x, True, WRAPS[self.kind](self.fc(x))


class Unwrap(nn.Module):
    def forward(self, value: Any) -> Tensor:
        _, _, box = value
        return box.hidden if hasattr(box, "hidden") else box["hidden"]


def wrapped(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Wrap(kind), Unwrap(), nn.Linear(4, 4)).double()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", list(WRAPS))
def test_a_layer_that_hands_on_what_is_no_pytree_is_named(kind: str, step: Step) -> None:
    x, y = sequences()
    with Pipe(cut(wrapped(kind), (2, 2)), split_size=2) as pipe:
        with pytest.raises(TypeError) as caught:
            step(pipe, x, y)
        with torch.no_grad(), pytest.raises(TypeError):
            pipe(x)
    assert str(caught.value) == (
        f"layer 1 (Wrap) hands on a {kind} with tensors inside, which the pipeline cannot see, "
        "move or differentiate: return tensors, or tuples, lists and dicts of them"
    )


def test_what_is_registered_as_a_pytree_or_holds_no_tensor_passes() -> None:
    for wrap in (
        lambda x: BaseModelOutput(last_hidden_state=x),
        lambda x: {"last_hidden_state": x, "more": SimpleNamespace(causal=True, name="a")},
    ):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 4), Call(wrap), Call(lambda v: v["last_hidden_state"]), nn.Linear(4, 4)
        ).double()
        assert_trains_as_plain(model, (2, 2), one_f_one_b)


def test_a_batch_in_what_is_no_pytree_is_refused() -> None:
    x, _ = sequences()
    with Pipe(cut(wrapped("Plain"), (2, 2))) as pipe:
        for given in (BatchEncoding({"x": x}), (x, Plain(x))):
            with pytest.raises(TypeError, match=r"the batch holds a \w+ with tensors inside"):
                pipe(given)
            with pytest.raises(TypeError, match=r"the batch holds a \w+ with tensors inside"):
                pipe.train_step(x, given, square_error)


# Tensors that pass by the pipeline


class Keep(nn.Module):
    """Leaves its output behind for `Use`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.fc(x)
        return self.kept.tanh()


class Use(nn.Module):
    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self.source = [keep]

    def forward(self, x: Tensor) -> Tensor:
        kept = self.source[0].kept
        assert kept is not None
        return x + kept


def skipping() -> nn.Sequential:
    torch.manual_seed(0)
    keep = Keep()
    return nn.Sequential(keep, nn.Linear(4, 4), nn.Linear(4, 4), Use(keep)).double()


LOST = (
    r"layer 3 \(Use\) uses a tensor that requires grad and is neither part of its input nor one of "
    r"its parameters: its gradient would be lost\. Let the layers before hand it on, e\.g\. return "
    r"\(output, tensor\), in tuples, .*; or make it a parameter of the layer"
)


@pytest.mark.parametrize("step", STEPS)
def test_a_skip_connection_through_an_attribute_is_named(step: Step) -> None:
    model = skipping()
    x, y = sequences()
    with Pipe(cut(model, (2, 2))) as pipe:
        pipe.split_size = 8  # of several micro-batches the attribute may have another's shape
        with pytest.raises(RuntimeError, match=LOST):
            step(pipe, x, y)
    assert set(gradients(model).values()) == {None}


def test_within_a_stage_it_is_right_for_each_micro_batch() -> None:
    for step in STEPS:
        torch.manual_seed(0)
        assert_trains_as_plain(nn.Sequential(*skipping(), nn.Linear(4, 4).double()), (4, 1), step)


def test_a_parameter_that_is_not_the_layer_s_own_is_named() -> None:
    x, y = sequences()
    first = nn.Linear(4, 4).double()
    model = nn.Sequential(first, nn.Tanh(), Call(lambda h: h @ first.weight), nn.Tanh())
    with (
        Pipe(cut(model, (2, 2))) as pipe,
        pytest.raises(RuntimeError, match=r"layer 2 \(Call\) uses a tensor that requires grad"),
    ):
        one_f_one_b(pipe, x, y)


@pytest.mark.parametrize("make", [nn.Parameter, lambda t: t.requires_grad_()])
def test_what_the_loss_alone_learns_is_named(make: Callable[[Tensor], Tensor]) -> None:
    x, y = sequences()
    temperature = make(torch.ones((), dtype=torch.float64))
    with (
        Pipe(cut(twice_in_place(), (2, 2))) as pipe,
        pytest.raises(RuntimeError, match="loss_fn uses a tensor that requires grad and is"),
    ):
        pipe.train_step(x, y, lambda o, t: square_error(o / temperature, t))


class Force(nn.Module):
    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.fc, self.create_graph = nn.Linear(4, 4), create_graph

    def forward(self, x: Tensor) -> Tensor:
        energy = self.fc(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + self.fc(x) + (force if self.create_graph else force.detach())


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_layer_may_differentiate_inside(create_graph: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), Force(create_graph), nn.Tanh(), Force(create_graph)]
    for step in (one_f_one_b, zb):
        assert_trains_as_plain(nn.Sequential(*deepcopy(layers)).double(), (2, 2), step)


# Hooks


def nested() -> tuple[nn.Sequential, dict[str, nn.Module]]:
    """A model, and its containers by name."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    model = nn.Sequential(WithDevice(inner, "cpu:0"), WithDevice(nn.Linear(4, 4), "cpu:1")).double()
    containers = {
        "the Sequential": model,
        "0": model[0],
        "0._module": inner,
        "0._module.1": inner[1],
        "1": model[1],
    }
    return model, containers


def _change(_: nn.Module, __: Any, output: Any) -> Any:
    return output


REGISTER: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.register_forward_hook(_change),
    "full_backward": lambda m: m.register_full_backward_hook(lambda *_: None),
}


@pytest.mark.parametrize("kind", list(REGISTER))
@pytest.mark.parametrize("name", [*nested()[1], "partitions.0", "partitions.1"])
def test_a_hook_on_what_a_pipe_takes_apart_is_refused_by_name(name: str, kind: str) -> None:
    x, y = sequences()
    model, containers = nested()
    with Pipe(model, split_size=4) as pipe:
        containers |= {f"partitions.{j}": part for j, part in enumerate(pipe.partitions)}
        handle = REGISTER[kind](containers[name])
        for step in STEPS:
            with pytest.raises(ValueError) as caught:
                step(pipe, x, y)
            assert str(caught.value) == (
                f"{name} ({type(containers[name]).__name__}) has a hook that would never run: a "
                "pipeline calls the layers, and not what holds them. Register it on a layer: the "
                "first or the last of them"
            )
        handle.remove()
        for step in STEPS:
            step(pipe, x, y)


def _double(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output * 2


@pytest.mark.parametrize("step", STEPS)
def test_hooks_on_layers_run_and_change_what_they_change_in_plain_pytorch(step: Step) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), transformer(), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)]
    model = nn.Sequential(*layers).double()
    model[0].register_forward_hook(_double)
    encoder: Any = model[1]
    encoder.linear1.register_forward_pre_hook(lambda _, given: (given[0] * 3,))
    inner: Any = model[2]
    inner[0].register_full_backward_hook(lambda _, dx, __: tuple(g * 2 for g in dx))
    last: Any = model[3]
    last.register_full_backward_pre_hook(lambda _, dy: tuple(g * 2 for g in dy))
    assert_trains_as_plain(model, (2, 2), step)


@pytest.mark.parametrize("step", STEPS)
def test_parametrizations(step: Step) -> None:
    torch.manual_seed(0)
    layers = [parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(4)]
    assert_trains_as_plain(nn.Sequential(*layers).double(), (2, 2), step)


@pytest.mark.parametrize(
    ("holder", "kind"),
    [("layers", "Sequential"), ("layers.0", "WithDevice"), ("module", "Sequential")],
)
def test_a_hook_on_what_a_process_takes_apart_is_refused_too(holder: str, kind: str) -> None:
    with ProcessPipe(nested()[0], [2]) as pipe:
        attrgetter(holder)(pipe).register_forward_hook(_change)
        with pytest.raises(ValueError, match=rf"^{holder} \({kind}\) has a hook that would never"):
            pipe.train_step(*sequences(), square_error)
