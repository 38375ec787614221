"""Reads plain text and text larger than memory, beside the pairs of texts.py, for train.py.

    a file, a folder of files   .txt, with <|endoftext|> between documents; or what texts.py reads,
    a dataset on the hub        with a column `text`

Plain text is what a language model learns (language.py). Text of more than `BIG` bytes, pairs or
plain, is copied for the ranks to map (stored.py), and later starts take it from there; less stays
in memory.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.launch.errors import UserError

from .stored import StoredRows, store
from .texts import (
    NO_NETWORK,
    SPLITS,
    Pair,
    Sizes,
    Texts,
    cut_splits,
    files_of,
    from_hub,
    is_plain,
    pairs_of,
    parallel_lines,
    refuse_one_language,
    refused_if_unreadable,
    splits_of,
    texts_of,
)

END = "<|endoftext|>"  # GPT-2's own: after every document
BIG = 1 << 26  # bytes of files of which a copy is made
COPIES = {1: "text", 2: "pairs"}  # the folder of a copy, by the number of texts in a row
HELD_OUT = 20  # of plain text, one part in so many is held out for validation
PIECE, READ = 4096, 1 << 20  # letters
# Where byte-level BPE has no token on both sides.
BREAK = re.compile(r"(?<=\S\n)(?=\S)|(?<=[^\W_])(?=\s+\S)")


def pieces(text: str) -> Iterator[str]:
    """A long text in pieces of some thousand letters, with the same tokens: so all cores work on
    one document."""
    first = 0
    while first < len(text):
        found = BREAK.search(text, first + PIECE)
        end = found.start() if found else len(text)
        yield text[first:end]
        first = end


@dataclass
class AnyTexts(Texts):
    """Pairs or documents, in memory or in a copy.

    Attributes:
        plain: they are documents to continue, not pairs; there is no test split.
    """

    plain: bool = False

    def hash(self, rows: Sequence[Any]) -> str:
        """Of the examples, in order."""
        return rows.fingerprint() if isinstance(rows, StoredRows) else super().hash(rows)

    def full(self, rows: Sequence[Pair]) -> Sequence[Any]:
        """The rows with text on all sides."""
        return rows.without_empty() if isinstance(rows, StoredRows) else super().full(rows)

    def documents(self, split: str) -> Iterator[str]:
        """What a language model learns, with an end token after every document."""
        rows = self.splits[split]
        return (row if isinstance(rows, StoredRows) else row + END for row in rows)


def load_texts(
    dataset: str, src: str, tgt: str, sizes: Sizes, world_size: int, folder: Path
) -> AnyTexts:
    """The texts of a run; arguments and errors as of `training.tasks.texts.load_pairs`.

    Args:
        folder: for a copy of large text.
    """
    refuse_one_language(src, tgt)
    rows: dict[str, Sequence[Any]] = {}
    with refused_if_unreadable(dataset):
        found, copy = _read(dataset, src, tgt, folder)
        plain = is_plain(dataset, found, src, tgt)
        keys = ("text",) if plain else (src, tgt)
        if copy is not None:
            copy /= COPIES[len(keys)]
        for split in [split for split in SPLITS if split in found]:
            if plain:
                whole = copy is not None and not isinstance(found[split], _LongTexts)
                every = _ended(texts_of(dataset, split, found[split], keys), END if whole else "")
            else:
                every = pairs_of(dataset, split, found[split], keys)
            rows[split] = list(every) if copy is None else store(copy / split, every, keys)
    if plain:
        return _documents(dataset, rows)
    return cut_splits(AnyTexts({}), dataset, rows, sizes, world_size)


def _read(dataset: str, src: str, tgt: str, copies: Path) -> tuple[Mapping[str, Any], Path | None]:
    """The rows of each split, and where to copy them to if they are many."""
    if lines := parallel_lines(dataset, src, tgt):
        paths = [path for split in lines.values() for path in split.files.values()]
        return lines, _copy_of_files(copies, paths)
    if Path(dataset).exists():
        return _rows_of_files(Path(dataset), src, tgt, copies)
    found = from_hub(dataset)
    size = sum(rows.data.nbytes for rows in found.values())
    of = [rows._fingerprint for rows in found.values()]
    return found, _copy(copies, size, of, src, tgt)


def _copy(copies: Path, size: int, *content: Any) -> Path | None:
    """Where to copy text of so many bytes to; None: it is to stay in memory."""
    if size < BIG:
        return None
    return copies / hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _copy_of_files(copies: Path, files: Iterable[Path], *content: Any) -> Path | None:
    """The same for files, which their names, sizes and times tell apart."""
    stats = [(str(file), file.stat()) for file in files if file.exists()]
    of = [(name, found.st_size, found.st_mtime_ns) for name, found in stats]
    return _copy(copies, sum(found.st_size for _, found in stats), of, *content)


def _rows_of_files(
    path: Path, src: str, tgt: str, copies: Path
) -> tuple[Mapping[str, Any], Path | None]:
    """The rows of a file, or of a folder's files of one kind, by split; see `_read`."""
    reader, options, files = files_of(path, src, tgt)
    copy = _copy_of_files(copies, [file for some in files.values() for file in some], src, tgt)
    if copy is not None:
        for keys in ((src, tgt), ("text",)):
            places = {split: copy / COPIES[len(keys)] / split for split in files}
            # Where an earlier start has copied all, no reader is imported: that takes 140 MB.
            if all(place.exists() for place in places.values()):
                return {split: StoredRows(place, keys) for split, place in places.items()}, copy
        if reader == "text":
            return {split: _LongTexts(some) for split, some in files.items()}, copy
    return splits_of(reader, options, files), copy


@dataclass(frozen=True)
class _LongTexts:
    """The pieces of text files, with an end token after each file. They are read anew each time. A
    file may be one long line."""

    files: Sequence[Path]

    def __iter__(self) -> Iterator[Pair]:
        for path in self.files:
            rest = ""
            with refused_if_unreadable(path), path.open(encoding="utf-8-sig") as file:
                while more := file.read(READ):
                    *whole, rest = pieces(rest + more)
                    for text in whole:
                        yield {"text": text}
            yield {"text": rest + END if rest.strip() else ""}


def _ended(rows: Iterable[Pair], end: str) -> Iterator[Pair]:
    """Documents, with `end` after each that is not blank."""
    for row in rows:
        text = row["text"]
        yield {"text": text + end if text.strip() else ""}


def _documents(dataset: str, rows: dict[str, Sequence[Any]]) -> AnyTexts:
    """The documents that are not blank; if there is no validation split, one is held out."""
    texts = AnyTexts({}, plain=True)
    for split in ("train", "validation"):
        documents = texts.without_empty(rows.get(split, []), split)
        stored = isinstance(documents, StoredRows)
        texts.splits[split] = documents if stored else [row["text"] for row in documents]
    train = texts.splits["train"]
    if not texts.splits["validation"]:
        at = len(train) * (HELD_OUT - 1) // HELD_OUT
        parts = (train[:at], train[at:]) if isinstance(train, StoredRows) else held_out(train)
        texts.splits["train"], texts.splits["validation"] = parts
        texts.notes.append(
            f"no validation split: {100 // HELD_OUT} % of the text is taken from its end."
        )
    if not all(texts.splits.values()):
        raise UserError(
            f"--dataset {dataset}: it has too little text for two parts, to train and to validate; "
            f"{NO_NETWORK}"
        )
    return texts


def held_out(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the text near its end: at the end of a line or document or, within the last line, of a
    word."""
    text = END.join(documents).rstrip()
    least = (len(text) - 1) * (HELD_OUT - 1) // HELD_OUT  # where the last twentieth begins
    end_of_line, end = text.find("\n", least) + 1, text.find(END, max(0, least - len(END)))
    found = [at for at in (end_of_line, end) if at > 0]
    at = min(found) if found else text.find(" ", least) + 1 or least
    parts = text[:at].split(END), text[at:].split(END)
    before, behind = ([t for t in part if t.strip()] for part in parts)
    return before, behind
