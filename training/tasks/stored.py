"""Text larger than memory: copied once into a file that ranks map.

Problem: 2 GB of pairs are 8 GB as Python strings, on every rank, and minutes to read.

Idea: the files of `training.tasks.tokens`, with the bytes of UTF-8 in the place of token ids. A row
is a pair, of which `num_source` bytes are the first text, or a document. The copy is named by what
the files are called, their sizes and times. Later runs find it and read it instead. A split is a
range of rows; any other choice of rows takes 8 bytes a row.

Cost: the text once more on disk, and 12 bytes a row. Less than 64 MB of text stay in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from training.progress import moving

from .tokens import TEXTS_AT_ONCE, Rows, Tokens, groups, write_tokens

COPIED = 64  # rows that are in memory together while they are copied: one may be a book


class StoredRows(Sequence[Any]):
    """Rows of a copy: of `numbers` as a dict with `keys`, or as a text if there is one key."""

    def __init__(self, folder: Path, keys: Sequence[str], numbers: Any = None) -> None:
        self.folder, self.keys, self.rows = folder, keys, Tokens(folder, np.uint8)
        self.numbers = range(len(self.rows)) if numbers is None else numbers

    def __reduce__(self) -> Any:
        return StoredRows, (self.folder, self.keys, self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return StoredRows(self.folder, self.keys, self.numbers[at])
        return next(self._read(self.numbers[at : at + 1]))

    def __iter__(self) -> Iterator[Any]:
        for at in range(0, len(self), TEXTS_AT_ONCE):
            yield from self._read(self.numbers[at : at + TEXTS_AT_ONCE])

    def _read(self, numbers: Any) -> Iterator[Any]:
        """The rows with these numbers, which rise: from one stretch of the copy."""
        where = self.rows.where[numbers[0] : numbers[-1] + 1]
        begin = int(self.rows.where["end"][numbers[0] - 1]) if numbers[0] else 0
        text = memoryview(self.rows.mapped()[begin : where["end"][-1]])  # read row by row
        ends = (where["end"] - begin).tolist()  # of rows in `text`
        sources = where["num_source"].tolist()
        for i in (np.asarray(numbers) - numbers[0]).tolist():
            first = ends[i - 1] if i else 0
            middle = first + sources[i]
            if len(self.keys) == 1:
                yield str(text[first : ends[i]], "utf-8")
            else:
                of = str(text[first:middle], "utf-8"), str(text[middle : ends[i]], "utf-8")
                yield dict(zip(self.keys, of, strict=True))

    def without_empty(self) -> StoredRows:
        """Those with text on all sides."""
        sizes, sources = np.diff(self.rows.where["end"], prepend=0), self.rows.where["num_source"]
        full = (sizes > sources) & ((sources > 0) | (len(self.keys) == 1))
        usable = np.asarray(self.numbers)[full[self.numbers]]
        same = len(usable) == len(self.numbers)
        return self if same else StoredRows(self.folder, self.keys, usable)

    def fingerprint(self) -> str:
        """A hash of the rows, in order: of the copy and of their numbers."""
        numbers = self.numbers
        which = repr(numbers) if isinstance(numbers, range) else numbers.tobytes().hex()
        return hashlib.sha256((_content(self.folder) + which).encode()).hexdigest()


def hash_of(path: Path) -> str:
    """Of a file's bytes. (Python 3.10 has no `hashlib.file_digest`.)"""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


@lru_cache
def _content(folder: Path) -> str:
    """A hash of a copy."""
    return hash_of(folder / "ids") + hash_of(folder / "index")


def store(folder: Path, rows: Iterable[dict[str, str]], keys: Sequence[str]) -> StoredRows:
    """The rows, from their copy, which is made if it is not there."""

    def encoded() -> Iterator[Rows]:
        for some in groups(moving(rows, f"Copying {folder.name}", None, "row"), COPIED):
            texts = [row[key].encode() for row in some for key in keys]
            sizes = np.array([len(text) for text in texts]).reshape(-1, len(keys))
            ids = np.frombuffer(b"".join(texts), np.uint8)
            yield Rows(ids, sizes.sum(1), sizes[:, 0] if keys[1:] else 0)

    write_tokens(folder, encoded, np.uint8)
    return StoredRows(folder, keys)
