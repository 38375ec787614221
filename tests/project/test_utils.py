"""The course's functions: batches, greedy translation with a cache, BLEU, gradients on disk."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from project.utils import (
    EpochTotals,
    collate_batch,
    evaluate_bleu,
    evaluate_loss,
    generate,
    get_tokenizer,
    precision_notes,
    save_grad_weights,
    sum_over_ranks,
    train,
)
from training.data import Encoded, Step, to_batch
from training.model import build_model, gpt2_config
from training.optimization import Optimizers, Recipe

PAIRS = [
    {"de": "Der Hund schläft.", "en": "The dog sleeps."},
    {"de": "Die Katze sieht den großen Hund im Garten.", "en": "The cat sees the big dog."},
    {"de": "Ja.", "en": "Yes, it does so every day in the garden of the neighbours."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return get_tokenizer(PAIRS, 280, "de", "en", tmp_path_factory.mktemp("tokenizer"))


def test_get_tokenizer_writes_where_transformers_reads(tmp_path: Path) -> None:
    get_tokenizer(PAIRS, 280, "de", "en", tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()


def test_collate_batch_is_the_courses(tokenizer: Any) -> None:
    batch = collate_batch(PAIRS, "de", "en", tokenizer, 40, "cpu")
    names = ("input_ids", "labels", "label_token_weights")
    assert [tuple(batch[name].shape) for name in names] == [(3, 40)] * 3
    for row, pair in enumerate(PAIRS):
        source = [*tokenizer(pair["de"])["input_ids"], 1]
        target = [*tokenizer(pair["en"])["input_ids"], 2]
        ids = (source + target + [0] * 41)[:41]
        assert batch["input_ids"][row].tolist() == ids[:-1]
        assert batch["labels"][row].tolist() == ids[1:]
        weights = [0] * (len(source) - 1) + [1] * len(target) + [0] * 40
        assert batch["label_token_weights"][row].tolist() == weights[:40]
    assert min(map(sum, batch["label_token_weights"].tolist())) > 0


# --------------------------------------------------------------------------------- generation


def random_model(max_length: int) -> Any:
    """A model whose weights are large enough that what it writes varies, in fp64: a cache sums
    in another order, and the largest of 320 logits should not depend on it."""
    config = gpt2_config("gpt2-mini", 320, max_length, n_layer=2, n_embd=32, n_head=2)
    model = build_model(config, 5).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".ln_" not in name:
                p.normal_(0, 0.5, generator=torch.Generator().manual_seed(p.numel()))
    return model.eval()


def recomputed(model: Any, prompt: list[int], vocab_size: int, max_length: int) -> list[int]:
    """Token by token, one sentence, everything computed again for each."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < max_length and (len(ids) == len(prompt) or ids[-1] != 2):
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1, :vocab_size]
            ids.append(int(logits.argmax()))
    return [token for token in ids[len(prompt) :] if token != 2]


# Prompts of 7, 23, 3, 11, 17, 28 and 61 tokens.
WORDS = ["a " * n for n in (3, 11, 0, 5, 8)]
EXAMPLES = [{"de": text + "Hund"} for text in [*WORDS, "a " * 11 + "xyz", "a " * 30]]


MAX_LENGTH = 28


@pytest.fixture(scope="module")
def recomputation(tokenizer: Any) -> tuple[Any, list[list[int]]]:
    """A model, and the tokens with which it continues EXAMPLES."""
    model = random_model(MAX_LENGTH)
    prompts = [[*tokenizer(e["de"])["input_ids"], 1] for e in EXAMPLES]

    def recompute(prompt: list[int]) -> list[int]:
        return recomputed(model, prompt, len(tokenizer), MAX_LENGTH)

    # Let a token that it likes be the end of a sentence: exchange the two in the tied embedding.
    liked = recompute(prompts[0])[3]
    assert liked not in {token for prompt in prompts for token in prompt}
    with torch.no_grad():
        table = model.transformer.wte.weight
        table[[2, liked]] = table[[liked, 2]]
    expected = [recompute(prompt) for prompt in prompts]
    # The examples are to show every end: the end token, no room left, and none from the start.
    room = [MAX_LENGTH - len(prompt) for prompt in prompts]
    ended = [len(row) < n for row, n in zip(expected, room, strict=True) if n > 0]
    assert (any(ended), all(ended), 0 in room, min(room) < 0) == (True, False, True, True)
    return model, expected


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_generation_is_what_recomputing_gives(
    tokenizer: Any, recomputation: tuple[Any, list[list[int]]], batch_size: int
) -> None:
    model, expected = recomputation
    sentences = generate(
        model, EXAMPLES, "de", "en", tokenizer, MAX_LENGTH, "cpu", "", 1, batch_size
    )
    assert sentences == [tokenizer.decode(row).strip() for row in expected]


def test_nothing_to_translate(tokenizer: Any) -> None:
    assert generate(random_model(16), [], "de", "en", tokenizer, 16, "cpu", "", 1) == []


def test_generation_leaves_no_gradient_and_evaluates(tokenizer: Any) -> None:
    model = random_model(16).train()
    generate(model, EXAMPLES[:1], "de", "en", tokenizer, 16, "cpu", "", 1)
    assert not model.training
    assert [p for p in model.parameters() if p.grad is not None] == []


# --------------------------------------------------------------------------------------- BLEU


def test_bleu_is_of_the_corpus() -> None:
    pairs = [{"en": "the cat sat on the mat today ."}, {"en": "a dog runs ."}]
    same = [pair["en"] for pair in pairs]
    assert evaluate_bleu(pairs, same, "en") == {"bleu": pytest.approx(100)}
    # 'the cat sat on the mat .' lacks one of 8 words: n-gram precisions 11/11, 8/9, 6/7, 4/5 with
    # the second sentence, brevity exp(1 - 12/11).
    found = evaluate_bleu(pairs, ["the cat sat on the mat .", same[1]], "en")["bleu"]
    precisions = 1 * (8 / 9) * (6 / 7) * (4 / 5)
    assert found == pytest.approx(100 * math.exp(1 - 12 / 11) * precisions**0.25)
    assert evaluate_bleu(pairs, ["x y z", "u v w"], "en")["bleu"] < 10


# ---------------------------------------------------------------------------------- training


def test_gradients_are_saved_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    model[0](torch.tensor([[3.0, 4.0]])).sum().backward()
    assert save_grad_weights(model, 1) == Path("tests/model1_gradients.pth")
    saved = torch.load(tmp_path / "tests" / "model1_gradients.pth", weights_only=True)
    assert {name: gradient.tolist() for name, gradient in saved.items()} == {
        "0.weight": [[3.0, 4.0]],
        "0.bias": [1.0],
    }


def test_an_epoch_averages_after_backward_and_counts() -> None:
    """Gradients are those of one step, averaged before the optimizer uses them."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    batches = [to_batch([Encoded([3, 4, 5, 2], 2)] * n, 0, "cpu") for n in (1, 2)]
    steps = [
        Step([batch], 99, positions, 1) for batch, positions in zip(batches, (7, 9), strict=True)
    ]
    order: list[str] = []

    def backward(step: Step) -> Tensor:
        order.append(f"backward {model.weight.grad is None} {model.training}")
        model.weight.grad = torch.tensor([[float(len(step.micro_batches[0]["labels"]))]])
        return torch.tensor(10.0 * step.positions)

    def average(_: nn.Module) -> None:
        order.append("average")
        assert model.weight.grad is not None
        model.weight.grad *= 10

    optimizer = Optimizers([torch.optim.SGD(model.parameters(), lr=1)], Recipe(1.0, 2))
    totals = train(model.eval(), optimizer, steps, backward, "", 1, average)
    assert order == ["backward True True", "average"] * 2
    assert model.weight.item() == -(1 * 10 + 2 * 10)
    assert totals == EpochTotals(160.0, 2 + 4, 16, 2, totals.seconds, steps=2)
    assert totals.seconds > 0
    assert model.weight.grad is not None and model.weight.grad.item() == 20


def test_the_rest_of_an_epoch_is_added_to_what_was_done() -> None:
    """And what happens after a step, as saving, is not training time."""
    model = nn.Linear(1, 1, bias=False)
    batch = to_batch([Encoded([3, 4, 5, 2], 2)], 0, "cpu")
    before = EpochTotals(10.0, 20, 30, 40, 5.0, 1, 3)
    seen: list[EpochTotals] = []

    def backward(_: Step) -> Tensor:
        model.weight.grad = torch.zeros(1, 1)
        return torch.tensor(2.5)

    def save(totals: EpochTotals) -> None:
        seen.append(totals)
        time.sleep(0.05)

    optimizer = Optimizers([torch.optim.SGD(model.parameters(), lr=1)], Recipe(1.0, 9))
    start = time.perf_counter()
    totals = train(
        model, optimizer, [Step([batch], 9, 7, 1)] * 3, backward, "", 1,
        before=before, after_step=save,
    )  # fmt: skip
    elapsed = time.perf_counter() - start
    assert totals == EpochTotals(17.5, 20 + 6, 51, 43, totals.seconds, 1, 6)
    assert [done.steps for done in seen] == [4, 5, 6]
    assert 5.0 < totals.seconds < 5.0 + elapsed - 3 * 0.05


def test_evaluation_sums_and_skips_what_has_no_targets() -> None:
    with_targets, without = Encoded([3, 4, 2], 1), Encoded([3, 4], 2)
    batches = [to_batch(rows, 0, "cpu") for rows in ([with_targets], [without], [with_targets] * 2)]
    losses = iter([torch.tensor(1.5), torch.tensor(2.0)])
    model = nn.Linear(1, 1)
    assert evaluate_loss(model, batches, lambda _: next(losses), "", 1) == (3.5, 2 + 4)
    assert not model.training


def test_sums_over_one_rank_are_the_values() -> None:
    assert sum_over_ranks((1.5, 2), torch.device("cpu")) == [1.5, 2]


@pytest.mark.parametrize(
    ("capabilities", "notes"),
    [
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, 1),
        ({"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": False}, 0),
        ({"architecture": "aarch64"}, 0),
        ({}, 0),
    ],
)
def test_a_cpu_without_bf16_is_told_of_it(
    capabilities: dict[str, Any], notes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert len(precision_notes(torch.device("cpu"), "bf16")) == notes
    assert precision_notes(torch.device("cpu"), "fp32") == []
    assert precision_notes(torch.device("cuda"), "bf16") == []
