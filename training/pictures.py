"""Labelled pictures: drawn here, CIFAR-10 from a local folder, or from a hub.

Problem: what a person names with --dataset must come out as two sets of pictures, or as one line
that says what is wrong with it. And the usual small pictures come as a pickle: a program that
whoever wrote the file may have put anything into.

    builtin          ten classes of shapes and textures (training/drawing.py)
    a folder         CIFAR-10, its Python version (data_batch_1, ...) or its binary one
                     (data_batch_1.bin, ...), as its archives unpack
    anything else    the name of a dataset on the hub, with a column of images and one of labels

Idea: of a pickle only the three names are let in that a numpy array needs; any other name is
refused *before* it is looked up, so no foreign code is found, let alone run.

Pictures are kept as bytes, a quarter of the memory, and become floats batch by batch.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from training.drawing import CLASSES, SIZE, draw
from training.launch import UserError
from training.text import BUILTIN, NO_NETWORK, load_from_hub, refused_if_unreadable

CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_TRAIN_FILES, _TEST_FILES = [f"data_batch_{i}" for i in range(1, 6)], ["test_batch"]
_SHAPE = (3, SIZE, SIZE)
_DEFAULT_SIZES = {"train": 5000, "test": 1000}  # of the built-in pictures, where all are asked for


@dataclass(frozen=True)
class Pictures:
    """Pictures as bytes [N, 3, 32, 32], and their classes [N]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def fingerprint(self) -> str:
        """What two have in common only if all pictures and classes are the same, in order."""
        content = hashlib.sha256(self.images.numpy().tobytes())
        content.update(self.labels.numpy().tobytes())
        return content.hexdigest()


@dataclass(frozen=True)
class PictureSets:
    """What a run trains on, what it is tested on, and what the classes are called."""

    train: Pictures
    test: Pictures
    classes: tuple[str, ...]

    def fingerprint(self) -> str:
        """What two sets have in common only if their training pictures are the same, in order."""
        return self.fingerprints()["train"]

    def fingerprints(self) -> dict[str, str]:
        """Of both sets."""
        return {"train": self.train.fingerprint(), "test": self.test.fingerprint()}


def to_inputs(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a network is given for pictures of bytes: numbers from -2 to 2."""
    return images.to(dtype) / 63.75 - 2


def load_pictures(dataset: str, n_train: int | None, n_test: int | None, seed: int) -> PictureSets:
    """The pictures of a run.

    Args:
        dataset: see the table above.
        n_train, n_test: at most so many; None takes all there are.
        seed: of the built-in pictures.

    Raises:
        UserError: nothing usable is there; the text says what, and what works.
    """
    path = Path(dataset)
    if dataset == BUILTIN:
        sizes = (n_train or _DEFAULT_SIZES["train"], n_test or _DEFAULT_SIZES["test"])
        # The test pictures are others than the training ones, and stay when those become more.
        train, test = (_as_pictures(*draw(n, [seed, s])) for s, n in enumerate(sizes))
        return PictureSets(train, test, CLASSES)
    with refused_if_unreadable(dataset):
        if path.exists():
            sets = _cifar10(path)
        elif path.is_absolute() or dataset.startswith((".", "~")):
            raise UserError(f"--dataset {dataset}: there is no such folder; {NO_NETWORK}")
        else:
            sets = _from_hub(dataset)
    return PictureSets(_first(sets.train, n_train), _first(sets.test, n_test), sets.classes)


def _as_pictures(images: Any, labels: Any) -> Pictures:
    return Pictures(torch.from_numpy(images), torch.from_numpy(labels))


def _first(pictures: Pictures, n: int | None) -> Pictures:
    return Pictures(pictures.images[:n], pictures.labels[:n])


def _cifar10(path: Path) -> PictureSets:
    """Reads whichever version the folder, or a folder in it, holds."""
    for folder in (path, path / "cifar-10-batches-py", path / "cifar-10-batches-bin"):
        for suffix, read in (("", _read_python), (".bin", _read_binary)):
            if (folder / f"{_TEST_FILES[0]}{suffix}").is_file():
                train, test = (
                    _join([read(folder / f"{name}{suffix}") for name in names])
                    for names in (_TRAIN_FILES, _TEST_FILES)
                )
                return PictureSets(train, test, CIFAR10_CLASSES)
    raise UserError(
        f"--dataset {path}: CIFAR-10's files are not there; its Python version has "
        f"{_TEST_FILES[0]} and {_TRAIN_FILES[0]} to 5, its binary one {_TEST_FILES[0]}.bin and so "
        f"on; {NO_NETWORK}"
    )


def _join(parts: list[tuple[Any, Any]]) -> Pictures:
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return _as_pictures(images, labels)


def _read_binary(path: Path) -> tuple[Any, Any]:
    """Records of a byte, the class, and 3072 bytes, the picture."""
    content = np.frombuffer(_read(path), np.uint8)
    record = 1 + 3 * SIZE * SIZE
    if not len(content) or len(content) % record:
        raise _broken(path, f"{len(content)} bytes are not a multiple of {record}")
    rows = content.reshape(-1, record)
    return _checked(path, rows[:, 1:], rows[:, 0])


def _read_python(path: Path) -> tuple[Any, Any]:
    """A pickled dictionary: b"data" [N, 3072] of bytes, b"labels" N numbers."""
    try:
        content = _ArrayUnpickler(io.BytesIO(_read(path)), encoding="bytes").load()
        return _checked(path, content[b"data"], content[b"labels"])
    except UserError:
        raise
    except Exception as error:  # a damaged pickle raises any kind
        raise _broken(path, f"{type(error).__name__}: {error}") from error


def _checked(path: Path, images: Any, labels: Any) -> tuple[Any, Any]:
    images, labels = np.array(images), np.array(labels)
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != 3 * SIZE * SIZE:
        raise _broken(path, f"pictures are {images.dtype} {list(images.shape)}")
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu" or not len(labels):
        raise _broken(path, f"{len(images)} pictures have labels {list(labels.shape)}")
    if labels.min() < 0 or labels.max() >= len(CIFAR10_CLASSES):
        raise _broken(path, f"there are labels from {labels.min()} to {labels.max()}")
    return images.reshape(-1, *_SHAPE), labels.astype(np.int64)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {NO_NETWORK}") from error


def _broken(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path}: this is not a file of CIFAR-10 ({' '.join(reason.split())[:160]}); "
        f"download it again, or {NO_NETWORK}"
    )


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into a pickle of protocol 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes are written as latin1, not as {encoding}")
    return text.encode("latin1")


class _ArrayUnpickler(pickle.Unpickler):
    """Reads numbers, bytes, text, lists, dictionaries and numpy arrays, and knows no other name."""

    KNOWN: ClassVar[dict[tuple[str, str], Any]] = {
        **{
            (f"numpy.{core}.multiarray", "_reconstruct"): np.array(0).__reduce__()[0]
            for core in ("core", "_core")
        },
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _latin1,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no picture")
        return self.KNOWN[module, name]


def _from_hub(name: str) -> PictureSets:
    found = load_from_hub(name)
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
    for split, labels in (("train", train.labels), ("test", test.labels)):
        low, high = (int(label) for label in labels.aminmax())
        if low < 0 or high >= len(names):
            raise UserError(
                f"--dataset {name}: {split} has labels from {low} to {high}, and {len(names)} "
                f"classes have names, 0 to {len(names) - 1}; every picture needs one of these; "
                f"{NO_NETWORK}"
            )
    return PictureSets(train, test, tuple(names))


def _to_bytes(picture: Any) -> Any:
    """A PIL image of any size and mode, as 3 x 32 x 32 bytes."""
    return np.array(picture.convert("RGB").resize((SIZE, SIZE))).transpose(2, 0, 1)
