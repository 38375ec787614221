"""Traced modules in stages: what the plain module computes, by name; and what cannot be traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from transformers.pytorch_utils import Conv1D

from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.processes.process import ProcessPipe
from pipeline.stage import Stage
from pipeline.tracing.trace import split
from tests.fuzz.models import Products, Shift, Skip
from tests.odd_layers import Complex, Empty, Reverse, hook_in_forward, hooked
from tests.pipeline.pipeline_models import (
    Call,
    assert_close,
    assert_same_bits,
    gpt2,
    gradients,
    square_error,
)


class Three(nn.Module):
    """Three layers and dropout. Two inputs; the second is used by the last layer alone, and so is
    what the first layer makes: both skip the stage between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("shift", torch.arange(3.0))

    def forward(self, x: Tensor, scale: Tensor, sign: int = 1) -> dict[str, Tensor]:
        first = torch.tanh(self.a(x))
        second = self.drop(torch.sigmoid(self.b(first)))
        last = self.c(second + first) * scale[:, None]
        return {"y": sign * last + self.shift, "z": last.sum(-1)}


class ResNet(nn.Module):
    """One block. B C H W."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu_(x + self.second(F.relu(self.norm(x), inplace=True)))
        return self.head(x.mean((2, 3)))


def odd() -> nn.Sequential:
    return nn.Sequential(Complex(), Empty(bias=True), nn.Linear(4, 3))


def sequence() -> nn.Sequential:
    """Operations in place, a weight in several products, attention, a shortcut over a cut. B T C"""
    attention = nn.TransformerEncoderLayer(4, 1, 6, 0.0, batch_first=True)
    return nn.Sequential(
        Products(4), nn.ELU(inplace=True), attention, Skip(4), Call(sum), Shift(4), nn.Linear(4, 3)
    )


def made(module: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return module().double()


def noise(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def loss_of_both(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return (output["y"].sum(1) + 2 * output["z"] - target).square().sum()


def loss_of_tokens(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten(), reduction="sum")


SENTENCES = torch.randint(40, (6, 9), generator=torch.Generator().manual_seed(3))
IDS, LABELS = SENTENCES[:, :-1], SENTENCES[:, 1:]  # B T, and what follows each
Case = tuple[Callable[[], nn.Module], Any, Any, Any, Any, list[str]]
# A module, an example input, a batch of another size and its target, the loss, where to cut.
CASES: dict[str, Case] = {
    "three": (
        partial(made, Three), {"scale": noise(1), "x": noise(1, 4), "sign": -1},
        {"x": noise(5, 4), "scale": noise(5), "sign": -1}, noise(5), loss_of_both, ["b", "drop"],
    ),
    "resnet": (
        partial(made, ResNet), noise(2, 3, 6, 6), noise(7, 3, 8, 5),
        torch.tensor([0, 1, 2, 3, 4, 0, 1]), partial(F.cross_entropy, reduction="sum"),
        ["second"],  # the shortcut crosses
    ),
    "odd": (partial(made, odd), noise(2, 4), noise(5, 4), noise(5, 3), square_error, ["0", "1"]),
    "sequence": (
        partial(made, sequence), noise(2, 3, 4), noise(7, 4, 4), noise(7, 4, 3), square_error,
        ["2", "4"],
    ),
    "gpt2": (
        partial(gpt2, blocks=1), {"input_ids": IDS[:2, :3], "use_cache": False},
        {"input_ids": IDS, "use_cache": False}, LABELS, loss_of_tokens, ["transformer.h.0.mlp"],
    ),
}  # fmt: skip


def everything(module: nn.Module) -> dict[str, Any]:
    """Gradients and buffers, by name."""
    return gradients(module) | {name: b.clone() for name, b in module.named_buffers()}


def plain(case: Case, num_microbatches: int) -> dict[str, Any]:
    """What the module does by itself, a micro-batch at a time: batch norm is over one."""
    make, _, x, target, loss_fn, _ = case
    module, total = make(), torch.zeros((), dtype=torch.float64)
    for i in range(num_microbatches):

        def part(t: Tensor, i: int = i) -> Tensor:
            return t.tensor_split(num_microbatches)[i]

        given, wanted = pytree.tree_map_only(Tensor, part, (x, target))
        output = module(**given) if isinstance(given, dict) else module(given)
        loss = loss_fn(output, wanted)
        loss.backward()
        total += loss.detach()
    return everything(module) | {"loss": total}


def in_threads(stages: nn.Sequential) -> Pipe:
    devices = [f"cpu:{s}" for s in range(len(stages))]
    return Pipe(nn.Sequential(*map(WithDevice, stages, devices)))


@pytest.mark.parametrize("name", CASES)
def test_stages_in_threads_compute_what_the_module_does(name: str) -> None:
    """Sizes are not the example's, and the last micro-batch is smaller. The mode stays as it was,
    and the stages have it."""
    make, example, x, target, loss_fn, at = CASES[name]
    module = make()
    stages = split(module, example, at)
    assert all(m.training for m in (*module.modules(), *stages))
    start = copy.deepcopy(module.state_dict())
    with in_threads(stages) as pipe:
        for schedule in ("gpipe", "zb"):
            module.load_state_dict(start)
            module.zero_grad()
            loss = pipe.train_step(x, target, loss_fn, schedule, num_microbatches=3)
            assert_close(everything(module) | {"loss": loss}, plain(CASES[name], 3))


@pytest.mark.parametrize("name", ["three", "resnet"])
def test_a_module_on_the_meta_device_gets_its_values_by_name(name: str) -> None:
    make, example, x, target, loss_fn, at = CASES[name]
    values = make().state_dict()
    with torch.device("meta"):
        module = make()
    stages = split(module, example, at)

    def initialize(key: str, tensor: Tensor) -> None:
        tensor.copy_(values[key])

    with ProcessPipe(stages, [len(stages)], model=module, initialize=initialize) as pipe:
        loss = pipe.train_step(x, target, loss_fn, "1f1b", num_microbatches=3)
        buffers = {key: b for stage in stages for key, b in stage.named_buffers()}
    assert_close(gradients(pipe) | buffers | {"loss": loss}, plain(CASES[name], 3))


def test_dropout_is_that_of_the_mode_and_of_layers_called_by_hand() -> None:
    """The same seed gives the same bits; in evaluation nothing is dropped."""

    def by_hand() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()

    found = []
    x = noise(6, 4)
    traced = split(by_hand().eval(), noise(2, 4), ["1", "2"])
    assert not any(stage.training for stage in traced)
    for layers in (by_hand(), traced):
        layers.train()
        with in_threads(layers) as pipe:
            torch.manual_seed(1)
            pipe.train_step(x, x[:, :3], square_error, "1f1b", 2)
            found.append({str(k): p.grad for k, p in enumerate(layers.parameters())})
            pipe.eval()
            assert_close({"y": pipe(x)}, {"y": by_hand().eval()(x)})
    assert_same_bits(found[1], found[0])


def test_the_gradients_of_traced_products_can_come_later() -> None:
    """Zero bubble: the first half of the backward makes no weight gradient of a matrix product."""
    layers = made(lambda: nn.Sequential(nn.Linear(4, 6), Conv1D(3, 6)))  # one as GPT-2's
    stage = Stage(0, split(layers, noise(2, 4), []), torch.device("cpu"))
    output = stage.forward(0, noise(2, 4))
    stage.backward_input(0, [torch.ones_like(output)])
    assert stage.take_gradients() == {}
    stage.backward_weight(0)
    assert list(stage.take_gradients()) == stage.parameters


class Short(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        return self.b(self.a(x) * times) if x.size(0) < 5 else x


class TwoNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.norm.num_batches_tracked = None  # what is left is written without a declaration

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(self.norm(x)))


class Counts(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x * self.calls


class Writes(nn.Module):
    """The first stage writes to a buffer, or to a view of it, and the second uses it."""

    count: Tensor

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.write = nn.Linear(4, 4), nn.Linear(4, 4), write
        self.register_buffer("count", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.write(self.count)
        return self.b(h) * self.count


def add_in_place(count: Tensor) -> None:
    count += 1


WRITES: list[Callable[[Tensor], Any]] = [
    add_in_place,
    lambda count: count[:2].add_(1),
    lambda count: count.detach().view(2, 2)[0].copy_(torch.zeros(2)),
    lambda count: torch.add(count, 1, out=count),
    lambda count: torch._foreach_add_([count], 1),
]


def in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x * 2


LOST = r"the backward of a torch.autograd.Function, a hook on a tensor, or inference_mode .* lost"
UNTRACED: list[tuple[Callable[[], nn.Module], list[str], str]] = [
    (Counts, [], "it replaces the buffer calls: write to it"),
    (Short, ["c"], "at=c: forward calls no such submodule, but a, b"),
    (lambda: nn.Sequential(Call(Reverse.apply)), [], LOST),
    (lambda: nn.Sequential(nn.Linear(4, 4), Call(hook_in_forward)), [], LOST),
    (lambda: nn.Sequential(*hooked()), [], r"1.0 \(Linear\) has a hook on its backward"),
    (lambda: nn.Sequential(nn.Linear(4, 4), Call(in_inference_mode)), [], LOST),
    (TwoNorms, ["a"], "buffer norm.running_.* is written to and used on several"),
    *(
        (partial(Writes, write), ["b"], "buffer count is written to and used on several")
        for write in WRITES
    ),
]


@pytest.mark.parametrize(("module", "at", "said"), UNTRACED)
def test_what_a_trace_would_lose_is_refused(
    module: Callable[[], nn.Module], at: list[str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        split(made(module), noise(2, 4), at)


def test_a_part_that_is_frozen_stays_so_and_cuts_are_in_any_order() -> None:
    """The second batch norm is in evaluation, the first is not."""

    def layers() -> nn.Sequential:
        return nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(2)), nn.Linear(4, 3))

    module: Any = made(layers)
    module.get_submodule("1").eval()
    stages, expected, x = split(module, noise(2, 4), ["2", "1"]), copy.deepcopy(module), noise(6, 4)
    assert [m.training for m in module] == [True, False, True]
    y = x
    for stage in stages:
        y = stage((y,) if stage is not stages[0] else y)
        y = y[0] if isinstance(y, tuple) else y
    assert torch.equal(y, expected(x)) and len(list(stages[1].parameters())) == 2
    assert_close(dict(module.named_buffers()), dict(expected.named_buffers()))


def test_inputs_must_answer_as_the_example_did_and_a_copy_is_a_stage_of_its_own() -> None:
    first = split(made(Short), {"x": noise(2, 4), "times": 3}, ["b"])[0]
    assert first({"times": 3, "x": noise(1, 4)})[0].shape == (1, 4)
    for given, said in (
        ({"x": noise(5, 4), "times": 3}, r"value\['x'\]\.size\(\)\[0\] <"),
        ({"x": noise(2, 4), "times": 2}, r"value\['times'\] == 3"),
        ({"x": noise(2, 4), "times": None}, "has None where the example had a value"),
        ({"x": noise(2, 4) > 0, "times": 3}, "has a tensor of booleans where the example had a va"),
        (noise(2, 4), "Node type mismatch"),
    ):
        with pytest.raises(ValueError, match=said):
            first(given)
    other, x = copy.deepcopy(first), {"x": noise(2, 4), "times": 3}
    before = first(x)[0]
    nn.init.zeros_(other.get_parameter("a.weight"))
    nn.init.zeros_(other.get_parameter("a.bias"))
    assert other(x)[0].eq(0).all() and torch.equal(first(x)[0], before)
