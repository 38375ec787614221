"""Whatever --dataset names becomes three lists of pairs, or one line that says what is wrong."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


# ----------------------------------------------------------------------------- parallel lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """train.de ... test.en, three lines each."""
    for split in ("train", "validation", "test"):
        for language in ("de", "en"):
            lines = "".join(f"{language} {split} {i}\n" for i in range(3))
            (tmp_path / f"{split}.{language}").write_text(lines)
    return tmp_path


def test_line_i_translates_line_i(folder: Path) -> None:
    texts = load(folder)
    assert texts.splits == {
        split: pairs([(f"de {split} {i}", f"en {split} {i}") for i in range(3)])
        for split in ("train", "validation", "test")
    }
    assert texts.notes == []
    (folder / "test.en").write_text("one\ntwo\n")
    assert error_of(folder) == (
        f"{folder}: test.de has 3 lines and test.en has 2: "
        "line i of one must translate line i of the other"
    )
    (folder / "test.en").unlink()
    assert error_of(folder) == (
        f"--dataset {folder}: {folder}/test.en cannot be read (No such file or directory)"
        + NO_NETWORK
    )


def test_lines_end_where_files_of_other_systems_end_them(folder: Path) -> None:
    """A byte-order mark, CRLF, no newline at the end; U+2028 and a form feed are no line ends."""
    (folder / "train.de").write_bytes(
        b"\xef\xbb\xbferster Satz\r\nzwei\xe2\x80\xa8ter\x0cSatz\r\ndritter"
    )
    (folder / "train.en").write_bytes(b"first\nsecond\nthird\n")
    assert load(folder).splits["train"] == pairs(
        [("erster Satz", "first"), ("zwei\u2028ter\x0cSatz", "second"), ("dritter", "third")]
    )


def test_another_encoding(folder: Path) -> None:
    (folder / "train.de").write_bytes("eins\nzwei\nvierfünf\n".encode("latin1"))
    assert error_of(folder) == (
        f"{folder}/train.de: it is not UTF-8 ('utf-8' codec can't decode byte 0xfc in position 15: "
        "invalid start byte); convert it, for example: iconv -f latin1 -t utf-8 train.de"
    )


def test_empty_pairs_are_skipped_and_sizes_are_upper_limits(folder: Path) -> None:
    (folder / "train.de").write_text("a\n\nc\n \ne\n")
    (folder / "train.en").write_text("A\nB\n\t\nD\nE\n")
    texts = load(folder, validation=2, test=4)
    assert texts.splits["train"] == pairs([("a", "A"), ("e", "E")])
    assert [len(texts.splits[split]) for split in SPLITS] == [2, 2, 3]
    assert texts.notes == [
        "train: skipped 3 pairs with an empty side.",
        "test: 3 pairs, all there are (4 were asked for).",
    ]


def test_each_rank_needs_a_pair(folder: Path) -> None:
    assert len(load(folder, world_size=3).splits["test"]) == 3
    assert error_of(folder, world_size=4) == (
        f"--dataset {folder}: train has 3 pairs for 4 ranks, and each rank needs one; "
        "--world_size 1 to 3 works, or more pairs"
    )
    (folder / "validation.de").write_text("")
    (folder / "validation.en").write_text("")
    assert error_of(folder, world_size=2) == (
        f"--dataset {folder}: validation has no pair with text on both sides; "
        "at least one is needed, or --dataset builtin"
    )


# ------------------------------------------------------------------------------------- tables


def write_jsonl(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs(rows)))


def write_json(path: Path, rows: Rows) -> None:
    path.write_text(json.dumps([{"translation": row} for row in pairs(rows)]))


def write_csv(path: Path, rows: Rows) -> None:
    path.write_text("id,de,en\n" + "".join(f'7,"{de}","{en}"\n' for de, en in rows))


def write_tsv(path: Path, rows: Rows) -> None:
    path.write_text("en\tde\n" + "".join(f"{en}\t{de}\n" for de, en in rows))


def write_parquet(path: Path, rows: Rows) -> None:
    import datasets

    datasets.Dataset.from_list([{"translation": row} for row in pairs(rows)]).to_parquet(path)


WRITERS = [write_jsonl, write_json, write_csv, write_tsv, write_parquet]


@pytest.mark.parametrize("write", WRITERS)
def test_a_single_file_is_cut_into_splits(
    tmp_path: Path, write: Callable[[Path, Rows], None]
) -> None:
    path = tmp_path / f"text.{write.__name__.removeprefix('write_')}"
    write(path, numbered(0, 40))
    texts = load(path, train=30)
    assert texts.splits == {
        "train": pairs(numbered(0, 30)),
        "validation": pairs(numbered(33, 36)),  # a tenth of the 36 that test has left
        "test": pairs(numbered(36, 40)),
    }
    assert texts.notes == [
        "test: no such split; it is the last 4 pairs of train.",
        "validation: no such split; it is the last 3 pairs of train.",
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
        write_jsonl(tmp_path / name, part)
    (tmp_path / "README.md").write_text("no data")
    texts = load(tmp_path)
    expected = [numbered(0, 5), numbered(10, 12), numbered(20, 23)]
    assert texts.splits == dict(zip(SPLITS, map(pairs, expected), strict=True))
    assert texts.notes == []


def test_all_of_a_csv_is_text(tmp_path: Path) -> None:
    """Also numbers, and what pandas takes for nothing."""
    path = tmp_path / "text.csv"
    rows = [("None", "NA"), ("nan", ""), *((f"00{i}", f"{i}.50") for i in range(18))]
    write_csv(path, rows)
    texts = load(path)
    assert texts.splits["train"] == pairs([rows[0], *rows[2:17]])
    assert "train: skipped 1 pairs with an empty side." in texts.notes


def test_other_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"src": "a", "tgt": "b"}\n' * 19 + '{"src": "a"}\n')
    assert error_of(path) == (
        f"--dataset {path}: row 1 of train has ['src', 'tgt'], and not the texts 'de' and 'en'; "
        "name the languages with --src and --tgt"
    )
    texts = load_texts(str(path), "src", "tgt", {**ALL}, 1)
    assert texts.splits["test"] == [{"src": "a", "tgt": "b"}]
    assert "test: skipped 1 pairs with an empty side." in texts.notes


ROW = '{"de": "Satz", "en": "sentence"}\n'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"translation": 5}\n', "row 1 of train has 5, and not the texts"),
        ("a.jsonl", ROW + '{"de": 5, "en": "five"}\n' + ROW, "row 2 of train: de is 5, and not"),
        ("a.jsonl", "\n \n", "has no pair with text on both sides"),
        (
            "a.jsonl",
            ROW * 2 + '{"de": "x", \n' + ROW,
            "nothing that can be read (ArrowInvalid: JSON",
        ),
        ("a.csv", "de,en\n" + "ä,b\n" * 20, "nothing that can be read (UnicodeDecodeError: "),
        ("a.parquet", "no parquet", "nothing that can be read (ArrowInvalid: Parquet"),
        ("a.txt", "\n \n", "there is no text to train on"),
        ("a.txt", "vierfünf", "nothing that can be read (UnicodeDecodeError: "),
        ("validation.txt", "alone", "there is no text to train on"),
        ("a.pdf", "no text", "nor any of .txt .jsonl .json .csv .tsv .parquet"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: str, said: str) -> None:
    """One line that names the file and says what is wrong."""
    path = tmp_path / name
    path.write_bytes(content.encode("latin1"))
    message = error_of(tmp_path if name == "validation.txt" else path)
    assert message.startswith(f"--dataset {tmp_path}") and said in message


# -------------------------------------------------------------------- what cannot be read at all


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="has no such permissions")
@pytest.mark.parametrize("kind", ["folder", "pictures"])
def test_what_may_not_be_read(kind: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # others may not enter pytest's folders
        inner = Path(name) / "inner"
        inner.mkdir()
        Path(name).chmod(0o755)
        inner.chmod(0)
        user = os.geteuid()
        os.seteuid(user or 65534)
        try:
            with pytest.raises(UserError) as error:
                if kind == "pictures":
                    load_pictures(str(inner), None, None, 0)
                load(inner)
        finally:
            os.seteuid(user)
            inner.chmod(0o755)
    assert str(error.value).startswith(f"--dataset {inner}: {inner}")
    assert str(error.value).endswith(f" cannot be read (Permission denied){NO_NETWORK}")


def test_places_with_nothing_to_read(tmp_path: Path) -> None:
    for missing in (tmp_path / "none", "none.jsonl", "./none"):
        assert error_of(missing) == (
            f"--dataset {missing}: there is no such file or folder{NO_NETWORK}"
        )
    assert "(File name too long)" in error_of("x" * 300)


# --------------------------------------------------------------------------- built in, and hub


def test_the_built_in_text_is_a_folder_with_two_languages() -> None:
    for sizes in ({}, {"train": 7, "validation": 5, "test": 3}):
        texts = load("builtin", **sizes)
        assert texts.splits == load(BUILTIN_FOLDER, **sizes).splits
        assert texts.notes == []
    assert load_texts("builtin", "en", "de", {**ALL, "train": 1}, 1).splits["train"]
    with pytest.raises(UserError, match=r"^--src de --tgt fr: .* is de and en"):
        load_texts("builtin", "de", "fr", {**ALL}, 1)
    with pytest.raises(UserError, match=r"^--src de --tgt de: .* as --src de --tgt en$"):
        load_texts("builtin", "de", "de", {**ALL}, 1)


class Hub:
    """Stands for the datasets library: answers, or raises, in the order given."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.config = SimpleNamespace(HF_HUB_OFFLINE=False)
        self.calls: list[tuple[str, dict[str, str]]] = []

    def load_dataset(self, name: str, **options: str) -> Any:
        self.calls.append((name, options))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Hub]:
    def answering(*answers: Any) -> Hub:
        stand_in = Hub(*answers)
        monkeypatch.setitem(sys.modules, "datasets", stand_in)
        monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])  # the hub's name resolves
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        return stand_in

    return answering


def translations(first: int, end: int) -> list[dict[str, dict[str, str]]]:
    return [{"translation": pair} for pair in pairs(numbered(first, end))]


FOUND = {
    "train": translations(0, 9),
    "validation": translations(10, 13),
    "test": translations(20, 22),
    "other": [],
}


def test_a_hub_whose_name_does_not_resolve_is_not_waited_for(
    hub: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    def unknown(*_: object) -> None:
        raise OSError("Name or service not known")

    stand_in = hub(FOUND, FOUND, FOUND)
    load("someone/translations")
    assert not constants.HF_HUB_OFFLINE and not stand_in.config.HF_HUB_OFFLINE
    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setattr("training.text.getproxies", lambda: {"https": "a proxy resolves names"})
    load("someone/translations")
    assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr("training.text.getproxies", dict)
    load("someone/translations")
    assert constants.HF_HUB_OFFLINE and stand_in.config.HF_HUB_OFFLINE


def test_a_dataset_of_the_hub(hub: Callable[..., Hub]) -> None:
    """One with a script is taken from its converted copy."""
    refusal = RuntimeError("Dataset scripts are no longer supported, but found iwslt.py")
    stand_in = hub(refusal, FOUND, {"train": translations(0, 20)})
    assert load("somebody/iwslt", train=4).splits == {
        "train": pairs(numbered(0, 4)),
        "validation": pairs(numbered(10, 13)),
        "test": pairs(numbered(20, 22)),
    }
    assert stand_in.calls == [
        ("somebody/iwslt", {}),
        ("somebody/iwslt", {"revision": "refs/convert/parquet"}),
    ]
    assert load("a/b").splits["test"] == pairs(numbered(18, 20))


def test_a_hub_that_cannot_be_reached_is_one_line_with_a_way_out(hub: Callable[..., Hub]) -> None:
    hub(ConnectionError("Couldn't reach\n 'a/b' on the Hub"))
    assert error_of("a/b") == (
        "--dataset a/b: it is no local path, and the hub has none (ConnectionError: Couldn't reach "
        f"'a/b' on the Hub){NO_NETWORK}"
    )


# ---------------------------------------------------------------------------------- plain text


def test_a_file_holds_documents_and_the_last_lines_are_held_out(tmp_path: Path) -> None:
    lines = [f"line {i:02}\n" for i in range(40)]  # of 8 letters
    (tmp_path / "a.txt").write_text("".join(lines[:20]) + END + "".join(lines[20:]))
    found = load(tmp_path / "a.txt")
    assert found.plain
    # 315 of 332 letters: in line 37.
    assert found.splits["train"] == ["".join(lines[:20]), "".join(lines[20:38])]
    assert found.splits["validation"] == ["".join(lines[38:])[:-1]]
    assert found.notes == ["validation: no such split; it is the last 5 % of the text."]


def test_a_cut_is_at_a_line_or_at_a_word() -> None:
    assert held_out(["abc def " * 10]) == (["abc def " * 9 + "abc "], ["def"])
    assert held_out(["x" * 100]) == (["x" * 94], ["x" * 6])
    assert held_out(["a\nb\n"]) == (["a\n"], ["b"])
    assert held_out(["one", "two", "th ree"]) == (["one", "two", "th "], ["ree"])
    documents = [*["eight by"] * 40, "a line\nand one"]
    assert held_out(documents) == (documents[:39], documents[39:])


def test_a_folder_of_texts(tmp_path: Path) -> None:
    for name in ("b", "a", "validation_1", "test"):
        (tmp_path / f"{name}.txt").write_text(f"This is {name}.")
    (tmp_path / "empty.txt").write_text(" \n")
    found = load(tmp_path)
    assert found.splits == {
        "train": ["This is a.", "This is b."], "validation": ["This is validation_1."]
    }  # fmt: skip
    assert found.notes == []
    assert len(set(found.fingerprints().values())) == 2


def test_a_column_of_texts(tmp_path: Path, hub: Callable[..., Hub]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    assert load(tmp_path / "a.jsonl").splits == {"train": ["one", "t"], "validation": ["wo"]}
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": 5}\n')
    with pytest.raises(UserError, match=r"row 2 of train: text is 5, and not text in quotes$"):
        load(tmp_path / "b.jsonl")
    rows = {"train": [{"text": "one"}, {"text": ""}], "validation": [{"text": "three"}]}
    hub(rows)
    assert load("some/texts").splits == {"train": ["one"], "validation": ["three"]}


def test_the_text_that_comes_along_is_the_english_side_of_the_corpus() -> None:
    text = (BUILTIN_FOLDER / "english.txt").read_text("utf-8")
    documents = text.split(END)
    sentences = [line for document in documents for line in document.strip().split("\n")]
    corpus = (BUILTIN_FOLDER / "train.en").read_text("utf-8").split("\n")
    assert sentences == corpus[: len(sentences)]
    assert len(text) < 100_000 and len(documents) == 72
