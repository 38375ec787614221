"""Sentence pairs: from the built-in corpus, from files, or from a hub.

Problem: whatever a person names with --dataset must come out as three lists of pairs, or as one
line that says what is wrong with it, before any process is started.

    builtin          the German-English corpus that a grammar writes (training/corpus.py)
    a folder         with train.de train.en validation.de ... test.en: line i translates line i
    a folder, file   JSONL, JSON, CSV or Parquet, with a column per language or a `translation`
    anything else    the name of a dataset on the hub, with `translation` dictionaries

Pairs with an empty side are skipped and counted.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from training.corpus import Pair, builtin_corpus
from training.launch import UserError

SPLITS = ("train", "validation", "test")
BUILTIN = "builtin"
_BEGINNINGS = {"train": ("train",), "validation": ("val", "dev"), "test": ("test",)}
NO_NETWORK = f"--dataset {BUILTIN} needs neither files nor network"
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

    def fingerprint(self) -> str:
        """What two sets of training pairs have in common only if they are the same, in order."""
        return hashlib.sha256(json.dumps(self.splits["train"]).encode()).hexdigest()


def load_texts(
    dataset: str, src: str, tgt: str, sizes: dict[str, int | None], seed: int, world_size: int
) -> Texts:
    """The sentence pairs of a run.

    Args:
        dataset: see the table above.
        src, tgt: the keys of the languages: file endings, columns.
        sizes: at most so many pairs of each split; None takes all there are.
        seed: of the built-in corpus.
        world_size: every split must hold at least a pair for each rank.

    Raises:
        UserError: nothing usable is there; the text says what, and what works.
    """
    if src == tgt:
        raise UserError(f"--src {src} --tgt {tgt}: two languages are needed, as --src de --tgt en")
    path = Path(dataset)
    if dataset == BUILTIN:
        texts = _builtin(src, tgt, sizes, seed)
    elif path.is_dir() and any(path.glob(f"train.{src}")) | any(path.glob(f"train.{tgt}")):
        texts = _parallel_lines(path, src, tgt, sizes)
    elif path.exists():
        texts = _local_files(path, src, tgt, sizes)
    elif path.suffix in _FORMATS or path.is_absolute() or dataset.startswith((".", "~")):
        raise UserError(f"--dataset {dataset}: there is no such file or folder; {NO_NETWORK}")
    else:
        texts = _hub(dataset, src, tgt, sizes)
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


def _builtin(src: str, tgt: str, sizes: dict[str, int | None], seed: int) -> Texts:
    if {src, tgt} != {"de", "en"}:
        raise UserError(
            f"--src {src} --tgt {tgt}: the built-in corpus has de and en; "
            "name a --dataset with these languages"
        )
    default = {"train": 5000, "validation": 1000, "test": 100}
    n = {split: default[split] if sizes[split] is None else sizes[split] for split in SPLITS}
    try:
        return Texts(builtin_corpus(n["train"], n["validation"], n["test"], seed))  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(f"--dataset {BUILTIN}: {error}") from error


def _read_lines(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: the file is missing; a folder needs {path.suffix[1:]} lines for "
            f"{', '.join(SPLITS)}; {NO_NETWORK}"
        ) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(
            f"{path}: line {line} is not UTF-8 (byte 0x{error.object[error.start]:02x}); "
            f"convert it, for example: iconv -f latin1 -t utf-8 {path.name}"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {NO_NETWORK}") from error
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines and not lines[-1] else lines


def _parallel_lines(folder: Path, src: str, tgt: str, sizes: dict[str, int | None]) -> Texts:
    texts = Texts({})
    for split in SPLITS:
        paths = [folder / f"{split}.{key}" for key in (src, tgt)]
        source, target = (_read_lines(path) for path in paths)
        if len(source) != len(target):
            raise UserError(
                f"{paths[0]} has {len(source)} lines and {paths[1]} has {len(target)}: "
                "line i of one must translate line i of the other"
            )
        rows = ({src: s, tgt: t} for s, t in zip(source, target, strict=True))
        _add(texts, split, rows, src, tgt, sizes[split])
    return texts


def _add(
    texts: Texts, split: str, rows: Iterable[Any], src: str, tgt: str, limit: int | None
) -> None:
    """Puts the first `limit` usable pairs of `rows` into a split."""
    pairs: list[Pair] = []
    empty = 0
    for row in rows:
        if limit is not None and len(pairs) >= limit:
            break
        pair = _as_pair(row, src, tgt)
        if pair[src] and pair[tgt]:
            pairs.append(pair)
        else:
            empty += 1
    if empty:
        texts.notes.append(f"{split}: skipped {empty} pairs with an empty side.")
    if limit is not None and len(pairs) < limit:
        texts.notes.append(f"{split}: {len(pairs)} pairs, all there are ({limit} were asked for).")
    texts.splits[split] = pairs


def _as_pair(row: Any, src: str, tgt: str) -> Pair:
    values = row.get("translation") or row
    try:
        return {key: (values[key] or "").strip() for key in (src, tgt)}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"a row has {sorted(values)}, and not the texts {src!r} and {tgt!r}; "
            "name the languages with --src and --tgt"
        ) from error


def _local_files(path: Path, src: str, tgt: str, sizes: dict[str, int | None]) -> Texts:
    """JSONL, CSV and Parquet. Files named after a split are that split; a single file, or one
    that names none, is cut: its last pairs become validation and test."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    files = [p for p in files if p.suffix in _FORMATS]
    if not files:
        raise UserError(
            f"--dataset {path}: no train.{src} and train.{tgt} there, nor any of "
            f"{' '.join(_FORMATS)}; {NO_NETWORK}"
        )
    named: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for file in files:
        named[_split_of(file.relative_to(path)) or "train"].append(file)
    read = {split: _read_files(paths) for split, paths in named.items() if paths}
    return _from_rows(read, src, tgt, sizes)


def _split_of(path: Path) -> str | None:
    """The split that a file's or folder's name begins with; None for no such name."""
    for part in reversed(path.parts):
        for split, beginnings in _BEGINNINGS.items():
            if part.startswith(beginnings):
                return split
    return None


def _read_files(paths: Sequence[Path]) -> list[Any]:
    from datasets import load_dataset  # takes seconds to import: only where it is needed

    rows: list[Any] = []
    for path in paths:
        options: dict[str, Any] = {}
        if _FORMATS[path.suffix] == "csv":  # a sentence may well be `None` or `NA`
            options = {
                "delimiter": "\t" if path.suffix == ".tsv" else ",",
                "keep_default_na": False,
            }
        try:
            # Streaming reads the file where it lies, and leaves no copy in a cache.
            rows += load_dataset(
                _FORMATS[path.suffix],
                data_files=str(path),
                split="train",
                streaming=True,
                **options,
            )
        except Exception as error:  # its readers raise many kinds
            reason = " ".join(str(error.__cause__ or error).split())[:200]
            raise UserError(f"{path}: cannot be read ({reason}); {NO_NETWORK}") from error
    return rows


def _from_rows(read: dict[str, Any], src: str, tgt: str, sizes: dict[str, int | None]) -> Texts:
    """The splits of `read`; what is missing is cut off the end of train."""
    texts = Texts({})
    rows = {**read, "train": list(read.get("train", []))}
    for split in ("test", "validation"):
        if split not in rows:
            count = min(sizes[split] or 1000, len(rows["train"]) // 10)
            cut = len(rows["train"]) - count
            rows[split], rows["train"] = rows["train"][cut:], rows["train"][:cut]
            texts.notes.append(f"{split}: no such split; it is the last {count} pairs of train.")
    for split in SPLITS:
        _add(texts, split, rows[split], src, tgt, sizes[split])
    return texts


def _hub(name: str, src: str, tgt: str, sizes: dict[str, int | None]) -> Texts:
    found = load_from_hub(name)
    known = {split: found[split] for split in SPLITS if split in found}
    return _from_rows(known, src, tgt, sizes)


def load_from_hub(name: str) -> Any:
    """The splits of a dataset of the hub, or of those that were downloaded before. Raises UserError
    where there is none."""
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
        raise UserError(
            f"--dataset {name}: it is no local path, and the hub did not give it "
            f"({type(error).__name__}: {reason}); {NO_NETWORK}"
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
