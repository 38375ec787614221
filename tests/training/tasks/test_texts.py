"""Whatever --dataset names becomes three lists of pairs, or one line that says what is wrong."""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from datasets import Dataset

from training.launch.errors import RunError, UserError
from training.tasks.any_text import END, AnyTexts, held_out, load_texts
from training.tasks.pictures import load_pictures
from training.tasks.texts import BUILTIN_FOLDER, SPLITS, load_pairs

ALL = {"train": None, "validation": None, "test": None}
NO_NETWORK = "; --dataset builtin needs neither files nor network"
NO = re.escape(NO_NETWORK)
Rows = list[tuple[str, str]]


def load(dataset: object, world_size: int = 1, **sizes: int | None) -> AnyTexts:
    """As train.py reads it; the other programs read the same pairs."""
    found = load_texts(str(dataset), "de", "en", {**ALL, **sizes}, world_size, Path("nowhere"))
    assert not Path("nowhere").exists()  # less than BIG is not copied
    if not found.plain and Path(str(dataset)).exists():
        pairs = load_pairs(str(dataset), "de", "en", {**ALL, **sizes}, world_size)
        assert (pairs.splits, pairs.notes) == (found.splits, found.notes)
        assert pairs.fingerprints() == found.fingerprints()
    return found


def copied(dataset: object, copies: Path, **sizes: int | None) -> AnyTexts:
    """As text larger than memory, with copies in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.tasks.any_text.BIG", 0)
        return load_texts(str(dataset), "de", "en", {**ALL, **sizes}, 1, copies)


def rows_of(texts: AnyTexts) -> dict[str, list[Any]]:
    """Of each split, in memory."""
    return {split: [*rows] for split, rows in texts.splits.items()}


def pairs(rows: Rows) -> list[dict[str, str]]:
    return [{"de": de, "en": en} for de, en in rows]


def in_splits(*rows: Rows) -> dict[str, list[dict[str, str]]]:
    """As train, validation and test."""
    return dict(zip(SPLITS, map(pairs, rows), strict=True))


def numbered(first: int, end: int) -> Rows:
    return [(f"Satz {i}", f"sentence {i}") for i in range(first, end)]


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
    texts = load(folder, world_size=2, validation=2, test=4)
    assert texts.splits == {
        "train": pairs([("eins", "one"), ("zwei\u2028ter\x0cSa\rtz", "two"), ("drei", "three")]),
        "validation": pairs([(f"de validation {i}", f"en validation {i}") for i in range(2)]),
        "test": pairs([(f"de test {i}", f"en test {i}") for i in range(3)]),
    }
    assert texts.notes == ["train: skipped 1 row with an empty text."]


def to_parquet(rows: Rows) -> bytes:
    import datasets

    found = io.BytesIO()
    datasets.Dataset.from_list([{"translation": row} for row in pairs(rows)]).to_parquet(found)
    return found.getvalue()


def to_jsonl(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in pairs(rows)).encode()


WRITERS: dict[str, Callable[[Rows], bytes]] = {
    "jsonl": to_jsonl,
    "json": lambda rows: json.dumps([{"translation": row} for row in pairs(rows)]).encode(),
    "csv": lambda rows: ("id,de,en\n" + "".join(f'7,"{x}","{y}"\n' for x, y in rows)).encode(),
    "tsv": lambda rows: ("en\tde\n" + "".join(f"{y}\t{x}\n" for x, y in rows)).encode(),
    "parquet": to_parquet,
}


@pytest.mark.parametrize("ending", WRITERS)
def test_a_single_file_is_cut_into_splits(tmp_path: Path, ending: str) -> None:
    """Also numbers among texts, and what pandas takes for nothing."""
    path = tmp_path / f"text.{ending}"
    rows = [("None", "NA"), ("001", "1.50"), *numbered(2, 40)]
    path.write_bytes(WRITERS[ending](rows))
    few = load(path, train=30, validation=2, test=3).splits
    assert few == in_splits(rows[:30], rows[35:37], rows[37:])
    texts = load(path, train=30)
    # Validation is a tenth of the 36 that test has left.
    assert texts.splits == in_splits(rows[:30], rows[32:36], rows[36:40])
    assert texts.notes == [
        f"no {split} split: 4 pairs held out from the end of train."
        for split in ("test", "validation")
    ]


def test_files_of_a_folder_are_the_split_that_they_or_their_folders_are_named_after(
    tmp_path: Path,
) -> None:
    (tmp_path / "valid").mkdir()
    for name, rows in (
        ("0.jsonl", numbered(0, 3)),
        ("train-1.jsonl", numbered(3, 5)),
        ("valid/0.jsonl", numbered(10, 12)),
        ("test.jsonl", numbered(20, 23)),
    ):
        (tmp_path / name).write_bytes(to_jsonl(rows))
    (tmp_path / "README.md").write_text("no data")
    texts = load(tmp_path)
    assert texts.splits == in_splits(numbered(0, 5), numbered(10, 12), numbered(20, 23))
    assert texts.notes == []


def test_the_built_in_text_has_no_sentence_twice_and_teaches_every_word() -> None:
    """The words of validation and test are in what a run without --n_train trains on. And it is a
    folder with two languages."""
    splits = load("builtin").splits
    assert splits == load(BUILTIN_FOLDER).splits
    assert {split: len(rows) for split, rows in splits.items()} == {
        "train": 9000, "validation": 1000, "test": 100,
    }  # fmt: skip
    for language in ("de", "en"):
        train, *others = ([pair[language] for pair in splits[split]] for split in SPLITS)
        tested = [sentence for other in others for sentence in other]
        assert len({*train, *tested}) == 10100
        words = [set(re.findall(r"\w+", " ".join(part))) for part in (tested, train[:5000])]
        assert words[0] - words[1] == set()
    assert load_pairs("builtin", "en", "de", {**ALL, "train": 1}, 1).splits["train"]


# Plain text


def test_a_file_holds_documents_and_the_last_lines_are_held_out(tmp_path: Path) -> None:
    lines = [f"line {i:02}\n" for i in range(40)]  # of 8 letters
    text = "".join(lines[:20]) + END + "".join(lines[20:])
    (tmp_path / "a.txt").write_text(text, "utf-8-sig")  # with a byte-order mark
    found = load(tmp_path / "a.txt")
    assert found.plain
    # 315 of 332 letters: in line 37.
    assert found.splits["train"] == ["".join(lines[:20]), "".join(lines[20:38])]
    assert found.splits["validation"] == ["".join(lines[38:])[:-1]]
    assert found.notes == ["no validation split: 5 % of the text is taken from its end."]
    # Without a line that ends there: at a document's end, or at a word.
    assert held_out(["abc def " * 10]) == (["abc def " * 9 + "abc "], ["def"])
    assert held_out(["x" * 100]) == (["x" * 94], ["x" * 6])
    documents = [*["eight by"] * 40, "a line\nand one"]
    assert held_out(documents) == (documents[:39], documents[39:])


def test_a_folder_or_a_column_of_texts(tmp_path: Path, hub: Callable[..., Mock]) -> None:
    for name in ("b", "a", "validation_1", "test"):
        (tmp_path / f"{name}.txt").write_text(f"This is {name}.")
    (tmp_path / "empty.txt").write_text(" \n")
    found = load(tmp_path)
    splits = {"train": ["This is a.", "This is b."], "validation": ["This is validation_1."]}
    assert (found.splits, found.notes) == (splits, ["train: skipped 1 row with an empty text."])
    assert len(set(found.fingerprints().values())) == 2
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    assert load(tmp_path / "a.jsonl").splits == {"train": ["one", "t"], "validation": ["wo"]}
    rows = {"train": [{"text": "one"}, {"text": ""}], "validation": [{"text": "three"}]}
    hub({split: Dataset.from_list(some) for split, some in rows.items()})
    assert load("some/texts").splits == {"train": ["one"], "validation": ["three"]}


# Text larger than memory


@pytest.mark.parametrize("ending", WRITERS)
def test_a_copy_holds_what_is_otherwise_in_memory(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut alike, without rows that have an empty text; ranks get where it is. A second start copies
    nothing, until the file is another."""
    path, folder = tmp_path / f"text.{ending}", tmp_path / "copies"
    rows = [(" \n", "NA"), ("für", "  for you "), ("x", ""), *numbered(2, 40)]
    path.write_bytes(WRITERS[ending](rows))
    small, texts = load(path, train=30), copied(path, folder, train=30)
    on_a_rank = pickle.loads(pickle.dumps(texts))
    for found in (texts, on_a_rank):
        assert (rows_of(found), found.notes) == (small.splits, small.notes)
    assert texts.splits["train"][1:3][1] == small.splits["train"][2]
    assert len(pickle.dumps(copied(path, folder).splits["test"])) < 999
    monkeypatch.setattr("training.tasks.stored.Rows", Mock(side_effect=AssertionError))
    again = copied(path, folder, train=30)
    assert again.fingerprints() == texts.fingerprints() == on_a_rank.fingerprints()
    assert len(set(again.fingerprints().values())) == 3
    path.write_bytes(WRITERS[ending](rows[1:]))
    with pytest.raises(UserError, match="AssertionError"):
        copied(path, folder, train=30)


def test_a_folder_of_lines_and_a_dataset_of_the_hub_are_copied_too(
    folder: Path, tmp_path: Path, hub: Callable[..., Mock]
) -> None:
    """Once each."""
    small, copies = load(folder).splits, tmp_path / "copies"
    rows = {split: Dataset.from_list(list(pairs)) for split, pairs in small.items()}
    hub(rows, rows)
    for dataset, files in ((folder, 1), (folder, 1), ("somebody/iwslt", 2), ("somebody/iwslt", 2)):
        assert rows_of(copied(dataset, copies)) == small
        assert len(list(copies.iterdir())) == files
    with pytest.raises(RunError, match=r"test.de/.*: cannot be written .Not a directory.; make "):
        copied(folder, folder / "test.de")


def test_a_large_file_may_be_one_long_line_of_which_little_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As text8 is, here after short ones. A blank file is no document; one that cannot be read is
    named. Python 3.10 has no hashlib.file_digest."""
    monkeypatch.setattr("training.tasks.any_text.READ", 1 << 14)
    monkeypatch.delattr("hashlib.file_digest", raising=False)
    folder, copies = tmp_path / "folder", tmp_path / "copies"
    folder.mkdir()
    whole = "".join(f"line {i}\n{END * (i % 1500 == 7)}\n" for i in range(9000))
    whole += " ".join(f"wörd{i}" for i in range(60_000))
    (folder / "a.txt").write_text(whole, "utf-8-sig")
    (folder / "b.txt").write_text(" \n")
    found = copied(folder, copies)
    texts = [[*found.documents(split)] for split in ("train", "validation")]
    assert "".join(chain(*texts)) == whole + END
    assert len("".join(texts[1])) == pytest.approx(len(whole) / 20, rel=0.1)
    assert max(map(len, chain(*texts))) < 5000
    assert len(set(found.fingerprints().values())) == 2
    assert found.notes[0] == "train: skipped 1 row with an empty text."
    (folder / "c.txt").mkdir()
    with pytest.raises(UserError, match=r"/c.txt: it cannot be read .IsADirectoryError"):
        copied(folder, copies)


@pytest.mark.parametrize("nothing", [[], [" "]], ids=["no row", "a blank row"])
def test_a_copy_of_a_split_without_text_is_as_good_as_none(
    tmp_path: Path, nothing: list[str], hub: Callable[..., Mock]
) -> None:
    """Plain text needs no test split, and takes its validation from train."""
    texts = {"train": [f"text {i}" for i in range(40)], "validation": nothing, "test": []}
    found = {split: Dataset.from_dict({"text": rows}) for split, rows in texts.items()}
    hub(found, found, found)
    small = load("somebody/text")
    for _ in range(2):  # a second start finds the copies
        large = copied("somebody/text", tmp_path)
        for split in ("train", "validation"):
            assert [*large.documents(split)] == [*small.documents(split)] != []
        assert large.splits.keys() == small.splits.keys()


DOCUMENTS = b"".join(b'{"text": "%d"}\n' % i for i in range(40))


@pytest.mark.parametrize(
    "content", [to_jsonl([("", "x"), *numbered(1, 40)]), DOCUMENTS], ids=["pairs", "documents"]
)
def test_a_second_start_does_not_import_the_readers(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take 140 MB of memory. They are needed again as soon as a split has no copy."""
    folder, copies = tmp_path / "folder", tmp_path / "copies"
    folder.mkdir()
    for name in ("dev", "train-1", "train-2"):
        (folder / f"{name}.jsonl").write_bytes(content)
    first = copied(folder, copies)
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import fails
    again = copied(folder, copies)
    assert again.fingerprints() == first.fingerprints()
    assert (rows_of(again), again.notes, again.plain) == (rows_of(first), first.notes, first.plain)
    (copy,) = copies.glob("*/*/validation")
    shutil.rmtree(copy)
    with pytest.raises(UserError, match=r"it cannot be read .*import of datasets"):
        copied(folder, copies)


# What cannot be used

ROW = '{"de": "Satz", "en": "sentence"}\n'
UNREADABLE = "--dataset {}: it cannot be read ("
NOT_UTF8 = f"{UNREADABLE}UnicodeDecodeError: 'utf-8' codec can't decode byte "
SPOILT = [  # a file of the folder above
    ("test.en", "one\ntwo\n", "--dataset {}: test.de has 3 lines and test.en has 2: line i "),
    ("train.de", "eins\nzwei\nfünf\n", NOT_UTF8.format("{}/train.de") + "0xfc in position 11"),
    ("train.de", "", "--dataset {}: train.de has 0 lines and train.en has 3: line i of one must "),
    ("test.de", "\n \n \n", "--dataset {}: test has 0 pairs with text on both sides, and a run "),
    ("train.de", "a\n" * 3, "--dataset {}: train has 3 pairs with text on both sides, and a run "),
]  # fmt: skip
ALONE = [
    ("a.jsonl", '{"eo": "a", "en": "b"}\n' * 9, "--dataset {}: its columns are eo, en, and not de "
     "and en; --src and --tgt name them"),
    ("a.jsonl", "\n \n", "--dataset {}: it is empty; "),
    ("a.jsonl", ROW + '{"de": 5, "en": "five"}\n' + ROW, "--dataset {}: row 2 of train: de is 5, "),
    ("a.jsonl", ROW * 2 + '{"de": "x", \n' + ROW, UNREADABLE + "ArrowInvalid: JSON parse error"),
    ("a.jsonl", ROW * 2, "--dataset {}: validation has 0 pairs with text on both "
     "sides, and a run of 1 rank needs 1 or more; a larger --n_validation"),
    ("a.jsonl", ROW + '{"de": "ü"}', NOT_UTF8),
    ("a.csv", "de,en\n" + "ä,b\n" * 20, NOT_UTF8),
    ("a.txt", "vierfünf", NOT_UTF8),
    ("a.txt", "h", "--dataset {}: it has too little text for two parts"),
    ("a.pdf", "no text", "--dataset {}: no train.de and train.en there, nor any of .txt .jsonl "),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "said"), SPOILT)
def test_folders_that_cannot_be_used(folder: Path, name: str, content: str, said: str) -> None:
    (folder / name).write_bytes(content.encode("latin1"))
    assert error_of(folder, 4 if "train has 3 pairs" in said else 1).startswith(said.format(folder))


@pytest.mark.parametrize(("name", "content", "said"), ALONE)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: str, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode("latin1"))
    assert error_of(path).startswith(said.format(path))


def test_places_where_nothing_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in (tmp_path / "none", "none.jsonl", "./none"):
        said = f"--dataset {missing}: there is no such file or folder{NO_NETWORK}"
        assert error_of(missing) == said
    assert "(OSError: [Errno 36] File name too long" in error_of("x" * 300)
    closed = Mock(side_effect=PermissionError(13, "Permission denied", "this"))
    monkeypatch.setattr("datasets.load_dataset", closed)
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "a.txt").write_text("text")
    for read in (load, lambda folder: load_pictures(folder, None, None)):
        with pytest.raises(UserError, match=f"{inner}: .*PermissionError: .* denied: 'this'.*{NO}"):
            read(str(inner))


# The hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Mock]:
    """Puts something in the place of the datasets library: it answers, or raises, in this order."""

    def answering(*answers: Any) -> Mock:
        stand_in = Mock(load_dataset=Mock(side_effect=answers))
        monkeypatch.setitem(sys.modules, "datasets", stand_in)
        return stand_in

    return answering


def test_a_dataset_of_the_hub(hub: Callable[..., Mock]) -> None:
    nested = [{"translation": pair} for pair in pairs(numbered(0, 9))]
    found = in_splits([], numbered(10, 13), numbered(20, 22)) | {"train": nested, "other": []}
    rows = {split: Dataset.from_list(some) for split, some in found.items()}
    hub(rows, ConnectionError("Couldn't reach\n 'a/b' on the Hub"))
    splits = load("somebody/iwslt", train=4).splits
    assert splits == in_splits(numbered(0, 4), numbered(10, 13), numbered(20, 22))
    assert error_of("a/b") == (
        "--dataset a/b (on the hub): it cannot be read (ConnectionError: Couldn't reach 'a/b' on "
        "the Hub)" + NO_NETWORK
    )
