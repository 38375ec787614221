"""Translating 100 sentences: token by token without a cache, against ours. Same translations.

The plain way recomputes the whole prefix for every token, a sentence at a time, as the course's
starter code does. The model is gpt2-mini after a short training, so that sentences end where a
trained model ends them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from benchmarks.harness import Row, alternate, ratio_of, summarize, write_rows
from benchmarks.text import benchmark_texts, text_name
from project.utils import generate
from training.data import PAD, GlobalBatches, RankLoader, encode, eos, train_tokenizer
from training.model import build_model, gpt2_config, round_vocab, target_loss

LENGTH, ROUNDS = 128, 5


def _trained(pairs: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast, n_steps: int) -> Any:
    model = build_model(gpt2_config("gpt2-mini", round_vocab(len(tokenizer)), LENGTH), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    examples = encode(pairs, tokenizer, "de", "en", LENGTH)
    loader = RankLoader(
        examples, GlobalBatches(len(examples), 64, seed=0), rank=0, world_size=1,
        pad_id=tokenizer.convert_tokens_to_ids(PAD), device="cpu",
    )  # fmt: skip
    steps = loader.steps(0)
    for _ in tqdm(range(n_steps), "Training a model to translate with", disable=None):
        step = next(steps)
        optimizer.zero_grad()
        (target_loss(model, step.micro_batches[0]) / step.target_tokens).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def _plain(
    model: Any, pairs: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast
) -> list[str]:
    """A sentence at a time, the whole prefix for every token."""
    sentences = []
    stop = tokenizer.convert_tokens_to_ids(eos("en"))
    for pair in pairs:
        prompt = tokenizer(pair["de"] + eos("de"))["input_ids"]
        ids = list(prompt)
        while len(ids) < LENGTH:
            logits = model(input_ids=torch.tensor([ids])).logits
            token = int(logits[0, -1, : len(tokenizer)].argmax())
            if token == stop:
                break
            ids.append(token)
        sentences.append(tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True).strip())
    return sentences


def run(n_sentences: int = 100, n_steps: int = 70) -> list[Row]:
    """Times both and prints their table."""
    texts = benchmark_texts()
    tokenizer = train_tokenizer(texts.splits["train"], 4096, "de", "en")
    model = _trained(texts.splits["train"], tokenizer, n_steps)
    test = texts.splits["test"][:n_sentences]
    said: dict[str, list[str]] = {}
    ours = partial(generate, model, test, "de", "en", tokenizer, LENGTH, "cpu", "Translating", 1)
    contestants = {
        "plain, token by token": lambda: said.update(plain=_plain(model, test, tokenizer)),
        "this project": lambda: said.update(ours=ours()),
    }
    seconds = alternate(contestants, ROUNDS)
    different = [
        i for i, (a, b) in enumerate(zip(said["plain"], said["ours"], strict=True)) if a != b
    ]
    if different:
        raise AssertionError(f"sentences {different} are translated differently")
    rows = []
    for name, goal in (("plain, token by token", None), ("this project", 10.0)):
        middle, spread = summarize([n_sentences / s for s in seconds[name]])
        ratio = ratio_of(seconds["plain, token by token"], seconds[name])
        rows.append(Row(name, middle, spread, "sentences/s", ratio, "plain", goal))
    title = f"Translating {n_sentences} sentences of {text_name()}, gpt2-mini"
    write_rows("generation", title, rows)
    return rows


if __name__ == "__main__":
    run()
