"""Dropout: the seed decides every bit, whatever the threads do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipeline.catalogue import ONE_EACH
from pipeline.pipe import Pipe
from runtime.randomness import StageRandomness, StepSeed
from tests.pipeline.pipeline_models import (
    DEVICES,
    Call,
    assert_same_bits,
    batch,
    cut,
    square_error,
    take_gradients,
    tower,
)  # fmt: skip

CPU = torch.device("cpu")


def dropping() -> nn.Sequential:
    layers = list(tower())
    return nn.Sequential(*layers[:2], nn.Dropout(0.3), *layers[2:], nn.Dropout(0.3))


@pytest.mark.parametrize("devices", DEVICES)
def test_the_same_seed_gives_the_same_bits_under_every_schedule(devices: tuple[str, str]) -> None:
    x, y = batch(8)
    model = dropping()
    found = []
    with Pipe(cut(model, (3, 5), devices), split_size=2) as pipe:
        for _ in range(2):
            for name in ONE_EACH:
                torch.manual_seed(5)
                loss = pipe.train_step(x, y, square_error, schedule=name)
                found.append({**take_gradients(model), "loss": loss})
            torch.manual_seed(5)
            loss = square_error(pipe(x), y.to(loss.device))
            loss.backward()
            found.append({**take_gradients(model), "loss": found[0]["loss"]})
    for other in found[1:]:
        assert_same_bits(other, found[0])


def test_the_cut_does_not_change_a_bit() -> None:
    """A balance by measured costs may cut elsewhere in the next run."""
    x, y = batch(8)
    model = dropping()
    found = []
    for sizes in [(1, 7), (3, 5), (7, 1)]:
        with Pipe(cut(model, sizes), split_size=2) as pipe:
            torch.manual_seed(5)
            loss = pipe.train_step(x, y, square_error)
            found.append({**take_gradients(model), "loss": loss})
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


def test_another_seed_another_step_another_layer_another_micro_batch_differ() -> None:
    rows = torch.ones(4, 64)

    def masks() -> list[bytes]:
        first, second = pipe(rows)
        return [part.detach().numpy().tobytes() for t in (first, second) for part in t.split(2)]

    def fork(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x, 0.5), torch.ones_like(x)

    def follow(value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return value[0], F.dropout(value[1], 0.5)

    with Pipe(cut(nn.Sequential(Call(fork), Call(follow)), (1, 1)), split_size=2) as pipe:
        torch.manual_seed(1)
        found = masks() + masks()
        torch.manual_seed(2)
        found += masks()
        assert len(found) == len(set(found)) == 12
        torch.manual_seed(1)
        assert masks() + masks() == found[:8]


def test_without_dropout_the_callers_generator_is_not_touched() -> None:
    x, y = batch(8)
    before = torch.get_rng_state()
    model = dropping()
    for mode in ("no dropout", "eval"):
        module = tower() if mode == "no dropout" else model.eval()
        before = torch.get_rng_state()
        with Pipe(cut(module, (2, len(module) - 2)), split_size=2) as pipe:
            pipe(x)
            pipe.train_step(x, y, square_error)
        assert torch.equal(torch.get_rng_state(), before)


def test_dropout_drops_the_share_it_should_and_scales_the_rest() -> None:
    with StageRandomness(CPU).of(StepSeed(), 0, 0):
        y = F.dropout(torch.ones(100_000), 0.2)
    kept = (y > 0).double().mean()  # standard deviation 0.4 / sqrt(1e5) = 0.0013
    assert abs(kept - 0.8) < 0.006
    assert set(y.tolist()) == {0.0, 1.25}


CALLS: dict[str, Any] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "module": nn.Dropout(0.5),
    "dropout of planes": lambda x: F.dropout1d(x, 0.5),
    "alpha": nn.AlphaDropout(0.5),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "randn": lambda x: torch.randn(x.shape),
    "randn_like": torch.randn_like,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True),
    "multi-head": lambda x: nn.MultiheadAttention(8, 2, dropout=0.5)(x, x, x)[0],
    "alpha function": lambda x: torch.alpha_dropout(x, 0.5, True),
    "rrelu": lambda x: torch.rrelu(-x, 0.1, 0.3, True),
    "rrelu module": lambda x: nn.RReLU()(-x),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.1),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "binomial": lambda x: torch.binomial(x * 100, x * 0.5),
    "always on": lambda x: F.dropout(x, 0.5, True),
    "init": lambda x: nn.init.normal_(torch.empty_like(x)),
    "init truncated": lambda x: nn.init.trunc_normal_(torch.empty_like(x)),
    "gamma": lambda x: torch.distributions.Gamma(x, x).sample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x).rsample(),
    "categorical": lambda x: torch.distributions.Categorical(x.cumsum(-1)).sample(),
    "von Mises": lambda x: torch.distributions.VonMises(x, x).sample(),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "randperm": lambda _: torch.randperm(50),
    "random_": lambda x: torch.empty_like(x).random_(),
    "operator": lambda x: torch.ops.aten.bernoulli(x * 0.5),
    "overload": lambda x: torch.ops.aten.bernoulli.default(x * 0.5),
    "fractional": lambda _: F.fractional_max_pool2d(
        torch.arange(256.0).view(1, 1, 16, 16), 2, output_size=7
    ),
    "grouped attention": lambda x: F.scaled_dot_product_attention(
        x.expand(4, 3, 5, 8).transpose(0, 1),
        x.unsqueeze(1),
        x.unsqueeze(1),
        dropout_p=0.5,
        enable_gqa=True,
    ),
    **{
        type(layer).__name__ + str(k): lambda x, layer=layer: layer(x)[0]
        for k, layer in enumerate(
            (
                nn.LSTM(8, 8, 2, dropout=0.5),
                nn.GRU(8, 8, 2, dropout=0.5),
                nn.RNN(8, 8, 2, dropout=0.5),
                nn.RNN(8, 8, 2, dropout=0.5, nonlinearity="relu"),
            )
        )
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_what_draws_draws_from_the_stage(name: str) -> None:
    x = torch.ones(3, 5, 8)
    randomness, step = StageRandomness(CPU), StepSeed()
    step.get()

    def draw(i: int) -> Tensor:
        torch.manual_seed(0)
        function = CALLS[name]
        with randomness.of(step, 0, i):
            result: Tensor = function(x)
        assert torch.equal(torch.get_rng_state(), after[name])
        return result

    torch.manual_seed(0)
    after = {name: torch.get_rng_state()}
    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


class Noise(nn.Module):
    """Draws in evaluation too, in three ways."""

    def forward(self, x: Tensor) -> Tensor:
        noise = nn.init.normal_(torch.empty_like(x))
        scale = torch.distributions.Gamma(torch.ones_like(x), 1.0).sample()
        return F.dropout(x + noise * scale, 0.5, True)


@pytest.mark.parametrize("training", [True, False])
def test_what_always_draws_gives_the_same_bits_for_every_cut(training: bool) -> None:
    x, y = batch(8)
    layers = list(tower())
    model = nn.Sequential(*layers[:2], Noise(), *layers[2:], Noise()).train(training)
    found = []
    for sizes in [(1, 7), (3, 5), (7, 1), (7, 1)]:
        with Pipe(cut(model, sizes), split_size=2) as pipe:
            torch.manual_seed(5)
            loss = pipe.train_step(x, y, square_error, schedule="gpipe")
            found.append({**take_gradients(model), "loss": loss})
            torch.manual_seed(5)
            with torch.no_grad():
                found[-1]["output"] = pipe(x)
    for other in found[1:]:
        assert_same_bits(other, found[0])


def test_an_operator_that_takes_no_generator_says_so() -> None:
    with (
        StageRandomness(CPU).of(StepSeed(), 0, 0),
        pytest.raises(
            RuntimeError, match=r"aten\.native_dropout\.default draws from the generator"
        ),
    ):
        torch.native_dropout(torch.ones(4), 0.5, True)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_torchs_but_for_where_the_mask_comes_from(causal: bool) -> None:
    """An identity value matrix shows the dropped weights: rescaled they are torch's undropped."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 6, 8, dtype=torch.float64), torch.randn(2, 3, 6, 8).double()
    v = torch.eye(6, dtype=torch.float64).expand(2, 3, 6, 6)
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    with StageRandomness(CPU).of(StepSeed(), 0, 0):
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, is_causal=causal)
    kept = dropped != 0
    assert 0.5 < kept[plain != 0].double().mean() < 0.95
    torch.testing.assert_close(dropped[kept] * 0.75, plain[kept], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("schedule", ["forward and backward", "1f1b"])
def test_a_forward_repeated_in_backward_must_not_draw(schedule: str) -> None:
    """Other masks than in the forward: silently wrong gradients."""
    dropout = nn.Dropout(0.5)
    layer = nn.Sequential(nn.Linear(4, 3), dropout).double()
    again = Call(lambda x: checkpoint(layer, x, use_reentrant=False))
    again.layer = layer
    module = nn.Sequential(nn.Linear(4, 4).double(), again)
    x, y = batch(4)

    def step() -> None:
        if schedule == "forward and backward":
            square_error(pipe(x), y).backward()
        else:
            pipe.train_step(x, y, square_error, schedule=schedule)

    with Pipe(cut(module, (1, 1)), split_size=2) as pipe:
        with pytest.raises(RuntimeError, match="do not checkpoint inside a Pipe"):
            step()
        dropout.p = 0.0
        step()
        want = square_error(layer(module[0](x)), y)
        expected = torch.autograd.grad(want, list(module.parameters()))
        for p, g in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, g, rtol=1e-12, atol=1e-12)
