"""Reads the pairs of sentences that --dataset names.

Problem: --dataset must become pairs, or one line that says what is wrong with it; and the text may
be larger than memory.

    builtin          the German-English text in training/tasks/corpus, a folder like the next
    a folder         with train.de train.en validation.de ... test.en: line i translates line i
    a folder, file   JSONL, JSON, CSV, TSV or Parquet, with a column per language or a
                     `translation` of both
    anything else    the name of a dataset on the hub, with such columns

A file is of the split that it, or its folder, is named after: train, validation (also valid, val,
dev) or test, before a dot or a dash. All others are train. A missing split is cut off the end of
train. Rows with an empty text are skipped and counted.

Idea: a split is no list. Its text is read anew each time that it is used, some lines at a time. The
first start reads it twice, for what each start must know (`remembered`: how many pairs, a hash, the
test pairs), and keeps that in a folder that is named by the files' paths, sizes and times. A later
start only looks whether that folder is there. Plain text: plain_text.py.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from training.files import json_text, writing
from training.launch.errors import RunError, UserError, counted
from training.launch.world import World

Pair = dict[str, str]  # {"de": ..., "en": ...}
Sizes = Mapping[str, int | None]
PathGroup = tuple[Path, ...]  # a file, or one for each language

SPLITS = ("train", "validation", "test")
BUILTIN = "builtin"
BUILTIN_FOLDER = Path(__file__).with_name("corpus")
NO_NETWORK = f"; --dataset {BUILTIN} needs neither files nor network"
SPLIT_OF = {"valid": "validation", "val": "validation", "dev": "validation"}
SPLIT_NAME = re.compile(r"(train|validation|valid|val|dev|test)(?![^.-])", re.IGNORECASE)
NO_DATA = re.compile(  # names of files about the data, and of hidden ones
    r"\.|(readme|licen[cs]e|copying|notice|authors|credits|citation|changelog|changes)(?![^._-])",
    re.IGNORECASE,
)
TAKEN = {"validation": 1000, "test": 100}  # pairs at most, out of train if there is no such split
MOST_NAMES = 3  # names of files in a line
TEXT = ".txt"  # the ending of plain text


@dataclass(frozen=True)
class Again:
    """`size` items, which begin() gives anew to each who iterates."""

    begin: Callable[[], Iterable[Any]]
    size: int = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.begin())

    def __len__(self) -> int:
        return self.size


@dataclass
class Texts:
    """The examples of each split, and notes on how they were made. A split is iterated over again
    and again, and has a length; that of test is a list.

    Attributes:
        plain: it is text to continue, not pairs; there is no test split.
        hashes: of each split's examples, in order.
    """

    splits: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)
    plain: bool = False
    hashes: dict[str, str] = field(default_factory=dict, repr=False)

    def fingerprints(self) -> dict[str, str]:
        """A hash of each split's examples, in order."""
        self.hashes = self.hashes or {split: hash_of(rows) for split, rows in self.splits.items()}
        return self.hashes


def hash_of(examples: Iterable[Any]) -> str:
    """A hash of the examples, in order: of their list in JSON."""
    digest, before = hashlib.sha256(b"["), ""
    for example in examples:
        digest.update((before + json.dumps(example)).encode())
        before = ", "
    digest.update(b"]")
    return digest.hexdigest()


@dataclass(frozen=True)
class Source:
    """What --dataset names.

    Attributes:
        rows: of each split, mappings by column; read anew each time.
        identity: what tells it apart from others, before it is read.
        files: of each split, if it is plain text in files.
        notes: for the user.
    """

    dataset: str
    rows: Mapping[str, Iterable[Any]]
    identity: Any
    files: Mapping[str, Sequence[PathGroup]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def is_plain(self, src: str, tgt: str) -> bool:
        """Whether it is plain text, and no pairs. Raises UserError if it is neither, or empty."""
        if self.files:
            return True
        first = next((row for rows in self.rows.values() for row in rows), None)
        if first is None:
            raise UserError(f"--dataset {self.dataset}: it is empty{NO_NETWORK}")
        columns = _columns(first).keys()
        if "text" in columns and not columns & {src, tgt}:
            return True
        if columns >= {src, tgt}:
            return False
        raise UserError(
            f"--dataset {self.dataset}: its columns are {', '.join(map(str, columns))}, and not "
            f"{src} and {tgt}; --src and --tgt name them, or a column named text holds plain text"
        )


def load_pairs(
    dataset: str, src: str, tgt: str, sizes: Sizes, dp: int, world: World, folder: Path
) -> Texts:
    """The pairs of a run. All ranks call it together: the first one of each host reads.

    Args:
        dataset: see the table above.
        src, tgt: the keys of the languages: file endings, columns.
        sizes: the maximum number of pairs per split; None takes all there are.
        dp: every split must hold at least a pair for each of so many ranks.
        folder: for what later starts need not read again.

    Raises:
        UserError: there are no usable pairs; the message says why, and what works.
    """
    source = find_source(dataset, src, tgt, world)
    if source.is_plain(src, tgt):
        raise UserError(
            f"--dataset {dataset}: this is plain text, and the program translates; "
            f"project/train.py ddp --model gpt2-mini --dataset {shlex.quote(dataset)} learns it"
        )
    return pairs_of(source, (src, tgt), sizes, dp, world, folder)


def pairs_of(
    source: Source, keys: tuple[str, str], sizes: Sizes, dp: int, world: World, folder: Path
) -> Texts:
    """See `load_pairs`."""
    examine = partial(_examine, source, keys, sizes, dp)
    facts = remembered(examine, world, folder, source.identity, keys, sizes)
    _check_sizes(source, facts["ranges"], dp)
    splits: dict[str, Any] = {
        split: Again(partial(_some, source, of, keys, first, size), size)
        for split, (of, first, size) in facts["ranges"].items()
    }
    notes = [*source.notes, *facts["notes"]]
    return Texts(splits | {"test": facts["test"]}, notes, hashes=facts["hashes"])


def _check_sizes(source: Source, ranges: Mapping[str, tuple[str, int, int]], dp: int) -> None:
    """Raises UserError if a rank has no pair of a split."""
    for split, (_, _, size) in ranges.items():
        if size < dp:
            raise UserError(
                f"--dataset {source.dataset}: {split} has {counted(size, 'pair')} with text on "
                f"both sides, and a run of {counted(dp, 'rank')} needs {dp} or more; "
                f"a larger --n_{split}, or more text, works"
            )


def _examine(source: Source, keys: tuple[str, str], sizes: Sizes, dp: int) -> dict[str, Any]:
    """Of each split the source's split, the first pair in it and their number, and a hash; the test
    pairs; and notes for the user."""
    ranges, notes = {}, []
    for split in [split for split in SPLITS if split in source.rows]:
        usable = Counter(all(pair.values()) for pair in _pairs(source, split, keys))
        ranges[split] = (split, 0, usable[True])
        if usable[False]:
            empty = counted(usable[False], "row")
            notes.append(f"{split}: skipped {empty} with an empty text.")
    for split in ("test", "validation"):  # test is cut off first: it has the last pairs
        if split not in ranges:
            *_, size = ranges.get("train", ("train", 0, 0))
            count = min(sizes[split] or TAKEN[split], -(-(size - 1) // 10))  # a pair stays
            ranges["train"] = ("train", 0, size - count)
            ranges[split] = ("train", size - count, count)
            held_out = counted(count, "pair")
            notes.append(f"no {split} split: {held_out} held out from the end of train.")
    for split, most in sizes.items():
        of, first, size = ranges[split]
        if most is not None and size < most:
            pairs = counted(size, "pair")
            notes.append(f"{split}: all {pairs}; --n_{split} {most:,} asks for more.")
        ranges[split] = (of, first, min(size, size if most is None else most))
    ranges = {split: ranges[split] for split in SPLITS}
    _check_sizes(source, ranges, dp)
    test, hashes = list[Pair](), dict[str, str]()
    rest = {of: _usable(source, of, keys) for of in source.rows}
    done = dict.fromkeys(rest, 0)
    for split, (of, first, size) in ranges.items():  # a source's pairs are read once, in order
        some: Iterable[Pair] = islice(rest[of], first - done[of], first - done[of] + size)
        done[of] = first + size
        if split == "test":
            some = test = list(some)
        hashes[split] = hash_of(some)
    return {"ranges": ranges, "hashes": hashes, "test": test, "notes": notes}


def _some(
    source: Source, split: str, keys: tuple[str, str], first: int, size: int
) -> Iterator[Pair]:
    """`size` usable pairs, after the first `first` ones."""
    return islice(_usable(source, split, keys), first, first + size)


def _usable(source: Source, split: str, keys: tuple[str, str]) -> Iterator[Pair]:
    """The pairs of a source's split with text on both sides."""
    return (pair for pair in _pairs(source, split, keys) if all(pair.values()))


def _pairs(source: Source, split: str, keys: tuple[str, str]) -> Iterator[Pair]:
    """All pairs of a source's split, without blanks around their texts."""
    for texts in texts_of(source, split, keys):
        yield {key: text.strip() for key, text in texts.items()}


def texts_of(source: Source, split: str, keys: Sequence[str]) -> Iterator[Pair]:
    """The texts of each row of a split by key; a missing one is empty. Raises UserError, which says
    where the row is, if one is not text."""
    for number, row in enumerate(source.rows.get(split, ()), 1):
        columns = _columns(row)
        texts = {key: columns.get(key) or "" for key in keys}
        for key, text in texts.items():
            if not isinstance(text, str):
                raise UserError(
                    f"--dataset {source.dataset}: row {number} of {split}: {key} is {text!r:.40}, "
                    "and not text in quotes"
                )
        yield texts


def _columns(row: Any) -> Mapping[str, Any]:
    """A row's values by column, or by language if it has a `translation` of both."""
    columns = row if isinstance(row, Mapping) else {}
    translation = columns.get("translation")
    return translation if isinstance(translation, Mapping) else columns


# What a start need not read again


def made_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Fills a folder by make(folder), if it is not there. It gets its name when it is whole; of
    several processes one gives it. Raises RunError if it cannot be written."""
    if folder.exists():
        return
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(dir=folder.parent, suffix=".part") as part:
                new = Path(part) / "new"  # with the permissions of other folders
                new.mkdir()
                make(new)
                with suppress(OSError):  # another has given the name
                    new.rename(folder)
        finally:
            with suppress(OSError):  # it is not empty
                folder.parent.rmdir()


def place(folder: Path, *made_of: Any) -> Path:
    """The folder, within another one, of what is made of these things."""
    return folder / hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]


def remembered(
    examine: Callable[[], dict[str, Any]], world: World, folder: Path, *of: Any
) -> dict[str, Any]:
    """What examine() returns, or has returned to an earlier start."""
    file = place(folder, "facts", *of) / "facts.json"

    def make(new: Path) -> None:
        (new / file.name).write_text(json_text(examine(), None), "utf-8")

    world.on_hosts(lambda: made_once(file.parent, make))
    facts: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return facts


# Where the rows are


def find_source(dataset: str, src: str, tgt: str, world: World) -> Source:
    """What --dataset names, before its text is read. All ranks call it together. Raises
    UserError."""
    if src == tgt:
        raise UserError(f"--src {src} --tgt {tgt}: two languages are needed, as --src de --tgt en")
    path = BUILTIN_FOLDER if dataset == BUILTIN else Path(dataset)
    with refused_if_unreadable(dataset):
        if not path.exists():
            world.on_hosts(lambda: str(from_hub(dataset)))  # one rank downloads it
            rows = from_hub(dataset)
            return Source(dataset, rows, [rows[split]._fingerprint for split in rows])
        files = files_of(path, dataset, src, tgt)
        names = [name for group in files.values() for some in group for name in some]
        stats = [(str(name.absolute()), name.stat()) for name in names]
        # Nobody can set the last of the times back.
        identity = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats]
        read = partial(rows_of_files, dataset, (src, tgt))
        rows = {split: Again(partial(read, group)) for split, group in files.items()}
        ending = names[0].suffix.lower()
        notes = [_which_files(files)] if path.is_dir() and ending in ENDINGS else []
        return Source(dataset, rows, identity, files if ending == TEXT else {}, notes)


def files_of(path: Path, dataset: str, src: str, tgt: str) -> dict[str, list[PathGroup]]:
    """A file, a folder's files with a language for an ending, or those of one kind, by split.
    Hidden files, empty ones, and README, LICENSE and the like are no data. Raises UserError."""
    languages: dict[str, dict[str, Path]] = {}  # of train.de and train.en by train, then de and en
    kinds: dict[str, list[Path]] = {}
    for file in [path] if path.is_file() else _data_in(path):
        ending = file.suffix.lower()
        if ending in ENDINGS:
            kinds.setdefault(ending, []).append(file)
        elif SPLIT_NAME.match(file.stem) and file.parent == path:
            languages.setdefault(file.stem, {})[file.suffix[1:]] = file
    groups: dict[str, list[PathGroup]] = {}
    for stem in sorted(languages, key=lambda stem: stem != "train"):  # the first is told
        files = languages[stem]
        if src in files and tgt in files:
            groups.setdefault(split_of(stem), []).append((files[src], files[tgt]))
        elif src in files or tgt in files or (len(files) > 1 and not kinds):
            names = " and ".join(file.name for file in files.values())
            missing = " or ".join(f"{stem}.{key}" for key in (src, tgt) if key not in files)
            works = f"line i of {stem}.{src} must translate line i of {stem}.{tgt}"
            if len(files) > 1:
                others = (key for key in files if key not in (src, tgt))
                one, other = (key if key in files else next(others) for key in (src, tgt))
                works = f"--src {one} --tgt {other} works"
            raise UserError(
                f"--dataset {dataset} --src {src} --tgt {tgt}: it has {names}, and no {missing}; "
                f"{works}"
            )
    if groups:
        return groups
    if not kinds:
        raise UserError(
            f"--dataset {dataset}: no train.{src} with train.{tgt} there, nor text in any of "
            f"{' '.join(ENDINGS)}"
        )
    if len(kinds) > 1:
        names = " and ".join(str(files[0].relative_to(path)) for files in kinds.values())
        first = shlex.quote(str(next(iter(kinds.values()))[0]))
        raise UserError(
            f"--dataset {dataset}: it has files of {len(kinds)} kinds, as {names}, and one kind "
            f"must hold all text; --dataset {first} takes that file alone"
        )
    for file in chain(*kinds.values()):
        groups.setdefault(split_of(*file.relative_to(path).parts), []).append((file,))
    return groups


def _data_in(folder: Path) -> Iterator[Path]:
    """The files of a folder, and of the folders in it, that may hold data."""
    for file in sorted([*folder.iterdir(), *folder.glob("*/*")]):
        hidden = any(map(NO_DATA.match, file.relative_to(folder).parts))
        if not hidden and file.is_file() and (file.stat().st_size or file.suffix not in ENDINGS):
            yield file


def split_of(*names: str) -> str:
    """The split that the last of these names says, or train."""
    said = [found[1].lower() for name in names if (found := SPLIT_NAME.match(name))]
    return SPLIT_OF.get(said[-1], said[-1]) if said else "train"


def _which_files(groups: Mapping[str, Sequence[PathGroup]]) -> str:
    """A line that says which files are which split."""
    texts = []
    for split, files in groups.items():
        more = f" and {len(files) - MOST_NAMES} more" if len(files) > MOST_NAMES else ""
        texts.append(f"{split} is {', '.join(file.name for (file,) in files[:MOST_NAMES])}{more}")
    return f"{'; '.join(texts)}."


def from_hub(dataset: str) -> Mapping[str, Any]:
    """The splits of a dataset on the hub. Raises UserError if it is the name of a file."""
    if Path(dataset).suffix.lower() in ENDINGS or dataset.startswith((".", "/", "~")):
        raise UserError(f"--dataset {dataset}: there is no such file or folder{NO_NETWORK}")
    where = f"{dataset} (on the hub)"
    with refused_if_unreadable(where, NO_NETWORK):
        try:
            return load_splits(dataset)
        except OSError as error:
            if error.filename is None:  # no file's, but the network's
                raise
            raise UserError(
                f"--dataset {where}: what is downloaded cannot be written ({error.filename}: "
                f"{error.strerror}); HF_HOME=FOLDER in the environment puts it elsewhere"
            ) from error


def load_splits(source: str, **options: Any) -> Mapping[str, Any]:
    """The splits of a dataset on the hub, or what a reader of `datasets` gives."""
    import datasets  # here: it takes seconds to import

    return datasets.load_dataset(source, **options)


@contextmanager
def refused_if_unreadable(where: object, advice: str = "") -> Iterator[None]:
    """Raises UserError, with the reason and `where` it is, if data cannot be read."""
    try:
        yield
    except (UserError, RunError):
        raise
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"--dataset {where}: it is not UTF-8 ({error.reason}: byte {byte:#x}); text in UTF-8 "
            "works, which `iconv -f latin1 -t utf-8` makes of Latin-1"
        ) from error
    except Exception as error:  # the readers raise many kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"--dataset {where}: it cannot be read ({reason}){advice}") from error


# Readers


def rows_of_files(
    dataset: str, keys: tuple[str, str], groups: Sequence[PathGroup]
) -> Iterator[Any]:
    """The rows of files, mappings by column."""
    for files in groups:
        if len(files) > 1:
            yield from _parallel_lines(dataset, keys, files)
        else:
            with refused_if_unreadable(files[0]), files[0].open("rb") as file:
                yield from READERS[files[0].suffix.lower()](file)


def _parallel_lines(dataset: str, keys: Sequence[str], files: PathGroup) -> Iterator[Pair]:
    sides = [_lines(path) for path in files]
    for number, pair in enumerate(zip_longest(*sides)):
        if None in pair:
            longer = number + 1 + sum(1 for side in sides for _ in side)
            source, target = (number if text is None else longer for text in pair)
            one, other = (path.name for path in files)
            raise UserError(
                f"--dataset {dataset}: {one} has {counted(source, 'line')} and {other} has "
                f"{target:,}: line i of one must translate line i of the other"
            )
        yield dict(zip(keys, pair, strict=True))


def _lines(path: Path) -> Iterator[str]:
    with refused_if_unreadable(path), path.open("rb") as file:
        yield from text_lines(file)


def text_lines(file: Iterable[bytes]) -> Iterator[str]:
    r"""The lines of a file in UTF-8 that is open for reading bytes, without their ends. A line ends
    at \n or \r\n alone; a byte-order mark is no text. Raises UnicodeDecodeError."""
    for number, line in enumerate(file):
        try:
            text = line.decode("utf-8" if number else "utf-8-sig")
        except UnicodeDecodeError as error:
            error.reason += f" in line {number + 1}"
            raise
        yield text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def _json_rows(file: BinaryIO) -> Iterator[Any]:
    """Reads a list of rows, or a row per line."""
    content = file.read()
    is_list = content.decode("utf-8-sig").lstrip().startswith("[")
    return iter(json.loads(content)) if is_list else _json_lines(io.BytesIO(content))


def _json_lines(file: Iterable[bytes]) -> Iterator[Any]:
    for number, line in enumerate(text_lines(file), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None


def _table_rows(file: Iterable[bytes]) -> Iterator[dict[str, str]]:
    """Rows by the names in the first line, which tells commas, semicolons and tabs apart. A cell
    may be in quotes, with line ends in it; but a tab ends a cell, whatever stands in it."""
    csv.field_size_limit(2**31 - 1)  # a cell may be a book
    lines = text_lines(file)
    first = next(lines, "")
    separator = max(",;\t", key=first.count)
    columns = [name.strip(' "') for name in first.split(separator)]
    reader = csv.reader(
        (f"{line}\n" for line in lines), strict=True, skipinitialspace=True, delimiter=separator
    )
    tabs = separator == "\t"
    begin = 2  # the first line of a row
    try:
        for cells in (line.split("\t") for line in lines) if tabs else reader:
            if len(cells) > len(columns):
                raise csv.Error(f"{len(cells)} cells, and the first line has {len(columns)}")
            if any(cells):
                yield dict(zip(columns, cells, strict=False))
            begin = begin + 1 if tabs else reader.line_num + 2
    except csv.Error as error:
        raise ValueError(f"the row that begins in line {begin}: {error}") from None


def _parquet_rows(file: BinaryIO) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile  # here: it takes half a second to import

    for batch in ParquetFile(file).iter_batches():
        yield from batch.to_pylist()


READERS: dict[str, Callable[[Any], Iterator[Any]]] = {  # by a file's ending
    ".jsonl": _json_lines, ".json": _json_rows, ".csv": _table_rows, ".tsv": _table_rows,
    ".parquet": _parquet_rows,
}  # fmt: skip
ENDINGS = (TEXT, *READERS)
