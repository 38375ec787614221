"""Sentence pairs: from the built-in text, from files, or from a hub.

Problem: whatever a person names with --dataset must come out as three lists of pairs, or as one
line that says what is wrong with it, before any process is started.

    builtin          the German-English text in training/corpus, a folder like the next
    a folder         with train.de train.en validation.de ... test.en: line i translates line i
    a folder, file   JSONL, JSON, CSV or Parquet, with a column per language or a `translation`
    anything else    the name of a dataset on the hub, with `translation` dictionaries

Pairs with an empty side are skipped and counted. A word longer than any that people write is cut:
the time that BPE takes to learn from it grows with its square, to minutes for a megabyte.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit
from urllib.request import getproxies

from training.launch import UserError

Pair = dict[str, str]  # {"de": ..., "en": ...}

SPLITS = ("train", "validation", "test")
BUILTIN = "builtin"
BUILTIN_FOLDER = Path(__file__).with_name("corpus")
_BEGINNINGS = {"train": ("train",), "validation": ("val", "dev"), "test": ("test",)}
NO_NETWORK = f"--dataset {BUILTIN} needs neither files nor network"
LONGEST_WORD = 1000  # characters
# What BPE takes for one word or less: letters and digits, other signs, or white space.
_WORDS = re.compile(r"[^\W_]+|(?:[^\w\s]|_)+|\s+")
_FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}


@dataclass
class Texts:
    """The pairs of each split, and what a reader should know about how they came about."""

    splits: dict[str, list[Pair]]
    notes: list[str] = field(default_factory=list)
    long_words: list[str] = field(default_factory=list)  # where one was cut, and how long it was

    def fingerprint(self, split: str = "train") -> str:
        """What two splits have in common only if their pairs are the same, in order."""
        return hashlib.sha256(json.dumps(self.splits[split]).encode()).hexdigest()

    def fingerprints(self) -> dict[str, str]:
        """Of every split."""
        return {split: self.fingerprint(split) for split in self.splits}


def load_texts(
    dataset: str, src: str, tgt: str, sizes: dict[str, int | None], world_size: int
) -> Texts:
    """The sentence pairs of a run.

    Args:
        dataset: see the table above.
        src, tgt: the keys of the languages: file endings, columns.
        sizes: at most so many pairs of each split; None takes all there are.
        world_size: every split must hold at least a pair for each rank.

    Raises:
        UserError: nothing usable is there; the text says what, and what works.
    """
    if src == tgt:
        raise UserError(f"--src {src} --tgt {tgt}: two languages are needed, as --src de --tgt en")
    path = Path(dataset)
    with refused_if_unreadable(dataset):
        if dataset == BUILTIN:
            texts = _builtin(src, tgt, sizes)
        elif path.is_dir() and any(path.glob(f"train.{src}")) | any(path.glob(f"train.{tgt}")):
            texts = _parallel_lines(path, src, tgt, sizes)
        elif path.exists():
            texts = _local_files(path, src, tgt, sizes)
        elif path.suffix in _FORMATS or path.is_absolute() or dataset.startswith((".", "~")):
            raise UserError(f"--dataset {dataset}: there is no such file or folder; {NO_NETWORK}")
        else:
            texts = _hub(dataset, src, tgt, sizes)
    if texts.long_words:
        more = f", and {n} more" if (n := len(texts.long_words) - 1) else ""
        texts.notes.append(f"{texts.long_words[0]}{more}: cut to {LONGEST_WORD:,} characters.")
    for split in SPLITS:
        have = len(texts.splits[split])
        if have == 0:
            raise UserError(
                f"--dataset {dataset}: {split} has no pair with text on both sides; "
                f"at least one is needed, or --dataset {BUILTIN}"
            )
        if have < world_size:
            raise UserError(
                f"--dataset {dataset}: {split} has {have} pairs for {world_size} ranks, and each "
                f"rank needs one; --world_size {have} or less, or more pairs, works"
            )
    return texts


def _builtin(src: str, tgt: str, sizes: dict[str, int | None]) -> Texts:
    if {src, tgt} != {"de", "en"}:
        raise UserError(
            f"--src {src} --tgt {tgt}: the built-in text is de and en; "
            "name a --dataset with these languages"
        )
    texts = _parallel_lines(BUILTIN_FOLDER, src, tgt, sizes)
    for split, asked in sizes.items():
        have = len(texts.splits[split])
        if asked is not None and asked > have:
            raise UserError(
                f"--n_{split} {asked}: the built-in text has {have} pairs; "
                f"--n_{split} {have} or less works"
            )
    return texts


@contextmanager
def refused_if_unreadable(dataset: str) -> Iterator[None]:
    """Turns a file or folder of --dataset that the system does not let this process read into a
    UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--dataset {dataset}: {error.filename or dataset} cannot be read "
            f"({error.strerror or error}); {NO_NETWORK}"
        ) from error


def _read_text(path: Path) -> str:
    """The text in a file of UTF-8. Raises UserError where it is something else."""
    content = path.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path}: it is UTF-16, and not UTF-8; {_convert('utf-16', path)}")
    # Without such a mark letters of UTF-16 are UTF-8 as well, with a zero byte beside each.
    if (zero := content.find(b"\0")) >= 0:
        encoding = "utf-16le" if zero % 2 else "utf-16be"
        raise UserError(
            f"{path}: line {_line(content, zero)} has a zero byte: it is UTF-16, and not UTF-8, or "
            f"no text; {_convert(encoding, path)}"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        content, at = error.object, error.start  # without the mark, if there was one
        raise UserError(
            f"{path}: line {_line(content, at)} is not UTF-8 (byte 0x{content[at]:02x}); "
            f"{_convert('latin1', path)}"
        ) from error


def _line(content: bytes, at: int) -> int:
    """The number of the line in which a byte is."""
    return content.count(b"\n", 0, at) + 1


def _convert(encoding: str, path: Path) -> str:
    return f"convert it, for example: iconv -f {encoding} -t utf-8 {path.name}"


def _read_lines(path: Path, texts: Texts) -> list[str]:
    try:
        text = _read_text(path)
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: the file is missing; a folder needs {path.suffix[1:]} lines for "
            f"{', '.join(SPLITS)}; {NO_NETWORK}"
        ) from error
    lines = text.replace("\r\n", "\n").split("\n")
    if not lines[-1]:
        lines.pop()
    return [_clean(line, f"{path}: line {i}", texts) for i, line in enumerate(lines, 1)]


def _clean(text: str, where: str, texts: Texts) -> str:
    """The text without white space around it, and no word longer than LONGEST_WORD."""
    text = text.strip()
    if len(text) <= LONGEST_WORD:
        return text
    longest = max(map(len, _WORDS.findall(text)))
    if longest <= LONGEST_WORD:
        return text
    texts.long_words.append(f"{where}: a word of {longest:,} characters")
    return _WORDS.sub(lambda word: word[0][:LONGEST_WORD], text)


def _parallel_lines(folder: Path, src: str, tgt: str, sizes: dict[str, int | None]) -> Texts:
    texts = Texts({})
    for split in SPLITS:
        paths = [folder / f"{split}.{key}" for key in (src, tgt)]
        source, target = (_read_lines(path, texts) for path in paths)
        if len(source) != len(target):
            raise UserError(
                f"{paths[0]} has {len(source)} lines and {paths[1]} has {len(target)}: "
                "line i of one must translate line i of the other"
            )
        pairs = [{src: s, tgt: t} for s, t in zip(source, target, strict=True)]
        _add(texts, split, pairs, src, tgt, sizes[split])
    return texts


def _add(
    texts: Texts, split: str, pairs: Iterable[Pair], src: str, tgt: str, limit: int | None
) -> None:
    """Puts the first `limit` usable pairs into a split."""
    usable: list[Pair] = []
    empty = 0
    for pair in pairs:
        if limit is not None and len(usable) >= limit:
            break
        if pair[src] and pair[tgt]:
            usable.append(pair)
        else:
            empty += 1
    if empty:
        texts.notes.append(f"{split}: skipped {empty} pairs with an empty side.")
    if limit is not None and len(usable) < limit:
        texts.notes.append(f"{split}: {len(usable)} pairs, all there are ({limit} were asked for).")
    texts.splits[split] = usable


def _as_pair(row: Any, src: str, tgt: str, where: str, texts: Texts) -> Pair:
    """The texts of a row, a missing one being empty. Raises UserError, which says `where` the row
    is, unless there are two texts."""
    values = row
    if isinstance(row, Mapping) and row.get("translation") is not None:
        values = row["translation"]
    if not isinstance(values, Mapping):
        example = json.dumps({src: "...", tgt: "..."})
        raise UserError(f"{where} has {_brief(values)} in place of two texts, as {example}")
    if not {src, tgt} <= values.keys():
        raise UserError(
            f"{where} has {sorted(map(str, values))}, and not the texts {src!r} and {tgt!r}; "
            "name the languages with --src and --tgt"
        )
    pair = {}
    for key in (src, tgt):
        value = "" if values[key] is None else values[key]
        if not isinstance(value, str):
            raise UserError(
                f"{where}: {key} is {_brief(value)}, and not text; text has quotes around it, as "
                f'"{key}": "..."'
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = value[error.start : error.end]
            raise UserError(f"{where}: {key} has {half!a}, which is half a character") from None
        pair[key] = _clean(value, where, texts)
    return pair


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _local_files(path: Path, src: str, tgt: str, sizes: dict[str, int | None]) -> Texts:
    """JSONL, CSV and Parquet. Files named after a split are that split; a single file, or one
    that names none, is cut: its last pairs become validation and test."""
    files = [path] if path.is_file() else _files_in(path)
    files = [p for p in files if p.suffix in _FORMATS]
    if not files:
        raise UserError(
            f"--dataset {path}: no train.{src} and train.{tgt} there, nor any of "
            f"{' '.join(_FORMATS)}; {NO_NETWORK}"
        )
    named: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for file in files:
        named[_split_of(file.relative_to(path)) or "train"].append(file)
    texts = Texts({})
    read = {
        split: [
            _as_pair(row, src, tgt, where, texts)
            for path in paths
            for where, row in _rows_of(path, src, tgt)
        ]
        for split, paths in named.items()
        if paths
    }
    return _split(texts, read, src, tgt, sizes)


def _files_in(folder: Path) -> list[Path]:
    """All files in it, and in folders in it. Raises OSError where one cannot be looked into."""

    def refuse(error: OSError) -> NoReturn:
        raise error

    paths = (Path(at, n) for at, _, names in os.walk(folder, onerror=refuse) for n in names)
    return sorted(path for path in paths if path.is_file())


def _split_of(path: Path) -> str | None:
    """The split that a file's or folder's name begins with; None for no such name."""
    for part in reversed(path.parts):
        for split, beginnings in _BEGINNINGS.items():
            if part.startswith(beginnings):
                return split
    return None


def _rows_of(path: Path, src: str, tgt: str) -> Iterator[tuple[str, Any]]:
    """The rows of a file, each with the place where it is."""
    if not path.stat().st_size:
        raise UserError(f"{path}: the file is empty; {NO_NETWORK}")
    if _FORMATS[path.suffix] == "json":
        found = [*_json_rows(path)]
        columns = {key: None for _, row in found if isinstance(row, dict) for key in row}
        for where, row in found:  # a row may lack what others have: that is an empty text
            yield where, {**columns, **row} if isinstance(row, dict) else row
        return
    from datasets import load_dataset  # takes seconds to import: only where it is needed

    options: dict[str, Any] = {}
    if _FORMATS[path.suffix] == "csv":  # a sentence may well be `None`, `NA` or `1984`
        _read_text(path)
        options = {
            "delimiter": "\t" if path.suffix == ".tsv" else ",",
            "keep_default_na": False,
            "converters": {src: str, tgt: str},
        }
    try:
        # Streaming reads the file where it lies, and leaves no copy in a cache.
        rows = [
            *load_dataset(
                _FORMATS[path.suffix],
                data_files=str(path),
                split="train",
                streaming=True,
                **options,
            )
        ]
    except Exception as error:  # its readers raise many kinds
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise UserError(f"{path}: cannot be read ({reason}); {NO_NETWORK}") from error
    for i, row in enumerate(rows, 1):
        yield f"{path}: row {i}", row


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file with one on each line, or with one list of them. (Not by way of
    `datasets`: pyarrow, which it reads with, crashes where a row is `null`.)"""
    text = _read_text(path)
    with suppress(ValueError, RecursionError):
        if text.lstrip().startswith("[") and isinstance(rows := json.loads(text), list):
            yield from ((f"{path}: row {i}", row) for i, row in enumerate(rows, 1))
            return
    for i, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", error)
                raise UserError(
                    f"{path}: line {i} is not JSON ({reason}); each line must be a row, or the "
                    "whole file a list of them"
                ) from error
            yield f"{path}: line {i}", row


def _split(
    texts: Texts, read: dict[str, list[Pair]], src: str, tgt: str, sizes: dict[str, int | None]
) -> Texts:
    """The splits of `read`; what is missing is cut off the end of train."""
    pairs = {**read, "train": read.get("train", [])}
    for split in ("test", "validation"):
        if split not in pairs:
            count = min(sizes[split] or 1000, len(pairs["train"]) // 10)
            cut = len(pairs["train"]) - count
            pairs[split], pairs["train"] = pairs["train"][cut:], pairs["train"][:cut]
            texts.notes.append(f"{split}: no such split; it is the last {count} pairs of train.")
    for split in SPLITS:
        _add(texts, split, pairs[split], src, tgt, sizes[split])
    return texts


def _hub(name: str, src: str, tgt: str, sizes: dict[str, int | None]) -> Texts:
    found = load_splits(name)
    texts = Texts({})
    read = {
        split: [
            _as_pair(row, src, tgt, f"--dataset {name}: row {i} of {split}", texts)
            for i, row in enumerate(found[split], 1)
        ]
        for split in SPLITS
        if split in found
    }
    return _split(texts, read, src, tgt, sizes)


def load_splits(name: str) -> Any:
    """The splits of a dataset of the hub, or of a folder. Raises UserError where there is none."""
    import datasets

    _do_not_wait_for_the_hub()
    try:
        try:
            return datasets.load_dataset(name)
        except RuntimeError as error:
            # Datasets 4 runs no code that comes with a dataset; the hub keeps a converted copy.
            if "script" not in str(error):
                raise
            return datasets.load_dataset(name, revision="refs/convert/parquet")
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        local = "it holds nothing that can be read"
        where = local if Path(name).exists() else "it is no local path, and the hub has none"
        raise UserError(
            f"--dataset {name}: {where} ({type(error).__name__}: {reason}); {NO_NETWORK}"
        ) from error


def _do_not_wait_for_the_hub() -> None:
    """Where the hub's name does not even resolve, its client would still try for half a minute:
    tells it to use what it has downloaded before, and else to fail at once."""
    import datasets
    from huggingface_hub import constants

    if getproxies():  # a proxy resolves names that this machine need not know
        return
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
