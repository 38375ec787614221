"""Sizes, initial weights that depend on names alone, the loss over targets, pretrained weights."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tests.plain_gpt2 import build_model
from training.tasks.gpt2 import Sequences, gpt2_config, gpt2_layers, loss_of_targets, round_vocab
from training.tasks.pretrained import Pretrained, check_pretrained
from training.tasks.sequences import SequenceTask
from training.tasks.task import stream
from training.tasks.tokens import get_tokenizer


def tiny(seed: int = 0, n_layer: int = 2, **sizes: Any) -> GPT2LMHeadModel:
    sizes = {"n_embd": 32, "n_head": 2, "dropout": 0.0, **sizes}
    return build_model(gpt2_config("gpt2-mini", 320, 16, n_layer=n_layer, **sizes), seed)


def test_presets_have_the_published_sizes_and_can_be_changed() -> None:
    counts = {
        "gpt2-mini": 4_240_896,  # with 4096 tokens and 128 positions
        "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080,
        "gpt2-xl": 1_557_611_200,
    }  # fmt: skip
    with torch.device("meta"):
        for name, count in counts.items():
            vocabulary = 4096 if name == "gpt2-mini" else 50257
            model = GPT2LMHeadModel(gpt2_config(name, vocabulary, 128))
            assert sum(p.numel() for p in model.parameters()) == count
    config = gpt2_config("gpt2", 1000, 2048, n_layer=3, n_embd=48, n_head=4, dropout=0.2)
    assert (config.n_layer, config.n_embd, config.n_head) == (3, 48, 4)
    assert (config.n_positions, config.vocab_size) == (2048, 1000)
    assert (config.attn_pdrop, config.embd_pdrop, config.resid_pdrop) == (0.2, 0.2, 0.2)
    assert [round_vocab(n) for n in (64, 65, 4097)] == [64, 128, 4160]


def test_no_two_streams_are_the_same_and_each_is_on_every_machine() -> None:
    """As those of seed + epoch would be: epoch 1 of seed 0, and epoch 0 of seed 1."""
    purposes = ("data order", "dropout", "initial weights")
    of = [stream(*of) for of in product(range(12), purposes, range(12), range(12))]
    of += [stream(1, "dropout", 12), stream(11, "dropout", 2), stream(1, "dropout", "12")]
    assert len({value & 0xFFFFFFFF for value in of}) == len(of)  # of which torch takes no more
    assert min(of) >= 0 and max(of) < 2**63
    assert stream(0, "data order", 1) == 6020721808494672217


def test_weights_are_those_of_gpt2_and_depend_on_seed_and_name_alone() -> None:
    short, long, other = (
        dict(tiny(seed, n_layer, n_embd=128).named_parameters())
        for seed, n_layer in ((0, 2), (0, 8), (1, 2))
    )
    for name, p in short.items():
        same = [torch.equal(p, found[name]) for found in (long, other)]
        if name.endswith("bias") or ".ln_" in name:
            assert torch.equal(p, torch.full_like(p, not name.endswith("bias"))), name
            assert same == [True, True]
            continue
        # With at least 2,048 samples the deviation is within 1/sqrt(2 * 2048) = 1.6 % of its
        # expectation at one sigma; the bound is six of them.
        residual = "c_proj" in name
        std = 0.01 if residual else 0.02
        assert p.std().item() == pytest.approx(std, rel=0.1), name
        assert abs(p.mean().item()) < 6 * std / p.numel() ** 0.5, name
        assert same == [not residual, False], name
        if residual:  # their deviation falls with the depth, here to a half
            torch.testing.assert_close(p, 2 * long[name], rtol=1e-6, atol=0)
    q, r = (long[f"transformer.h.{i}.attn.c_attn.weight"] for i in (0, 1))
    assert not torch.equal(q, r)
    # Losses that the documentation states, and runs to be continued, depend on them.
    first = short["transformer.wte.weight"][0, :3].tolist()
    assert first == pytest.approx([-0.02690713, -0.02315010, 0.00897220], rel=1e-4)


IDS = torch.tensor([[5, 6, 7, 8], [3, 4, 2, 0], [3, 4, 0, 0]])
WEIGHTS = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]])


def test_the_loss_of_the_layers_is_the_masked_cross_entropy_of_the_model() -> None:
    """The layers compute logits at targets alone; without any they cost nothing."""
    model = tiny().double()
    labels = IDS.roll(-1, 1)
    layers = nn.Sequential(*gpt2_layers(model))
    logits = layers(Sequences(IDS, WEIGHTS))
    assert logits.shape == (4, 320)
    loss = loss_of_targets(logits, labels[WEIGHTS == 1])
    numbers = torch.tensor([1, 2, 3, 5])  # of the targets among all 12 positions, row by row
    assert layers(Sequences(IDS, numbers)).equal(logits)
    log_p = model(input_ids=IDS).logits.log_softmax(-1)
    nll = -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(loss, (nll * WEIGHTS).sum(), rtol=1e-12, atol=0)
    half = loss_of_targets(logits.bfloat16(), labels[WEIGHTS == 1])
    assert half.dtype == torch.float32 and half.item() == pytest.approx(loss.item(), rel=1e-2)
    none = torch.zeros_like(WEIGHTS)
    nothing = loss_of_targets(layers(Sequences(IDS, none)), labels[none == 1])
    nothing.backward()
    assert nothing.item() == 0
    assert [n for n, p in model.named_parameters() if p.grad is None or p.grad.any()] == []


@pytest.mark.parametrize("part", ["whole in bfloat16", "transformer"])
def test_weights_are_read_by_name_and_grow_with_the_vocabulary(part: str, tmp_path: Path) -> None:
    """The published GPT-2 has its names without the prefix `transformer.`, and no head; its weights
    may be in several files."""
    model = tiny(seed=3)
    saved = model.transformer if part == "transformer" else model.bfloat16()
    saved.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    get_tokenizer([{"a": "Ja."}], 300, "a", "a", tmp_path)
    assert check_pretrained(str(tmp_path)) == 16
    config = Pretrained(str(tmp_path), 0.25, seed=0).config(num_tokens=330)
    assert (config.vocab_size, config.resid_pdrop) == (330, 0.25)
    for name, p in model.named_parameters():
        rows = (330, 32) if "wte" in name else p.shape
        filled = [torch.empty(rows) for _ in range(3)]  # in fp32: small steps would be lost in less
        for t, seed in zip(filled, (5, 5, 6), strict=True):
            Pretrained(str(tmp_path), 0.0, seed).initialize(name, t)
        assert torch.equal(filled[0][: len(p)], p.float()), name
        assert torch.equal(filled[0], filled[1])
        assert torch.equal(filled[0], filled[2]) == ("wte" not in name)  # new rows are the seed's


@pytest.mark.parametrize(
    "fields",
    [
        {"activation_function": "relu"}, {"activation_function": "gelu"}, {},
        {"layer_norm_epsilon": 0.1}, {"n_inner": 6}, {"tie_word_embeddings": False},
        {"reorder_and_upcast_attn": True},
    ],
)  # fmt: skip
def test_what_a_configuration_says_is_computed(fields: dict[str, Any], tmp_path: Path) -> None:
    """By transformers and by our layers: the same logits, of weights that make it matter."""
    config = GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=320, n_positions=16, **fields)
    saved = GPT2LMHeadModel(config).double().eval()
    for p in saved.parameters():
        p.data.mul_(10)
    saved.save_pretrained(tmp_path)
    get_tokenizer([{"a": "Ja."}], 300, "a", "a", tmp_path)
    assert check_pretrained(str(tmp_path)) == 16
    pretrained = Pretrained(str(tmp_path), dropout=0.0, seed=0)
    model = GPT2LMHeadModel(pretrained.config(num_tokens=320)).double().eval()
    for name, p in model.named_parameters():
        pretrained.initialize(name, p.data)
    logits = nn.Sequential(*gpt2_layers(model))(Sequences(IDS))
    torch.testing.assert_close(logits, saved(input_ids=IDS).logits, rtol=1e-9, atol=1e-9)


def test_hosts_with_other_weights_differ(tmp_path: Path) -> None:
    """Though their files have the same names. Where they are says nothing."""

    def content(host: str, seed: int) -> bytes:
        tiny(seed).save_pretrained(tmp_path / host, max_shard_size="40KB")
        pretrained = Pretrained(str(tmp_path / host), dropout=0.1, seed=0)
        task: Any = SimpleNamespace(config=pretrained.config(320), pretrained=pretrained)
        return SequenceTask.model_content(task)

    assert content("a", seed=3) == content("b", seed=3) != content("c", seed=4)
