"""Whatever --dataset names becomes three lists of pairs, or one line that says what is wrong."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from training.data import train_tokenizer
from training.launch import UserError
from training.pictures import load_pictures
from training.text import BUILTIN_FOLDER, SPLITS, Texts, load_texts

ALL = {"train": None, "validation": None, "test": None}
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


def test_lines_end_where_files_of_other_systems_end_them(folder: Path) -> None:
    """A byte-order mark, CRLF, no newline at the end; U+2028 and a form feed are no line ends."""
    (folder / "train.de").write_bytes(
        b"\xef\xbb\xbferster Satz\r\nzwei\xe2\x80\xa8ter\x0cSatz\r\ndritter"
    )
    (folder / "train.en").write_bytes(b"first\nsecond\nthird\n")
    assert load(folder).splits["train"] == pairs(
        [("erster Satz", "first"), ("zwei\u2028ter\x0cSatz", "second"), ("dritter", "third")]
    )


def test_unequal_line_counts(folder: Path) -> None:
    (folder / "test.en").write_text("one\ntwo\n")
    assert error_of(folder) == (
        f"{folder}/test.de has 3 lines and {folder}/test.en has 2: "
        "line i of one must translate line i of the other"
    )


@pytest.mark.parametrize("name", ["train.de", "train.en", "validation.de", "test.en"])
def test_a_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    message = error_of(folder)
    assert message.startswith(f"{folder / name}: the file is missing; ")
    assert message.endswith("; --dataset builtin needs neither files nor network")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_bad_encoding_names_the_line(folder: Path, mark: bytes) -> None:
    (folder / "train.de").write_bytes(mark + "eins\nzwei\nvierfünf\n".encode("latin1"))
    assert error_of(folder) == (
        f"{folder}/train.de: line 3 is not UTF-8 (byte 0xfc); "
        "convert it, for example: iconv -f latin1 -t utf-8 train.de"
    )


def test_pairs_with_an_empty_side_are_skipped_and_counted(folder: Path) -> None:
    (folder / "train.de").write_text("a\n\nc\n \ne\n")
    (folder / "train.en").write_text("A\nB\n\t\nD\nE\n")
    texts = load(folder)
    assert texts.splits["train"] == pairs([("a", "A"), ("e", "E")])
    assert texts.notes == ["train: skipped 3 pairs with an empty side."]


def test_sizes_are_upper_limits(folder: Path) -> None:
    texts = load(folder, train=2, validation=3, test=4)
    assert {split: len(rows) for split, rows in texts.splits.items()} == {
        "train": 2, "validation": 3, "test": 3,
    }  # fmt: skip
    assert texts.notes == ["test: 3 pairs, all there are (4 were asked for)."]


def test_each_rank_needs_a_pair(folder: Path) -> None:
    assert len(load(folder, world_size=3).splits["test"]) == 3
    assert error_of(folder, world_size=4) == (
        f"--dataset {folder}: train has 3 pairs for 4 ranks, and each rank needs one; "
        "--world_size 3 or less, or more pairs, works"
    )
    (folder / "validation.de").write_text("")
    (folder / "validation.en").write_text("")
    assert error_of(folder, world_size=2) == (
        f"--dataset {folder}: validation has no pair with text on both sides; "
        "at least one is needed, or --dataset builtin"
    )


# -------------------------------------------------------------------- tables that datasets read


def write_jsonl(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs(rows)))


def write_translations(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps({"translation": row}) + "\n" for row in pairs(rows)))


def write_csv(path: Path, rows: Rows) -> None:
    path.write_text("id,de,en\n" + "".join(f'7,"{de}","{en}"\n' for de, en in rows))


def write_tsv(path: Path, rows: Rows) -> None:
    path.write_text("en\tde\n" + "".join(f"{en}\t{de}\n" for de, en in rows))


def write_parquet(path: Path, rows: Rows) -> None:
    import datasets

    datasets.Dataset.from_list([{"translation": row} for row in pairs(rows)]).to_parquet(path)


WRITERS = [
    ("jsonl", write_jsonl),
    ("jsonl", write_translations),
    ("csv", write_csv),
    ("tsv", write_tsv),
    ("parquet", write_parquet),
]


@pytest.mark.parametrize(("ending", "write"), WRITERS)
def test_a_single_file_is_cut_into_splits(
    tmp_path: Path, ending: str, write: Callable[[Path, Rows], None]
) -> None:
    path = tmp_path / f"text.{ending}"
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
        ("other.jsonl", "dev.jsonl", "test.jsonl"),
        ("train/0.jsonl", "valid/0.jsonl", "test/0.jsonl"),
    ],
)
def test_files_of_a_folder_are_the_split_they_are_named_after(
    tmp_path: Path, names: tuple[str, str, str]
) -> None:
    rows = [numbered(0, 5), numbered(10, 12), numbered(20, 23)]
    for name, part in zip(names, rows, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, part)
    (tmp_path / "README.md").write_text("no data")
    texts = load(tmp_path)
    expected = dict(zip(("train", "validation", "test"), map(pairs, rows), strict=True))
    assert texts.splits == expected
    assert texts.notes == []


def test_parts_of_a_split_come_in_order(tmp_path: Path) -> None:
    for i in range(3):
        write_jsonl(tmp_path / f"train-{i}.jsonl", numbered(i, i + 1))
        write_jsonl(tmp_path / f"test-{i}.jsonl", numbered(10 + i, 11 + i))
    write_jsonl(tmp_path / "validation.jsonl", numbered(20, 21))
    texts = load(tmp_path)
    assert texts.splits["train"] == pairs(numbered(0, 3))
    assert texts.splits["test"] == pairs(numbered(10, 13))


def test_words_that_pandas_takes_for_nothing_are_text(tmp_path: Path) -> None:
    path = tmp_path / "text.csv"
    write_csv(path, [("None", "NA"), ("nan", ""), *numbered(0, 18)])
    texts = load(path)
    assert texts.splits["train"] == pairs([("None", "NA"), *numbered(0, 15)])
    assert "train: skipped 1 pairs with an empty side." in texts.notes


def test_other_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"src": "a", "tgt": "b"}\n' * 20)
    assert error_of(path) == (
        f"{path}: line 1 has ['src', 'tgt'], and not the texts 'de' and 'en'; "
        "name the languages with --src and --tgt"
    )
    texts = load_texts(str(path), "src", "tgt", {**ALL}, 1)
    assert texts.splits["test"] == [{"src": "a", "tgt": "b"}] * 2


def test_a_file_that_is_not_what_its_name_says(tmp_path: Path) -> None:
    path = tmp_path / "text.parquet"
    path.write_text("no parquet")
    message = error_of(path)
    assert message.startswith(f"{path}: cannot be read (")
    assert message.endswith("); --dataset builtin needs neither files nor network")


EXAMPLE = 'in place of two texts, as {"de": "...", "en": "..."}'
ROW = '{"de": "Satz", "en": "sentence"}\n'
NOT_TEXT = 'and not text; text has quotes around it, as "de": "..."'
UTF16 = "it is UTF-16, and not UTF-8"
ZERO = f"has a zero byte: {UTF16}, or no text"
EMPTY = "the file is empty; --dataset builtin needs neither files nor network"
NO_PAIR = "has no pair with text on both sides"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        # rows that are no pair
        ("a.jsonl", '{"translation": 5}\n', f"line 1 has 5 {EXAMPLE}"),
        ("a.jsonl", ROW * 3 + '{"translation": ["a", "b"]}\n', f"line 4 has ['a', 'b'] {EXAMPLE}"),
        ("a.jsonl", ROW + "null\n", f"line 2 has None {EXAMPLE}"),
        ("a.json", f"[{ROW}, [3]]", f"row 2 has [3] {EXAMPLE}"),
        ("a.json", '{"data": []}', "line 1 has ['data'], and not the texts 'de' and 'en'"),
        ("a.jsonl", '{"translation": {"de": "a"}}', "line 1 has ['de'], and not the texts"),
        # texts that are none
        ("a.jsonl", '{"de": 1984, "en": 1984}\n' * 20, f"line 1: de is 1984, {NOT_TEXT}"),
        ("a.jsonl", ROW + '\n{"de": 5, "en": "five"}\n' + ROW, f"line 3: de is 5, {NOT_TEXT}"),
        ("a.jsonl", ROW + '{"de": "\\ud800", "en": "b"}\n', "line 2: de has '\\ud800', which is"),
        # no rows
        ("a.jsonl", "", EMPTY),
        ("a.csv", "", EMPTY),
        ("a.parquet", "", EMPTY),
        ("a.jsonl", "\n \n", NO_PAIR),
        ("a.json", "[]", NO_PAIR),
        ("a.csv", "de,en\n", NO_PAIR),
        # what is no JSON
        ("a.jsonl", ROW * 2 + '{"de": "x", \n' + ROW, "line 3 is not JSON (Expecting property"),
        ("a.jsonl", "[" * 100_000 + "]" * 100_000, "line 1 is not JSON (maximum recursion depth"),
        # other encodings
        ("a.jsonl", (ROW * 20).encode("utf-16"), f"{UTF16}; convert it, for example: iconv -f utf"),
        ("a.csv", ("de,en\n" + "a,b\n" * 20).encode("utf-16"), UTF16),
        ("a.csv", ("de,en\n" + "ä,b\n" * 20).encode("utf-16-le"), f"line 1 {ZERO}; convert it, for "
         "example: iconv -f utf-16le -t utf-8 a.csv"),
        ("a.tsv", "de\ten\nx\ta\0b\n", f"line 2 {ZERO}"),
        ("a.jsonl", '{"de": "ä", "en": "a"}\n'.encode("latin1"), "line 1 is not UTF-8 (byte 0xe4); "
         "convert it, for example: iconv -f latin1 -t utf-8 a.jsonl"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_used(
    tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    """One line that names the file and says where in it what is wrong."""
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    message = error_of(path)
    assert message.startswith((f"{path}: ", f"--dataset {path}: ")) and said in message


@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        ("utf-16", "it is UTF-16, and not UTF-8; convert it, for example: iconv -f utf-16 "),
        ("utf-16-le", f"line 1 {ZERO}; convert it, for example: iconv -f utf-16le "),
        ("utf-16-be", f"line 1 {ZERO}; convert it, for example: iconv -f utf-16be "),
    ],
)
def test_lines_of_utf16_are_not_taken_for_latin1(folder: Path, encoding: str, said: str) -> None:
    (folder / "train.de").write_bytes("vierfünf\nzwei\ndrei\n".encode(encoding))
    assert error_of(folder) == f"{folder}/train.de: {said}-t utf-8 train.de"


def test_numbers_in_a_csv_are_text(tmp_path: Path) -> None:
    """Which have no quotes to tell them apart, whether all are numbers or one is."""
    path = tmp_path / "text.csv"
    rows = [(f"00{i}", f"{i}.50") for i in range(20)]
    write_csv(path, rows)
    assert load(path).splits["train"] == pairs(rows[:17])
    rows[0] = ("Satz", "sentence")
    write_csv(path, rows)
    assert load(path).splits["train"] == pairs(rows[:17])


def test_a_row_that_lacks_a_column_has_an_empty_side(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"en": "sentence"}\n' + ROW * 19)
    texts = load(path)
    assert texts.splits["train"] == pairs([("Satz", "sentence")] * 16)
    assert "train: skipped 1 pairs with an empty side." in texts.notes


def denied(call: Callable[[], object]) -> str:
    """What a call says that is made by a user who may not read what root has put aside."""
    if os.geteuid() != 0:
        return error_of_call(call)
    os.seteuid(65534)
    try:
        return error_of_call(call)
    finally:
        os.seteuid(0)


def error_of_call(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="has no such permissions")
@pytest.mark.parametrize("kind", ["folder", "below", "file", "pictures"])
def test_what_may_not_be_read(kind: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # others may not enter pytest's folders
        folder = Path(name)
        folder.chmod(0o755)
        inner = folder / "inner"
        inner.mkdir()
        (inner / "train.jsonl").write_text(ROW * 20)
        closed = {"file": inner / "train.jsonl"}.get(kind, inner)
        dataset = {"below": folder, "file": inner / "train.jsonl"}.get(kind, inner)
        closed.chmod(0)
        read: Callable[[], object] = partial(load, dataset)
        if kind == "pictures":
            read = partial(load_pictures, str(dataset), None, None, 0)
        said = denied(read)
        closed.chmod(0o755)
    assert said.startswith(f"--dataset {dataset}: {closed}")
    assert said.endswith(
        " cannot be read (Permission denied); --dataset builtin needs neither files nor network"
    )


def test_names_that_are_none(tmp_path: Path) -> None:
    long = "x" * 300
    assert error_of(long).startswith(
        f"--dataset {long}: {long} cannot be read (File name too long)"
    )
    (tmp_path / "text.jsonl").mkdir()
    assert error_of(tmp_path / "text.jsonl").startswith(
        f"--dataset {tmp_path}/text.jsonl: no train"
    )
    (tmp_path / "train.de").mkdir()
    assert error_of(tmp_path).startswith(
        f"--dataset {tmp_path}: {tmp_path}/train.de cannot be read (Is a directory)"
    )


MEGABYTE = 1_000_000
LONG = {
    "letters": "".join(random.Random(1).choices("abcdefghij", k=MEGABYTE)),
    "white space": f"a{' ' * MEGABYTE}b",
}


@pytest.mark.parametrize("kind", LONG)
def test_a_word_of_a_megabyte_is_cut_and_does_not_stall_the_tokenizer(
    folder: Path, kind: str
) -> None:
    (folder / "train.de").write_text(f"eins\nzwei {LONG[kind]} drei\nvier\n")
    texts = load(folder)
    assert texts.notes == [
        f"{folder}/train.de: line 2: a word of 1,000,000 characters: cut to 1,000 characters."
    ]
    begin = time.perf_counter()
    train_tokenizer(texts.splits["train"], 4096, "de", "en")
    assert time.perf_counter() - begin < 20  # it is one; that word alone takes minutes


def test_long_words_in_a_table_are_cut_and_counted(tmp_path: Path) -> None:
    long = "ä" * 1001
    for name, write in (("text.csv", write_csv), ("text.jsonl", write_translations)):
        write(tmp_path / name, [(f"ein {long}.", long), *numbered(0, 18), ("a", "b" * 200_000)])
        texts = load(tmp_path / name)
        assert texts.splits["train"][0] == {"de": f"ein {long[:1000]}.", "en": long[:1000]}
        where = f"{tmp_path / name}: {'row' if 'csv' in name else 'line'} 1"
        assert texts.notes[-1] == (
            f"{where}: a word of 1,001 characters, and 2 more: cut to 1,000 characters."
        )


def test_long_sentences_are_left_as_they_are(folder: Path) -> None:
    sentence = "ein Wort, " * 100_000 + "x" * 1000
    (folder / "train.de").write_text(f"eins\n{sentence}\n  \n")
    texts = load(folder)
    assert texts.splits["train"][1]["de"] == sentence
    assert texts.notes == ["train: skipped 1 pairs with an empty side."]


def test_places_with_nothing_to_read(tmp_path: Path) -> None:
    assert error_of(tmp_path) == (
        f"--dataset {tmp_path}: no train.de and train.en there, nor any of "
        ".jsonl .json .csv .tsv .parquet; --dataset builtin needs neither files nor network"
    )
    way_out = "there is no such file or folder; --dataset builtin needs neither files nor network"
    for missing in (tmp_path / "none", "none.jsonl", "./none"):
        assert error_of(missing) == f"--dataset {missing}: {way_out}"


# --------------------------------------------------------------------------- built in, and hub


def test_the_built_in_text_is_a_folder_like_any_other() -> None:
    for sizes in ({}, {"train": 7, "validation": 5, "test": 3}):
        texts = load("builtin", **sizes)
        assert texts.splits == load(BUILTIN_FOLDER, **sizes).splits
        assert texts.notes == []
    assert [len(load("builtin").splits[split]) for split in SPLITS] == [9000, 1000, 100]


def test_the_built_in_text_has_two_languages_and_an_end() -> None:
    for src, tgt in (("de", "fr"), ("xx", "en")):
        with pytest.raises(UserError, match=f"^--src {src} --tgt {tgt}: .* is de and en"):
            load_texts("builtin", src, tgt, {**ALL}, 1)
    with pytest.raises(UserError, match=r"^--src de --tgt de: .* as --src de --tgt en$"):
        load_texts("builtin", "de", "de", {**ALL}, 1)
    assert load_texts("builtin", "en", "de", {**ALL, "train": 1}, 1).splits["train"]
    for split, have in (("train", 9000), ("validation", 1000), ("test", 100)):
        assert load("builtin", **{split: have})
        assert error_of("builtin", **{split: have + 1}) == (
            f"--n_{split} {have + 1}: the built-in text has {have} pairs; "
            f"--n_{split} {have} or less works"
        )


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


def test_a_hub_whose_name_does_not_resolve_is_not_waited_for(
    hub: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    def unknown(*_: object) -> None:
        raise OSError("Name or service not known")

    stand_in = hub(FOUND, FOUND)
    load("someone/translations")
    assert not constants.HF_HUB_OFFLINE and not stand_in.config.HF_HUB_OFFLINE
    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setattr("training.text.getproxies", lambda: {"https": "a proxy resolves names"})
    load("someone/translations")
    assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr("training.text.getproxies", dict)
    stand_in.answers.append(FOUND)
    load("someone/translations")
    assert constants.HF_HUB_OFFLINE and stand_in.config.HF_HUB_OFFLINE


def translations(first: int, end: int) -> list[dict[str, dict[str, str]]]:
    return [{"translation": pair} for pair in pairs(numbered(first, end))]


FOUND = {
    "train": translations(0, 9),
    "validation": translations(10, 13),
    "test": translations(20, 22),
    "other": [],
}


def test_a_dataset_of_the_hub(hub: Callable[..., Hub]) -> None:
    stand_in = hub(FOUND)
    texts = load("somebody/iwslt", train=4)
    assert texts.splits == {
        "train": pairs(numbered(0, 4)),
        "validation": pairs(numbered(10, 13)),
        "test": pairs(numbered(20, 22)),
    }
    assert stand_in.calls == [("somebody/iwslt", {})]


def test_a_dataset_with_a_script_is_taken_from_its_converted_copy(
    hub: Callable[..., Hub],
) -> None:
    refusal = RuntimeError("Dataset scripts are no longer supported, but found iwslt.py")
    stand_in = hub(refusal, FOUND)
    assert load("somebody/iwslt").splits["test"] == pairs(numbered(20, 22))
    assert stand_in.calls == [
        ("somebody/iwslt", {}),
        ("somebody/iwslt", {"revision": "refs/convert/parquet"}),
    ]


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([ConnectionError("Couldn't reach\n 'a/b' on the Hub")], "ConnectionError: Couldn't reach"),
        ([RuntimeError("Dataset scripts"), OSError("no such ref")], "OSError: no such ref"),
    ],
)
def test_a_hub_that_cannot_be_reached_is_one_line_with_a_way_out(
    hub: Callable[..., Hub], answers: list[Exception], reason: str
) -> None:
    hub(*answers)
    message = error_of("a/b")
    assert message.startswith("--dataset a/b: it is no local path, and the hub has none (")
    assert reason in message
    assert message.endswith("); --dataset builtin needs neither files nor network")


def test_splits_that_the_hub_does_not_have_are_cut_off_train(hub: Callable[..., Hub]) -> None:
    hub({"train": translations(0, 20)})
    texts = load("a/b")
    assert texts.splits["validation"] == pairs(numbered(17, 18))
    assert texts.splits["test"] == pairs(numbered(18, 20))
    hub({"test": translations(0, 20)})
    assert error_of("a/b").startswith("--dataset a/b: train has no pair with text on both sides")
