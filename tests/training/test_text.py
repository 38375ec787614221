"""Whatever --dataset names becomes three lists of pairs, or one line that says what is wrong."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from training.errors import UserError
from training.pictures import load_pictures
from training.text import BUILTIN_FOLDER, END, SPLITS, Texts, held_out, load_texts

ALL = {"train": None, "validation": None, "test": None}
NO_NETWORK = "; --dataset builtin needs neither files nor network"
Rows = list[tuple[str, str]]


def load(dataset: object, world_size: int = 1, **sizes: int | None) -> Texts:
    return load_texts(str(dataset), "de", "en", {**ALL, **sizes}, world_size)


def pairs(rows: Rows) -> list[dict[str, str]]:
    return [{"de": de, "en": en} for de, en in rows]


def numbered(first: int, end: int) -> Rows:
    return [(f"Satz {i}", f"sentence {i}") for i in range(first, end)]


def error_of(*args: Any, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        load(*args, **options)
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
    """A byte-order mark, CRLF, no newline at the end; U+2028 and a form feed are no line ends."""
    (folder / "train.de").write_bytes(
        b"\xef\xbb\xbferster Satz\r\nzwei\xe2\x80\xa8ter\x0cSatz\r\ndritter"
    )
    texts = load(folder, world_size=3)
    german = ["erster Satz", "zwei\u2028ter\x0cSatz", "dritter"]
    assert texts.splits == {
        "train": pairs([(de, f"en train {i}") for i, de in enumerate(german)]),
        "validation": pairs([(f"de validation {i}", f"en validation {i}") for i in range(3)]),
        "test": pairs([(f"de test {i}", f"en test {i}") for i in range(3)]),
    }
    assert texts.notes == []


def test_empty_pairs_are_skipped_and_sizes_are_upper_limits(folder: Path) -> None:
    (folder / "train.de").write_text("a\n\nc\n \ne\n")
    (folder / "train.en").write_text("A\nB\n\t\nD\nE\n")
    texts = load(folder, validation=2, test=4)
    assert texts.splits["train"] == pairs([("a", "A"), ("e", "E")])
    assert [len(texts.splits[split]) for split in SPLITS] == [2, 2, 3]
    assert texts.notes == ["train: skipped 3 rows with an empty text."]


def to_parquet(rows: Rows) -> bytes:
    import io

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
    """All of it is text, also numbers, and what pandas takes for nothing."""
    path = tmp_path / f"text.{ending}"
    rows = [("None", "NA"), ("001", "1.50"), *numbered(2, 40)]
    path.write_bytes(WRITERS[ending](rows))
    texts = load(path, train=30)
    assert (
        texts.splits
        == {
            "train": pairs(rows[:30]),
            "validation": pairs(rows[32:36]),  # a tenth of the 36 that test has left
            "test": pairs(rows[36:40]),
        }
    )
    assert texts.notes == [
        "no test split: the last 4 pairs are taken out of train.",
        "no validation split: the last 4 pairs are taken out of train.",
    ]


@pytest.mark.parametrize(
    "names",
    [
        ("0.jsonl", "train-1.jsonl", "dev.jsonl", "test.jsonl"),
        ("train/0.jsonl", "train/1.jsonl", "valid/0.jsonl", "test/0.jsonl"),
    ],
)
def test_files_of_a_folder_are_the_split_they_are_named_after(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    rows = [numbered(0, 3), numbered(3, 5), numbered(10, 12), numbered(20, 23)]
    for name, part in zip(names, rows, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(to_jsonl(part))
    (tmp_path / "README.md").write_text("no data")
    texts = load(tmp_path)
    expected = [numbered(0, 5), numbered(10, 12), numbered(20, 23)]
    assert texts.splits == dict(zip(SPLITS, map(pairs, expected), strict=True))
    assert texts.notes == []


def test_the_built_in_text_is_a_folder_with_two_languages() -> None:
    texts = load("builtin")
    assert (texts.splits, texts.notes) == (load(BUILTIN_FOLDER).splits, [])
    assert load_texts("builtin", "en", "de", {**ALL, "train": 1}, 1).splits["train"]
    for tgt, said in (
        ("fr", r"is no train.fr \(found: train.de, t"),
        ("de", "as --src de --tgt en$"),
    ):
        with pytest.raises(UserError, match=f"--src de --tgt {tgt}: .*{said}"):
            load_texts("builtin", "de", tgt, {**ALL}, 1)


@pytest.mark.parametrize("language", ["de", "en"])
def test_the_built_in_text_has_no_sentence_twice_and_teaches_every_word(language: str) -> None:
    """The words of validation and test are in what a run without --n_train trains on."""
    splits = load("builtin").splits
    train, validation, test = ([pair[language] for pair in splits[split]] for split in SPLITS)
    assert (len(train), len(validation), len(test)) == (9000, 1000, 100)
    assert len({*train, *validation, *test}) == 10100
    of = (train[:5000], validation + test)
    known, tested = (set(re.findall(r"\w+", " ".join(sentences))) for sentences in of)
    assert tested - known == set()


# What cannot be used

ROW = '{"de": "Satz", "en": "sentence"}\n'
NOTHING = "--dataset {}: it holds nothing that can be read"
NOT_UTF8 = "--dataset {}: it is not UTF-8 ('utf-8' codec can't decode byte "
OF_FOLDER = [
    ("test.en", "one\ntwo\n", "--dataset {}: test.de has 3 lines and test.en has 2: line i of one"),
    ("train.de", "eins\nzwei\nfünf\n", "--dataset {}/train.de: it is not UTF-8 ('utf-8' codec "
     "can't decode byte 0xfc in position 11: invalid start byte); convert it, for example: iconv"),
    ("train.de", "a\n" * 3, "--dataset {}: train has 3 pairs for 4 ranks, and each rank needs one"),
    ("train.de", "\n" * 3, "--dataset {}: train has 0 pairs for 1 ranks"),
]  # fmt: skip
OF_FILE = [
    ("a.jsonl", '{"eo": "a", "en": "b"}\n' * 9, "--dataset {}: its columns are eo, en, and not de "
     "and en; --src and --tgt name them"),
    ("a.jsonl", '{"translation": 5}\n', "--dataset {}: its columns are translation, and not de"),
    ("a.jsonl", "\n \n", "--dataset {}: its columns are none"),
    ("a.jsonl", ROW + '{"de": 5, "en": "five"}\n' + ROW, "--dataset {}: row 2 of train: de is 5, "),
    ("a.jsonl", '{"text": "a"}\n{"text": 5}\n', "--dataset {}: row 2 of train: text is 5, and not"),
    ("a.jsonl", ROW * 2 + '{"de": "x", \n' + ROW, NOTHING + " (ArrowInvalid: JSON parse error"),
    ("a.parquet", "no parquet", NOTHING + " (ArrowInvalid: Parquet"),
    ("a.jsonl", ROW * 2, "--dataset {}: validation has 0 pairs for 1 ranks"),
    ("a.jsonl", ROW + '{"de": "ü"}', NOT_UTF8),
    ("a.csv", "de,en\n" + "ä,b\n" * 20, NOT_UTF8),
    ("a.txt", "vierfünf", NOT_UTF8),
    ("a.txt", "\n \n", "--dataset {}: it has too little text for two parts"),
    ("a.txt", "h", "--dataset {}: it has too little text for two parts"),
    ("a.pdf", "no text", "--dataset {}: no train.de and train.en there, nor any of .txt .jsonl "),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "said"), OF_FOLDER)
def test_folders_that_cannot_be_used(folder: Path, name: str, content: str, said: str) -> None:
    (folder / name).write_bytes(content.encode("latin1"))
    ranks = 4 if "4 ranks" in said else 1
    assert error_of(folder, ranks).startswith(said.format(folder))


@pytest.mark.parametrize(("name", "content", "said"), OF_FILE)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: str, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode("latin1"))
    assert error_of(path).startswith(said.format(path))


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="has no such permissions")
@pytest.mark.parametrize("read", [load, lambda folder: load_pictures(folder, None, None, 0)])
def test_what_may_not_be_read(read: Callable[[str], object]) -> None:
    with tempfile.TemporaryDirectory() as name:  # others may not enter pytest's folders
        inner = Path(name) / "inner"
        inner.mkdir(mode=0)
        Path(name).chmod(0o755)
        user = os.geteuid()
        os.seteuid(user or 65534)
        try:
            with pytest.raises(UserError) as error:
                read(str(inner))
        finally:
            os.seteuid(user)
            inner.chmod(0o755)
    assert str(error.value).startswith(f"--dataset {inner}: {inner}")
    assert str(error.value).endswith(f" cannot be read (Permission denied){NO_NETWORK}")


def test_places_with_nothing_to_read(tmp_path: Path) -> None:
    for missing in (tmp_path / "none", "none.jsonl", "./none"):
        said = f"--dataset {missing}: there is no such file or folder{NO_NETWORK}"
        assert error_of(missing) == said
    (tmp_path / "train.de").touch()
    assert error_of(tmp_path) == (
        f"--dataset {tmp_path} --src de --tgt en: there is no train.en (found: train.de); "
        "--src and --tgt are the endings of the files"
    )
    assert "(File name too long)" in error_of("x" * 300)


# The hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Mock]:
    """Puts something in the place of the datasets library: it answers, or raises, in this order."""

    def answering(*answers: Any) -> Mock:
        stand_in = Mock(load_dataset=Mock(side_effect=answers), config=Mock(HF_HUB_OFFLINE=False))
        monkeypatch.setitem(sys.modules, "datasets", stand_in)
        monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])  # the hub's name resolves
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        return stand_in

    return answering


FOUND = {
    "train": [{"translation": pair} for pair in pairs(numbered(0, 9))],
    "validation": pairs(numbered(10, 13)),
    "test": pairs(numbered(20, 22)),
    "other": [],
}


def test_a_dataset_of_the_hub(hub: Callable[..., Mock]) -> None:
    hub(FOUND, ConnectionError("Couldn't reach\n 'a/b' on the Hub"))
    assert load("somebody/iwslt", train=4).splits == {
        "train": pairs(numbered(0, 4)),
        "validation": pairs(numbered(10, 13)),
        "test": pairs(numbered(20, 22)),
    }
    assert error_of("a/b") == (
        "--dataset a/b: it is no local path, and the hub has none (ConnectionError: Couldn't reach "
        f"'a/b' on the Hub){NO_NETWORK}"
    )


def test_a_hub_whose_name_does_not_resolve_is_not_waited_for(
    hub: Callable[..., Mock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where a proxy resolves names."""
    from huggingface_hub import constants

    stand_in = hub(FOUND, FOUND, FOUND)
    unknown = Mock(side_effect=OSError("Name or service not known"))
    for look_up, proxies in ((Mock(), {}), (unknown, {"https": "a proxy"}), (unknown, {})):
        assert not constants.HF_HUB_OFFLINE and not stand_in.config.HF_HUB_OFFLINE
        monkeypatch.setattr("socket.getaddrinfo", look_up)
        monkeypatch.setattr("training.text.getproxies", lambda found=proxies: found)
        load("someone/translations")
    assert constants.HF_HUB_OFFLINE and stand_in.config.HF_HUB_OFFLINE


# Plain text


def test_a_file_holds_documents_and_the_last_lines_are_held_out(tmp_path: Path) -> None:
    lines = [f"line {i:02}\n" for i in range(40)]  # of 8 letters
    (tmp_path / "a.txt").write_text("".join(lines[:20]) + END + "".join(lines[20:]))
    found = load(tmp_path / "a.txt")
    assert found.plain
    # 315 of 332 letters: in line 37.
    assert found.splits["train"] == ["".join(lines[:20]), "".join(lines[20:38])]
    assert found.splits["validation"] == ["".join(lines[38:])[:-1]]
    assert found.notes == ["no validation split: 5 % of the text are taken from its end."]


def test_a_cut_is_at_a_line_or_at_a_word() -> None:
    assert held_out(["abc def " * 10]) == (["abc def " * 9 + "abc "], ["def"])
    assert held_out(["x" * 100]) == (["x" * 94], ["x" * 6])
    assert held_out(["a\nb\n"]) == (["a\n"], ["b"])
    assert held_out(["one", "two", "th ree"]) == (["one", "two", "th "], ["ree"])
    documents = [*["eight by"] * 40, "a line\nand one"]
    assert held_out(documents) == (documents[:39], documents[39:])


def test_a_folder_or_a_column_of_texts(tmp_path: Path, hub: Callable[..., Mock]) -> None:
    for name in ("b", "a", "validation_1", "test"):
        (tmp_path / f"{name}.txt").write_text(f"This is {name}.")
    (tmp_path / "empty.txt").write_text(" \n")
    found = load(tmp_path)
    splits = {"train": ["This is a.", "This is b."], "validation": ["This is validation_1."]}
    assert (found.splits, found.notes) == (splits, ["train: skipped 1 rows with an empty text."])
    assert len(set(found.fingerprints().values())) == 2
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    found = load(tmp_path / "a.jsonl")
    assert found.splits == {"train": ["one", "t"], "validation": ["wo"]}
    assert found.notes[0] == "train: skipped 1 rows with an empty text."
    hub({"train": [{"text": "one"}, {"text": ""}], "validation": [{"text": "three"}]})
    assert load("some/texts").splits == {"train": ["one"], "validation": ["three"]}
