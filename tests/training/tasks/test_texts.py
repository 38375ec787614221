"""Whatever --dataset names becomes splits of examples, or one line that says what is wrong."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from datasets import Dataset

from tests.ranks import Ranks
from training.launch.errors import RunError, UserError
from training.launch.world import World
from training.options import Options
from training.tasks import text_files
from training.tasks.pictures import load_pictures
from training.tasks.text_files import BUILTIN_FOLDER, END, rows_of_files, text_lines
from training.tasks.texts import SPLITS, Texts, hash_of, load_texts, made_once

NO_NETWORK = "; --dataset builtin needs neither files nor network"
Rows = list[tuple[str, str]]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, where run/ has what later starts need not read again."""
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))


def asked(dataset: object, dp: int = 1, **sizes: int | None) -> Options:
    """The options of a run."""
    n: Any = {f"n_{split}": size for split, size in sizes.items()}
    return Options(dataset=str(dataset), workdir=Path("run"), dp=dp, **n)


def load(dataset: object, dp: int = 1, **sizes: int | None) -> Texts:
    """As train.py reads it. The other programs read the same pairs."""
    args = asked(dataset, dp, **sizes)
    texts = load_texts(args, World())
    if not texts.plain and Path(str(dataset)).exists():
        same = load_texts(args, World(), translates=True)
        assert (in_memory(same), same.notes) == (in_memory(texts), texts.notes)
        hashes = {split: hash_of(rows) for split, rows in in_memory(texts).items()}
        assert same.hashes == texts.hashes == hashes
    return texts


def in_memory(texts: Texts) -> dict[str, list[Any]]:
    """The examples of each split; the documents of plain text are whole."""
    found: dict[str, list[Any]] = {split: [*rows] for split, rows in texts.splits.items()}
    if texts.plain:
        whole = ("".join(END if part is None else part for part in found[split]) for split in found)
        return {split: text.split(END)[:-1] for split, text in zip(found, whole, strict=True)}
    assert {split: len(rows) for split, rows in texts.splits.items()} == {
        split: len(rows) for split, rows in found.items()
    }
    return found


def pairs(rows: Rows) -> list[dict[str, str]]:
    return [{"de": de, "en": en} for de, en in rows]


def in_splits(*rows: Rows) -> dict[str, list[dict[str, str]]]:
    """As train, validation and test."""
    return dict(zip(SPLITS, map(pairs, rows), strict=True))


def numbered(first: int, end: int) -> Rows:
    return [(f"Satz {i}", f"sentence {i}") for i in range(first, end)]


def rows_of(path: Path) -> list[Any]:
    """The rows of a file, with all columns."""
    return [*rows_of_files("", ("de", "en"), [(path,)])]


def error_of(*args: Any) -> str:
    with pytest.raises(UserError) as error:
        load(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


# What is read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """train.de ... test.en, three lines each."""
    for split in SPLITS:
        for language in ("de", "en"):
            lines = "".join(f"{language} {split} {i}\n" for i in range(3))
            (tmp_path / f"{split}.{language}").write_text(lines)
    return tmp_path


def test_line_i_translates_line_i(folder: Path) -> None:
    """A byte-order mark, CRLF, no newline at the end; U+2028, a form feed and CR are no line ends.
    Empty pairs are skipped, and sizes are upper limits."""
    (folder / "train.de").write_bytes(
        b"\xef\xbb\xbfeins\r\nzwei\xe2\x80\xa8ter\x0cSa\rtz\r\n \r\ndrei"
    )
    (folder / "train.en").write_text("one\ntwo\nnothing\nthree\n")
    texts = load(folder, dp=2, validation=2, test=4)
    assert in_memory(texts) == {
        "train": pairs([("eins", "one"), ("zwei\u2028ter\x0cSa\rtz", "two"), ("drei", "three")]),
        "validation": pairs([(f"de validation {i}", f"en validation {i}") for i in range(2)]),
        "test": pairs([(f"de test {i}", f"en test {i}") for i in range(3)]),
    }
    assert texts.notes == [
        "train: skipped 1 row without text on both sides.",
        "test: all 3 pairs; --n_test 4 asks for more.",
    ]


@pytest.mark.parametrize(
    "inside", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\ufeff"]
)
def test_a_line_ends_at_a_newline_alone(tmp_path: Path, inside: str) -> None:
    """Or at CR and newline. A byte-order mark at the beginning is no text."""
    content = f"\ufeffa{inside}b\r\n\n c{inside}d\ne{inside}".encode()
    assert [*text_lines(io.BytesIO(content))] == [f"a{inside}b", "", f" c{inside}d", f"e{inside}"]
    row = {"de": f"x{inside}y", "en": "z"}
    tables = {"tsv": f"\ufeffde\ten\r\n{row['de']}\tz\r\n", "csv": f'de,en\n"{row["de"]}","z"'}
    if inside >= " ":  # JSON has no other
        tables["jsonl"] = f"\ufeff{json.dumps(row, ensure_ascii=False)}\r\n\r\n"
    for ending, table in tables.items():
        path = tmp_path / f"a.{ending}"
        path.write_bytes(table.encode())
        assert rows_of(path) == [row]


def to_parquet(rows: Rows) -> bytes:
    found = io.BytesIO()
    Dataset.from_list([{"translation": row} for row in pairs(rows)]).to_parquet(found)
    return found.getvalue()


def to_jsonl(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in pairs(rows)).encode()


def table(line: str, head: str) -> Callable[[Rows], bytes]:
    """Writes rows by a form of a line."""
    return lambda rows: (head + "".join(line.format(x=x, y=y) for x, y in rows)).encode()


WRITERS: dict[str, tuple[str, Callable[[Rows], bytes]]] = {
    "jsonl": ("a.jsonl", to_jsonl),
    "in capitals": ("a.JSONL", to_jsonl),
    "json": (
        "a.json",
        lambda rows: json.dumps([{"translation": row} for row in pairs(rows)], indent=1).encode(),
    ),
    "json, a row per line": ("a.json", to_jsonl),
    "csv": ("a.csv", table('7,"{x}","{y}"\n', 'id,"de",en\n')),
    "csv, a blank after the comma": ("a.csv", table('"{x}", "{y}"\n', "de, en\n")),
    "csv, a comma in a name": ("a.csv", table('7,"{x}","{y}"\n', '"id, no.",de,en\n')),
    "csv, semicolons": ("a.csv", table("{x};{y}\r\n", "de;en\r\n")),
    "tsv": ("a.tsv", table("{y}\t{x}\n", "en\tde\n")),
    "parquet": ("a.parquet", to_parquet),
    "a pattern, to some libraries": ("a[1]::b.parquet", to_parquet),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_single_file_is_cut_into_splits(tmp_path: Path, kind: str) -> None:
    """Also numbers among texts, and what pandas takes for nothing."""
    name, write = WRITERS[kind]
    rows = [("None", "NA"), ("001", "1.50"), *numbered(2, 40)]
    (tmp_path / name).write_bytes(write(rows))
    few = load(tmp_path / name, train=30, validation=2, test=3)
    assert in_memory(few) == in_splits(rows[:30], rows[35:37], rows[37:])
    texts = load(tmp_path / name, train=30)
    # Validation is a tenth of the 36 that test has left.
    assert in_memory(texts) == in_splits(rows[:30], rows[32:36], rows[36:40])
    assert texts.notes == [
        f"no {split} split: 4 pairs held out from the end of train."
        for split in ("test", "validation")
    ]
    more = load(tmp_path / name, train=33).notes
    assert more[2:] == ["train: all 32 pairs; --n_train 33 asks for more."]


def test_a_quote_is_a_letter_in_tsv(tmp_path: Path) -> None:
    """But not around a column's name."""
    rows = [('"A', "x"), ("B", '"y"'), ('"C"', 'z"'), *numbered(0, 3)]
    path = tmp_path / "pairs.tsv"
    path.write_bytes(table("{x}\t{y}\n", 'de\t"en"\n')(rows))
    assert rows_of(path) == pairs(rows)
    path.write_text('text\n"one, two\n')
    assert rows_of(path) == [{"text": '"one, two'}]


def test_a_cell_in_quotes_may_have_lines_commas_and_quotes(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    book = 200_000 * "x"
    path.write_text(f'de,en\n"a\n""b"", c",d\n,\ne "f" g,\n{book},"{book}"\n')
    assert rows_of(path) == pairs([('a\n"b", c', "d"), ('e "f" g', ""), (book, book)])


def test_a_row_may_lack_a_cell_also_the_first(tmp_path: Path) -> None:
    """It is skipped, and the others count."""
    rows = numbered(0, 9)
    short = {
        "csv": table("{x},{y}\n", "de,en\na\n")(rows),
        "jsonl": b'{"de": "a"}\n' + to_jsonl(rows),
    }
    for ending, content in short.items():
        path = tmp_path / f"pairs.{ending}"
        path.write_bytes(content)
        texts = load(path)
        assert in_memory(texts)["train"] == pairs(rows[:7])
        assert texts.notes[0] == "train: skipped 1 row without text on both sides."
    assert rows_of(tmp_path / "pairs.csv")[0] == {"de": "a", "en": ""}


def test_copies_of_the_files_of_a_split_are_no_languages(folder: Path) -> None:
    expected = in_memory(load(folder))
    for ending in ("bak", "orig"):
        (folder / f"train.de.{ending}").write_text("old\n")
    assert in_memory(load(folder)) == expected


def test_columns_that_nobody_needs_may_be_anything(tmp_path: Path) -> None:
    """In one file null and in another a number, a list, or missing. Pairs may have a `text`."""
    for number, more in enumerate((None, 1, [2], "three")):
        rows: list[Any] = [
            row | {"id": more, "text": "a"} for row in pairs(numbered(9 * number, 9 * number + 9))
        ]
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "4.jsonl").write_bytes(to_jsonl(numbered(36, 40)))
    assert len(in_memory(load(tmp_path))["train"]) == 40 - 4 - 4


# Which files


def test_a_missing_validation_file_is_a_part_of_train(folder: Path) -> None:
    """The same for test. Files may be in parts."""
    for split in ("validation", "test"):
        for language in ("de", "en"):
            number = SPLITS.index(split)
            (folder / f"{split}.{language}").rename(folder / f"train-{number}.{language}")
    texts = load(folder)
    assert {split: len(rows) for split, rows in texts.splits.items()} == {
        "train": 7, "validation": 1, "test": 1,
    }  # fmt: skip
    assert in_memory(texts)["test"] == [{"de": "de test 2", "en": "en test 2"}]


FOLDERS = [  # names of files with a pair or a text of their own, and which files are which split
    ("0.jsonl valid/train-1.jsonl valid/0.jsonl test.jsonl README.jsonl",
     {"train": ["0.jsonl", "valid/train-1.jsonl"], "validation": ["valid/0.jsonl"],
      "test": ["test.jsonl"]}),
    ("a.txt devils.txt testament.txt training.txt valid8.txt dev.1.txt",
     {"train": ["a.txt", "devils.txt", "testament.txt", "training.txt", "valid8.txt"],
      "validation": ["dev.1.txt"]}),
    ("book.txt .ipynb_checkpoints/book-checkpoint.txt .book.txt sub/.#book.txt book.txt~ val.txt",
     {"train": ["book.txt"], "validation": ["val.txt"]}),
    ("corpus.jsonl LICENSE.txt readme.de.txt Licence-MIT.txt sub/NOTICE.json DEV.jsonl test.jsonl "
     "sub/train.de sub/train.en",
     {"train": ["corpus.jsonl"], "validation": ["DEV.jsonl"], "test": ["test.jsonl"]}),
    ("1/2/a.jsonl dev/2/b.jsonl test/2/3/c.jsonl 1/.2/d.jsonl",
     {"train": ["1/2/a.jsonl"], "validation": ["dev/2/b.jsonl"], "test": ["test/2/3/c.jsonl"]}),
    ("authors/jane.txt copyright.txt LICENSES.txt notice/val.txt",
     {"train": ["authors/jane.txt"], "validation": ["notice/val.txt"]}),
]  # fmt: skip


@pytest.mark.parametrize(("names", "expected"), FOLDERS, ids=[names for names, _ in FOLDERS])
def test_the_files_of_a_folder(tmp_path: Path, names: str, expected: dict[str, list[str]]) -> None:
    """A whole name says a split. Hidden files and folders, copies of editors, and what is about the
    data are none; those above say nothing. The run says which file is which split."""
    folder = tmp_path / ".cache" / "test"
    for name in names.split():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(name if ".txt" in name else json.dumps({"de": name, "en": "x"}))
    (folder / "empty.txt").touch()
    texts = load(folder)
    found = in_memory(texts)
    if not texts.plain:
        found = {split: [pair["de"] for pair in rows] for split, rows in found.items()}
    assert found == expected
    (said,) = texts.notes
    for split, files in expected.items():
        first = ", ".join(name.split("/")[-1] for name in files[:3])
        assert f"{split} is {first}" + " and 2 more" * (len(files) == 5) in said


def test_the_built_in_text_has_no_sentence_twice_and_teaches_every_word() -> None:
    """The words of validation and test are in what a run without --n_train trains on. And it is a
    folder with two languages."""
    splits = in_memory(load("builtin"))
    assert splits == in_memory(load(BUILTIN_FOLDER))
    assert {split: len(rows) for split, rows in splits.items()} == {
        "train": 9000, "validation": 1000, "test": 100,
    }  # fmt: skip
    for language in ("de", "en"):
        train, *others = ([pair[language] for pair in splits[split]] for split in SPLITS)
        tested = [sentence for other in others for sentence in other]
        assert len({*train, *tested}) == 10100
        words = [set(re.findall(r"\w+", " ".join(part))) for part in (tested, train[:5000])]
        assert words[0] - words[1] == set()


# Plain text


def test_a_file_holds_documents(tmp_path: Path) -> None:
    """A byte-order mark and blank documents are none."""
    text = f"\n{END}one\r\n\r\ntwo {END}\n \n{END}{END} three{END}\n"
    (tmp_path / "a.txt").write_text(text, "utf-8-sig", newline="")
    texts = load(tmp_path / "a.txt")
    assert texts.plain and texts.notes == []
    assert in_memory(texts) == {"train": ["one\n\ntwo ", " three"]}


def test_a_column_of_texts(tmp_path: Path, hub: Callable[..., Mock]) -> None:
    """In which `END` is text as any other."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    texts = load(path)
    assert in_memory(texts) == {"train": ["one", "two"]}
    assert texts.notes == ["train: skipped 1 row without text."]
    rows = {"train": [{"text": "one"}, {"text": f"a{END}b"}], "validation": [{"text": "three"}]}
    hub({split: Dataset.from_list(some) for split, some in rows.items()})
    found = load("some/texts").splits
    assert [*found["train"]] == ["one", None, f"a{END}b", None]
    assert [*found["validation"]] == ["three", None]


def test_a_large_file_may_be_one_long_line_of_which_little_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As text8 is, here after short ones, with `END` and CRLF where a part that is read ends."""
    monkeypatch.setattr("training.tasks.text_files.READ", 5003)
    whole = "".join(f"line {i}\r\n{END * (i % 1500 == 7)}\r\n" for i in range(4000))
    whole += " ".join(f"wörd{i}" for i in range(30_000))
    (tmp_path / "a.txt").write_text(whole, "utf-8-sig", newline="")
    texts = load(tmp_path)
    train = [*texts.splits["train"]]
    assert len(train) == len(texts.splits["train"])
    text = "".join(END if piece is None else piece for piece in train[:-1])
    assert text == whole.replace("\r\n", "\n") and train[-1] is None
    assert max(len(piece or "") for piece in train) < 5003


# A second start


def starts(read: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int]:
    """The texts of a start, and how often it has read a text to the end."""
    ends = 0
    real = text_files.rows_of_files

    def counting(read: Callable[..., Any], *args: Any) -> Any:
        nonlocal ends
        yield from read(*args)
        ends += 1

    with monkeypatch.context() as patch:
        patch.setattr(text_files, "rows_of_files", partial(counting, real))
        found = read()
    return found, ends


@pytest.mark.parametrize("kind", ["lines", "jsonl", "texts", "txt"])
def test_a_second_start_reads_nothing_and_gets_the_same(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder
    if kind != "lines":
        content = to_jsonl(numbered(0, 40)) if kind == "jsonl" else b'{"text": "a b c"}\n' * 40
        path = folder / ("a.txt" if kind == "txt" else "a.jsonl")
        path.write_bytes(content)
    first, opened = starts(lambda: load_texts(asked(path), World()), monkeypatch)
    assert opened
    again, opened = starts(lambda: load_texts(asked(path), World()), monkeypatch)
    assert opened == 0
    assert in_memory(again) == in_memory(first)
    assert (again.notes, again.plain) == (first.notes, first.plain)
    assert again.hashes == first.hashes


def _renamed(path: Path) -> Path:
    return path.rename(path.with_name("b.jsonl"))


def _rewritten(path: Path, content: bytes) -> Path:
    """Other content of the same size and time."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    return path


CHANGES: dict[str, Callable[[Path], Any]] = {
    "content": lambda path: load(_rewritten(path, to_jsonl(numbered(40, 80)))),
    "name": lambda path: load(_renamed(path)),
    "a size": lambda path: load(path, train=3),
    "languages": lambda path: load_texts(replace(asked(path), src="en", tgt="de"), World()),
    "place": lambda path: load_texts(replace(asked(path), workdir=Path("other")), World()),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_start_with_another_text_reads_it(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gets what a first start gets."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(to_jsonl(numbered(10, 50)))
    before = load(path)
    changed, opened = starts(lambda: CHANGES[what](path), monkeypatch)
    assert opened
    if what in ("content", "a size", "languages"):
        assert changed.hashes["train"] != before.hashes["train"]
        first = next(iter(changed.splits["train"]))
        assert first["en"] == ("sentence 40" if what == "content" else "sentence 10")
        assert [*first] == (["en", "de"] if what == "languages" else ["de", "en"])


def test_facts_are_whole_or_not_there(tmp_path: Path) -> None:
    """Where one is killed, another begins afresh; where two write, one gives the name."""
    folder = tmp_path / "tokens" / "name"

    def write(content: str, new: Path) -> None:
        assert not folder.exists()
        (new / "file").write_text(content)
        if content == "killed":
            raise KeyboardInterrupt
        if content == "slow":
            made_once(folder, lambda new: write("fast", new))

    with pytest.raises(KeyboardInterrupt):
        made_once(folder, lambda new: write("killed", new))
    assert not folder.parent.exists()
    made_once(folder, lambda new: write("slow", new))
    made_once(folder, lambda new: write("again", new))
    assert (folder / "file").read_text() == "fast"
    assert [*folder.parent.iterdir()] == [folder]
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"/file/name: cannot be written .*File exists"):
        made_once(tmp_path / "file" / "name", lambda _: None)


def _of_a_rank(rank: int, world_size: int, path: Path, folder: Path) -> tuple[Any, int]:
    """What a rank of a host has read or raised, and how often it has read a text to the end."""
    world = World(rank, world_size, rank)

    def pairs_or_error() -> Any:
        try:
            return load_texts(replace(asked(path), workdir=folder), world).hashes
        except UserError as error:
            return str(error)

    with pytest.MonkeyPatch.context() as patch:
        return starts(pairs_or_error, patch)


def test_one_rank_of_a_host_reads_and_all_say_what_is_wrong(ranks: Ranks, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_bytes(to_jsonl(numbered(0, 9)))
    bad.write_bytes(to_jsonl(numbered(0, 9)) + b"{")
    (hashes, ends), *others = ranks.run(_of_a_rank, good, tmp_path / "facts")
    assert len(hashes) == 3 and ends > 0
    assert others == [(hashes, 0)] * len(others) != []
    (error, _), *others = ranks.run(_of_a_rank, bad, tmp_path / "facts")
    assert error.startswith(f"--dataset {bad}: it cannot be read (ValueError: line 10: ")
    assert others == [(error, 0)] * len(others)


# What cannot be used

ROW = '{"de": "Satz", "en": "sentence"}\n'
UNREADABLE = "--dataset {}: it cannot be read ("
NOT_UTF8 = "--dataset {}: it is not UTF-8 ("
SPOILT = [  # a file of the folder above
    ("test.en", "one\ntwo\n", "--dataset {}: test.de has 3 lines and test.en has 2 lines: line i "),
    ("train.de", "eins\nzwei\nfünf\n",
     "--dataset {}/train.de: it is not UTF-8 (invalid start byte in line 3: byte 0xfc); text in "),
    ("train.de", "", "--dataset {}: train.de has 0 lines and train.en has 3 lines: line i "),
    ("test.de", "\n \n \n", "--dataset {}: test has 0 pairs with text on both sides, and a run "),
    ("train.de", "a\n" * 3, "--dataset {}: train has 3 pairs with text on both sides, and a run "),
    ("valid-2.de", "a\n", "--dataset {} --src de --tgt en: it has valid-2.de, and no valid-2.en; "
     "line i of valid-2.de must translate line i of valid-2.en"),
]  # fmt: skip
ALONE = [
    ("a.jsonl", '{"eo": "a", "en": "b"}\n' * 9, "--dataset {}: the columns of its first rows are "
     "eo, en, and none has both de and en; --src and --tgt name them"),
    ("a.jsonl", "\n \n", "--dataset {}: it is empty; "),
    ("a.jsonl", ROW + '{"de": 5, "en": "five"}\n' + ROW, "--dataset {}: row 2 of train: de is 5, "),
    ("a.jsonl", ROW + '{"de": 0, "en": "five"}\n', "--dataset {}: row 2 of train: de is 0, and "),
    ("a.jsonl", ROW + '{"de": "\\ud83d x", "en": "y"}\n', "--dataset {}: row 2 of train: de has "
     "'\\ud83d', half of a letter"),
    ("a.jsonl", ROW * 2 + '{"de": "x", \n' + ROW, UNREADABLE + "ValueError: line 3: "),
    ("a.jsonl", '["x"]\n5\n', "--dataset {}: a row is 5, and not columns by name; "
     '{{"de": "...", "en": "..."}} works'),
    ("a.jsonl", '{"de": "x"}\n{"en": "y"}\n', "--dataset {}: the columns of its first rows are "
     "de, en, and none has both de and en"),
    ("a.jsonl", '{\n  "de": "x"\n}\n', UNREADABLE + "ValueError: line 1: Expecting property name "
     "enclosed in double quotes at column 2 (char 1); a row per line works)"),
    ("a.csv", "\xff\xfed\0e\0,\0e\0n\0", NOT_UTF8 + "invalid start byte in line "
     "1: byte 0xff); text in UTF-8 works, which `iconv -f utf-16 -t utf-8` makes of UTF-16"),
    ("a.jsonl", ROW * 2, "--dataset {}: validation has 0 pairs with text on both "
     "sides, and a run of 1 rank needs 1 or more; more text works"),
    ("a.jsonl", ROW + '{"de": "ü"}', NOT_UTF8),
    ("a.csv", "de,en\n" + "a,b\n" * 3 + "ä,b\n", NOT_UTF8 + "invalid continuation byte in line 5"),
    ("a.csv", 'de,en\na,b\n"A,x\nB,y\n"C,z\n', UNREADABLE + "ValueError: the row that begins in "
     "line 3: ',' expected after '\"'"),
    ("a.csv", 'de,en\na,b\nc,"d\nB,y\n', UNREADABLE + "ValueError: the row that begins in line 3: "
     "unexpected end of data"),
    ("a.csv", "de,en\na,b\nJa, gern,Yes\n", UNREADABLE + "ValueError: the row that begins in "
     "line 3: 3 cells, and the first line has 2"),
    ("a.tsv", "de\ten\na\tb\tc\n", UNREADABLE + "ValueError: the row that begins in line 2: "
     "3 cells"),
    ("a.txt", "vierfünf", NOT_UTF8),
    ("a.txt", " ", "--dataset {}: it has no text to learn"),
    ("a.parquet", "PAR", UNREADABLE + "ArrowInvalid"),
    ("a.pdf", "no text", "--dataset {}: it has neither train.de and train.en, nor a "
     "file that ends in .txt, .jsonl"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "said"), SPOILT)
def test_folders_that_cannot_be_used(folder: Path, name: str, content: str, said: str) -> None:
    (folder / name).write_bytes(content.encode("latin1"))
    error = error_of(folder, 4 if "train has 3 pairs" in said else 1)
    assert error.startswith(said.format(folder)) and NO_NETWORK not in error


@pytest.mark.parametrize(("name", "content", "said"), ALONE)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: str, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode("latin1"))
    assert error_of(path).startswith(said.format(path))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("train.en train.fr", "it has train.en and train.fr, and no train.de; --src fr --tgt en "),
        ("train.de train.it", "it has train.de and train.it, and no train.en; --src de --tgt it "),
        (
            "train.es train.it",
            "it has train.es and train.it, and no train.de or train.en; --src es --tgt it works",
        ),
        ("train.de", "it has train.de, and no train.en; line i of train.de must translate line i "),
        (
            "test.jsonl dev.jsonl",
            "it has no train split, but validation and test; text in a split ",
        ),
        ("val.txt", "it has no train split, but validation; text in a split named train works"),
        ("a.jsonl b.txt", "it has files of 2 kinds, as a.jsonl and b.txt, and text is read from "),
        (
            ".hidden/a.txt LICENSE.txt",
            "nor a file that ends in .txt, .jsonl, .json, .parquet, .csv or .tsv; "
            ".hidden/a.txt is left out: it is empty, hidden, or about the data by its name",
        ),
        (
            "more/train.de more/train.en",
            "; more/train.de is in a folder of its own, which --dataset ",
        ),
    ],
)
def test_a_folder_says_what_was_found(tmp_path: Path, names: str, said: str) -> None:
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(ROW)
    error = error_of(tmp_path)
    assert said in error and error.startswith(f"--dataset {tmp_path}") and NO_NETWORK not in error


def test_places_where_nothing_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in (tmp_path / "none", "none.jsonl", "none.TSV", "./none"):
        said = f"--dataset {missing}: there is no such file or folder{NO_NETWORK}"
        assert error_of(missing) == said
    assert "(OSError: [Errno 36] File name too long" in error_of("x" * 300)
    closed = Mock(side_effect=PermissionError(13, "Permission denied", "this"))
    monkeypatch.setattr("datasets.load_dataset", closed)
    with pytest.raises(UserError, match=rf"{tmp_path}: .*PermissionError: .* denied: 'this'"):
        load_pictures(str(tmp_path), None, None)


# The hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Mock]:
    """Puts something in the place of the datasets library: it answers, or raises, in this order,
    and the last again and again."""

    def answering(*answers: Any) -> Mock:
        rest = iter(answers)
        last = [None]

        def answer(*_: Any, **__: Any) -> Any:
            last[0] = next(rest, last[0])
            if isinstance(last[0], Exception):
                raise last[0]
            return last[0]

        stand_in = Mock(load_dataset=Mock(side_effect=answer))
        monkeypatch.setitem(sys.modules, "datasets", stand_in)
        return stand_in

    return answering


def test_a_dataset_of_the_hub(hub: Callable[..., Mock]) -> None:
    nested = [{"translation": pair} for pair in pairs(numbered(0, 9))]
    found = in_splits([], numbered(10, 13), numbered(20, 22)) | {"train": nested, "other": []}
    hub({split: Dataset.from_list(some) for split, some in found.items()})
    splits = in_memory(load("somebody/iwslt", train=4))
    assert splits == in_splits(numbered(0, 4), numbered(10, 13), numbered(20, 22))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("Couldn't reach\n 'a/b' on the Hub"),
         "--dataset a/b (on the hub): it cannot be read (ConnectionError: Couldn't reach 'a/b' on "
         f"the Hub){NO_NETWORK}"),
        (PermissionError(13, "Permission denied", "/root/.cache/x"),
         "--dataset a/b (on the hub): what is downloaded cannot be written (/root/.cache/x: "
         "Permission denied); HF_HOME=FOLDER in the environment puts it elsewhere"),
    ],
)  # fmt: skip
def test_why_the_hub_gives_nothing(hub: Callable[..., Mock], error: Exception, said: str) -> None:
    hub(error)
    assert error_of("a/b") == said


def test_a_hub_out_of_reach_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own library would wait for half a minute."""
    session = Mock(head=Mock(side_effect=OSError("no network")))
    monkeypatch.setattr("huggingface_hub.get_session", lambda: session)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert "ConnectionError: Couldn't reach 'some/where' on the Hub" in error_of("some/where")
    assert session.head.call_count == 1 and huggingface_hub.constants.HF_HUB_OFFLINE
