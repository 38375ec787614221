"""What --dataset names as plain text, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from training.documents import END, Documents, held_out, load_data
from training.errors import UserError
from training.text import BUILTIN_FOLDER, Texts

SIZES: dict[str, int | None] = {"train": None, "validation": None, "test": None}


def load(dataset: str | Path) -> Texts | Documents:
    return load_data(str(dataset), "de", "en", SIZES, 1)


def test_a_file_holds_documents_and_the_last_lines_are_held_out(tmp_path: Path) -> None:
    lines = [f"line {i:02}\n" for i in range(40)]  # of 8 letters
    (tmp_path / "a.txt").write_text("".join(lines[:20]) + END + "".join(lines[20:]))
    found = load(tmp_path / "a.txt")
    assert isinstance(found, Documents)
    # 301 of 318 letters: in line 37, of 19 and 20 lines the second document's 18th.
    assert found.splits["train"] == ["".join(lines[:20])[:-1], "".join(lines[20:38])]
    assert found.splits["validation"] == ["".join(lines[38:])[:-1]]
    assert found.notes == ["validation: no such split; it is the last 5 % of the text."]


def test_a_cut_is_at_a_line_or_at_a_word() -> None:
    assert held_out(["abc def " * 10]) == (["abc def " * 9 + "abc "], ["def"])
    assert held_out(["x" * 100]) == (["x" * 94], ["x" * 6])
    assert held_out(["a" * 10, "b" * 190]) == (["a" * 10, "b" * 179], ["b" * 11])
    assert held_out(["a\nb\n"]) == (["a\n"], ["b"])
    assert held_out(["a", "b" * 9]) == (["a", "b" * 7], ["bb"])


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


def test_a_dataset_of_the_hub_with_a_column_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str) -> datasets.DatasetDict:
        texts = {"train": ["one", "", "two"], "validation": ["three"], "test": ["four"]}
        if name == "some/holes":
            texts["train"][1] = None  # type: ignore[call-overload]
        rows = {split: datasets.Dataset.from_dict({"text": t}) for split, t in texts.items()}
        return datasets.DatasetDict(rows)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("training.text._do_not_wait_for_the_hub", lambda: None)
    assert load("some/texts").splits == {"train": ["one", "two"], "validation": ["three"]}
    with pytest.raises(UserError, match=r"^--dataset some/holes: row 2 has no text \(None\)"):
        load("some/holes")


def test_the_text_that_comes_along_is_the_english_side_of_the_corpus() -> None:
    text = (BUILTIN_FOLDER / "english.txt").read_text("utf-8")
    documents = text.split(END)
    sentences = [line for document in documents for line in document.strip().split("\n")]
    corpus = (BUILTIN_FOLDER / "train.en").read_text("utf-8").split("\n")
    assert sentences == corpus[: len(sentences)]
    assert len(text) < 100_000 and len(documents) == 72


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.txt", b"", "there is no text to train on"),
        ("a.txt", b"\n \n", "there is no text to train on"),
        ("a.txt", b"fine\n\x80", r"a\.txt: line 2 is not UTF-8 \(byte 0x80\)"),
        ("a.txt", b"MZ\0\0", "a.txt: line 1 is not UTF-8"),
        ("missing/a.txt", None, "there is no such file; --dataset builtin needs"),
        ("validation.txt", b"alone", "there is no text to train on"),
        ("a.pdf", b"no text", r"no train.de and train.en there, nor any of \.txt"),
    ],
)
def test_what_is_no_text(tmp_path: Path, name: str, content: bytes | None, why: str) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    if content is not None:
        (folder / name).write_bytes(content)
    dataset = folder if name in ("validation.txt", "a.pdf") else folder / name
    with pytest.raises(UserError, match=why) as error:
        load(dataset)
    assert "\n" not in str(error.value)
