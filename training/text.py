"""Reads the text that --dataset names: pairs of sentences to translate, or documents to model.

Problem: before any process is started, --dataset must become lists of examples, or one line that
says what is wrong with it.

    builtin          the German-English text in training/corpus, a folder like the next
    a folder         with train.de train.en validation.de ... test.en: line i translates line i
    a folder, file   JSONL, JSON, CSV or Parquet, with a column per language, a `translation` of
                     both, or a `text`; or .txt, with <|endoftext|> between documents
    anything else    the name of a dataset on the hub, with such columns

`datasets` reads all but the first two. A file that is named after a split is that split; a missing
split is cut off the end of train. Pairs with an empty side are skipped and counted.
"""

from __future__ import annotations

import glob
import hashlib
import json
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from training.errors import UserError, works

Pair = dict[str, str]  # {"de": ..., "en": ...}
Sizes = Mapping[str, int | None]

SPLITS = ("train", "validation", "test")
BUILTIN = "builtin"
BUILTIN_FOLDER = Path(__file__).with_name("corpus")
NO_NETWORK = f"--dataset {BUILTIN} needs neither files nor network"
BEGINNINGS = {"train": "train", "val": "validation", "dev": "validation", "test": "test"}
READERS: dict[str, tuple[str, dict[str, Any]]] = {  # of `datasets`, by a file's ending
    ".txt": ("text", {"sample_by": "document"}), ".jsonl": ("json", {}), ".json": ("json", {}),
    ".csv": ("csv", {}), ".tsv": ("csv", {"sep": "\t"}), ".parquet": ("parquet", {}),
}  # fmt: skip
END = "<|endoftext|>"  # GPT-2's own: after every document
HELD_OUT = 20  # of plain text, one part in so many is held out for validation


@dataclass
class Texts:
    """The examples of each split, and notes on how they were made.

    Attributes:
        plain: they are documents to continue, not pairs; there is no test split.
    """

    splits: dict[str, list[Any]]
    notes: list[str] = field(default_factory=list)
    plain: bool = False

    def fingerprints(self) -> dict[str, str]:
        """A hash of each split's examples, in order."""
        texts = {split: json.dumps(examples) for split, examples in self.splits.items()}
        return {split: hashlib.sha256(text.encode()).hexdigest() for split, text in texts.items()}


def load_texts(dataset: str, src: str, tgt: str, sizes: Sizes, world_size: int) -> Texts:
    """The texts of a run.

    Args:
        dataset: see the table above.
        src, tgt: the keys of the languages: file endings, columns.
        sizes: the maximum number of pairs per split; None takes all there are.
        world_size: every split must hold at least a pair for each rank.

    Raises:
        UserError: there is no usable text; the message says why, and what works.
    """
    if src == tgt:
        raise UserError(f"--src {src} --tgt {tgt}: two languages are needed, as --src de --tgt en")
    if dataset == BUILTIN and {src, tgt} != {"de", "en"}:
        raise UserError(
            f"--src {src} --tgt {tgt}: the built-in text is de and en; "
            "name a --dataset with these languages"
        )
    folder = BUILTIN_FOLDER if dataset == BUILTIN else Path(dataset)
    found: Mapping[str, Any]
    with refused_if_unreadable(dataset):
        if folder.is_dir() and any(folder.glob(f"train.{src}")) | any(folder.glob(f"train.{tgt}")):
            found = {split: _parallel_lines(folder, split, src, tgt) for split in SPLITS}
        elif folder.exists():
            found = _rows_of_files(folder, src, tgt)
        elif folder.suffix in READERS or folder.is_absolute() or dataset.startswith((".", "~")):
            raise UserError(f"--dataset {dataset}: there is no such file or folder; {NO_NETWORK}")
        else:
            found = load_splits(dataset)
    first = next((row for rows in found.values() for row in rows), None)
    if isinstance(first, Mapping) and "text" in first and not first.keys() & {src, tgt}:
        return _documents(dataset, found)
    texts = _pairs(dataset, found, src, tgt, sizes)
    for split in SPLITS:
        have = len(texts.splits[split])
        if have == 0 and split not in found and 0 < len(texts.splits["train"]) < 3:
            raise UserError(f"--dataset {dataset}: no pair is left for {split}; 3 pairs work")
        if have == 0:
            values = first.get("translation") or first if isinstance(first, Mapping) else {}
            raise UserError(
                f"--dataset {dataset}: {split} has no pair with text on both sides, {src} and "
                f"{tgt}; its columns are {', '.join(map(str, values)) or 'none'}; --src and --tgt "
                f"name them, or --dataset {BUILTIN} works"
            )
        if have < world_size:
            raise UserError(
                f"--dataset {dataset}: {split} has {have} pairs for {world_size} ranks, and each "
                f"rank needs one; {works('--world_size', have)}, or more pairs"
            )
    return texts


@contextmanager
def refused_if_unreadable(dataset: str) -> Iterator[None]:
    """Turns the OSError of a file or folder of --dataset that cannot be read into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--dataset {dataset}: {error.filename or dataset} cannot be read "
            f"({error.strerror or error}); {NO_NETWORK}"
        ) from error


def _parallel_lines(folder: Path, split: str, src: str, tgt: str) -> list[Pair]:
    lines = []
    for path in (folder / f"{split}.{key}" for key in (src, tgt)):
        if not path.exists():
            there = ", ".join(sorted(found.name for found in folder.glob(f"{split}.*"))) or "none"
            raise UserError(
                f"--dataset {folder} --src {src} --tgt {tgt}: there is no {path.name} (found: "
                f"{there}); --src and --tgt are the endings of the files"
            )
        check_files([path])
        lines.append(path.read_text("utf-8-sig").removesuffix("\n").split("\n"))
    source, target = lines
    if len(source) != len(target):
        raise UserError(
            f"--dataset {folder}: {split}.{src} has {len(source)} lines and {split}.{tgt} has "
            f"{len(target)}: line i of one must translate line i of the other; {NO_NETWORK}"
        )
    return [{src: s, tgt: t} for s, t in zip(source, target, strict=True)]


def _rows_of_files(path: Path, src: str, tgt: str) -> Mapping[str, Any]:
    """The rows of a file, or of a folder's files of one kind, by split."""
    every = [path] if path.is_file() else sorted([*path.iterdir(), *path.glob("*/*")])
    ending = next((file.suffix for file in every if file.suffix in READERS), None)
    if ending is None:
        raise UserError(
            f"--dataset {path}: no train.{src} and train.{tgt} there, nor any of "
            f"{' '.join(READERS)}; {NO_NETWORK}"
        )
    reader, options = READERS[ending]
    if reader == "csv":  # everything is text, even numbers and what pandas takes for missing
        texts = dict.fromkeys((src, tgt, "text"), str)
        options = {**options, "keep_default_na": False, "converters": texts}
    files: dict[str, list[Path]] = {}
    for file in (file for file in every if file.suffix == ending and file.is_file()):
        split = "train"  # or the one that the file or its folder is named after
        for part in file.relative_to(path).parts:
            split = next((s for b, s in BEGINNINGS.items() if part.startswith(b)), split)
        if reader != "json" or file.stat().st_size:  # which the reader does not take
            files.setdefault(split, []).append(file)
    if not files:
        return {}
    names = {split: [glob.escape(str(file)) for file in found] for split, found in files.items()}
    try:
        return load_splits(str(path), reader, data_files=names, **options)
    except UserError:
        if reader != "parquet":
            check_files(file for found in files.values() for file in found)
        raise


def check_files(files: Iterable[Path]) -> None:
    """Raises UserError, with the place, if one is not UTF-8, or has a line that is not JSON."""
    for file in files:
        content = file.read_bytes()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            found = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
            raise UserError(
                f"{file}: it is not UTF-8 ({error}); convert it, for example: "
                f"iconv -f {found} -t utf-8 {file} > utf8_{file.name}"
            ) from None
        for number, line in enumerate(text.split("\n") if file.suffix == ".jsonl" else [], 1):
            try:
                json.loads(line.strip() or "0")
            except ValueError as error:
                raise UserError(
                    f"{file}: line {number} is not JSON ({getattr(error, 'msg', error)}); "
                    "mend or remove it"
                ) from None


def load_splits(dataset: str, reader: str | None = None, **options: Any) -> Mapping[str, Any]:
    """The splits of a dataset on the hub, or of files through a reader of `datasets`. Raises
    UserError if nothing can be read."""
    import datasets  # here: it takes seconds to import

    try:
        if reader is not None:  # streaming leaves no copy in a cache
            found = datasets.load_dataset(reader, streaming=True, **options)
            return {split: list(rows) for split, rows in found.items()}
        _do_not_wait_for_the_hub()
        try:
            return datasets.load_dataset(dataset)
        except RuntimeError as error:
            # Datasets 4 runs no code that comes with a dataset; the hub keeps a converted copy.
            if "script" not in str(error):
                raise
            return datasets.load_dataset(dataset, revision="refs/convert/parquet")
    except PermissionError:
        raise
    except Exception as error:  # its readers raise many kinds
        reason = " ".join(str(error).split())[:160]
        local = "it holds nothing that can be read"
        where = local if Path(dataset).exists() else "it is no local path, and the hub has none"
        raise UserError(
            f"--dataset {dataset}: {where} ({type(error).__name__}: {reason}); {NO_NETWORK}"
        ) from error


def _do_not_wait_for_the_hub() -> None:
    """If the hub's name does not even resolve, its client would still retry for half a minute: this
    makes it use earlier downloads, or fail at once."""
    import datasets
    from huggingface_hub import constants

    if getproxies():  # a proxy resolves names that this machine need not know
        return
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def _pairs(dataset: str, found: Mapping[str, Any], src: str, tgt: str, sizes: Sizes) -> Texts:
    """The splits in `found`; a missing one is cut off the end of train."""
    texts = Texts({})
    pairs = {
        split: [
            _as_pair(row, src, tgt, f"--dataset {dataset}: row {i} of {split}")
            for i, row in enumerate(found.get(split, []), 1)
        ]
        for split in SPLITS
    }
    for split in ("test", "validation"):  # test is cut off first: it has the last pairs
        if split not in found:
            tenth = -(-(len(pairs["train"]) - 1) // 10)  # rounded up, but a pair stays
            count = min(sizes[split] or 1000, tenth)
            at = len(pairs["train"]) - count
            pairs[split], pairs["train"] = pairs["train"][at:], pairs["train"][:at]
            texts.notes.append(f"no {split} split: the last {count} pairs are taken out of train.")
    for split in SPLITS:
        _add(texts, split, pairs[split], sizes[split])
    return texts


def _as_pair(row: Any, src: str, tgt: str, where: str) -> Pair:
    """The two texts of a row; a missing one is empty. Raises UserError, which says `where` the row
    is, if they are not text."""
    values = row.get("translation") or row
    if not isinstance(values, Mapping) or not values.keys() & {src, tgt}:
        shown = sorted(map(str, values)) if isinstance(values, Mapping) else repr(values)[:40]
        raise UserError(
            f"{where} has {shown}, and not the texts {src!r} and {tgt!r}; "
            "name the languages with --src and --tgt; plain text is in a column `text`"
        )
    pair = {key: values.get(key) or "" for key in (src, tgt)}
    for key, value in pair.items():
        if not isinstance(value, str):
            raise UserError(f"{where}: {key} is {value!r:.40}, and not text in quotes")
    return pair


def _add(texts: Texts, split: str, pairs: Iterable[Pair], limit: int | None) -> None:
    """Puts the first `limit` usable pairs into a split."""
    usable: list[Pair] = []
    empty = 0
    for pair in pairs:
        if limit is not None and len(usable) >= limit:
            break
        stripped = {key: text.strip() for key, text in pair.items()}
        if all(stripped.values()):
            usable.append(stripped)
        else:
            empty += 1
    if empty:
        texts.notes.append(f"{split}: skipped {empty} pairs with an empty side.")
    if limit is not None and len(usable) < limit:
        texts.notes.append(f"{split}: {len(usable)} pairs; --n_{split} {limit} allows more.")
    texts.splits[split] = usable


def _documents(dataset: str, found: Mapping[str, Any]) -> Texts:
    """The documents that are not blank; if there is no validation split, one is held out."""
    texts = Texts({}, plain=True)
    for split in ("train", "validation"):
        texts.splits[split] = documents = []
        empty = 0
        for i, row in enumerate(found.get(split, []), 1):
            text = row.get("text") or ""
            if not isinstance(text, str):
                raise UserError(
                    f"--dataset {dataset}: row {i} of {split}: text is {text!r:.40}, and not text "
                    "in quotes"
                )
            documents += [t for t in text.split(END) if t.strip()]
            empty += not text.strip()
        if empty:
            texts.notes.append(f"{split}: skipped {empty} row{'s' * (empty > 1)} without text.")
    train = texts.splits["train"]
    if not train:
        raise UserError(f"--dataset {dataset}: there is no text to train on; {NO_NETWORK}")
    if not texts.splits["validation"]:
        texts.splits["train"], texts.splits["validation"] = held_out(train)
        if not all(texts.splits.values()):
            raise UserError(
                f"--dataset {dataset}: it is one word, and two parts are needed; more text works"
            )
        texts.notes.append(
            f"no validation split: {100 // HELD_OUT} % of the text are taken from its end."
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
