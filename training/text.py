"""Sentence pairs: from the built-in text, from files, or from a hub.

Problem: whatever a person names with --dataset must come out as three lists of pairs, or as one
line that says what is wrong with it, before any process is started.

    builtin          the German-English text in training/corpus, a folder like the next
    a folder         with train.de train.en validation.de ... test.en: line i translates line i
    a folder, file   JSONL, JSON, CSV or Parquet, with a column per language or a `translation`
    anything else    the name of a dataset on the hub, with `translation` dictionaries

Pairs with an empty side are skipped and counted. Words of more than 1,000 characters are cut: the
time that BPE takes to learn from a word grows with its square, to minutes for a megabyte.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from training.errors import UserError, works

Pair = dict[str, str]  # {"de": ..., "en": ...}
Example = TypeVar("Example")

SPLITS = ("train", "validation", "test")
BUILTIN = "builtin"
BUILTIN_FOLDER = Path(__file__).with_name("corpus")
NO_NETWORK = f"--dataset {BUILTIN} needs neither files nor network"
BEGINNINGS = {"train": "train", "val": "validation", "dev": "validation", "test": "test"}
ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_LONG_WORD = re.compile(r"(\S{1000})\S+|(\s{1000})\s+")


@dataclass
class Splits(Generic[Example]):
    """The examples of each split, and what a reader should know about how they came about."""

    splits: dict[str, list[Example]]
    notes: list[str] = field(default_factory=list)

    def fingerprint(self, split: str = "train") -> str:
        """What two splits have in common only if their examples are the same, in order."""
        return fingerprint_of(self.splits[split])

    def fingerprints(self) -> dict[str, str]:
        """Of every split."""
        return {split: self.fingerprint(split) for split in self.splits}


class Texts(Splits[Pair]):
    """Pairs of sentences."""


def fingerprint_of(content: list[Any]) -> str:
    """A hash of what JSON can hold."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def load_texts(
    dataset: str,
    src: str,
    tgt: str,
    sizes: dict[str, int | None],
    world_size: int,
    found: Any = None,
) -> Texts:
    """The sentence pairs of a run.

    Args:
        dataset: see the table above.
        src, tgt: the keys of the languages: file endings, columns.
        sizes: at most so many pairs of each split; None takes all there are.
        world_size: every split must hold at least a pair for each rank.
        found: the splits of a dataset of the hub, where they are loaded already.

    Raises:
        UserError: nothing usable is there; the text says what, and what works.
    """
    if src == tgt:
        raise UserError(f"--src {src} --tgt {tgt}: two languages are needed, as --src de --tgt en")
    path = Path(dataset)
    with refused_if_unreadable(dataset):
        if dataset == BUILTIN:
            if {src, tgt} != {"de", "en"}:
                raise UserError(
                    f"--src {src} --tgt {tgt}: the built-in text is de and en; "
                    "name a --dataset with these languages"
                )
            texts = _parallel_lines(BUILTIN_FOLDER, src, tgt, sizes)
        elif path.is_dir() and any(path.glob(f"train.{src}")) | any(path.glob(f"train.{tgt}")):
            texts = _parallel_lines(path, src, tgt, sizes)
        elif path.exists():
            texts = _split(_local_files(path, src, tgt), sizes)
        elif path.suffix in ENDINGS or path.is_absolute() or dataset.startswith((".", "~")):
            raise UserError(f"--dataset {dataset}: there is no such file or folder; {NO_NETWORK}")
        else:
            texts = _split(_hub(dataset, found or load_splits(dataset), src, tgt), sizes)
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
                f"rank needs one; {works('--world_size', have)}, or more pairs"
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


def _parallel_lines(folder: Path, src: str, tgt: str, sizes: dict[str, int | None]) -> Texts:
    texts = Texts({})
    for split in SPLITS:
        paths = [folder / f"{split}.{key}" for key in (src, tgt)]
        source, target = (read_text(path).removesuffix("\n").split("\n") for path in paths)
        if len(source) != len(target):
            raise UserError(
                f"{paths[0]} has {len(source)} lines and {paths[1]} has {len(target)}: "
                "line i of one must translate line i of the other"
            )
        pairs = ({src: s, tgt: t} for s, t in zip(source, target, strict=True))
        _add(texts, split, pairs, sizes[split])
    return texts


def read_text(path: Path) -> str:
    """The text in a file of UTF-8. Raises UserError where it is something else."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path}: the file is missing; {NO_NETWORK}") from error
    try:
        text, bad = content.decode("utf-8-sig"), content.find(b"\0")
    except UnicodeDecodeError as error:
        text, content, bad = "", error.object, error.start
    if bad >= 0:  # letters of UTF-16 are UTF-8 as well, with a zero byte beside each
        line, encoding = content[:bad].count(b"\n") + 1, "latin1"
        if content[bad] in (0, 0xFE, 0xFF):
            encoding = "utf-16"
        raise UserError(
            f"{path}: line {line} is not UTF-8 (byte 0x{content[bad]:02x}); "
            f"convert it, for example: iconv -f {encoding} -t utf-8 {path.name}"
        )
    return text.replace("\r\n", "\n")


def _add(texts: Texts, split: str, pairs: Iterable[Pair], limit: int | None) -> None:
    """Puts the first `limit` usable pairs into a split."""
    usable: list[Pair] = []
    empty = cut = 0
    for pair in pairs:
        if limit is not None and len(usable) >= limit:
            break
        stripped = {key: text.strip() for key, text in pair.items()}
        short = {key: _LONG_WORD.sub(r"\1\2", text) for key, text in stripped.items()}
        cut += short != stripped
        if all(short.values()):
            usable.append(short)
        else:
            empty += 1
    if empty:
        texts.notes.append(f"{split}: skipped {empty} pairs with an empty side.")
    if cut:
        texts.notes.append(f"{split}: cut words of more than 1,000 characters in {cut} pairs.")
    if limit is not None and len(usable) < limit:
        texts.notes.append(f"{split}: {len(usable)} pairs, all there are ({limit} were asked for).")
    texts.splits[split] = usable


def _split(found: dict[str, list[Pair]], sizes: dict[str, int | None]) -> Texts:
    """The splits of what was `found`; what is missing is cut off the end of train."""
    texts, pairs = Texts({}), {"train": [], **found}
    for split in ("test", "validation"):
        if split not in pairs:
            count = min(sizes[split] or 1000, len(pairs["train"]) // 10)
            at = len(pairs["train"]) - count
            pairs[split], pairs["train"] = pairs["train"][at:], pairs["train"][:at]
            texts.notes.append(f"{split}: no such split; it is the last {count} pairs of train.")
    for split in SPLITS:
        _add(texts, split, pairs[split], sizes[split])
    return texts


def _as_pair(row: Any, src: str, tgt: str, where: str) -> Pair:
    """The texts of a row, a missing one being empty. Raises UserError, which says `where` the row
    is, unless they are texts."""
    values = row.get("translation") or row if isinstance(row, Mapping) else row
    if not isinstance(values, Mapping) or not values.keys() & {src, tgt}:
        shown = sorted(map(str, values)) if isinstance(values, Mapping) else repr(values)[:40]
        raise UserError(
            f"{where} has {shown}, and not the texts {src!r} and {tgt!r}; "
            "name the languages with --src and --tgt"
        )
    pair = {key: values.get(key) or "" for key in (src, tgt)}
    for key, value in pair.items():
        if not isinstance(value, str):
            raise UserError(f"{where}: {key} is {value!r:.40}, and not text in quotes")
    return pair


def _local_files(path: Path, src: str, tgt: str) -> dict[str, list[Pair]]:
    """Files named after a split are that split; others are train."""
    every = [path] if path.is_file() else [*path.iterdir(), *path.glob("*/*")]
    files = [file for file in sorted(every) if file.suffix in ENDINGS and file.is_file()]
    if not files:
        raise UserError(
            f"--dataset {path}: no train.{src} and train.{tgt} there, nor any of .txt "
            f"{' '.join(ENDINGS)}; {NO_NETWORK}"
        )
    found: dict[str, list[Pair]] = {}
    for file in files:
        split = "train"
        for part in file.relative_to(path).parts:
            split = next((s for b, s in BEGINNINGS.items() if part.startswith(b)), split)
        rows = (_as_pair(row, src, tgt, f"{file}: {where}") for where, row in _rows_of(file))
        found.setdefault(split, []).extend(rows)
    return found


def _rows_of(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file, each with its place. (Texts are not read by way of `datasets`: pyarrow
    crashes where a row of JSON is `null`, pandas takes the sentences `None` and `1984` for others.)
    """
    if path.suffix == ".parquet":
        from datasets import load_dataset  # takes seconds to import: only where it is needed

        try:  # streaming leaves no copy in a cache
            rows = [*load_dataset("parquet", data_files=str(path), split="train", streaming=True)]
        except Exception as error:  # its readers raise many kinds
            reason = " ".join(str(error.__cause__ or error).split())[:200]
            raise UserError(f"{path}: cannot be read ({reason}); {NO_NETWORK}") from error
        yield from ((f"row {i}", row) for i, row in enumerate(rows, 1))
        return
    text = read_text(path)
    if path.suffix in (".csv", ".tsv"):
        csv.field_size_limit(len(text) + 1)
        table = csv.DictReader(io.StringIO(text), delimiter="\t" if path.suffix == ".tsv" else ",")
        yield from ((f"row {i}", row) for i, row in enumerate(table, 1))
    elif path.suffix == ".json" and text.lstrip().startswith("["):
        yield from ((f"row {i}", row) for i, row in enumerate(_parse_json(text, f"{path}"), 1))
    else:
        for i, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"line {i}", _parse_json(line, f"{path}: line {i}")


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", error)
        raise UserError(
            f"{where} is not JSON ({reason}); each line must be a row, or the whole file a list "
            "of them"
        ) from error


def _hub(name: str, found: Any, src: str, tgt: str) -> dict[str, list[Pair]]:
    return {
        split: [
            _as_pair(row, src, tgt, f"--dataset {name}: row {i} of {split}")
            for i, row in enumerate(found[split], 1)
        ]
        for split in SPLITS
        if split in found
    }


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
