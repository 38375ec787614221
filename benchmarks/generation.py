"""Translating 100 texts: `generate` of transformers with its cache, all texts in one batch and one
by one, against ours. Translations must be the same. The texts are sentences, then one to four
sentences in a row, so that their lengths differ more; those that fill the model's positions are
left out.

The model is gpt2-mini after a short training, so that translations have realistic lengths.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from benchmarks.harness import DATASET, Row, alternate, ratio_of, summarize, write_rows
from project.run_data_parallel import parse_data_parallel
from training.launch.world import World
from training.layouts.layout import setup_of
from training.layouts.replicated import Replicated
from training.tasks.texts import load_texts
from training.tasks.tokens import eos
from training.tasks.translation import TranslationTask

LENGTH, ROUNDS = 128, 5


def train(task: TranslationTask, model: Replicated, n_steps: int) -> None:
    """Some steps of training."""
    (optimizer,) = model.optimizers
    steps = islice(task.steps(0, 0, 1, None), n_steps)
    for step in tqdm(steps, "Training a model to translate with", n_steps, disable=None):
        optimizer.zero_grad()
        model.backward(step)
        optimizer.step()


def with_more_positions(model: Any) -> Any:
    """A copy of the model with twice as many positions. In a batch, `generate` goes on until every
    text has ended. The longest text may then go beyond the model's last position, after its own
    end: what is generated there is cut off."""
    longer = copy.deepcopy(model)
    table = longer.transformer.wpe
    longer.transformer.wpe = nn.Embedding(2 * len(table.weight), table.embedding_dim)
    with torch.no_grad():
        longer.transformer.wpe.weight.copy_(table.weight.repeat(2, 1))
    longer.config.n_positions = 2 * len(table.weight)
    return longer.eval()


@torch.no_grad()
def translated(
    model: Any, sources: Sequence[str], tokenizer: PreTrainedTokenizerFast, size: int
) -> list[str]:
    """The translations by `generate`, in batches of `size` texts, padded on the left."""
    stop = tokenizer.convert_tokens_to_ids(eos("en"))
    unused = list(range(len(tokenizer), model.config.vocab_size))  # rows of no token
    sentences = []
    for at in range(0, len(sources), size):
        prompts = [tokenizer(source + eos("de"))["input_ids"] for source in sources[at : at + size]]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        kept = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        found = model.generate(
            input_ids=ids, attention_mask=kept, use_cache=True, do_sample=False,
            max_new_tokens=LENGTH - min(map(len, prompts)), eos_token_id=stop, pad_token_id=stop,
            suppress_tokens=unused or None,
        )  # fmt: skip
        for prompt, row in zip(prompts, found[:, longest:].tolist(), strict=True):
            new = row[: row.index(stop)] if stop in row else row
            text = tokenizer.decode(new[: LENGTH - len(prompt)], skip_special_tokens=True)
            sentences.append(text.strip())
    return sentences


def sources_of(task: TranslationTask, sentences: Iterable[str], n: int, most: int) -> list[str]:
    """The first n texts that leave room for a translation. They have one, two, ..., `most`, one,
    ... sentences."""
    rest, sources = iter(sentences), list[str]()
    while len(sources) < n and (row := list(islice(rest, 1 + len(sources) % most))):
        if len(task.tokenizer(" ".join(row))["input_ids"]) + 1 < LENGTH:
            sources.append(" ".join(row))
    return sources


def compare(model: Replicated, task: TranslationTask, kind: str, sources: list[str]) -> list[Row]:
    """Rows of `generate` and of ours. Raises AssertionError if a text is translated differently."""
    said: dict[str, list[str]] = {}
    ours = partial(task.translated, World(), model, sources)
    theirs = partial(translated, with_more_positions(model.module), sources, task.tokenizer)
    batch, single, own = (f"{kind}: {who}" for who in ("one batch", "one by one", "this project"))
    contestants = {
        batch: lambda: said.update({batch: theirs(size=len(sources))}),
        single: lambda: said.update({single: theirs(size=1)}),
        own: lambda: said.update({own: ours()}),
    }
    with model.evaluating():
        seconds = alternate(contestants, ROUNDS)
    if different := [
        i for i, texts in enumerate(zip(*said.values(), strict=True)) if len({*texts}) > 1
    ]:
        raise AssertionError(f"{kind} {different} are translated differently")
    rows = []
    for name, of_rounds in seconds.items():
        value, spread = summarize([len(sources) / s for s in of_rounds])
        ratio, against, goal = ratio_of(seconds[single], of_rounds), "one by one", None
        rows.append(Row(name, value, spread, "texts/s", ratio, against, goal))
    ratio, goal = ratio_of(seconds[batch], of_rounds), 1.2
    rows.append(Row(own, value, spread, "texts/s", ratio, "one batch", goal))
    return rows


def run(n_texts: int = 100, n_steps: int = 70) -> list[Row]:
    """Times both, on both kinds of text, and prints their table."""
    with tempfile.TemporaryDirectory() as folder:
        args = parse_data_parallel(
            f"--world_size 1 --device cpu --model gpt2-mini --dropout 0 --workdir {folder} "
            f"--dataset {DATASET} --n_train 5000 --n_validation 1000 --n_test 100 "
            f"--vocab_size 4096 --model_max_length {LENGTH} --batch_size 64".split(),
        )  # fmt: skip
        texts = load_texts(args, World(), translates=True)
        task = TranslationTask(args, World(), texts, None)
    model = Replicated(task, World(), setup_of(args, World()))
    train(task, model, n_steps)
    rows = []
    for kind, split, most in (
        ("sentences", "test", 1), ("one to four sentences", "validation", 4)
    ):  # fmt: skip
        sentences = (pair["de"] for pair in texts.pairs(split))
        rows += compare(model, task, kind, sources_of(task, sentences, n_texts, most))
    title = f"Translating {n_texts} texts of --dataset {DATASET}, gpt2-mini"
    write_rows("generation", title, rows)
    return rows


if __name__ == "__main__":
    run()
