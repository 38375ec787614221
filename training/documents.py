"""Plain text: from a file, a folder of files, or a hub.

    NAME.txt       a document, or several with <|endoftext|> between them
    a folder       of .txt files; those named valid... are validated with, test... are left out
    a hub's name   of a dataset with a column `text`: a document per row

Where no text is for validation, it is the last 5 % of the training text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.errors import UserError
from training.text import (
    BEGINNINGS,
    BUILTIN,
    ENDINGS,
    NO_NETWORK,
    Splits,
    Texts,
    load_splits,
    load_texts,
    read_text,
    refused_if_unreadable,
)

END = "<|endoftext|>"  # GPT-2's own: after every document
HELD_OUT = 20  # one part of so many is for validation
SPLITS = ("train", "validation")


class Documents(Splits[str]):
    """Plain texts."""


def load_data(
    dataset: str, src: str, tgt: str, sizes: dict[str, int | None], world_size: int
) -> Texts | Documents:
    """Documents where --dataset names plain text, else pairs; see `load_texts`.

    Raises:
        UserError: nothing usable is there; the text says what, and what works.
    """
    path = Path(dataset)
    with refused_if_unreadable(dataset):
        if path.suffix == ".txt" and path.is_file():
            return of_splits(dataset, {"train": _documents(path)})
        if path.is_dir() and (files := sorted(path.glob("*.txt"))):
            return of_splits(dataset, _of_files(files))
    if path.suffix == ".txt":
        raise UserError(f"--dataset {dataset}: there is no such file; {NO_NETWORK}")
    found: Any = None
    local = path.exists() or path.is_absolute() or dataset.startswith((".", "~"))
    if dataset != BUILTIN and not local and path.suffix not in ENDINGS:
        found = load_splits(dataset)
        if "text" in getattr(found.get("train"), "column_names", ()):
            return of_splits(dataset, {split: _rows(dataset, found[split]) for split in found})
    return load_texts(dataset, src, tgt, sizes, world_size, found)


def _documents(path: Path) -> list[str]:
    return read_text(path).split(END)


def _of_files(files: Sequence[Path]) -> dict[str, list[str]]:
    splits: dict[str, list[str]] = {"train": []}
    for file in files:
        split = next((s for b, s in BEGINNINGS.items() if file.name.startswith(b)), "train")
        splits.setdefault(split, []).extend(_documents(file))
    return splits


def _rows(dataset: str, rows: Any) -> list[str]:
    texts = list(rows["text"])
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise UserError(f"--dataset {dataset}: row {number} has no text ({text!r:.40})")
    return texts


def of_splits(dataset: str, found: dict[str, list[str]]) -> Documents:
    """The documents without those of no letter; validation is held out where there is none."""
    splits = {split: [t for t in found.get(split, []) if t.strip()] for split in SPLITS}
    documents = Documents(splits)
    if not splits["train"]:
        raise UserError(f"--dataset {dataset}: there is no text to train on; {NO_NETWORK}")
    if not splits["validation"]:
        splits["train"], splits["validation"] = held_out(splits["train"])
        documents.notes.append(
            f"validation: no such split; it is the last {100 // HELD_OUT} % of the text."
        )
    return documents


def held_out(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The documents before and behind a point near the end, at which one of them may be cut: where
    the next line begins, in the last line the next word."""
    texts = [text.rstrip() for text in texts]
    place = (sum(map(len, texts)) - 1) * (HELD_OUT - 1) // HELD_OUT
    i = 0
    while place >= len(texts[i]):
        place -= len(texts[i])
        i += 1
    text = texts[i]
    found = [at for at in (text.find("\n", place), text.find(" ", place)) if at >= 0]
    at = found[0] + 1 if found else place
    before, behind = [*texts[:i], text[:at]], [text[at:], *texts[i + 1 :]]
    return [t for t in before if t.strip()], [t for t in behind if t.strip()]
