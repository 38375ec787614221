"""Pictures: drawn ones, and those that `datasets` reads."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from training.launch.errors import UserError
from training.tasks.pictures import CLASSES, draw, fingerprint, load_pictures, to_inputs


def test_drawn_pictures_are_the_same_every_time_and_however_many() -> None:
    few, labels = draw(7, [3])
    many, more_labels = draw(300, [3])
    assert few.shape == (7, 3, 32, 32) and few.dtype == np.uint8
    assert (many[:7] == few).all() and (more_labels[:7] == labels).all()
    assert (many[:7] != draw(7, [4])[0]).any(axis=(1, 2, 3)).all()
    assert many.mean() == pytest.approx(125.892, abs=0.05)  # machines round sines differently
    assert np.bincount(more_labels).tolist() == [100, 100, 100]
    means = [many[more_labels == c].mean() for c in range(len(CLASSES))]
    assert max(means) - min(means) < 9  # no colour gives the class away


def test_builtin_sets() -> None:
    sets = load_pictures("builtin", 30, 20)
    assert (len(sets.train), len(sets.test), sets.classes) == (30, 20, CLASSES)
    assert not torch.equal(sets.train[:20][0], sets.test[:][0])
    longer = load_pictures("builtin", 40, 20)
    assert fingerprint(longer.test) == fingerprint(sets.test)
    assert fingerprint(longer.train) != fingerprint(sets.train)


def test_inputs_are_from_minus_two_to_two() -> None:
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).view(3, 1, 1, 1)
    assert to_inputs(images).flatten().tolist() == pytest.approx([-2, 2, -1.2])
    assert to_inputs(images, torch.float64).dtype == torch.float64


def test_a_folder_of_pictures_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a class have one colour here."""
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for split, (k, name), i in product(("train", "test"), enumerate(("cat", "dog")), range(2)):
        (tmp_path / "pictures" / split / name).mkdir(parents=True, exist_ok=True)
        pixels = np.full((40, 40, 3), 100 * k + 50, np.uint8)
        pixels[20:] += 1  # below the middle
        picture = image.fromarray(pixels)
        picture.save(tmp_path / "pictures" / split / name / f"{i}.png")
    sets = load_pictures(str(tmp_path / "pictures"), None, 3)
    assert sets.classes == ("cat", "dog")
    assert (len(sets.train), len(sets.test)) == (4, 3)
    for picture, label in zip(*sets.train[:], strict=True):
        assert picture.shape == (3, 32, 32)
        colour = 100 * int(label) + 50
        assert picture[:, 0].unique().tolist() == [colour]
        assert picture[:, -1].unique().tolist() == [colour + 1]
    (tmp_path / "empty").mkdir()
    for name in ("none", "empty"):
        with pytest.raises(UserError, match=f"/{name}: it cannot be read .*Error: .*data"):
            load_pictures(f"{tmp_path}/{name}", None, None)


def test_a_dataset_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import ClassLabel, Dataset, Features, Image  # here: it takes seconds to import

    image = pytest.importorskip("PIL.Image")
    grey = image.new("L", (64, 64), 77)
    colour = image.fromarray(np.full((32, 32, 3), (1, 2, 3), np.uint8))
    columns = {"img": [grey, colour, grey], "label": [1, 0, 1]}
    features = Features({"img": Image(), "label": ClassLabel(names=["cat", "dog"])})
    split = Dataset.from_dict(columns, features)
    monkeypatch.setattr(
        "training.tasks.pictures.load_splits", lambda _: {"train": split, "test": split}
    )
    sets = load_pictures("pets", 2, None)
    assert sets.classes == ("cat", "dog")
    images, labels = sets.train[:]
    assert labels.tolist() == [1, 0] and sets.test[:][1].tolist() == [1, 0, 1]
    assert images[0].unique().tolist() == [77]
    assert images[1, :, 5, 9].tolist() == [1, 2, 3]
    for wrong, word in (
        ({"train": split}, "with the columns img and label; train and test are"),
        ({"train": Dataset.from_dict({"text": []}), "test": split}, "with the columns text; "),
    ):
        monkeypatch.setattr("training.tasks.pictures.load_splits", lambda _, found=wrong: found)
        with pytest.raises(UserError, match=word):
            load_pictures("pets", None, None)
