"""Pictures: drawn ones, CIFAR-10 in both versions, and files that are not what they say."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from training.drawing import CLASSES, draw
from training.launch import UserError
from training.pictures import CIFAR10_CLASSES, Pictures, load_pictures, to_inputs

RECORD = 3072


def test_drawn_pictures_are_the_same_every_time_and_however_many() -> None:
    few, labels = draw(7, 3)
    many, more_labels = draw(1013, 3)  # more than are computed at once
    assert few.shape == (7, 3, 32, 32) and few.dtype == np.uint8
    assert (many[:7] == few).all() and (more_labels[:7] == labels).all()
    assert (many[500:502] == draw(502, 3)[0][500:]).all()
    assert (many[:7] != draw(7, 4)[0]).any(axis=(1, 2, 3)).all()
    assert many.mean() == pytest.approx(104.126, abs=0.01)  # machines round sines differently


def test_classes_are_equally_many() -> None:
    assert np.bincount(draw(100, 0)[1]).tolist() == [10] * len(CLASSES)


def test_no_two_pictures_are_alike() -> None:
    images = draw(300, 0)[0].reshape(300, -1)
    assert len({image.tobytes() for image in images}) == 300


def right(train: Any, test: Any) -> float:
    """The share of test examples that a linear model tells apart: least squares on the classes."""
    (x, y), (u, v) = ((a.reshape(len(a), -1).astype(np.float64), b) for a, b in (train, test))
    mean = x.mean(0)
    system = (x - mean).T @ (x - mean) + 1e4 * np.eye(x.shape[1])
    weights = np.linalg.solve(system, (x - mean).T @ np.eye(10)[y])
    return float((((u - mean) @ weights).argmax(1) == v).mean())


def test_colours_do_not_give_the_class_away() -> None:
    """Three mean colours and their deviations: what is not shape. Guessing finds 0.1."""
    sets = [(np.concatenate([i.mean((2, 3)), i.std((2, 3))], 1), y) for i, y in drawn()]
    assert right(*sets) < 0.35


def test_a_linear_model_does_not_suffice() -> None:
    sets = [(images[:, :, ::2, ::2], labels) for images, labels in drawn()]
    assert right(*sets) < 0.6


def drawn() -> list[Any]:
    return [draw(2000, 0), draw(500, 1)]


def test_builtin_sets() -> None:
    sets = load_pictures("builtin", 30, 20, seed=1)
    assert (len(sets.train), len(sets.test), sets.classes) == (30, 20, CLASSES)
    assert not torch.equal(sets.train.images[:20], sets.test.images)
    longer = load_pictures("builtin", 40, 20, seed=1)
    assert torch.equal(longer.train.images[:30], sets.train.images)
    assert torch.equal(longer.test.images, sets.test.images)
    whole = load_pictures("builtin", None, None, seed=1)
    assert (len(whole.train), len(whole.test)) == (5000, 1000)


def test_inputs_are_from_minus_two_to_two() -> None:
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).view(3, 1, 1, 1)
    assert to_inputs(images).flatten().tolist() == pytest.approx([-2, 2, -1.2])
    assert to_inputs(images, torch.float64).dtype == torch.float64


def rows(file: int, n: int = 3) -> tuple[Any, list[int]]:
    """Pictures of which every byte is known, and their labels."""
    images = (np.arange(n * RECORD).reshape(n, RECORD) * (file + 1) % 251).astype(np.uint8)
    return images, [(file + i) % 10 for i in range(n)]


def write_python(folder: Path, protocol: int = 2) -> Path:
    """As the archive has them; keys are bytes there, since Python 2 wrote it."""
    folder.mkdir(parents=True)
    for file, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        images, labels = rows(file)
        content = {b"batch_label": b"x", b"labels": labels, b"data": images, b"filenames": [b"a"]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))
    return folder


def write_binary(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for file, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        images, labels = rows(file)
        content = np.concatenate([np.array(labels, np.uint8)[:, None], images], 1)
        (folder / f"{name}.bin").write_bytes(content.tobytes())
    return folder


@pytest.mark.parametrize(
    "write",
    [
        write_binary,
        write_python,
        lambda folder: write_python(folder, protocol=4),
        lambda folder: write_python(folder / "cifar-10-batches-py").parent,
        lambda folder: write_binary(folder / "cifar-10-batches-bin").parent,
    ],
    ids=["binary", "python", "protocol 4", "folder of python", "folder of binary"],
)
def test_cifar10_is_read(write: Callable[[Path], Path], tmp_path: Path) -> None:
    sets = load_pictures(str(write(tmp_path / "cifar")), 11, None, seed=0)
    assert (len(sets.train), len(sets.test), sets.classes) == (11, 3, CIFAR10_CLASSES)
    images, labels = zip(*(rows(file) for file in range(6)), strict=True)
    train = torch.from_numpy(np.concatenate(images[:5])).view(-1, 3, 32, 32)
    assert torch.equal(sets.train.images, train[:11])
    assert sets.train.labels.tolist() == [*labels[0], *labels[1], *labels[2], *labels[3]][:11]
    assert torch.equal(sets.test.images, torch.from_numpy(images[5]).view(-1, 3, 32, 32))
    assert sets.test.labels.tolist() == labels[5]


def test_what_python_2_wrote_is_read(tmp_path: Path) -> None:
    """Text of Python 2, as the keys of the published files are, and numpy under its old name."""
    folder = write_python(tmp_path / "cifar")
    images, labels = rows(5)
    content = pickle.dumps({b"data": images, b"labels": labels}, protocol=2)
    assert b"_core.multiarray" in content or b"core.multiarray" in content
    old = content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    (folder / "test_batch").write_bytes(old)
    assert load_pictures(str(folder), None, None, seed=0).test.labels.tolist() == labels


class Evil:
    """Runs a command where it is unpickled as usual."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.where),)


def broken(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load_pictures(str(path.parent), None, None, seed=0)
    said = str(error.value)
    assert said.startswith(str(path)) and "--dataset builtin needs neither" in said
    assert "\n" not in said
    return said


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    folder = write_python(tmp_path / "cifar")
    trap = tmp_path / "trap"
    images, labels = rows(0)
    for content in (Evil(trap), {b"data": images, b"labels": labels, b"more": Evil(trap)}):
        said = broken(folder / "data_batch_1", pickle.dumps(content))
        assert "it asks for posix.mkdir, which is no picture" in said
    assert not trap.exists()
    pickle.loads(pickle.dumps(Evil(trap)))  # the trap works
    assert trap.exists()


@pytest.mark.parametrize("name", ["builtins.eval", "numpy.load", "os.system", "pickle.loads"])
def test_other_names_are_not_even_looked_up(name: str, tmp_path: Path) -> None:
    module, _, function = name.rpartition(".")
    folder = write_python(tmp_path / "cifar")
    content = f"c{module}\n{function}\n(S'x'\ntR.".encode()
    assert f"it asks for {name}," in broken(folder / "test_batch", content)


BROKEN_PYTHON: list[tuple[str, Callable[[], bytes], str]] = [
    ("truncated", lambda: pickle.dumps({b"data": rows(0)[0]})[:-900], "truncated"),
    ("empty", lambda: b"", "EOFError"),
    ("no pickle", lambda: b"<html>404</html>", "UnpicklingError"),
    ("no labels", lambda: pickle.dumps({b"data": rows(0)[0]}), "KeyError: b'labels'"),
    ("a list", lambda: pickle.dumps([1, 2]), "TypeError"),
    (
        "labels of others",
        lambda: pickle.dumps({b"data": rows(0)[0], b"labels": [1, 2]}),
        "3 pictures have labels [2]",
    ),
    (
        "floats",
        lambda: pickle.dumps({b"data": rows(0)[0].astype(np.float32), b"labels": [1, 2, 3]}),
        "pictures are float32 [3, 3072]",
    ),
    (
        "28 pixels",
        lambda: pickle.dumps({b"data": rows(0)[0][:, :784], b"labels": [1, 2, 3]}),
        "pictures are uint8 [3, 784]",
    ),
    (
        "100 classes",
        lambda: pickle.dumps({b"data": rows(0)[0], b"labels": [1, 99, 3]}),
        "there are labels from 1 to 99",
    ),
]


@pytest.mark.parametrize(
    ("make", "word"), [case[1:] for case in BROKEN_PYTHON], ids=[case[0] for case in BROKEN_PYTHON]
)
def test_a_broken_pickle_is_named(make: Callable[[], bytes], word: str, tmp_path: Path) -> None:
    said = broken(write_python(tmp_path / "cifar") / "data_batch_3", make())
    assert word in said, said


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "0 bytes are not a multiple of 3073"),
        (bytes(3072), "3072 bytes are not a multiple of 3073"),
        (b"\x0a" + bytes(3072), "there are labels from 10 to 10"),
    ],
)
def test_a_broken_binary_file_is_named(content: bytes, word: str, tmp_path: Path) -> None:
    assert word in broken(write_binary(tmp_path / "cifar") / "data_batch_2.bin", content)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = write_binary(tmp_path / "cifar")
    (folder / "data_batch_4.bin").unlink()
    with pytest.raises(UserError, match=r"data_batch_4\.bin: cannot be read \(No such file"):
        load_pictures(str(folder), None, None, seed=0)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"CIFAR-10's files are not there; .* --dataset builtin"):
        load_pictures(str(tmp_path), None, None, seed=0)
    with pytest.raises(UserError, match="there is no such folder"):
        load_pictures(str(tmp_path / "none"), None, None, seed=0)


class Features(dict[str, Any]):
    """Columns, of which one may name classes."""


class Column:
    """What `datasets` says of a column of labels."""

    def __init__(self, names: list[str]) -> None:
        self.names = names


class Split(dict[str, Any]):
    """A split of a dataset: columns by name."""

    def __init__(self, columns: dict[str, Any], names: list[str]) -> None:
        super().__init__(columns)
        self.features = {key: Column(names) if key == "label" else None for key in columns}


def test_a_dataset_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    grey = image.new("L", (64, 64), 77)
    colour = image.fromarray(np.full((32, 32, 3), (1, 2, 3), np.uint8))
    split = Split({"img": [grey, colour, grey], "label": [1, 0, 1]}, ["cat", "dog"])
    found = {"train": split, "test": split}
    monkeypatch.setattr("training.pictures.load_from_hub", lambda _: found)
    sets = load_pictures("pets", 2, None, seed=0)
    assert sets.classes == ("cat", "dog")
    assert isinstance(sets.train, Pictures) and sets.train.labels.tolist() == [1, 0]
    assert sets.test.labels.tolist() == [1, 0, 1]
    assert sets.train.images[0].unique().tolist() == [77]
    assert sets.train.images[1, :, 5, 9].tolist() == [1, 2, 3]
    unlabelled = Split({"img": [grey, grey], "label": [-1, 1]}, ["cat", "dog"])
    for wrong, word in (
        ({"train": split}, "train and test are needed"),
        ({"train": Split({"text": []}, []), "test": split}, "its columns are text"),
        (
            {"train": split, "test": unlabelled},
            "pets: test has labels from -1 to 1, and 2 ",
        ),
    ):
        monkeypatch.setattr("training.pictures.load_from_hub", lambda _, found=wrong: found)
        with pytest.raises(UserError, match=word):
            load_pictures("pets", None, None, seed=0)
