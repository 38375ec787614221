"""Translating 100 texts: `generate` of transformers with its cache, all texts in one batch and one
by one, against ours. Translations must be the same. The texts are sentences, then one to four
sentences in a row, so that their lengths differ more.

The model is gpt2-mini after a short training, so that sentences have realistic lengths.
"""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import islice
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from benchmarks.harness import Row, alternate, ratio_of, summarize, write_rows
from benchmarks.text import benchmark_texts, text_name
from project.run_data_parallel import parse_data_parallel
from training.launch.world import World
from training.layouts.layout import setup_of
from training.layouts.replicated import Replicated
from training.tasks.tokens import eos
from training.tasks.translation import TranslationTask

LENGTH = 128
ROUNDS = 5


def _trained(task: TranslationTask, model: Replicated, n_steps: int) -> None:
    (optimizer,) = model.optimizers
    steps = islice(task.steps(0, 0, 1, None), n_steps)
    for step in tqdm(steps, "Training a model to translate with", n_steps, disable=None):
        optimizer.zero_grad()
        model.backward(step)
        optimizer.step()


@torch.no_grad()
def _transformers(
    model: Any, pairs: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast, size: int
) -> list[str]:
    """Batches of `size` texts, padded on the left."""
    if len(pairs) > size:
        parts = [pairs[i : i + size] for i in range(0, len(pairs), size)]
        return [text for part in parts for text in _transformers(model, part, tokenizer, size)]
    model.eval()
    stop = tokenizer.convert_tokens_to_ids(eos("en"))
    prompts = [tokenizer(pair["de"] + eos("de"))["input_ids"] for pair in pairs]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    kept = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    unused = list(range(len(tokenizer), model.config.vocab_size))  # rows of no token
    found = model.generate(
        input_ids=ids, attention_mask=kept, use_cache=True, do_sample=False,
        max_new_tokens=LENGTH - min(map(len, prompts)), eos_token_id=stop, pad_token_id=stop,
        suppress_tokens=unused or None,
    )  # fmt: skip
    sentences = []
    for prompt, row in zip(prompts, found[:, longest:].tolist(), strict=True):
        new = row[: row.index(stop)] if stop in row else row
        new = new[: max(0, LENGTH - len(prompt))]
        sentences.append(tokenizer.decode(new, skip_special_tokens=True).strip())
    return sentences


def _in_a_row(pairs: list[dict[str, str]], n: int) -> list[dict[str, str]]:
    """n sources: the next one, two, three, four, one ... sentences."""
    sources = (pair["de"] for pair in pairs)
    return [{"de": " ".join(islice(sources, 1 + i % 4))} for i in range(n)]


def run(n_texts: int = 100, n_steps: int = 70) -> list[Row]:
    """Times both, on both kinds of text, and prints their tables."""
    texts = benchmark_texts()
    with tempfile.TemporaryDirectory() as folder:
        args = parse_data_parallel(
            None, f"--world_size 1 --device cpu --model gpt2-mini --dropout 0 --workdir {folder} "
            f"--vocab_size 4096 --model_max_length {LENGTH} --batch_size 64".split(),
        )  # fmt: skip
        task = TranslationTask(args, World(), texts, None)
    model = Replicated(task, World(), setup_of(args, World()))
    _trained(task, model, n_steps)
    found = []
    for kind, pairs in (
        ("sentences", list(texts.splits["test"][:n_texts])),
        ("one to four sentences", _in_a_row(list(texts.splits["validation"]), n_texts)),
    ):
        found += _compare(model, pairs, task, kind)
    title = f"Translating {n_texts} texts of {text_name()}, gpt2-mini"
    write_rows("generation", title, found)
    return found


def _compare(
    model: Replicated, pairs: list[dict[str, str]], task: TranslationTask, kind: str
) -> list[Row]:
    said: dict[str, list[str]] = {}
    sources = [pair["de"] for pair in pairs]
    ours = partial(task.translated, World(), model, sources)
    theirs = partial(_transformers, model.module, pairs, task.tokenizer)
    batch, single, mine = (f"{kind}: {who}" for who in ("one batch", "one by one", "this project"))
    contestants = {
        batch: lambda: said.update({batch: theirs(size=len(pairs))}),
        single: lambda: said.update({single: theirs(size=1)}),
        mine: lambda: said.update({mine: ours()}),
    }
    with model.evaluating():
        seconds = alternate(contestants, ROUNDS)
    if different := [
        i for i, texts in enumerate(zip(*said.values(), strict=True)) if len({*texts}) > 1
    ]:
        raise AssertionError(f"{kind} {different} are translated differently")
    rows = []
    for name, found in seconds.items():
        middle, spread = summarize([len(pairs) / s for s in found])
        goal = 8.0 if name == mine else None
        ratio = ratio_of(seconds[single], found)
        rows.append(Row(name, middle, spread, "texts/s", ratio, "one by one", goal))
    return rows


if __name__ == "__main__":
    run()
