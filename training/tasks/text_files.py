"""Finds the files that --dataset names, and reads their rows.

    builtin          the German-English text in training/tasks/corpus, a folder like the next
    a folder         with train.de train.en validation.de ... test.en: line i translates line i
    a folder, file   JSONL, JSON, CSV, TSV or Parquet, with a column per language or a
                     `translation` of both, or a column `text`; or .txt, with <|endoftext|> between
                     documents
    anything else    the name of a dataset on the hub, with such columns

A file is of the split that it, or a folder that it is in, is named after: train, validation (also
valid, val, dev) or test, before a dot or a dash. All others are train. Rows are read anew by each
who iterates, a few at a time.

A text to continue is read in pieces of documents, with None after each document:

    "The first document", None, "The second one, of many let", "ters", None

Rejected: `datasets` as the reader of lines. It guesses types, so null in a column that nobody needs
spoils a file, and it reads a CSV whose quotes do not end without a word.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from training.launch.errors import RunError, UserError, counted, listed
from training.launch.world import World

Pair = dict[str, str]  # {"de": ..., "en": ...}
TextPiece = str | None  # of a document, or its end
PathGroup = tuple[Path, ...]  # a file, or one for each language

BUILTIN = "builtin"
BUILTIN_FOLDER = Path(__file__).with_name("corpus")
NO_NETWORK = f"; --dataset {BUILTIN} needs neither files nor network"
SPLIT_OF = {"valid": "validation", "val": "validation", "dev": "validation"}
SPLIT_NAME = re.compile(r"(train|validation|valid|val|dev|test)(?![^.-])", re.IGNORECASE)
HALF_LETTER = re.compile("[\ud800-\udfff]")  # as a text in JSON that was cut may have
ABOUT_DATA = re.compile(  # names of files about the data
    r"(readme|licen[cs]es?|copying|copyright|notice|authors|citation|changelog)(?![^._-])",
    re.IGNORECASE,
)
MOST_NAMES = 3  # names of files in a line
FIRST_ROWS = 1000  # in which the columns are looked for: a row may lack one
END = "<|endoftext|>"  # GPT-2's own: after every document
PIECE, READ = 4096, 1 << 20  # letters
# Where byte-level BPE has no token on both sides.
BREAK = re.compile(r"(?<=\S\n)(?=\S)|(?<=[^\W_])(?=\s+\S)")


@dataclass(frozen=True)
class Again:
    """`size` items, which begin() gives anew to each who iterates."""

    begin: Callable[[], Iterable[Any]]
    size: int = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.begin())

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True)
class Source:
    """What --dataset names.

    Attributes:
        rows: of each split, mappings by column; read anew each time.
        identity: what tells it apart from others, before it is read.
        in_pieces: whether rows are pieces of documents instead, of plain text in files.
        notes: for the user.
    """

    dataset: str
    rows: Mapping[str, Iterable[Any]]
    identity: Any
    in_pieces: bool = False
    notes: Sequence[str] = ()

    def is_plain(self, src: str, tgt: str) -> bool:
        """Whether it is plain text, and no pairs. Raises UserError if it is neither, or empty."""
        if self.in_pieces:
            return True
        row, names = None, dict[str, None]()
        for row in islice(chain.from_iterable(self.rows.values()), FIRST_ROWS):
            columns = _columns(row).keys()
            if "text" in columns and not columns & {src, tgt}:
                return True
            if columns >= {src, tgt}:
                return False
            names |= dict.fromkeys(columns)
        if row is None:
            raise UserError(f"--dataset {self.dataset}: it is empty{NO_NETWORK}")
        if not names:
            raise UserError(
                f"--dataset {self.dataset}: a row is {row!r:.40}, and not columns by name; "
                f'{{"{src}": "...", "{tgt}": "..."}} works'
            )
        raise UserError(
            f"--dataset {self.dataset}: the columns of its first rows are {', '.join(names)}, and "
            f"none has both {src} and {tgt}; --src and --tgt name them, or a column named text "
            "holds plain text"
        )


def texts_of(source: Source, split: str, keys: Sequence[str]) -> Iterator[Pair]:
    """The texts of each row of a split by key; a missing one is empty. Raises UserError, which says
    where the row is, if one is not text."""
    for number, row in enumerate(source.rows.get(split, ()), 1):
        columns = _columns(row)
        texts = {key: "" if columns.get(key) is None else columns[key] for key in keys}
        for key, text in texts.items():
            wrong = ""
            if not isinstance(text, str):
                wrong = f"is {text!r:.40}, and not text in quotes"
            elif not text.isascii() and (half := HALF_LETTER.search(text)):
                wrong = f"has {half[0]!r}, half of a letter (a surrogate); without it it works"
            if wrong:
                where = f"row {number} of {split}"
                raise UserError(f"--dataset {source.dataset}: {where}: {key} {wrong}")
        yield texts


def pieces_of(source: Source, split: str) -> Iterator[TextPiece]:
    """The pieces of the documents of a split."""
    if source.in_pieces:
        yield from source.rows.get(split, ())
        return
    for row in texts_of(source, split, ("text",)):
        yield from pieces(row["text"])
        yield None


def pieces(text: str) -> Iterator[str]:
    """A long text in pieces of some thousand letters, with the same tokens: so all cores work on
    one document."""
    first = 0
    while first < len(text):
        after = BREAK.search(text, first + PIECE)
        end = after.start() if after else len(text)
        yield text[first:end]
        first = end


def _columns(row: Any) -> Mapping[str, Any]:
    """A row's values by column, or by language if it has a `translation` of both."""
    columns = row if isinstance(row, Mapping) else {}
    translation = columns.get("translation")
    return translation if isinstance(translation, Mapping) else columns


# Which files


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
        notes = [_which_files(files)] if path.is_dir() and ending in READERS else []
        return Source(dataset, rows, identity, ending == ".txt", notes)


def files_of(path: Path, dataset: str, src: str, tgt: str) -> dict[str, list[PathGroup]]:
    """A file, a folder's files with a language for an ending, or those of one kind, by split.
    Hidden files, empty ones, and README, LICENSE and the like are no data. Raises UserError."""
    languages: dict[str, dict[str, Path]] = {}  # of train.de and train.en by train, then de and en
    kinds: dict[str, list[Path]] = {}
    for file in [path] if path.is_file() else _data_in(path):
        ending = file.suffix.lower()
        if ending in READERS:
            kinds.setdefault(ending, []).append(file)
        elif SPLIT_NAME.match(file.stem) and file.parent == path:
            languages.setdefault(file.stem, {})[file.suffix[1:]] = file
    groups: dict[str, list[PathGroup]] = {}
    for stem in sorted(languages, key=lambda stem: stem != "train"):  # the first is told
        files = languages[stem]
        if src in files and tgt in files:
            groups.setdefault(split_of(stem), []).append((files[src], files[tgt]))
        elif src in files or tgt in files or (len(files) > 1 and not kinds and not groups):
            raise _missing_language(dataset, stem, files, src, tgt)
    if groups:
        return groups
    if not kinds:
        raise UserError(
            f"--dataset {dataset}: it has neither train.{src} and train.{tgt}, nor a file that "
            f"ends in {listed(READERS, 'or')}{_left_out(path, src)}"
        )
    if len(kinds) > 1:
        names = " and ".join(str(files[0].relative_to(path)) for files in kinds.values())
        first = shlex.quote(str(next(iter(kinds.values()))[0]))
        raise UserError(
            f"--dataset {dataset}: it has files of {len(kinds)} kinds, as {names}, and text is "
            f"read from one kind; --dataset {first} takes that file alone"
        )
    for file in chain(*kinds.values()):
        groups.setdefault(split_of(*file.relative_to(path).parts), []).append((file,))
    return groups


def _left_out(path: Path, src: str) -> str:
    """Says which file of a folder looks like data and is none, if there is one."""
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path)
        if file.suffix == f".{src}" and SPLIT_NAME.match(file.stem):
            folder = shlex.quote(str(file.parent))
            return f"; {name} is in a folder of its own, which --dataset {folder} takes"
        if file.suffix.lower() in READERS:
            return f"; {name} is left out: it is empty, hidden, or about the data by its name"
    return ""


def _missing_language(
    dataset: str, stem: str, files: Mapping[str, Path], src: str, tgt: str
) -> UserError:
    """Says which languages the files of this name have, and which options take them."""
    works = f"line i of {stem}.{src} must translate line i of {stem}.{tgt}"
    if len(files) > 1:
        one, other = sorted(files, key=lambda key: (key == tgt) - (key == src))[:2]
        works = f"--src {one} --tgt {other} works"
    names = " and ".join(file.name for file in files.values())
    missing = " or ".join(f"{stem}.{key}" for key in (src, tgt) if key not in files)
    return UserError(
        f"--dataset {dataset} --src {src} --tgt {tgt}: it has {names}, and no {missing}; {works}"
    )


def _data_in(folder: Path) -> Iterator[Path]:
    """The files of a folder, and of all folders in it, that may hold data."""
    for file in sorted(folder.rglob("*")):
        hidden = any(name.startswith(".") for name in file.relative_to(folder).parts)
        if hidden or ABOUT_DATA.match(file.name) or not file.is_file():
            continue
        if file.stat().st_size or file.suffix.lower() not in READERS:
            yield file


def split_of(*names: str) -> str:
    """The split that the last of these names says, or train."""
    splits = [match[1].lower() for name in names if (match := SPLIT_NAME.match(name))]
    return SPLIT_OF.get(splits[-1], splits[-1]) if splits else "train"


def _which_files(groups: Mapping[str, Sequence[PathGroup]]) -> str:
    """A line that says which files are which split."""
    texts = []
    for split, files in groups.items():
        more = f" and {len(files) - MOST_NAMES} more" if len(files) > MOST_NAMES else ""
        texts.append(f"{split} is {', '.join(file.name for (file,) in files[:MOST_NAMES])}{more}")
    return f"{'; '.join(texts)}."


def from_hub(dataset: str) -> Mapping[str, Any]:
    """The splits of a dataset on the hub. Raises UserError if it is the name of a file."""
    if Path(dataset).suffix.lower() in READERS or dataset.startswith((".", "/", "~")):
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


def load_splits(source: str, **settings: Any) -> Mapping[str, Any]:
    """The splits of a dataset on the hub, or what a reader of `datasets` gives."""
    import datasets  # here: it takes seconds to import

    if not Path(source).is_dir():
        try_hub()
    return datasets.load_dataset(source, **settings)


def try_hub() -> None:
    """One quick try of the hub, whose own library tries for half a minute. Where the hub cannot be
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
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        utf16 = not error.start and error.object.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
        code, encoding = ("utf-16", "UTF-16") if utf16 else ("latin1", "Latin-1")
        raise UserError(
            f"--dataset {where}: it is not UTF-8 ({error.reason}: byte {byte:#x}); text in UTF-8 "
            f"works, which `iconv -f {code} -t utf-8` makes of {encoding}"
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
    for pair in zip_longest(*map(_lines, files)):
        if None in pair:
            sizes = [sum(1 for _ in _lines(path)) for path in files]
            both = " and ".join(
                f"{path.name} has {counted(size, 'line')}"
                for path, size in zip(files, sizes, strict=True)
            )
            raise UserError(
                f"--dataset {dataset}: {both}: line i of one must translate line i of the other"
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
                wrong = str(error).replace(": line 1 column", " at column")
                raise ValueError(f"line {number}: {wrong}; a row per line works") from None


def _table_rows(separators: str, file: Iterable[bytes]) -> Iterator[dict[str, str]]:
    """Rows by the names in the first line, which shows the separator. A cell may be in quotes, with
    line ends in it; but a tab ends a cell, whatever stands in it."""
    csv.field_size_limit(2**31 - 1)  # a cell may be a book
    lines = text_lines(file)
    first = next(lines, "")
    separator = max(separators, key=first.count)
    ended = (f"{line}\n" for line in chain([first], lines))
    reader = csv.reader(ended, strict=True, skipinitialspace=True, delimiter=separator)
    tabs = separator == "\t"
    table = (line[:-1].split("\t") for line in ended) if tabs else reader
    begin = 1  # the first line of a row
    try:
        columns = [name.strip(' "') for name in next(table)]
        begin = 2
        for cells in table:
            if len(cells) > len(columns):
                raise csv.Error(f"{len(cells)} cells, and the first line has {len(columns)}")
            if any(cells):
                yield dict(zip_longest(columns, cells, fillvalue=""))
            begin = begin + 1 if tabs else reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"the row that begins in line {begin}: {error}") from None


def _parquet_rows(file: BinaryIO) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile  # here: it takes half a second to import

    for batch in ParquetFile(file).iter_batches():
        yield from batch.to_pylist()


def _documents(file: BinaryIO) -> Iterator[TextPiece]:
    """The pieces of a text. It may be one long line, of which little is in memory."""
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


READERS: dict[str, Callable[[Any], Iterator[Any]]] = {  # by a file's ending
    ".txt": _documents, ".jsonl": _json_lines, ".json": _json_rows, ".parquet": _parquet_rows,
    ".csv": partial(_table_rows, ",;\t"), ".tsv": partial(_table_rows, "\t"),
}  # fmt: skip
