"""The trained model translates where it was trained, in its shards and stages, with a cache, as one
process does without one. (test_losses.py checks that no rank needs the whole model for it.)"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from project.run_pipeline import choose_devices
from project.train import lay_out
from tests.project.conftest import WorldOf
from tests.project.programs import (
    FLOW,
    TINY,
    finish,
    large_weights,
    parse,
    read_json,
    recomputed,
    summary,
)
from training.launch.world import World
from training.layouts.layout import setup_of
from training.layouts.threads import BlocksInThreads, StagesInThreads
from training.tasks.generation import bleu_tokenizer, evaluate_bleu
from training.tasks.task import whole_model
from training.tasks.texts import load_texts
from training.tasks.translation import TranslationTask

pytestmark = pytest.mark.usefixtures("elsewhere")

LENGTH = 64


@pytest.mark.parametrize(
    ("n", "line"),
    [
        (1, f"run_pipeline {FLOW}"), (1, f"run_pipeline {FLOW} --pipeline blocks"),
        (2, "train pipeline --schedule zbv"), (3, "train fsdp --world_size 3"),
    ],
)  # fmt: skip
def test_a_layout_translates_as_one_process(world_of: WorldOf, n: int, line: str) -> None:
    """Each part of the data has its own sentences; every rank gets all translations, in order."""
    line = f"{line} {SIZES} --workdir {Path('work').resolve()}"
    world = world_of(n)
    found = world.run(translations, line) if world else [translations(0, 1, line)]
    expected, lengths = of_one_process()
    assert found == [expected] * n
    # The examples are to show what can happen.
    assert len(set(lengths)) > 2 and min(lengths) < LENGTH == max(lengths), lengths


# In fp64: a cache sums in another order, and the largest logit should not depend on it.
SIZES = f"{TINY} --n_test 7 --precision fp64"


@cache
def of_one_process() -> tuple[list[str], list[int]]:
    """The translations, computed without a cache; and their lengths in tokens, with the source."""
    task = made(f"train single {SIZES}", 0, 1)
    tokenizer = task.tokenizer
    one = whole_model(task, torch.device("cpu"), torch.float64).eval()
    expected, lengths = [], []
    for pair in task.scored_examples():
        prompt = [*tokenizer(pair["de"])["input_ids"], 1]
        ids = recomputed(one, prompt, len(tokenizer), 2, LENGTH)
        expected.append(tokenizer.decode(ids, skip_special_tokens=True).strip())
        lengths.append(len(prompt) + len(ids))
    return expected, lengths


def made(line: str, rank: int, world_size: int) -> TranslationTask:
    args = parse(line)
    world = World(rank, world_size, rank)
    task = TranslationTask(args, world, load_texts(args, world, translates=True))
    task._initialize = large_weights
    return task


def translations(rank: int, world_size: int, line: str) -> list[str]:
    """All translations, by the layout."""
    task, world = made(line, rank, world_size), World(rank, world_size, rank)
    args: Any = task.args
    setup = setup_of(args, world)
    if line.startswith("train"):
        model = lay_out(task, world, setup)
    elif args.pipeline == "blocks":
        model = BlocksInThreads(task, world, setup, choose_devices(args), split_size=2)
    else:
        model = StagesInThreads(task, world, setup, choose_devices(args))
    sources, found = [pair["de"] for pair in task.scored_examples()], []
    for positions in (60, 1 << 16):  # a few sentences at a time, or all of them
        with model.evaluating(), patch.object(task, "positions_at_once", lambda *_, n=positions: n):
            found.append(task.translated(world, model, sources))
    model.close()
    assert found[0] == found[1]
    return found[0]


def test_bleu_is_of_the_corpus() -> None:
    pairs = [{"en": "the cat sat on the mat today ."}, {"en": "a dog runs ."}]
    same = [pair["en"] for pair in pairs]
    assert evaluate_bleu(pairs, same, "en") == {"bleu": pytest.approx(100)}
    # Without "today" 11 of 12 words: 11/11, 8/9, 6/7, 4/5 of the n-grams, and brevity.
    found = evaluate_bleu(pairs, ["the cat sat on the mat .", same[1]], "en")["bleu"]
    precisions = 1 * (8 / 9) * (6 / 7) * (4 / 5)
    assert found == pytest.approx(100 * math.exp(1 - 12 / 11) * precisions**0.25)


@pytest.mark.parametrize(
    ("sentence", "tokenizer"),
    [
        ("Today the weather is fine.", "13a"),
        ("오늘은 날씨가 아주 좋습니다.", "13a"),
        ("今天天气很好", "zh"),
        ("我在用 GPT-2 做实验。", "zh"),
        ("今日は天気がいいです。", "char"),
        ("วันนี้อากาศดี", "char"),
        ("ຂ້ອຍຮັກເຈົ້າ", "char"),
        ("ខ្ញុំស្រឡាញ់អ្នក", "char"),
        ("ကျွန်တော်ချစ်တယ်", "char"),
        ("ང་ཁྱོད་ལ་དགའ", "char"),
    ],
)
def test_bleu_of_a_language_without_spaces_counts_its_letters(
    sentence: str, tokenizer: str
) -> None:
    """The name of the column says nothing of the language."""
    assert bleu_tokenizer([sentence]) == tokenizer
    pairs = [{"target": sentence}]
    assert evaluate_bleu(pairs, [sentence], "target")["bleu"] == pytest.approx(100)


def test_the_tokenizer_of_bleu_stands_in_the_head_and_the_result_files() -> None:
    Path("zh").mkdir()
    for split in ("train", "validation", "test"):
        Path("zh", f"{split}.de").write_text("Ei\n" * 8, "utf-8")
        Path("zh", f"{split}.en").write_text("今天天气很好\n" * 8, "utf-8")
    printed = finish(f"train single {TINY} --dataset zh --n_epochs 1")
    assert "BLEU zh" in printed
    assert read_json(Path("work/rank0_results_epoch0.json"))["bleu_tokenizer"] == "zh"
    assert summary()["bleu_tokenizer"] == "zh"
