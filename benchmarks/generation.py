"""Translating 100 sentences: token by token without a cache, against ours. Same translations.

The plain way recomputes the whole prefix for every token, a sentence at a time, as the course's
starter code does. The model is gpt2-mini after a short training, so that sentences end where a
trained model ends them.
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
from project.utils import generate, plan_of
from training.data import eos
from training.launch import World
from training.replicated import Replicated
from training.translation import TranslationTask

LENGTH, ROUNDS = 128, 5


def _trained(task: TranslationTask, model: Replicated, n_steps: int) -> None:
    (optimizer,) = model.optimizers
    steps = islice(task.steps(0, 0, 1, None), n_steps)
    for step in tqdm(steps, "Training a model to translate with", n_steps, disable=None):
        optimizer.zero_grad()
        model.backward(step)
        optimizer.step()


@torch.no_grad()
def _plain(
    model: Any, pairs: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast
) -> list[str]:
    """A sentence at a time, the whole prefix for every token."""
    model.eval()
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
    with tempfile.TemporaryDirectory() as folder:
        args = parse_data_parallel(
            None, f"--world_size 1 --device cpu --model gpt2-mini --dropout 0 --workdir {folder} "
            f"--vocab_size 4096 --model_max_length {LENGTH} --batch_size 64".split(),
        )  # fmt: skip
        task = TranslationTask(args, World(), texts, None)
    model = Replicated(task, World(), plan_of(args, World()))
    _trained(task, model, n_steps)
    test = texts.splits["test"][:n_sentences]
    tokenizer = task.tokenizer
    said: dict[str, list[str]] = {}
    ours = partial(generate, model, test, "de", "en", tokenizer, LENGTH, "cpu", "Translating", 1)
    contestants = {
        "plain, token by token": lambda: said.update(plain=_plain(model.module, test, tokenizer)),
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
