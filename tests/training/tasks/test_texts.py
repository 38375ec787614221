"""Whatever --dataset names becomes splits of examples, or one line that says what is wrong."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest

from tests.ranks import Ranks
from training.launch.errors import RunError, UserError
from training.launch.world import World
from training.options import Options
from training.tasks import text_files
from training.tasks.language import LanguageTask
from training.tasks.text_files import BUILTIN_FOLDER, END, rows_of_files, text_lines
from training.tasks.texts import SPLITS, Texts, load_texts, made_once
from training.tasks.tokens import get_tokenizer, tokenizer_files
from training.tasks.translation import TranslationTask

NO_NETWORK = "; --dataset builtin needs neither files nor network"
Rows = list[tuple[str, str]]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, where run/ has what later starts need not read again."""
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))


def asked(dataset: object, dp: int = 1, **sizes: int | None) -> Options:
    """The options of a run."""
    n: Any = {f"n_{split}": size for split, size in sizes.items()}
    return Options(dataset=str(dataset), workdir=Path("run"), dp=dp, model="gpt2-mini", **n)


def texts_of(dataset: object) -> Texts:
    return load_texts(asked(dataset), World())


def load(dataset: object, dp: int = 1, **sizes: int | None) -> TranslationTask:
    """As the programs read it."""
    args = asked(dataset, dp, **sizes)
    return TranslationTask(args, World(), load_texts(args, World(), translates=True))


def in_memory(task: TranslationTask) -> dict[str, list[dict[str, str]]]:
    """The pairs of each split, from their tokens. Those of test are kept as text, too."""
    decode, found = task.tokenizer.decode, dict[str, list[dict[str, str]]]()
    for split, examples in task.examples.items():
        sides = ((e.ids[: e.num_source - 1], e.ids[e.num_source : -1]) for e in examples)
        texts = [(decode(source), decode(target)) for source, target in sides]
        found[split] = [dict(zip(task.texts.keys, both, strict=True)) for both in texts]
    assert task.scored_examples() == found["test"]
    return found


def documents(texts: Texts) -> dict[str, list[str]]:
    """Of plain text; `END` stands in no document here."""
    whole = ("".join(END if p is None else p for p in texts.pieces(s)) for s in texts.splits)
    return {split: text.split(END)[:-1] for split, text in zip(texts.splits, whole, strict=True)}


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
    (folder / "train.de.bak").write_text("old\n")  # a copy is no language
    texts = load(folder, dp=2, validation=2, test=4)
    assert in_memory(texts) == {
        "train": pairs([("eins", "one"), ("zwei\u2028ter\x0cSa\rtz", "two"), ("drei", "three")]),
        "validation": pairs([(f"de validation {i}", f"en validation {i}") for i in range(2)]),
        "test": pairs([(f"de test {i}", f"en test {i}") for i in range(3)]),
    }
    which = "test is test.de, test.en; train is train.de, train.en"
    assert texts.notes == [
        f"{which}; validation is validation.de, validation.en; not read: train.de.bak.",
        "train: skipped 1 row without text on both sides.",
        "validation: the first 2 pairs (--n_validation).",
    ]


@pytest.mark.parametrize(
    "inside", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\ufeff"]
)
def test_a_line_ends_at_a_newline_alone(tmp_path: Path, inside: str) -> None:
    """Or at CR and newline. A byte-order mark at the beginning is no text."""
    content = f"\ufeffa{inside}b\r\n\n c{inside}d\ne{inside}".encode()
    assert [*text_lines(io.BytesIO(content))] == [f"a{inside}b", "", f" c{inside}d", f"e{inside}"]
    row = {"de": f"x{inside}y", "en": "z"}
    tables = {"csv": f'\ufeffde,en\r\n"{row["de"]}","z"'}
    if inside != "\r":  # in TSV an error
        tables["tsv"] = f"\ufeffde\ten\r\n{row['de']}\tz\r\n"
    if inside >= " ":  # JSON has no other
        tables["jsonl"] = f"\ufeff{json.dumps(row, ensure_ascii=False)}\r\n\r\n"
    for ending, table in tables.items():
        path = tmp_path / f"a.{ending}"
        path.write_bytes(table.encode())
        assert rows_of(path) == [row]


def as_dataset(rows: list[Any]) -> Any:
    """A data set of the library, which takes seconds to import: not in every worker."""
    from datasets import Dataset

    return Dataset.from_list(rows)


def to_parquet(rows: Rows) -> bytes:
    found = io.BytesIO()
    as_dataset([{"translation": row} for row in pairs(rows)]).to_parquet(found)
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
    "csv": ("a.csv", table('7,"{x}","{y}"\n', '"id, no.","de",en\n')),
    "csv, a blank after the comma": ("a.csv", table('"{x}", "{y}"\n', "de, en\n")),
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
    assert {split: len(rows) for split, rows in texts.examples.items()} == {
        "train": 7, "validation": 1, "test": 1,
    }  # fmt: skip
    assert in_memory(texts)["test"] == [{"de": "de test 2", "en": "en test 2"}]


FOLDERS = [  # names of files with a pair or a text of their own, and which files are which split
    ("0.jsonl valid/train-1.jsonl valid/0.jsonl test.jsonl README.jsonl",
     {"train": ["0.jsonl", "valid/train-1.jsonl"], "validation": ["valid/0.jsonl"],
      "test": ["test.jsonl"]}),
    ("a.txt contest.txt devils.txt testament.txt training.txt valid_8.txt dev2.txt",
     {"train": ["a.txt", "contest.txt", "devils.txt", "testament.txt", "training.txt"],
      "validation": ["dev2.txt", "valid_8.txt"]}),
    ("train-00000-of-00002.jsonl test_2016_flickr.jsonl newstest2014-deen.jsonl wmt_test.jsonl "
     "test2016.jsonl valid_1.jsonl tst-2.jsonl dev/a.jsonl", {
         "train": ["train-00000-of-00002.jsonl"], "validation": ["dev/a.jsonl", "valid_1.jsonl"],
         "test": ["newstest2014-deen.jsonl", "test2016.jsonl", "test_2016_flickr.jsonl",
                  "tst-2.jsonl", "wmt_test.jsonl"]}),
    ("trainset.jsonl devset.jsonl testset.jsonl newsdiscusstest2015-enfr.jsonl "
     "newsdiscussdev2015-enfr.jsonl", {
        "train": ["trainset.jsonl"],
        "validation": ["devset.jsonl", "newsdiscussdev2015-enfr.jsonl"],
        "test": ["newsdiscusstest2015-enfr.jsonl", "testset.jsonl"]}),
    ("book.txt .ipynb_checkpoints/book-checkpoint.txt .book.txt sub/.#book.txt book.txt~ val.txt",
     {"train": ["book.txt"], "validation": ["val.txt"]}),
    ("corpus.jsonl LICENSE.txt Readme.txt DEV.jsonl test.jsonl sub/train.de sub/train.en",
     {"train": ["corpus.jsonl"], "validation": ["DEV.jsonl"], "test": ["test.jsonl"]}),
    ("1/2/a.jsonl dev/2/b.jsonl test/2/3/c.jsonl 1/.2/d.jsonl",
     {"train": ["1/2/a.jsonl"], "validation": ["dev/2/b.jsonl"], "test": ["test/2/3/c.jsonl"]}),
]  # fmt: skip


@pytest.mark.parametrize(("names", "expected"), FOLDERS, ids=[names for names, _ in FOLDERS])
def test_the_files_of_a_folder(tmp_path: Path, names: str, expected: dict[str, list[str]]) -> None:
    """A whole name says a split. Hidden files and folders, copies of editors, README and LICENSE
    are none; those above say nothing. The run says which file is which split."""
    folder = tmp_path / ".cache" / "test"
    for name in names.split():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(name if ".txt" in name else json.dumps({"de": name, "en": "x"}))
    texts = texts_of(folder)
    if texts.plain:
        assert documents(texts) == expected
    else:
        found = {split: [pair["de"] for pair in texts.pairs(split)] for split in texts.splits}
        assert found == expected
    (said,) = texts.source.notes
    for split, files in expected.items():
        first = ", ".join(name.split("/")[-1] for name in files[:3])
        assert f"{split} is {first}" + " and 2 more" * (len(files) == 5) in said


def test_a_name_of_two_splits_is_refused_and_a_packed_one_is_told(tmp_path: Path) -> None:
    for name in ("a.jsonl", "dev.jsonl.gz", "b.jsonl.zst"):
        (tmp_path / name).write_text(json.dumps({"de": "x", "en": "y"}))
    assert texts_of(tmp_path).source.notes == [
        "train is a.jsonl; not read: b.jsonl.zst, dev.jsonl.gz."
    ]
    (tmp_path / "train_test.jsonl").touch()
    with pytest.raises(UserError, match=r"train_test.jsonl may be test or train, .* test-1.jsonl"):
        texts_of(tmp_path)


def test_the_built_in_text_has_no_sentence_twice_and_teaches_every_word() -> None:
    """The words of validation and test are in what a run without --n_train trains on. And it is a
    folder with two languages."""
    texts, folder = texts_of("builtin"), texts_of(BUILTIN_FOLDER)
    splits = {split: [*texts.pairs(split)] for split in SPLITS}
    assert splits == {split: [*folder.pairs(split)] for split in SPLITS}
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
    texts = texts_of(tmp_path / "a.txt")
    assert documents(texts) == {"train": ["one\n\ntwo ", " three"]}
    assert (texts.source.notes, texts.skipped) == ([], 0)
    (tmp_path / "a.txt").write_text("one", "utf-16")
    with pytest.raises(UserError, match=r"cannot be read .*; text in UTF-8 works$"):
        documents(texts_of(tmp_path / "a.txt"))


def test_a_column_of_texts(tmp_path: Path, hub: Callable[..., Mock]) -> None:
    """In which `END` is text as any other."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    args = replace(asked(path), model_max_length=2)
    task = LanguageTask(args, World(), load_texts(args, World()))
    assert documents(task.texts) == {"train": ["one", "two"]}
    assert task.notes[0] == "train: skipped 1 row without text."
    rows = {"train": [{"text": "one"}, {"text": f"a{END}b"}], "validation": [{"text": "three"}]}
    hub({split: as_dataset(some) for split, some in rows.items()})
    texts = texts_of("some/texts")
    assert [*texts.pieces("train")] == ["one", None, f"a{END}b", None]
    assert [*texts.pieces("validation")] == ["three", None]


def test_a_large_file_may_be_one_long_line_of_which_little_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As text8 is, here after short ones, with `END` and CRLF where a part that is read ends."""
    monkeypatch.setattr("training.tasks.text_files.READ", 5003)
    whole = "".join(f"line {i}\r\n{END * (i % 1500 == 7)}\r\n" for i in range(4000))
    whole += " ".join(f"wörd{i}" for i in range(30_000))
    (tmp_path / "a.txt").write_text(whole, "utf-8-sig", newline="")
    texts = texts_of(tmp_path)
    train = [*texts.pieces("train")]
    assert len(train) == texts.size("train")
    text = "".join(END if piece is None else piece for piece in train[:-1])
    assert text == whole.replace("\r\n", "\n") and train[-1] is None
    assert max(len(piece or "") for piece in train) < 5003


# A second start


def starts(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str], int]:
    """The task of a start, what it has made of the text, and how many files it has read to the
    end."""
    made, reads = list[str](), list[Any]()
    real = text_files.rows_of_files

    def counting(dataset: str, keys: Any, groups: Any) -> Any:
        yield from real(dataset, keys, groups)
        reads.append(groups)

    with monkeypatch.context() as patch:
        patch.setattr(text_files, "rows_of_files", counting)
        for name in ("encoded", "train_tokenizer"):
            method = getattr(TranslationTask, name)

            def noting(task: TranslationTask, argument: Any, method: Any = method) -> Any:
                made.append(argument if isinstance(argument, str) else "tokenizer")
                return method(task, argument)

            patch.setattr(TranslationTask, name, noting)
        return make(), made, len(reads)


ALL = ["tokenizer", *SPLITS]
CHANGES: dict[str, tuple[dict[str, Any], list[str]]] = {  # options, and what is made anew
    "nothing": ({}, []),
    "the length, at which pairs are cut later": ({"model_max_length": 61}, []),
    "vocabulary": ({"vocab_size": 262}, ALL),
    "sizes": ({"n_train": 2, "n_test": 2}, ALL),
    "languages": ({"src": "en", "tgt": "de"}, ALL),
    "place": ({"workdir": Path("other")}, ALL),
    "content": ({}, ALL),
    "name": ({"dataset": "renamed"}, ALL),
    "files of a tokenizer": ({}, [*SPLITS]),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_second_start_takes_what_the_first_has_made_of_the_same(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it reads nothing. It gets what a first start gets."""
    for split in SPLITS:
        (tmp_path / f"{split}.jsonl").write_bytes(to_jsonl(numbered(0, 3)))
    files: dict[str, bytes] | None = None

    def start(args: Options) -> TranslationTask:
        return TranslationTask(args, World(), load_texts(args, World()), files)

    args = asked(tmp_path)
    first, made, reads = starts(lambda: start(args), monkeypatch)
    assert made == ALL and reads > 0
    options, expected = CHANGES[what]
    changed = replace(args, **options)
    if what == "content":  # of the same size and time
        path = tmp_path / "validation.jsonl"
        before = path.stat()
        path.write_bytes(to_jsonl(numbered(3, 6)))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif what == "name":
        tmp_path.rename(changed.dataset)
    elif what == "files of a tokenizer":  # of a checkpoint
        get_tokenizer(pairs([("aaaa", "bbbb")] * 3), 280, "de", "en", Path("of"))
        files = tokenizer_files(Path("of"))
    again, made, reads = starts(lambda: start(changed), monkeypatch)
    assert made == expected and (reads > 0) == bool(expected)
    anew = start(replace(changed, workdir=Path("anew")))
    assert in_memory(again) == in_memory(anew)
    assert (again.notes, again.fingerprints()) == (anew.notes, anew.fingerprints())
    kept = {"name", "place", "languages", "vocabulary", "files of a tokenizer"}
    assert (in_memory(again) == in_memory(first)) == (not expected or what in kept)


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
    assert [*folder.parent.iterdir()] == []
    made_once(folder, lambda new: write("slow", new))
    made_once(folder, lambda new: write("again", new))
    assert (folder / "file").read_text() == "fast"
    assert [*folder.parent.iterdir()] == [folder]
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"/file/name: cannot be written .*File exists"):
        made_once(tmp_path / "file" / "name", lambda _: None)


def _of_a_rank(rank: int, world_size: int, path: Path, folder: Path) -> tuple[Any, int]:
    """What a rank of a host has read or raised, and how often it has read a text to the end."""
    world, args = World(rank, world_size, rank), replace(asked(path), workdir=folder)

    def made_or_error() -> Any:
        try:
            return TranslationTask(args, world, load_texts(args, world)).fingerprints()
        except UserError as error:
            return str(error)

    with pytest.MonkeyPatch.context() as patch:
        found, _, reads = starts(made_or_error, patch)
        return found, reads


def test_one_rank_of_a_host_reads_and_all_say_what_is_wrong(ranks: Ranks, tmp_path: Path) -> None:
    """One that counts pairs, and then makes tokens. The reading for a tokenizer does not come to
    the end: what is held out is there."""
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_bytes(to_jsonl(numbered(0, 9)))
    bad.write_bytes(to_jsonl(numbered(0, 9)) + b"{")
    (hashes, ends), *others = ranks.run(_of_a_rank, good, tmp_path / "facts")
    assert len(hashes) == 1 and ends == 2
    assert others == [(hashes, 0)] * len(others) != []
    (error, _), *others = ranks.run(_of_a_rank, bad, tmp_path / "facts")
    assert error.startswith(f"--dataset {bad}: it cannot be read (ValueError: line 10, column ")
    assert others == [(error, 0)] * len(others)


# What cannot be used

ROW = '{"de": "Satz", "en": "sentence"}\n'
UNREADABLE = "--dataset {}: it cannot be read ("
NO_TEXT = "--dataset {}: none of the first rows has both de and en, but "
UNUSABLE = [  # a file of the folder above, or one alone
    ("test.en", "one\ntwo\n", "--dataset {}: test.en has 2 lines, and test.de has more: line i "),
    ("train.de", "eins\nzwei\nfünf\n",
     "--dataset {}/train.de: it cannot be read (UnicodeDecodeError: 'utf-8' codec can't decode "
     "byte 0xfc in position 1: invalid start byte in line 3); text in UTF-8 works"),
    ("train.de", "", "--dataset {}: train.de has 0 lines, and train.en has more: line i "),
    ("test.de", "\n \n \n", "--dataset {}: test has 0 pairs with text on both sides, and a run "),
    ("train.de", "a\n" * 3, "--dataset {}: train has 3 pairs with text on both sides, and a run "),
    ("a.jsonl", '{"eo": "a", "en": "b"}\n' * 9, NO_TEXT + "eo, en; --src and --tgt name the "),
    ("a.jsonl", "\n \n", "--dataset {}: it is empty, or its rows have no columns; "),
    ("a.jsonl", ROW + '{"de": 5, "en": "five"}\n' + ROW, "--dataset {}: row 2 of train: de is 5, "),
    ("a.jsonl", ROW + '{"de": 0, "en": "five"}\n', "--dataset {}: row 2 of train: de is 0, and "),
    ("a.jsonl", ROW + '{"de": "\\ud83d x", "en": "y"}\n', "--dataset {}: row 2 of train: de is "
     "'\\ud83d x', and not a string of valid Unicode"),
    ("a.jsonl", '5\n["x"]\n', "--dataset {}: it is empty, or its rows have no columns; "),
    ("a.jsonl", '{\n  "de": "x"\n}\n', UNREADABLE + "ValueError: line 1, column 2: Expecting "
     "property name enclosed in double quotes; a row per line works)"),
    ("a.jsonl", ROW * 2, "--dataset {}: validation has 0 pairs with text on both "
     "sides, and a run of 1 rank needs 1 or more; more text works"),
    ("a.csv", 'de,en\na,b\n"A,x\nB,y\n"C,z\n', UNREADABLE + "ValueError: the row that begins in "
     "line 3: ',' expected after '\"'"),
    ("a.csv", "de,en\na,b\nJa, gern,Yes\n", UNREADABLE + "ValueError: the row that begins in "
     "line 3: 3 cells, and the first line has 2"),
    ("a.tsv", "de\ten\na\rb\tc\n", UNREADABLE + "ValueError: the row that begins in line 2: "
     "new-line character"),
    ("a.parquet", "PAR", UNREADABLE + "ArrowInvalid"),
    ("a.pdf", "no text", "--dataset {}: text is read from train.de and train.en (see --src and "
     "--tgt), or from files of one kind, .txt, .jsonl, "),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "said"), UNUSABLE)
def test_what_cannot_be_used(folder: Path, name: str, content: str, said: str) -> None:
    (folder / name).write_bytes(content.encode("latin1"))
    dataset = folder if name.endswith((".de", ".en")) else folder / name
    error = error_of(dataset, 4 if "train has 3 pairs" in said else 1)
    assert error.startswith(said.format(dataset)) and NO_NETWORK not in error


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("train.en train.fr", "it has train.en, and no train.de, in which line i translates its"),
        ("train.de train.it", "it has train.de, and no train.en, in which line i translates its"),
        ("train.es train.it", "text is read from train.de and train.en (see --src and --tgt), or "),
        (
            "test.jsonl dev.jsonl",
            "it has no train split, but validation and test; text in a split ",
        ),
        ("a.jsonl b.txt", ".csv or .tsv; it has .jsonl and .txt"),
        (".hidden/a.txt LICENSE.txt more/train.de", ".csv or .tsv; it has no such file"),
        ("train.jsonl.gz", "; it has no such file; unpack train.jsonl.gz, and it works"),
    ],
)
def test_a_folder_says_what_was_found(tmp_path: Path, names: str, said: str) -> None:
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(ROW)
    error = error_of(tmp_path)
    assert said in error and error.startswith(f"--dataset {tmp_path}") and NO_NETWORK not in error


def test_places_where_nothing_can_be_read(tmp_path: Path) -> None:
    for missing in (tmp_path / "none", "none.jsonl", "none.TSV", "./none"):
        said = f"--dataset {missing}: there is no such file or folder{NO_NETWORK}"
        assert error_of(missing) == said
    assert "(OSError: [Errno 36] File name too long" in error_of("x" * 300)


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
    hub({split: as_dataset(some) for split, some in found.items()})
    splits = in_memory(load("somebody/iwslt", train=4))
    assert splits == in_splits(numbered(0, 4), numbered(10, 13), numbered(20, 22))


def test_why_the_hub_gives_nothing(hub: Callable[..., Mock]) -> None:
    hub(ConnectionError("Couldn't reach\n 'a/b' on the Hub"))
    reason = "ConnectionError: Couldn't reach 'a/b' on the Hub"
    assert (
        error_of("a/b") == f"--dataset a/b (on the hub): it cannot be read ({reason}){NO_NETWORK}"
    )


def test_a_hub_out_of_reach_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own library would wait for half a minute."""
    session = Mock(head=Mock(side_effect=OSError("no network")))
    monkeypatch.setattr("huggingface_hub.get_session", lambda: session)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert "ConnectionError: Couldn't reach 'some/where' on the Hub" in error_of("some/where")
    assert session.head.call_count == 1 and huggingface_hub.constants.HF_HUB_OFFLINE
