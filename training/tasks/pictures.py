"""Labelled pictures: drawn here, or read by `datasets` from a folder or from the hub.

    builtin          rows, columns and checkerboards, drawn from a fixed seed
    a folder         Parquet files, or pictures in folders train/CLASS/ and test/CLASS/
    anything else    the name of a dataset on the hub, e.g. uoft-cs/cifar10

A dataset needs a column of images (img or image) and one of labels with named classes. Pictures are
kept as bytes, a quarter of the memory, and become floats batch by batch.

Only the texture gives the class of a drawn picture. Position, size, rotation, both colours and
noise are random in the same way for every class, so no pixel, mean colour or histogram gives it
away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from training.files import moving
from training.launch.errors import UserError, listed

from .text_files import BUILTIN, NO_NETWORK, load_splits, refused_if_unreadable

SIZE = 32  # pixels of an edge
BUILTIN_SEED = 1234  # whatever --seed is, the pictures are the same, like the built-in text
_DRAWN = (5000, 1000)  # built-in pictures to train and to test, if all are asked for
Array = np.ndarray[Any, np.dtype[Any]]
# True where a pixel of the grid u, v is foreground; the period is 2.
TEXTURES: dict[str, Callable[[Array, Array], Array]] = {
    "rows": lambda u, v: np.sin(np.pi * v) > 0,  # noqa: ARG005
    "columns": lambda u, v: np.sin(np.pi * u) > 0,  # noqa: ARG005
    "checkerboard": lambda u, v: np.sin(np.pi * u) * np.sin(np.pi * v) > 0,
}
CLASSES = tuple(TEXTURES)


@dataclass(frozen=True)
class PictureSets:
    """A run's training and test pictures, as bytes [N, 3, 32, 32] with their classes [N], and the
    names of the classes."""

    train: TensorDataset
    test: TensorDataset
    classes: tuple[str, ...]


def fingerprint(pictures: TensorDataset) -> str:
    """A hash of all pictures and classes, in order."""
    content = b"".join(tensor.numpy().tobytes() for tensor in pictures.tensors)
    return hashlib.sha256(content).hexdigest()


def to_inputs(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Pictures of bytes as network inputs: numbers from -2 to 2."""
    return images.to(dtype) / 63.75 - 2


def load_pictures(
    dataset: str, n_train: int | None, n_test: int | None, shown: bool = True
) -> PictureSets:
    """The pictures of a run.

    Args:
        dataset: see the table above.
        n_train, n_test: the maximum; None takes all there are.
        shown: whether this rank shows its progress.

    Raises:
        UserError: there is no usable data; the text says why, and what works.
    """
    if dataset == BUILTIN:
        sizes = (n_train or _DRAWN[0], n_test or _DRAWN[1])
        # Test pictures differ from training pictures and do not depend on n_train.
        train, test = (_as_pictures(*draw(n, [BUILTIN_SEED, part])) for part, n in enumerate(sizes))
        return PictureSets(train, test, CLASSES)
    with refused_if_unreadable(dataset):
        return _read(dataset, n_train, n_test, shown)


def draw(n: int, seed: Sequence[int]) -> tuple[Array, Array]:
    """n pictures as bytes [n, 3, 32, 32], and their classes [n]. Picture i is of class i % 3, and
    depends on the seed and i only. Takes about 0.1 ms a picture."""
    labels = np.arange(n) % len(CLASSES)
    images = np.empty((n, 3, SIZE, SIZE), np.uint8)
    axis = np.linspace(-1, 1, SIZE)
    for i, name in enumerate(CLASSES[label] for label in labels):
        random = np.random.default_rng([*seed, i])
        x, y, turn, scale = random.random(4)
        across, down = axis[None] - x, axis[:, None] - y
        angle, unit = 0.6 * (turn - 0.5), 0.2 + 0.1 * scale
        u = (across * np.cos(angle) + down * np.sin(angle)) / unit  # [32, 32]
        v = (down * np.cos(angle) - across * np.sin(angle)) / unit
        below, above = 0.5 * random.random((2, 3, 1, 1)) + [[[[0.0]]], [[[0.5]]]]  # two colours
        picture = np.where(TEXTURES[name](u, v), above, below)  # [3, 32, 32], from 0 to 1
        noise = 0.1 * random.standard_normal(picture.shape)
        images[i] = np.clip(255 * (picture + noise), 0, 255)
    return images, labels


def _as_pictures(images: Any, labels: Any) -> TensorDataset:
    return TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))


def _read(name: str, n_train: int | None, n_test: int | None, shown: bool) -> PictureSets:
    """A folder, or a dataset of the hub. No more pictures are decoded than asked for."""
    splits = load_splits(name)
    features = next(iter(splits.values())).features
    image = next((key for key in ("img", "image") if key in features), "")
    label = next((key for key in ("label", "fine_label") if key in features), "")
    names = getattr(features.get(label), "names", None)
    if not {"train", "test"} <= set(splits) or not image or not names:
        raise UserError(
            f"--dataset {name}: it has {listed(sorted(splits), 'and')}, with the columns "
            f"{listed(features, 'and')}; train and test are needed, with an image (img) and a "
            f"label with named classes, as in cifar10{NO_NETWORK}"
        )

    def read(split: str, most: int | None) -> Iterable[Any]:
        pictures = islice(splits[split][image], most)
        return moving(pictures, f"Reading {split}", None, "picture", shown=shown)

    train, test = (
        _as_pictures(
            np.stack([_to_bytes(picture) for picture in read(split, n)]),
            np.array(splits[split][label][:n], np.int64),
        )
        for split, n in (("train", n_train), ("test", n_test))
    )
    return PictureSets(train, test, tuple(names))


def _to_bytes(picture: Any) -> Any:
    """A PIL image of any size and mode, as 3 x 32 x 32 bytes."""
    return np.array(picture.convert("RGB").resize((SIZE, SIZE))).transpose(2, 0, 1)
