"""One stage: backward in two halves, or layer by layer: the same gradients, in less memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from pipeline.pipe import Pipe
from pipeline.processes.process import ProcessPipe
from pipeline.stage import Stage
from pipeline.step import hand_over
from runtime import linear
from runtime.linear import WeightsMayWait
from tests.live_bytes import LiveBytes
from tests.pipeline.pipeline_models import Call, batch, square_error, watched

CPU = torch.device("cpu")


def test_a_half_frees_what_the_other_does_not_need() -> None:
    """After I only x and dy of products are held, after W nothing: the caches are empty."""
    saved: list[Callable[[], Tensor | None]] = []
    dense = nn.Linear(4, 3).double()
    stage = Stage(0, nn.Sequential(dense, watched(saved, 1)), CPU)
    with WeightsMayWait([dense]):
        output = stage.forward(0, batch(8)[0])
    assert [token() is None for token in saved] == [False]
    gc.disable()  # references alone must do
    try:
        assert stage.backward_input(0, [torch.ones_like(output)]) == [None]
        assert [token() for token in saved] == [None]
        products = stage._kept[0].parts[0][2].products
        held = [weakref.ref(products[0].x), weakref.ref(products[0].dy)]
        assert (len(products), stage.take_gradients()) == (1, {})
        stage.backward_weight(0)
        assert [token() for token in held] == [None, None]
    finally:
        gc.enable()
    assert list(stage.take_gradients()) == stage.parameters


def test_no_python_runs_in_the_backward_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in that of an x with a graph. Its operands are freed before those of the layer before."""
    monkeypatch.delattr(linear._Multiplied, "backward")
    seen: list[bool] = []
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    memories: list[StorageWeakRef] = []
    inner[1].register_forward_hook(
        lambda _, __, h: memories.append(StorageWeakRef(h.untyped_storage()))
    )
    stage = Stage(
        0, nn.Sequential(inner), CPU, num_microbatches=1,
        deliver=lambda sums: seen.extend(
            [memories[0].expired(), *(g.requires_grad for g in sums.values())]
        ),
    )  # fmt: skip
    x = batch(8)[0].requires_grad_()
    with WeightsMayWait([inner]):
        (dx,) = stage.backward(0, [torch.ones_like(stage.forward(0, x))])
    assert seen == [True, *[False] * 4]
    assert dx is not None and torch.equal(dx, torch.autograd.grad(inner(x).sum(), x)[0])


class Reversed(torch.autograd.Function):
    """Keeps only its input, and runs the layer again in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(dy)
        return x.grad, None


@pytest.mark.parametrize("kind", [Reversed.apply, partial(checkpoint, use_reentrant=False)])
def test_a_product_that_a_backward_computes_again(kind: Any) -> None:
    """Nothing holds its x meanwhile, and its gradients are those of plain PyTorch."""
    dense = nn.Linear(4, 4).double()
    hidden: list[weakref.ref[Tensor]] = []

    def inside(x: Tensor) -> Tensor:
        h = x.sin()
        hidden.append(weakref.ref(h))
        y: Tensor = dense(h)
        return y

    again = Call(lambda x: kind(x, layer) if kind == Reversed.apply else kind(layer, x))
    layer = Call(inside)
    again.layer, layer.dense = layer, dense
    x, dy = batch(8)[0].requires_grad_(), torch.ones(8, 4, dtype=torch.float64)
    expected = torch.autograd.grad(dense(x.sin()), (x, *dense.parameters()), dy)
    stage = Stage(0, nn.Sequential(again), CPU)
    gc.disable()  # references alone must do
    try:
        with WeightsMayWait([dense]):
            stage.forward(0, x)
            assert hidden[0]() is None
            (dx,) = stage.backward(0, [dy])
    finally:
        gc.enable()
    hand_over(stage.take_gradients())  # a backward inside the backward has its own in p.grad
    found = [dx, *(p.grad for p in dense.parameters())]
    torch.testing.assert_close(found, [*expected], rtol=0, atol=1e-13)


def test_a_layer_that_differentiates_in_an_evaluation_keeps_nothing() -> None:
    dense = nn.Linear(4, 4).double()
    inputs: list[weakref.ref[Tensor]] = []

    def force(x: Tensor) -> Tensor:
        assert all(ref() is None for ref in inputs)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            inputs.append(weakref.ref(x))
            return torch.autograd.grad(dense(x.sin()).sum(), x)[0]

    layer = Call(lambda x: force(force(x)))
    layer.dense = dense
    gc.disable()  # references alone must do
    try:
        with WeightsMayWait([dense]), torch.no_grad():
            Stage(0, nn.Sequential(layer), CPU).forward(0, batch(8)[0])
    finally:
        gc.enable()
    assert len(inputs) == 2


@pytest.mark.parametrize("deliver", [None, dict.clear], ids=["one graph", "by layer"])
def test_a_parameter_that_layers_share_and_that_is_another_s_gradient(deliver: Any) -> None:
    """y = x + p: the gradients of p, of q and of x are one tensor, and sums are written to."""

    def adding(*terms: nn.Parameter) -> Call:
        layer = Call(lambda x: sum(terms, x))
        layer.terms = nn.ParameterList(terms)
        return layer

    x, _ = batch(4)
    p, q = (nn.Parameter(torch.zeros(4, 4, dtype=torch.float64)) for _ in "pq")
    layers = nn.Sequential(adding(p, q), Call(torch.sin), adding(p))
    stage = Stage(0, layers, CPU, deliver=deliver)
    for i in range(3):
        dy = torch.ones_like(stage.forward(i, x.clone().requires_grad_()))
        (dx,) = stage.backward(i, [dy])
        assert dx is not None and torch.equal(dx, x.cos())  # p and q are 0
        assert torch.equal(dy, torch.ones_like(dy))
    totals = stage.take_gradients()
    torch.testing.assert_close(totals[p], 3 * (x.cos() + 1), rtol=0, atol=1e-14)
    torch.testing.assert_close(totals[q], 3 * x.cos(), rtol=0, atol=1e-14)


def test_a_whole_backward_delivers_each_layer_once() -> None:
    """In the last micro-batch, from the last layer to the first."""
    layers = nn.Sequential(nn.Linear(4, 4).double(), nn.Linear(4, 4).double())
    delivered: list[list[nn.Parameter]] = []
    stage = Stage(
        0, layers, CPU, num_microbatches=2, deliver=lambda sums: delivered.append([*sums])
    )
    for i in range(2):
        assert not delivered
        stage.backward(i, [torch.ones_like(stage.forward(i, batch(4)[0]))])
    assert delivered == [[*layers[1].parameters()], [*layers[0].parameters()]]


@pytest.mark.parametrize("kind", [Pipe, partial(ProcessPipe, sizes=[2])], ids=["threads", "rank"])
def test_a_pipe_leaves_the_layers_as_they_were(kind: Any) -> None:
    """A layer that has changed would refer to itself, and stay until the collector finds it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    before = [{**vars(layer)} for layer in model]
    x, y = batch(4)[0], torch.zeros(4, 4, dtype=torch.float64)
    with kind(model) as pipe:
        pipe.train_step(x[:, :1].expand(-1, 4), y, square_error, num_microbatches=2)
        assert [vars(layer) for layer in model] == before
    dropped = weakref.ref(model[0])
    gc.disable()  # references alone must do
    try:
        del pipe, model, before
        assert dropped() is None
    finally:
        gc.enable()


def test_gradients_have_the_strides_of_their_parameters() -> None:
    """Fused optimizers take both by address. Products, whole and halved; all that is not one."""
    columns = nn.Linear(3, 5).double()
    columns.weight = nn.Parameter(columns.weight.detach().t().contiguous().t())
    images: Any = nn.Conv2d(3, 3, 2).double()
    images.to(memory_format=torch.channels_last)
    added = Call(lambda x: x + added.weight)
    added.weight = nn.Parameter(torch.ones(3, 4).double().t())
    rows, pictures = torch.ones(4, 3), torch.ones(4, 3, 5, 5)
    for layer, x in ((columns, rows), (images, pictures), (added, rows)):
        stage = Stage(0, nn.Sequential(layer), CPU)
        with WeightsMayWait([layer]):
            for i in (0, 1):
                stage.backward(i, [torch.ones_like(stage.forward(i, x.double()))])
        for p, gradient in stage.take_gradients().items():
            assert gradient.stride() == p.stride()


@pytest.mark.parametrize("kind", [Pipe, partial(ProcessPipe, sizes=[2])], ids=["threads", "rank"])
def test_a_layer_that_turns_wrong_in_a_later_step_is_found(kind: Any) -> None:
    """Steps are checked now and then; before, it only computes."""
    steps, elsewhere = count(), nn.Parameter(torch.ones(4, dtype=torch.float64))
    wrong = Call(lambda h: h * elsewhere if next(steps) > 4 else h)
    x, y = torch.ones(2, 2, 4, dtype=torch.float64)
    layers = nn.Sequential(nn.Linear(4, 4).double(), wrong)
    with (
        kind(layers) as pipe,
        pytest.raises(RuntimeError, match=r"^layer 1 \(Call\) uses a tensor"),
    ):
        while True:
            pipe.train_step(x, y, square_error, num_microbatches=1)
    assert next(steps) == 17  # it ran in steps 0 to 16


WIDTH, LAYERS, ROWS = 64, 8, 4
WEIGHT = WIDTH * WIDTH * 8  # bytes
OUTPUT = ROWS * WIDTH * 8


class Dense(nn.Module):
    """A product that the halved backward does not see, so that all of it is autograd's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_backward_by_layer_holds_the_weight_gradients_of_one_layer_at_a_time() -> None:
    """In the second micro-batch, when all totals exist. In one graph it holds those of all eight,
    until its end. Activations are small: at most two per layer, and five for the loss."""
    peaks = []
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    one = [torch.ones((), dtype=torch.float64)]
    for deliver in (None, dict.clear):  # a graph per stage; by layer
        layers = nn.Sequential(*(Dense() for _ in range(LAYERS)))
        stage = Stage(0, layers, CPU, deliver=deliver)
        stage.tail = lambda _, y: square_error(y, x)
        stage.forward(0, x)
        stage.backward(0, one)
        with LiveBytes() as live:
            stage.forward(1, x)
            live.peak = live.now
            stage.backward(1, one)
        peaks.append(live.peak)
    assert peaks[0] >= LAYERS * WEIGHT
    assert peaks[1] <= 2 * WEIGHT + (2 * LAYERS + 5) * OUTPUT
