"""Labelled pictures: drawn here, or read by `datasets` from a folder or from the hub.

    builtin          ten classes of shapes and textures (training/tasks/drawing.py)
    a folder         Parquet files, or pictures in folders train/CLASS/ and test/CLASS/
    anything else    the name of a dataset on the hub, as uoft-cs/cifar10

A dataset needs a column of images (img or image) and one of labels with named classes. Pictures are
kept as bytes, a quarter of the memory, and become floats batch by batch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.launch.errors import UserError

from .drawing import CLASSES, SIZE, draw
from .texts import BUILTIN, NO_NETWORK, load_splits, refused_if_unreadable

_DEFAULT_SIZES = {"train": 5000, "test": 1000}  # of the built-in pictures, if all are asked for


@dataclass(frozen=True)
class Pictures:
    """Pictures as bytes [N, 3, 32, 32], and their classes [N]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def fingerprint(self) -> str:
        """A hash of all pictures and classes, in order."""
        content = self.images.numpy().tobytes() + self.labels.numpy().tobytes()
        return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class PictureSets:
    """A run's training and test pictures, and the names of their classes."""

    train: Pictures
    test: Pictures
    classes: tuple[str, ...]

    def fingerprints(self) -> dict[str, str]:
        """The hashes of both sets."""
        return {"train": self.train.fingerprint(), "test": self.test.fingerprint()}


def to_inputs(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Pictures of bytes as network inputs: numbers from -2 to 2."""
    return images.to(dtype) / 63.75 - 2


def load_pictures(dataset: str, n_train: int | None, n_test: int | None, seed: int) -> PictureSets:
    """The pictures of a run.

    Args:
        dataset: see the table above.
        n_train, n_test: the maximum; None takes all there are.
        seed: of the built-in pictures.

    Raises:
        UserError: there is no usable data; the text says why, and what works.
    """
    path = Path(dataset)
    if dataset == BUILTIN:
        sizes = (n_train or _DEFAULT_SIZES["train"], n_test or _DEFAULT_SIZES["test"])
        # Test pictures differ from training pictures and do not depend on n_train.
        train, test = (_as_pictures(*draw(n, [seed, s])) for s, n in enumerate(sizes))
        return PictureSets(train, test, CLASSES)
    with refused_if_unreadable(dataset):
        if not path.exists() and (path.is_absolute() or dataset.startswith((".", "~"))):
            raise UserError(f"--dataset {dataset}: there is no such folder; {NO_NETWORK}")
        if path.is_dir():
            list(path.iterdir())  # raises if unreadable, which the library would not report
        sets = _read(str(path.resolve()) if path.exists() else dataset)
    return PictureSets(_first(sets.train, n_train), _first(sets.test, n_test), sets.classes)


def _as_pictures(images: Any, labels: Any) -> Pictures:
    return Pictures(torch.from_numpy(images), torch.from_numpy(labels))


def _first(pictures: Pictures, n: int | None) -> Pictures:
    return Pictures(pictures.images[:n], pictures.labels[:n])


def _read(name: str) -> PictureSets:
    """A dataset of the hub, or of a folder."""
    found = load_splits(name)
    if not {"train", "test"} <= set(found):
        raise UserError(
            f"--dataset {name}: it has {', '.join(sorted(found))}, and train and test are needed; "
            f"{NO_NETWORK}"
        )
    features = found["train"].features
    image = next((key for key in ("img", "image") if key in features), None)
    label = next((key for key in ("label", "fine_label") if key in features), None)
    names = getattr(features[label], "names", None) if label else None
    if image is None or label is None or not names:
        raise UserError(
            f"--dataset {name}: its columns are {', '.join(features)}; an image (img) and a label "
            f"with named classes are needed, as in cifar10; {NO_NETWORK}"
        )
    train, test = (
        _as_pictures(
            np.stack([_to_bytes(picture) for picture in found[split][image]]),
            np.array(found[split][label], np.int64),
        )
        for split in ("train", "test")
    )
    return PictureSets(train, test, tuple(names))


def _to_bytes(picture: Any) -> Any:
    """A PIL image of any size and mode, as 3 x 32 x 32 bytes."""
    return np.array(picture.convert("RGB").resize((SIZE, SIZE))).transpose(2, 0, 1)
