"""Reads the text that --dataset names: pairs of sentences to translate.

Problem: before any process is started, --dataset must become lists of examples, or one line that
says what is wrong with it.

    builtin          the German-English text in training/tasks/corpus, a folder like the next
    a folder         with train.de train.en validation.de ... test.en: line i translates line i
    a folder, file   JSONL, JSON, CSV or Parquet, with a column per language or a `translation` of
                     both
    anything else    the name of a dataset on the hub, with such columns

`datasets` reads all but the first two, and says what it cannot read. A file that is named after a
split is that split; a missing split is cut off the end of train. Rows with an empty text are
skipped and counted. Plain text, and text larger than memory: any_text.py.
"""

from __future__ import annotations

import glob
import hashlib
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from training.launch.errors import RunError, UserError, counted

Pair = dict[str, str]  # {"de": ..., "en": ...}
Sizes = Mapping[str, int | None]

SPLITS = ("train", "validation", "test")
BUILTIN = "builtin"
BUILTIN_FOLDER = Path(__file__).with_name("corpus")
NO_NETWORK = f"--dataset {BUILTIN} needs neither files nor network"
BEGINNINGS = {"train": "train", "val": "validation", "dev": "validation", "test": "test"}
READERS: dict[str, tuple[str, dict[str, Any]]] = {  # of `datasets`, by a file's ending
    ".txt": ("text", {"sample_by": "document", "encoding": "utf-8-sig"}),
    ".jsonl": ("json", {}), ".json": ("json", {}),
    ".csv": ("csv", {"keep_default_na": False}), ".parquet": ("parquet", {}),
    ".tsv": ("csv", {"keep_default_na": False, "sep": "\t"}),
}  # fmt: skip
TAKEN = {"validation": 1000, "test": 100}  # pairs at most, out of train if there is no such split


@dataclass
class Texts:
    """The examples of each split, and notes on how they were made."""

    splits: dict[str, Sequence[Any]]
    notes: list[str] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict, repr=False)

    def fingerprints(self) -> dict[str, str]:
        """A hash of each split's examples, in order; made once, before ranks start."""
        self.hashes = self.hashes or {split: self.hash(rows) for split, rows in self.splits.items()}
        return self.hashes

    def hash(self, rows: Sequence[Any]) -> str:
        """Of the examples, in order."""
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def full(self, rows: Sequence[Pair]) -> Sequence[Any]:
        """The rows with text on all sides."""
        return [row for row in rows if all(row.values())]

    def without_empty(self, rows: Sequence[Pair], split: str) -> Sequence[Any]:
        """The same, with a note on the others."""
        usable = self.full(rows)
        if len(usable) < len(rows):
            empty = counted(len(rows) - len(usable), "row")
            self.notes.append(f"{split}: skipped {empty} with an empty text.")
        return usable


TextsT = TypeVar("TextsT", bound=Texts)


def load_pairs(dataset: str, src: str, tgt: str, sizes: Sizes, world_size: int) -> Texts:
    """The pairs of a run, in memory.

    Args:
        dataset: see the table above.
        src, tgt: the keys of the languages: file endings, columns.
        sizes: the maximum number of pairs per split; None takes all there are.
        world_size: every split must hold at least a pair for each rank.

    Raises:
        UserError: there are no usable pairs; the message says why, and what works.
    """
    refuse_one_language(src, tgt)
    rows: dict[str, Sequence[Pair]] = {}
    with refused_if_unreadable(dataset):
        found = _read(dataset, src, tgt)
        if is_plain(dataset, found, src, tgt):
            raise UserError(
                f"--dataset {dataset}: this is plain text, and the program translates; "
                f"project/train.py ddp --model gpt2-mini --dataset {shlex.quote(dataset)} learns it"
            )
        for split in [split for split in SPLITS if split in found]:
            rows[split] = list(pairs_of(dataset, split, found[split], (src, tgt)))
    return cut_splits(Texts({}), dataset, rows, sizes, world_size)


def _read(dataset: str, src: str, tgt: str) -> Mapping[str, Any]:
    """The rows of each split."""
    if lines := parallel_lines(dataset, src, tgt):
        return lines
    if not Path(dataset).exists():
        return from_hub(dataset)
    return splits_of(*files_of(Path(dataset), src, tgt))


@contextmanager
def refused_if_unreadable(where: object) -> Iterator[None]:
    """Raises UserError, with the reason and `where` it is, if data cannot be read."""
    try:
        yield
    except (UserError, RunError):  # the latter: a copy cannot be written
        raise
    except Exception as error:  # the readers of `datasets` raise many kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"--dataset {where}: it cannot be read ({reason}); {NO_NETWORK}") from error


def refuse_one_language(src: str, tgt: str) -> None:
    """Raises UserError."""
    if src == tgt:
        raise UserError(f"--src {src} --tgt {tgt}: two languages are needed, as --src de --tgt en")


def is_plain(dataset: str, found: Mapping[str, Any], src: str, tgt: str) -> bool:
    """Whether the rows are plain text, and no pairs. Raises UserError if they are neither, or there
    is none."""
    first = next((row for rows in found.values() for row in rows), None)
    if first is None:
        raise UserError(f"--dataset {dataset}: it is empty; {NO_NETWORK}")
    columns = _columns(first).keys()
    if columns >= {src, tgt}:
        return False
    if "text" in columns and not columns & {src, tgt}:
        return True
    raise UserError(
        f"--dataset {dataset}: its columns are {', '.join(columns)}, and not {src} "
        f"and {tgt}; --src and --tgt name them, or a column named text holds plain text"
    )


def parallel_lines(dataset: str, src: str, tgt: str) -> dict[str, ParallelLines]:
    """The pairs of each split, if --dataset names a folder with train.de and train.en, or alike."""
    folder = BUILTIN_FOLDER if dataset == BUILTIN else Path(dataset)
    missing = [key for key in (src, tgt) if not (folder / f"train.{key}").exists()]
    if dataset != BUILTIN and len(missing) == 2:
        return {}
    if missing:
        raise UserError(
            f"--dataset {dataset} --src {src} --tgt {tgt}: it has no train.{missing[0]}; "
            f"--dataset {BUILTIN} has --src de --tgt en, and the reverse"
        )
    paths = {split: {key: folder / f"{split}.{key}" for key in (src, tgt)} for split in SPLITS}
    return {split: ParallelLines(dataset, files) for split, files in paths.items()}


@dataclass(frozen=True)
class ParallelLines:
    """The pairs of a split, from a file for each language; they are read anew each time."""

    dataset: str
    files: Mapping[str, Path]

    def __iter__(self) -> Iterator[Pair]:
        sides = [_lines(path) for path in self.files.values()]
        for number, pair in enumerate(zip_longest(*sides)):
            if None in pair:
                longer = number + 1 + sum(1 for side in sides for _ in side)
                source, target = (number if text is None else longer for text in pair)
                one, other = (path.name for path in self.files.values())
                raise UserError(
                    f"--dataset {self.dataset}: {one} has {counted(source, 'line')} and {other} "
                    f"has {target}: line i of one must translate line i of the other; {NO_NETWORK}"
                )
            yield dict(zip(self.files, pair, strict=True))


def _lines(path: Path) -> Iterator[str]:
    with refused_if_unreadable(path), path.open(encoding="utf-8-sig", newline="\n") as file:
        for line in file:
            yield line.removesuffix("\n")


def files_of(path: Path, src: str, tgt: str) -> tuple[str, dict[str, Any], dict[str, list[Path]]]:
    """A file, or a folder's files of one kind: the reader of `datasets` and its options, and the
    files of each split."""
    every = [path] if path.is_file() else sorted([*path.iterdir(), *path.glob("*/*")])
    ending = next((file.suffix for file in every if file.suffix in READERS), None)
    if ending is None:
        raise UserError(
            f"--dataset {path}: no train.{src} and train.{tgt} there, nor any of "
            f"{' '.join(READERS)}; {NO_NETWORK}"
        )
    files: dict[str, list[Path]] = {}  # by split
    for file in every:
        if file.suffix != ending or not file.stat().st_size:  # readers take no empty file
            continue
        split = "train"  # or the one that the file or its folder is named after
        for part in file.relative_to(path).parts:
            split = next((s for b, s in BEGINNINGS.items() if part.startswith(b)), split)
        files.setdefault(split, []).append(file)
    return *READERS[ending], files


def from_hub(dataset: str) -> Mapping[str, Any]:
    """The splits of a dataset on the hub. Raises UserError if it is the name of a file."""
    if Path(dataset).suffix in READERS or dataset.startswith((".", "/", "~")):
        raise UserError(f"--dataset {dataset}: there is no such file or folder; {NO_NETWORK}")
    with refused_if_unreadable(f"{dataset} (on the hub)"):
        return load_splits(dataset)


def load_splits(source: str, **options: Any) -> Mapping[str, Any]:
    """The splits of a dataset on the hub, or what a reader of `datasets` gives."""
    import datasets  # here: it takes seconds to import

    return datasets.load_dataset(source, **options)


def splits_of(
    reader: str, options: Mapping[str, Any], files: Mapping[str, Sequence[Path]]
) -> Mapping[str, Any]:
    """What `files_of` has found; it is read anew each time, without a copy in a cache."""
    # To `datasets` a bracket in a name is a pattern.
    escaped = {split: [glob.escape(str(file)) for file in some] for split, some in files.items()}
    return load_splits(reader, streaming=True, data_files=escaped, **options) if files else {}


def _columns(row: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """A row's values by column, or by language if it has a `translation` of both."""
    if isinstance(row, str):  # of a copy of documents (any_text.py)
        return {"text": row}
    translation = row.get("translation")
    return translation if isinstance(translation, Mapping) else row


def pairs_of(dataset: str, split: str, rows: Iterable[Any], keys: Sequence[str]) -> Iterator[Pair]:
    """The pairs, without blanks around their texts."""
    for texts in texts_of(dataset, split, rows, keys):
        yield {key: text.strip() for key, text in texts.items()}


def texts_of(dataset: str, split: str, rows: Iterable[Any], keys: Sequence[str]) -> Iterator[Pair]:
    """The texts of each row by key; a missing one is empty. Raises UserError, which says where the
    row is, if one is not text."""
    for number, row in enumerate(rows, 1):
        texts = {key: _columns(row).get(key) or "" for key in keys}
        for key, text in texts.items():
            if not isinstance(text, str):
                raise UserError(
                    f"--dataset {dataset}: row {number} of {split}: {key} is {text!r:.40}, and not "
                    "text in quotes"
                )
        yield texts


def cut_splits(
    texts: TextsT, dataset: str, rows: dict[str, Sequence[Pair]], sizes: Sizes, world_size: int
) -> TextsT:
    """With the pairs of each split; a missing split is cut off the end of train. Raises UserError
    if a split has too few."""
    for split in ("test", "validation"):  # test is cut off first: it has the last pairs
        if split not in rows:
            train = rows.get("train", [])
            tenth = -(-(len(train) - 1) // 10)  # rounded up, but a pair stays
            count = min(sizes[split] or TAKEN[split], tenth)
            at = len(train) - count
            rows["train"], rows[split] = train[:at], train[at:]
            taken = counted(count, "pair")
            texts.notes.append(f"no {split} split: {taken} held out from the end of train.")
    for split in SPLITS:
        usable = texts.without_empty(rows.get(split, []), split)
        texts.splits[split] = pairs = usable[: sizes[split]]
        if len(pairs) < world_size:
            raise UserError(
                f"--dataset {dataset}: {split} has {counted(len(pairs), 'pair')} with text on both "
                f"sides, and a run of {counted(world_size, 'rank')} needs {world_size} or more; "
                f"a larger --n_{split}, or more text, works"
            )
    return texts
