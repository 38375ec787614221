"""Finds the files that --dataset names, and reads their rows.

    builtin          the German-English text in training/tasks/corpus, a folder like the next
    a folder         with train.de train.en validation.de ... test.en: line i translates line i
    a folder, file   JSONL, JSON, CSV, TSV or Parquet, with a column per language or a
                     `translation` of both, or a column `text`; or .txt, with <|endoftext|> between
                     documents
    anything else    the name of a dataset on the hub, with such columns

The split of a file is in its name, or else in the name of a folder that it is in: one of
`SPLIT_WORDS`, between dots, dashes, underscores, blanks and digits, as in test_2016_flickr.de or
newstest2014-deen.jsonl. A name that says two splits is refused. All other files are train. Each
iteration reads the rows anew, a few at a time.

A text to continue is read in pieces of documents, with None after each document:

    "The first document", None, "The second one, of many let", "ters", None

Rejected: `datasets` as the reader of lines. It guesses types, so a null in an unused column makes a
file unreadable, and it raises no error at a CSV whose quotes do not end.
"""

from __future__ import annotations

import csv
import io
import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from training.launch.errors import RunError, UserError, counted, listed
from training.launch.world import World

Pair = dict[str, str]  # {"de": ..., "en": ...}
TextPiece = str | None  # of a document, or its end
PathGroup = tuple[Path, ...]  # a file, or one for each language

BUILTIN = "builtin"
BUILTIN_FOLDER = Path(__file__).with_name("corpus")
UTF_8 = "; text in UTF-8 works"
NO_NETWORK = f"; --dataset {BUILTIN} needs neither files nor network"
# The words of `datasets` 5.2 (its SPLIT_KEYWORDS, and what it has between words), those of the
# shared tasks of translation, and other common ones. `datasets` looks at folders first; here the
# name that is nearest to the file decides.
SPLIT_WORDS = {
    "train": {"train", "training", "trainset"},
    "validation": {"validation", "valid", "val", "dev", "devset", "newsdev", "newsdiscussdev"},
    "test": {"test", "testing", "testset", "eval", "evaluation", "newstest", "newsdiscusstest",
             "tst", "devtest"},
}  # fmt: skip
BETWEEN_WORDS = re.compile(r"[-._ \d]+")
ABOUT_DATA = ("readme", "license")  # files that are no data
PACKED = {".gz", ".bz2", ".xz", ".zst", ".zip"}
MOST_NAMES = 3  # names of files in a line
END = "<|endoftext|>"  # GPT-2's own: after every document
PIECE, WORD, READ = 4096, 4096, 1 << 20  # letters
# Where no token of byte-level BPE crosses.
BREAK = re.compile(r"(?<=\S\n)(?=\S)|(?<=[^\W_])(?=\s+\S)")


@dataclass(frozen=True)
class Source:
    """What --dataset names.

    Attributes:
        rows: for each split, a function that reads its rows: mappings by column.
        identity: what tells it apart from other sources, before it is read.
        in_pieces: whether rows are pieces of documents instead, from files of plain text.
        notes: for the user.
    """

    rows: Mapping[str, Callable[[], Iterator[Any]]]
    identity: Any
    in_pieces: bool = False
    notes: Sequence[str] = ()


# Which files


def find_source(dataset: str, src: str, tgt: str, world: World) -> Source:
    """What --dataset names, before its text is read. All ranks call it together. Raises
    UserError."""
    if src == tgt:
        raise UserError(f"--src {src} --tgt {tgt}: two languages are needed: --src de --tgt en")
    path = BUILTIN_FOLDER if dataset == BUILTIN else Path(dataset)
    with refused_if_unreadable(dataset):
        if not path.exists():
            world.on_hosts(lambda: str(from_hub(dataset)))  # one rank downloads it
            splits = from_hub(dataset)
            rows = {split: partial(iter, splits[split]) for split in splits}
            return Source(rows, [splits[split]._fingerprint for split in splits])
        files = files_of(path, dataset, src, tgt)
        names = [name for group in files.values() for some in group for name in some]
        stats = [(str(name.absolute()), name.stat()) for name in names]
        # The last one, ctime, cannot be set back.
        identity = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats]
        read = partial(rows_of_files, dataset, (src, tgt))
        told = path.is_dir() and dataset != BUILTIN
        notes = [_which_files(files, set(_data_in(path)) - {*names})] if told else []
        rows_of_split = {split: partial(read, group) for split, group in files.items()}
        return Source(rows_of_split, identity, names[0].suffix.lower() == ".txt", notes)


def files_of(path: Path, dataset: str, src: str, tgt: str) -> dict[str, list[PathGroup]]:
    """By split: one file, the files of a folder that end in a language, or those of one kind.
    Raises UserError."""
    files = [path] if path.is_file() else list(_data_in(path))
    of_languages = {f".{src}", f".{tgt}"}
    parallel = {file.stem for file in files if file.suffix in of_languages and file.parent == path}
    groups: dict[str, list[PathGroup]] = {}
    for stem in filter(splits_in, sorted(parallel)):
        both = path / f"{stem}.{src}", path / f"{stem}.{tgt}"
        for file, other in (both, both[::-1]):
            if not file.is_file():
                raise UserError(
                    f"--dataset {dataset} --src {src} --tgt {tgt}: it has {other.name}, and no "
                    f"{file.name}, in which line i translates its line i; with that file it works"
                )
        groups.setdefault(split_of(stem), []).append(both)
    if groups:
        return groups
    kinds = {file.suffix.lower() for file in files} & READERS.keys()
    if len(kinds) != 1:
        there = f"it has {listed(sorted(kinds), 'and')}" if kinds else "it has no such file"
        if packed := [file.name for file in files if file.suffix.lower() in PACKED]:
            there += f"; unpack {packed[0]}, and it works"
        raise UserError(
            f"--dataset {dataset}: text is read from train.{src} and train.{tgt} (see --src and "
            f"--tgt), or from files of one kind, {listed(READERS, 'or')}; {there}"
        )
    for file in files:
        if file.suffix.lower() in kinds:
            groups.setdefault(split_of(*file.relative_to(path).parts), []).append((file,))
    return groups


def _data_in(folder: Path) -> Iterator[Path]:
    """The files of a folder, and of all folders in it, that may hold data."""
    for file in sorted(folder.rglob("*")):
        hidden = any(name.startswith(".") for name in file.relative_to(folder).parts)
        if file.is_file() and not hidden and file.stem.lower() not in ABOUT_DATA:
            yield file


def splits_in(name: str) -> set[str]:
    """The splits whose words are in the name of a file or folder."""
    found = set(BETWEEN_WORDS.split(name.lower()))
    return {split for split, words in SPLIT_WORDS.items() if words & found}


def split_of(*names: str) -> str:
    """The split that the last of these names says, or train. Raises UserError if it says two."""
    for name in names[::-1]:
        match sorted(splits_in(name)):
            case [split]:
                return split
            case [_, _, *_] as several:
                raise UserError(
                    f"--dataset: {name} may be {listed(several, 'or')}, by the words in its name; "
                    f"with one of them, e.g. {several[0]}-1{Path(name).suffix}, it works"
                )
    return "train"


def _which_files(groups: Mapping[str, Sequence[PathGroup]], others: Iterable[Path]) -> str:
    """A line that says which files are which split, and which others look like data."""
    texts = []
    for split, files in groups.items():
        more = f" and {len(files) - MOST_NAMES} more" if len(files) > MOST_NAMES else ""
        named = ", ".join(file.name for group in files[:MOST_NAMES] for file in group)
        texts.append(f"{split} is {named}{more}")
    if unread := sorted(f.name for f in others if splits_in(f.name) or f.suffix.lower() in PACKED):
        texts.append(f"not read: {', '.join(unread)}")
    return f"{'; '.join(texts)}."


def from_hub(dataset: str) -> Mapping[str, Any]:
    """The splits of a dataset on the hub. Raises UserError if it is the name of a file."""
    if Path(dataset).suffix.lower() in READERS or dataset.startswith((".", "/", "~")):
        raise UserError(f"--dataset {dataset}: there is no such file or folder{NO_NETWORK}")
    with refused_if_unreadable(f"{dataset} (on the hub)", NO_NETWORK):
        return load_splits(dataset)


def load_splits(source: str) -> Mapping[str, Any]:
    """The splits of a dataset on the hub, or of a folder that `datasets` reads."""
    import datasets  # here: it takes seconds to import

    if not Path(source).is_dir():
        try_hub()
    return datasets.load_dataset(source)


def try_hub() -> None:
    """Tries the hub once: its own library would try for half a minute. If the hub cannot be
    reached, this process reads only what was downloaded before."""
    import huggingface_hub as hub  # here: it takes a quarter of a second to import

    try:
        hub.get_session().head(hub.constants.ENDPOINT, timeout=5)
    except Exception:  # of the library below it, which differs between versions
        hub.constants.HF_HUB_OFFLINE = True


@contextmanager
def refused_if_unreadable(where: object, advice: str = "") -> Iterator[None]:
    """Raises UserError, with the reason and `where` it is, if data cannot be read."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:  # the readers raise many kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if isinstance(error, UnicodeDecodeError):
            advice = UTF_8 + advice
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
    for number, pair in enumerate(zip_longest(*map(_lines, files))):
        if None in pair:
            short, longer = files if pair[0] is None else reversed(files)
            raise UserError(
                f"--dataset {dataset}: {short.name} has {counted(number, 'line')}, and "
                f"{longer.name} has more: line i of one must translate line i of the other"
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


def _json_rows(file: io.BufferedReader) -> Iterator[Any]:
    """Reads a list of rows, or a row per line."""
    if file.peek(1).removeprefix(BOM_UTF8).lstrip().startswith(b"["):
        yield from json.load(file)
        return
    for number, line in enumerate(text_lines(file), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                where = f"line {number}, column {error.colno}"
                raise ValueError(f"{where}: {error.msg}; a row per line works") from None


def _table_rows(separators: str, file: Iterable[bytes]) -> Iterator[dict[str, str]]:
    """Rows by the names in the first line, which shows the separator. A cell may be in quotes, with
    line ends in it; but a tab always ends a cell, even in quotes."""
    csv.field_size_limit(2**31 - 1)  # a cell may be a book
    lines = text_lines(file)
    first = next(lines, "")
    separator = max(separators, key=first.count)
    quoting: Any = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
    table = csv.reader(
        (f"{line}\n" for line in chain([first], lines)),
        strict=True, skipinitialspace=separator != "\t", delimiter=separator, quoting=quoting,
    )  # fmt: skip
    begin = 1  # the first line of a row
    try:
        columns = [name.strip(' "') for name in next(table)]
        begin = 2
        for cells in table:
            if len(cells) > len(columns):
                raise csv.Error(f"{len(cells)} cells, and the first line has {len(columns)}")
            if any(cells):
                yield dict(zip_longest(columns, cells, fillvalue=""))
            begin = table.line_num + 1
    except csv.Error as error:
        raise ValueError(f"the row that begins in line {begin}: {error}") from None


def _parquet_rows(file: BinaryIO) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile  # here: it takes half a second to import

    for batch in ParquetFile(file).iter_batches():
        yield from batch.to_pylist()


def _documents(file: BinaryIO) -> Iterator[TextPiece]:
    """The pieces of a text. It may be one long line; only a little of it is in memory."""
    text, rest = io.TextIOWrapper(file, "utf-8-sig", newline="\n"), ""
    while more := text.read(READ):
        *documents, rest = (rest + more).replace("\r\n", "\n").split(END)
        for document in documents:
            yield from pieces(document)
            yield None
        *whole, rest = list(pieces(rest)) or [""]
        yield from whole
    yield from pieces(rest)
    yield None


def pieces(text: str) -> Iterator[str]:
    """A long text in pieces of some thousand letters, with the same tokens: so all cores work on
    one document. Where that many letters have no blank between them (DNA, base64), it is cut
    anyway: the time for a word grows with the square of its length."""
    first = 0
    while first < len(text):
        after = BREAK.search(text, first + PIECE, first + PIECE + WORD)
        end = after.start() if after else first + PIECE + WORD
        yield text[first:end]
        first = end


READERS: dict[str, Callable[[Any], Iterator[Any]]] = {  # by a file's ending
    ".txt": _documents, ".jsonl": _json_rows, ".json": _json_rows, ".parquet": _parquet_rows,
    ".csv": partial(_table_rows, ",;\t"), ".tsv": partial(_table_rows, "\t"),
}  # fmt: skip
