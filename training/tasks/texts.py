"""Reads the text that --dataset names: pairs of sentences to translate, or documents to model.

Problem: before any process is started, --dataset must become lists of examples, or one line that
says what is wrong with it.

    builtin          the German-English text in training/tasks/corpus, a folder like the next
    a folder         with train.de train.en validation.de ... test.en: line i translates line i
    a folder, file   JSONL, JSON, CSV or Parquet, with a column per language, a `translation` of
                     both, or a `text`; or .txt, with <|endoftext|> between documents
    anything else    the name of a dataset on the hub, with such columns

`datasets` reads all but the first two, and says what it cannot read. Text of more than `BIG` bytes
is copied for the ranks to map (stored.py), and later starts take it from there. A file that is
named after a split is that split; a missing split is cut off the end of train. Rows with an empty
text are skipped and counted.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from training.launch.errors import UserError

from .stored import StoredRows, store

Pair = dict[str, str]  # {"de": ..., "en": ...}
Sizes = Mapping[str, int | None]

SPLITS = ("train", "validation", "test")
BUILTIN = "builtin"
BUILTIN_FOLDER = Path(__file__).with_name("corpus")
NO_NETWORK = f"--dataset {BUILTIN} needs neither files nor network"
BEGINNINGS = {"train": "train", "val": "validation", "dev": "validation", "test": "test"}
READERS: dict[str, tuple[str, dict[str, Any]]] = {  # of `datasets`, by a file's ending
    ".txt": ("text", {"sample_by": "document"}), ".jsonl": ("json", {}), ".json": ("json", {}),
    ".csv": ("csv", {"keep_default_na": False}), ".parquet": ("parquet", {}),
    ".tsv": ("csv", {"keep_default_na": False, "sep": "\t"}),
}  # fmt: skip
END = "<|endoftext|>"  # GPT-2's own: after every document
TAKEN = {"validation": 1000, "test": 100}  # pairs at most, out of train if there is no such split
BIG = 1 << 26  # bytes of files of which a copy is made
COPIES = {1: "text", 2: "pairs"}  # the folder of a copy, by the number of texts in a row
HELD_OUT = 20  # of plain text, one part in so many is held out for validation


@dataclass
class Texts:
    """The examples of each split, and notes on how they were made.

    Attributes:
        plain: they are documents to continue, not pairs; there is no test split.
    """

    splits: dict[str, Sequence[Any]]
    notes: list[str] = field(default_factory=list)
    plain: bool = False
    hashes: dict[str, str] = field(default_factory=dict, repr=False)

    def fingerprints(self) -> dict[str, str]:
        """A hash of each split's examples, in order; made once, before ranks start."""
        self.hashes = self.hashes or {split: _hash(rows) for split, rows in self.splits.items()}
        return self.hashes

    def documents(self, split: str) -> Iterator[str]:
        """What a language model learns, with an end token after every document."""
        rows = self.splits[split]
        return (row if isinstance(rows, StoredRows) else row + END for row in rows)


def _hash(rows: Sequence[Any]) -> str:
    if isinstance(rows, StoredRows):
        return rows.fingerprint()
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def load_texts(
    dataset: str, src: str, tgt: str, sizes: Sizes, world_size: int, folder: Path | None = None
) -> Texts:
    """The texts of a run.

    Args:
        dataset: see the table above.
        src, tgt: the keys of the languages: file endings, columns.
        sizes: the maximum number of pairs per split; None takes all there are.
        world_size: every split must hold at least a pair for each rank.
        folder: for a copy of large files; by default they are read into memory.

    Raises:
        UserError: there is no usable text; the message says why, and what works.
    """
    if src == tgt:
        raise UserError(f"--src {src} --tgt {tgt}: two languages are needed, as --src de --tgt en")
    with refused_if_unreadable(dataset):
        found, copy, whole = _read(dataset, src, tgt, folder)
        first = next((row for rows in found.values() for row in rows), None)
    if first is None:
        raise UserError(f"--dataset {dataset}: it is empty; {NO_NETWORK}")
    columns = _columns(first)
    plain = "text" in columns and not columns.keys() & {src, tgt}
    keys = ("text",) if plain else (src, tgt)
    if not columns.keys() >= set(keys):
        raise UserError(
            f"--dataset {dataset}: its columns are {', '.join(columns)}, and not {src} "
            f"and {tgt}; --src and --tgt name them, or a column named text holds plain text"
        )
    end = ""
    if copy is not None:
        copy /= COPIES[len(keys)]
        end = END if plain and whole else ""
    rows: dict[str, Sequence[Any]] = {}
    with refused_if_unreadable(dataset):
        for split in SPLITS:
            if split in found:
                every = (
                    _texts_of(row, keys, f"--dataset {dataset}: row {i} of {split}", end)
                    for i, row in enumerate(found[split], 1)
                )
                rows[split] = list(every) if copy is None else store(copy / split, every, keys)
    if plain:
        return _documents(dataset, rows)
    texts = _pairs(rows, sizes)
    for split, pairs in texts.splits.items():
        if len(pairs) < world_size:
            raise UserError(
                f"--dataset {dataset}: {split} has {len(pairs)} pairs with text on both sides, and "
                f"each of {world_size} ranks needs one; more pairs work, or {NO_NETWORK}"
            )
    return texts


def _read(
    dataset: str, src: str, tgt: str, copies: Path | None
) -> tuple[Mapping[str, Any], Path | None, bool]:
    """The rows of each split; where to copy them to if they are many; whether a row of text is a
    document that still needs its end token."""
    folder = BUILTIN_FOLDER if dataset == BUILTIN else Path(dataset)
    if dataset == BUILTIN or any((folder / f"train.{key}").exists() for key in (src, tgt)):
        lines = {split: _ParallelLines(dataset, folder, split, src, tgt) for split in SPLITS}
        files = [folder / f"{split}.{key}" for split in SPLITS for key in (src, tgt)]
        return lines, _copy_of_files(copies, files), True
    if folder.exists():
        return _rows_of_files(folder, src, tgt, copies)
    if folder.suffix in READERS or dataset.startswith((".", "/", "~")):  # no name on the hub
        raise UserError(f"--dataset {dataset}: there is no such file or folder; {NO_NETWORK}")
    found = load_splits(dataset)
    if copies is None:
        return found, None, True
    size = sum(rows.data.nbytes for rows in found.values())
    of = [rows._fingerprint for rows in found.values()]
    return found, _copy(copies, size, of, src, tgt), True


@contextmanager
def refused_if_unreadable(where: object) -> Iterator[None]:
    """Raises UserError, with the reason and `where` it is, if data cannot be read."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the readers of `datasets` raise many kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"--dataset {where}: it cannot be read ({reason}); {NO_NETWORK}") from error


@dataclass(frozen=True)
class _ParallelLines:
    """The pairs of a split whose files are train.de and train.en, or alike."""

    dataset: str
    folder: Path
    split: str
    src: str
    tgt: str

    def __iter__(self) -> Iterator[Pair]:
        sides = [self._lines(key) for key in (self.src, self.tgt)]
        for number, pair in enumerate(zip_longest(*sides)):
            if None in pair:
                longer = number + 1 + sum(1 for side in sides for _ in side)
                source, target = (number if text is None else longer for text in pair)
                raise UserError(
                    f"--dataset {self.dataset}: {self.split}.{self.src} has {source} lines and "
                    f"{self.split}.{self.tgt} has {target}: line i of one must translate line i of "
                    f"the other; {NO_NETWORK}"
                )
            yield dict(zip((self.src, self.tgt), pair, strict=True))

    def _lines(self, key: str) -> Iterator[str]:
        path = self.folder / f"{self.split}.{key}"
        with refused_if_unreadable(path), path.open(encoding="utf-8-sig") as file:
            for line in file:
                yield line.removesuffix("\n")


def _copy(copies: Path | None, size: int, *content: Any) -> Path | None:
    """Where to copy text of so many bytes to; None: it is to stay in memory."""
    if copies is None or size < BIG:
        return None
    return copies / hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _copy_of_files(copies: Path | None, files: Iterable[Path], *content: Any) -> Path | None:
    """The same for files, which their names, sizes and times tell apart."""
    stats = [(str(file), file.stat()) for file in files if file.exists()]
    of = [(name, found.st_size, found.st_mtime_ns) for name, found in stats]
    return _copy(copies, sum(found.st_size for _, found in stats), of, *content)


def _rows_of_files(
    path: Path, src: str, tgt: str, copies: Path | None
) -> tuple[Mapping[str, Any], Path | None, bool]:
    """The rows of a file, or of a folder's files of one kind, by split; see `_read`."""
    every = [path] if path.is_file() else sorted([*path.iterdir(), *path.glob("*/*")])
    ending = next((file.suffix for file in every if file.suffix in READERS), None)
    if ending is None:
        raise UserError(
            f"--dataset {path}: no train.{src} and train.{tgt} there, nor any of "
            f"{' '.join(READERS)}; {NO_NETWORK}"
        )
    reader, options = READERS[ending]
    files: dict[str, list[str]] = {}  # by split
    for file in every:
        if file.suffix != ending or not file.stat().st_size:  # readers take no empty file
            continue
        split = "train"  # or the one that the file or its folder is named after
        for part in file.relative_to(path).parts:
            split = next((s for b, s in BEGINNINGS.items() if part.startswith(b)), split)
        files.setdefault(split, []).append(glob.escape(str(file)))
    if not files:
        return {}, None, True
    copy = _copy_of_files(copies, [file for file in every if file.suffix == ending], src, tgt)
    if copy is None:
        return load_splits(str(path), reader, data_files=files, **options), None, True
    for keys in ((src, tgt), ("text",)):
        places = {split: copy / COPIES[len(keys)] / split for split in files}
        # Where an earlier start has copied all, no reader is imported: that takes 140 MB.
        if all(place.exists() for place in places.values()):
            return {split: StoredRows(place, keys) for split, place in places.items()}, copy, False
    if reader != "text":
        return load_splits(str(path), reader, True, data_files=files, **options), copy, True
    rows = load_splits(str(path), reader, True, data_files=files, keep_linebreaks=True)
    return {split: lines.map(_joined, batched=True) for split, lines in rows.items()}, copy, False


def _joined(lines: dict[str, list[str]]) -> dict[str, list[str]]:
    return {"text": ["".join(lines["text"])]}


def load_splits(
    dataset: str, reader: str | None = None, streaming: bool = False, **options: Any
) -> Mapping[str, Any]:
    """The splits of a dataset on the hub, or of files through a reader of `datasets`: lists, or
    what reads them anew each time."""
    import datasets  # here: it takes seconds to import

    if reader is None:
        return datasets.load_dataset(dataset)
    found = datasets.load_dataset(reader, streaming=True, **options)  # no copy in a cache
    return found if streaming else {split: list(rows) for split, rows in found.items()}


def _columns(row: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """A row's values by column, or by language if it has a `translation` of both."""
    if isinstance(row, str):  # of a copy of documents
        return {"text": row}
    translation = row.get("translation")
    return translation if isinstance(translation, Mapping) else row


def _texts_of(row: Mapping[str, Any], keys: Sequence[str], where: str, end: str) -> dict[str, str]:
    """The texts of a row, a pair's without blanks around them, others with `end`; a missing one is
    empty. Raises UserError, which says `where` the row is, if they are not text."""
    texts = {key: _columns(row).get(key) or "" for key in keys}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise UserError(f"{where}: {key} is {text!r:.40}, and not text in quotes")
        if keys[1:] or not text.strip():
            texts[key] = text.strip()
        else:
            texts[key] = text + end
    return texts


def _without_empty(rows: Sequence[Pair], split: str, notes: list[str]) -> Sequence[Pair]:
    usable: Sequence[Pair]
    if isinstance(rows, StoredRows):
        usable = rows.without_empty()
    else:
        usable = [row for row in rows if all(row.values())]
    if len(usable) < len(rows):
        notes.append(f"{split}: skipped {len(rows) - len(usable)} rows with an empty text.")
    return usable


def _pairs(rows: dict[str, Sequence[Pair]], sizes: Sizes) -> Texts:
    """The pairs of each split; a missing split is cut off the end of train."""
    texts = Texts({})
    for split in ("test", "validation"):  # test is cut off first: it has the last pairs
        if split not in rows:
            train = rows.get("train", [])
            tenth = -(-(len(train) - 1) // 10)  # rounded up, but a pair stays
            count = min(sizes[split] or TAKEN[split], tenth)
            at = len(train) - count
            rows["train"], rows[split] = train[:at], train[at:]
            texts.notes.append(f"no {split} split: the last {count} pairs are taken out of train.")
    for split in SPLITS:
        usable = _without_empty(rows.get(split, []), split, texts.notes)
        texts.splits[split] = usable[: sizes[split]]
    return texts


def _documents(dataset: str, rows: dict[str, Sequence[Any]]) -> Texts:
    """The documents that are not blank; if there is no validation split, one is held out."""
    texts = Texts({}, plain=True)
    for split in ("train", "validation"):
        documents = _without_empty(rows.get(split, []), split, texts.notes)
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
