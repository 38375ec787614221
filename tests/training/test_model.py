"""Sizes, initial weights that depend on names alone, the loss over targets, pretrained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, GPT2LMHeadModel

from training.data import Encoded, to_batch, train_tokenizer
from training.launch import UserError
from training.model import (
    build_model,
    gpt2_config,
    round_vocab,
    target_loss,
)
from training.pretrained import (
    check_pretrained,
    load_pretrained,
    pretrained_config,
    pretrained_initializer,
)


def tiny(seed: int = 0, n_layer: int = 2, **sizes: Any) -> GPT2LMHeadModel:
    sizes = {"n_embd": 32, "n_head": 2, "dropout": 0.0, **sizes}
    return build_model(gpt2_config("gpt2-mini", 320, 16, n_layer=n_layer, **sizes), seed)


@pytest.mark.parametrize(
    ("name", "vocab_size", "count"),
    [
        ("gpt2-mini", 4096, 4_240_896),  # with 128 positions; the others have 1024
        ("gpt2", 50257, 124_439_808),
        ("gpt2-medium", 50257, 354_823_168),
        ("gpt2-large", 50257, 774_030_080),
        ("gpt2-xl", 50257, 1_557_611_200),
    ],
)
def test_presets_have_the_published_sizes(name: str, vocab_size: int, count: int) -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(gpt2_config(name, vocab_size, 128))
    assert sum(p.numel() for p in model.parameters()) == count


def test_a_preset_can_be_changed() -> None:
    config = gpt2_config("gpt2", 1000, 2048, n_layer=3, n_embd=48, n_head=4, dropout=0.2)
    assert (config.n_layer, config.n_embd, config.n_head) == (3, 48, 4)
    assert (config.n_positions, config.vocab_size) == (2048, 1000)
    assert (config.attn_pdrop, config.embd_pdrop, config.resid_pdrop) == (0.2, 0.2, 0.2)


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("gpt3", {}, ["--model gpt3", "gpt2-mini"]),
        ("gpt2-mini", {"n_head": 3}, ["--n_head 3", "n_head must divide n_embd", "--n_head 4"]),
        ("gpt2-mini", {"n_layer": 0}, ["--n_layer 0", "must be positive", "--n_layer 4"]),
    ],
)
def test_sizes_that_make_no_model(name: str, sizes: dict[str, int], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        gpt2_config(name, 64, 128, **sizes)
    assert [word for word in words if word not in str(error.value)] == []


def test_vocabularies_are_rounded_up() -> None:
    assert [round_vocab(n) for n in (1, 64, 65, 4096, 4097)] == [64, 64, 128, 4096, 4160]


# ---------------------------------------------------------------------------- initial weights


def test_weights_depend_on_seed_and_name_alone() -> None:
    short, long, other = (dict(tiny(s, n).named_parameters()) for s, n in ((0, 1), (0, 4), (1, 1)))
    differing = [n for n, p in short.items() if not torch.equal(p, long[n])]
    residual = ["transformer.h.0.attn.c_proj.weight", "transformer.h.0.mlp.c_proj.weight"]
    assert differing == residual  # their deviation falls with the depth, here to a half
    for name in residual:
        torch.testing.assert_close(short[name], 2 * long[name], rtol=1e-6, atol=0)
    same = [n for n, p in short.items() if torch.equal(p, other[n])]
    assert same == [n for n in short if n.endswith("bias") or ".ln_" in n]
    q, r = (long[f"transformer.h.{i}.attn.c_attn.weight"] for i in (0, 1))
    assert not torch.equal(q, r)


def test_weights_are_those_of_earlier_versions() -> None:
    """Losses that the documentation states, and runs to be continued, depend on it."""
    weights = tiny().transformer.wte.weight[0, :3]
    assert weights.tolist() == pytest.approx([-0.02690713, -0.02315010, 0.00897220], rel=1e-4)


def test_weights_are_distributed_as_in_gpt2() -> None:
    parameters = dict(tiny(n_layer=2, n_embd=128).named_parameters())
    zero = [n for n, p in parameters.items() if not p.count_nonzero()]
    one = [n for n, p in parameters.items() if torch.equal(p, torch.ones_like(p))]
    assert zero == [n for n in parameters if n.endswith("bias")]
    assert one == [n for n in parameters if ".ln_" in n and n.endswith("weight")]
    # With at least 2,048 samples the deviation is within 1/sqrt(2 * 2048) = 1.6 % of its
    # expectation at one sigma; the bound is six of them.
    for name, p in parameters.items():
        if name not in zero + one:
            std = 0.01 if "c_proj" in name else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.1), name
            assert abs(p.mean().item()) < 6 * std / p.numel() ** 0.5, name


def test_the_head_is_tied_to_the_embedding() -> None:
    model = tiny()
    assert model.lm_head.weight is model.transformer.wte.weight


# ----------------------------------------------------------------------------------- the loss


def test_target_loss_is_the_masked_cross_entropy_over_all_logits() -> None:
    model = tiny().double()
    batch = to_batch(
        [Encoded([5, 6, 7, 8, 9], 2), Encoded([3, 4, 2], 2), Encoded([3, 4], 2)], 0, "cpu"
    )
    loss = target_loss(model, batch)
    log_p = model(input_ids=batch["input_ids"]).logits.log_softmax(-1)
    nll = -log_p.gather(-1, batch["labels"].unsqueeze(-1)).squeeze(-1)
    expected = (nll * batch["label_token_weights"]).sum()
    # fp64: some hundred roundings of 1e-16 each
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    assert 4 * 5 < loss.item() < 4 * 6.5  # four targets; an untrained one costs about ln(320)


def test_a_batch_without_targets_costs_nothing() -> None:
    model = tiny()
    loss = target_loss(model, to_batch([Encoded([3, 4], 2)], 0, "cpu"))
    loss.backward()
    assert loss.item() == 0
    assert [n for n, p in model.named_parameters() if p.grad is None or p.grad.any()] == []


# --------------------------------------------------------------------------------- pretrained


@pytest.mark.parametrize("part", ["whole", "transformer"])
def test_pretrained_weights_are_taken_as_they_are(part: str, tmp_path: Path) -> None:
    """The published GPT-2 has its names without the prefix `transformer.`, and no head."""
    model = tiny(seed=3)
    (model if part == "whole" else model.transformer).save_pretrained(tmp_path)
    train_tokenizer([{"de": "Ja.", "en": "Yes."}], 300, "de", "en").save_pretrained(tmp_path)
    check_pretrained(str(tmp_path), 16)
    loaded = load_pretrained(str(tmp_path), 300, 0.25, 0)
    expected = dict(model.named_parameters())
    found = dict(loaded.named_parameters())
    assert list(found) == list(expected)
    assert [n for n in found if not torch.equal(found[n], expected[n])] == []
    assert loaded.config.resid_pdrop == 0.25


def test_pretrained_embeddings_grow_with_the_vocabulary(tmp_path: Path) -> None:
    model = tiny(seed=3)
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(str(tmp_path), 330, 0.0, 5)
    assert loaded.transformer.wte.weight.shape == (330, 32)
    assert torch.equal(loaded.transformer.wte.weight[:320], model.transformer.wte.weight)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    new = [
        load_pretrained(str(tmp_path), 330, 0.0, seed).transformer.wte.weight[320:]
        for seed in (5, 6)
    ]
    assert torch.equal(new[0], loaded.transformer.wte.weight[320:])  # the seed's, and not torch's
    assert not torch.equal(new[0], new[1])


@pytest.mark.parametrize("part", ["whole", "transformer", "pickled", "in bfloat16"])
def test_weights_are_the_same_read_one_by_one(part: str, tmp_path: Path) -> None:
    """What no process may hold whole is read by name; with rows for tokens that are new."""
    model = tiny(seed=3)
    if part == "in bfloat16":
        model.bfloat16()
    if part == "pickled":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        model.config.save_pretrained(tmp_path)
    else:
        saved = model.transformer if part == "transformer" else model
        saved.save_pretrained(tmp_path, max_shard_size="40KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = dict(load_pretrained(str(tmp_path), 330, 0.1, 5).named_parameters())
    config = pretrained_config(str(tmp_path), 330, 0.1)
    assert (config.vocab_size, config.resid_pdrop) == (330, 0.1)
    fill = pretrained_initializer(str(tmp_path), config, 5)
    for name, p in expected.items():
        filled = torch.empty_like(p)
        fill(name, filled)
        assert torch.equal(filled, p), name
        assert p.dtype == torch.float32  # the optimizer's small steps would be lost in less


def test_a_weight_that_is_missing_is_named(tmp_path: Path) -> None:
    model = tiny()
    state = {n: p for n, p in model.state_dict().items() if n != "transformer.h.1.ln_2.bias"}
    model.save_pretrained(tmp_path, state_dict=state)
    config = pretrained_config(str(tmp_path), 320, 0.0)
    for refused in (
        lambda: load_pretrained(str(tmp_path), 320, 0.0, 0),
        lambda: pretrained_initializer(str(tmp_path), config, 0),
    ):
        with pytest.raises(UserError, match=r"\(transformer.h.1.ln_2.bias is missing\)"):
            refused()


def test_folders_that_hold_no_gpt2_are_refused(tmp_path: Path) -> None:
    bert = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        vocab_size=300,
    )  # fmt: skip
    BertModel(bert).save_pretrained(tmp_path)
    for refused in (
        lambda: check_pretrained(str(tmp_path), 16),
        lambda: load_pretrained(str(tmp_path), 300, 0.0, 0),
        lambda: check_pretrained(str(tmp_path / "none"), 16),
    ):
        with pytest.raises(UserError, match=r"no GPT-2 weights come from .*presets need none"):
            refused()


def test_pretrained_positions_must_suffice(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^--model_max_length 17 .* --model_max_length 16 works$"):
        check_pretrained(str(tmp_path), 17)
