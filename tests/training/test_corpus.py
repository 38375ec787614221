"""The built-in text: its sizes, and that nothing in it is twice, empty or unheard of."""

from __future__ import annotations

import re

import pytest

from training.text import BUILTIN_FOLDER as FOLDER
from training.text import SPLITS

PAIRS = {"train": 9000, "validation": 1000, "test": 100}
DEFAULT_TRAIN = 5000  # of a run without --n_train

LANGUAGES = pytest.mark.parametrize("language", ["de", "en"])


def lines(split: str, language: str) -> list[str]:
    text = (FOLDER / f"{split}.{language}").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return text[:-1].split("\n")


def words(sentences: list[str]) -> set[str]:
    return {word for sentence in sentences for word in re.findall(r"\w+", sentence)}


def test_the_folder_holds_these_files_and_a_megabyte_at_most() -> None:
    names = {f"{split}.{language}" for split in SPLITS for language in ("de", "en")}
    names.add("english.txt")
    assert {path.name for path in FOLDER.iterdir()} == names
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1 << 20


@LANGUAGES
def test_no_sentence_is_twice_within_or_across_the_splits(language: str) -> None:
    every = [line for split in SPLITS for line in lines(split, language)]
    assert len(set(every)) == len(every)
    assert {split: len(lines(split, language)) for split in SPLITS} == PAIRS


@LANGUAGES
def test_validation_and_test_have_no_word_that_the_default_training_set_lacks(
    language: str,
) -> None:
    known = words(lines("train", language)[:DEFAULT_TRAIN])
    assert words(lines("validation", language) + lines("test", language)) - known == set()
