"""The whole GPT-2 as a pipeline: transformers' model, its names, its loss, its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from pipeline.model_parallel import Block
from pipeline.partition import place
from pipeline.pipe import Pipe
from tests.pipeline.pipeline_models import DEVICES, assert_close
from training.generation import newest_alone
from training.model import gpt2_layers, loss_of_targets
from training.prefix import Prefix


def gpt2(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=40, n_positions=16, n_embd=16, n_layer=3, n_head=2, embd_pdrop=dropout,
            resid_pdrop=dropout, attn_pdrop=dropout,
        )
    ).double()  # fmt: skip


def sentences() -> tuple[Tensor, Tensor, Tensor]:
    """Ids B T, what follows each, and the weight of that: a third has no target."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(40, (6, 9), generator=generator)
    weights = torch.rand(6, 8, generator=generator, dtype=torch.float64).sub(0.33).clamp(min=0)
    weights[2] = 0  # a micro-batch may have no target at all
    return ids[:, :-1], ids[:, 1:], weights


def plain_loss(model: Any, ids: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """All logits, one process: what the course computes."""
    logits = model(ids).logits
    losses = F.cross_entropy(logits.reshape(-1, 40), labels.reshape(-1), reduction="none")
    return (losses * weights.reshape(-1)).sum() / weights.sum()


def by_name(model: Any) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("sizes", [[1, 7], [4, 4], [7, 1]])
def test_loss_and_every_gradient_are_those_of_the_plain_model(
    sizes: list[int], devices: tuple[str, str]
) -> None:
    ids, labels, weights = sentences()
    plain, same = gpt2(), gpt2()
    expected = plain_loss(plain, ids, labels, weights)
    expected.backward()
    module, replicas = place(gpt2_layers(same), sizes, devices)
    with Pipe(module, replicas=replicas) as pipe:
        for schedule in ("gpipe", "1f1b"):
            same.zero_grad()
            loss = pipe.train_step(
                (ids, weights), (labels, weights), loss_of_targets, schedule,
                num_microbatches=4, scale=1 / weights.sum(),
            )  # fmt: skip
            assert_close(by_name(same), by_name(plain))
            assert_close({"loss": loss.cpu()}, {"loss": expected.detach()})
    assert list(same.state_dict()) == list(plain.state_dict())


def test_a_block_of_transformers_4_returns_a_tuple() -> None:
    block = gpt2().transformer.h[0]
    hidden = torch.randn(2, 5, 16).double()
    expected = Block(block)(hidden)
    inner = block.forward
    block.forward = lambda *args, **kwargs: (inner(*args, **kwargs), "presents")
    assert torch.equal(Block(block)(hidden), expected)


def test_a_cut_that_does_not_fit_says_so() -> None:
    with pytest.raises(ValueError, match=r"sizes \[2, 2\] on 2 devices: .* the 8 layers"):
        place(gpt2_layers(gpt2()), [2, 2], ["cpu:0", "cpu:1"])


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@torch.no_grad()
def test_continued_sentences_have_the_logits_of_the_plain_model(precision: str) -> None:
    """Two of 7 and 4 tokens, padded on the left, in steps of 5, 1 and 1 positions. A padding
    position sees no token: that must not become NaN, nor under autocast."""
    model = gpt2().eval()
    bf16 = precision == "bf16"
    ids = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(3))
    rows = [model(ids[:1]).logits[0], model(ids[1:, 3:]).logits[0]]
    layers = torch.nn.Sequential(*gpt2_layers(model.float() if bf16 else model))
    prefix = Prefix([5, 2])
    for begin, end in ((0, 5), (5, 6), (6, 7)):
        new = ids[:, begin:end]
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = layers((new, newest_alone(new), prefix))
        prefix.extend()
        for got, row in zip(logits, rows, strict=True):
            expected = row[end - 8]
            size = (expected.abs().max() * (2**-5 if bf16 else 1e-13)).item()
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=size)
