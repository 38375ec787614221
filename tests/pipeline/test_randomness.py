"""Dropout: the seed decides every bit, whatever the threads do."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.pipe import Pipe
from runtime.randomness import OfThread
from tests.pipeline.pipeline_models import (
    DEVICES,
    Call,
    assert_same_bits,
    batch,
    cut,
    square_error,
    take_gradients,
    tower,
)
from tests.pipeline.schedules.drawn import ONE_EACH

CPU = torch.device("cpu")


class Noise(nn.Module):
    """Draws in evaluation too, in three ways."""

    def forward(self, x: Tensor) -> Tensor:
        noise = nn.init.normal_(torch.empty_like(x))
        scale = torch.distributions.Gamma(torch.ones_like(x), 1.0).sample()
        return F.dropout(x + noise * scale, 0.5, True)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("training", [True, False])
def test_the_same_seed_gives_the_same_bits_under_every_schedule_and_cut(
    training: bool, devices: tuple[str, str]
) -> None:
    """A balance by measured costs may cut elsewhere in the next run."""
    x, y = batch(8)
    layers = list(tower())
    model = nn.Sequential(*layers[:2], Noise(), *layers[2:], Noise()).train(training)
    found = []
    for sizes in [(3, 5), (1, 7), (7, 1)] if devices == DEVICES[0] else [(3, 5)]:
        with Pipe(cut(model, sizes, devices), split_size=2) as pipe:
            for name in ONE_EACH:
                torch.manual_seed(5)
                loss = pipe.train_step(x, y, square_error, schedule=name)
                found.append({**take_gradients(model), "loss": loss})
            torch.manual_seed(5)
            square_error(pipe(x), y).backward()
            found.append({**take_gradients(model), "loss": found[0]["loss"]})
    for other in found[1:]:
        assert_same_bits(other, found[0])


def test_another_seed_another_step_another_layer_another_micro_batch_differ() -> None:
    def masks() -> list[bytes]:
        outputs = pipe(torch.ones(4, 64))
        return [part.detach().numpy().tobytes() for t in outputs for part in t.split(2)]

    last = Call(lambda h: (h, F.dropout(torch.ones_like(h), 0.5)))
    with Pipe(cut(nn.Sequential(nn.Dropout(0.5), last), (1, 1)), split_size=2) as pipe:
        torch.manual_seed(1)
        found = masks() + masks()
        torch.manual_seed(2)
        found += masks()
        assert len(found) == len(set(found)) == 12
        torch.manual_seed(1)
        assert masks() + masks() == found[:8]


def test_between_checked_steps_only_layers_that_have_drawn_are_looked_at() -> None:
    seen: list[Any] = []
    look = OfThread.__torch_function__

    def noted(self: OfThread, func: Any, *args: Any) -> Any:
        seen.append(func)
        return look(self, func, *args)

    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.ones(4, 4)
    with (
        patch.object(OfThread, "__torch_function__", noted),
        Pipe(cut(model, (2, 2)), split_size=2) as pipe,
    ):
        by_step = []
        for _ in range(17):
            pipe.train_step(x, x, lambda y, target: (y - target).sum(), "1f1b", 2)
            by_step.append({*seen})
            seen.clear()
    assert {torch.addmm, F.dropout} < by_step[0] == by_step[1] == by_step[16]
    assert by_step[2:16] == [{F.dropout}] * 14


class Later(nn.Module):
    """Draws in evaluation, and in training if `asked`."""

    asked = False

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x) if self.asked or not self.training else x


@pytest.mark.filterwarnings("error")
def test_a_layer_that_draws_later_is_found_at_the_end_of_that_step() -> None:
    layer, x = Later(), torch.ones(4, 8)
    with Pipe(cut(nn.Sequential(nn.Linear(8, 8), layer), (1, 1)), split_size=2) as pipe:

        def step() -> Tensor:
            torch.manual_seed(1)
            return pipe.train_step(x, x, square_error, "1f1b", 2)

        before = [step() for _ in range(3)]
        layer.asked = True
        with pytest.warns(UserWarning, match="torch's default generator was used"):
            step()
        masked = step()
        assert masked not in before and [step() for _ in range(4)] == [masked] * 4


@pytest.mark.filterwarnings("error")
def test_a_recomputed_layer_that_draws_later_draws_the_same_twice() -> None:
    layer, x = Later(), torch.ones(4, 8)
    linear = nn.Linear(8, 1, bias=False)
    model = cut(nn.Sequential(layer, linear, nn.Identity()), (2, 1))
    with Pipe(model, split_size=2, recompute="always") as pipe:
        for _ in range(3):
            pipe.train_step(x, x, lambda y, _: y.sum(), "1f1b", 2)
        layer.asked = True
        linear.zero_grad()
        loss = pipe.train_step(x, x, lambda y, _: y.sum(), "1f1b", 2)
    assert linear.weight.grad is not None  # whose product with the weight is the loss
    torch.testing.assert_close((linear.weight.grad * linear.weight).sum(), loss)


@pytest.mark.filterwarnings("error")
def test_what_draws_in_evaluation_alone_is_found_there() -> None:
    """Its first calls are checked, too, whatever training has seen."""
    with Pipe(cut(nn.Sequential(nn.Linear(8, 8), Later()), (1, 1)), split_size=2) as pipe:

        def evaluated() -> list[float]:
            torch.manual_seed(1)
            return [*pipe.eval()(torch.ones(4, 8)).flatten()]

        for _ in range(3):
            pipe.train()(torch.ones(4, 8))
        assert evaluated() == evaluated() == evaluated()


class Encoder(nn.Module):
    """Two layers of torch, which see the first three of four positions. B T C."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        pads = torch.arange(4).expand(len(x), 4) == 3
        y: Tensor = self.layers(x, src_key_padding_mask=pads)
        return y


@pytest.mark.filterwarnings("error", "ignore:The PyTorch API of nested tensors")
def test_layers_of_torch_take_their_fast_path_in_every_step() -> None:
    """In evaluation, and frozen. It leaves positions 0 that nobody sees."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Encoder().eval(), nn.Linear(8, 8)), torch.randn(4, 4, 8)
    model[0].requires_grad_(False)
    assert model[0](x)[:, 3].eq(0).all()
    with Pipe(cut(model, (1, 1)), split_size=2) as pipe:
        for _ in range(3):  # the third is not checked
            torch.testing.assert_close(pipe(x), model(x))
            loss = pipe.train_step(x, x, lambda y, _: y.square().sum(), "1f1b", 2)
            torch.testing.assert_close(loss, model(x).square().sum())
    losses = []
    with Pipe(cut(model.train(), (1, 1)), split_size=2) as pipe:  # dropout draws from the stage
        for _ in range(3):
            torch.manual_seed(1)
            losses.append(pipe.train_step(x, x, lambda y, _: y.square().sum(), "1f1b", 2))
    assert losses[0] == losses[1] == losses[2] != loss


# By the way torch takes to its kernel: functions, operators, methods, Python's, and recurrent
# layers; kernels that take a generator, and those of which another overload does.
CALLS: dict[str, Any] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "rrelu": lambda x: nn.RReLU()(-x),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "randn_like": torch.randn_like,
    "randperm": lambda _: torch.randperm(50),
    "operator": lambda x: torch.ops.aten.bernoulli(x * 0.5),
    "overload": lambda x: torch.ops.aten.bernoulli.default(x * 0.5),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x).rsample(),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True),
    "gumbel_softmax": F.gumbel_softmax,
    "fractional_max_pool2d": lambda _: F.fractional_max_pool2d(
        torch.arange(4800.0).view(3, 40, 40), 2, output_ratio=(0.7, 0.7)
    ),
    "LSTM": nn.LSTM(8, 8, 2, dropout=0.5),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_draws_draws_from_the_stage(name: str) -> None:
    x = torch.ones(3, 5, 8)
    randomness = OfThread(CPU, 7)
    torch.manual_seed(0)
    before = torch.get_rng_state()

    def draw(i: int) -> Tensor:
        torch.manual_seed(0)
        with randomness.of(0, i, True):
            result = CALLS[name](x)
        assert torch.equal(torch.get_rng_state(), before)
        return result[0] if isinstance(result, tuple) else result

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


def test_what_draws_nothing_runs_as_it_is() -> None:
    """Its kernels are not looked at, though it is written in Python."""
    with (
        patch("runtime.randomness._Kernels", side_effect=AssertionError),
        OfThread(CPU, 7).of(0, 0, True),
    ):
        F.layer_norm(torch.ones(3, 8), (8,))


def test_inference_mode_draws_what_no_grad_does() -> None:
    """Its operators arrive whole, and have no overload with a generator."""
    drawn = []
    with Pipe(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), 2) as pipe:
        for mode in (torch.no_grad(), torch.inference_mode()):
            torch.manual_seed(0)
            with mode:
                drawn.append(pipe(torch.ones(4, 8)).tolist())
    assert drawn[0] == drawn[1]


def test_an_operator_that_takes_no_generator_is_refused() -> None:
    with OfThread(CPU, 7).of(0, 0, True), pytest.raises(RuntimeError, match="native_dropout"):
        torch.native_dropout(torch.ones(4), 0.5, True)
