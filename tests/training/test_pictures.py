"""Pictures: drawn ones, CIFAR-10 in both versions, and files that are not what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from training.drawing import CLASSES, draw
from training.launch import UserError
from training.pictures import Pictures, load_pictures, to_inputs

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


def write_folder(folder: Path, splits: tuple[str, ...] = ("train", "test")) -> Path:
    """Two pictures of each of two classes in every split; those of a class have one colour."""
    image = pytest.importorskip("PIL.Image")
    for split in splits:
        for k, name in enumerate(("cat", "dog")):
            (folder / split / name).mkdir(parents=True)
            for i in range(2):
                picture = image.fromarray(np.full((40, 40, 3), 100 * k + 50, np.uint8))
                picture.save(folder / split / name / f"{i}.png")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_a_folder_of_pictures_is_read(tmp_path: Path) -> None:
    sets = load_pictures(str(write_folder(tmp_path / "pictures")), None, 3, 0)
    assert sets.classes == ("cat", "dog")
    assert (len(sets.train), len(sets.test)) == (4, 3)
    for image, label in zip(sets.train.images, sets.train.labels, strict=True):
        assert image.shape == (3, 32, 32)
        assert image.unique().tolist() == [100 * int(label) + 50]


def test_a_folder_without_a_test_split_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pictures", ("train",))
    with pytest.raises(UserError, match=f"^--dataset {folder}: it has train, and train and test"):
        load_pictures(str(folder), None, None, 0)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^--dataset {tmp_path}/nothing: there is no such folder"):
        load_pictures(f"{tmp_path}/nothing", None, None, 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        UserError, match=r"it holds nothing that can be read .*builtin needs neither"
    ):
        load_pictures(f"{tmp_path}/empty", None, None, 0)


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
    monkeypatch.setattr("training.pictures.load_splits", lambda _: found)
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
        monkeypatch.setattr("training.pictures.load_splits", lambda _, found=wrong: found)
        with pytest.raises(UserError, match=word):
            load_pictures("pets", None, None, seed=0)
