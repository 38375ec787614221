"""Tensors of a checkpoint, in pieces: what a rank holds, in files and back.

Problem: ranks hold whole parameters, the layers of a stage, or parts of flat buffers that begin
and end anywhere; a checkpoint must be loadable where they hold something else.

Idea: a tensor is known by the *name of the parameter* and its whole shape, and a rank hands over
whichever rectangles it holds of it (`Piece`): all (`whole`), a share of what every rank holds
(`deal`), or a range of the flattened tensor (`flat_pieces`). Loading takes the same pieces: each is
filled from all stored rectangles that overlap it, whoever wrote them.

The files are those of `torch.distributed.checkpoint` in its safetensors form: its
HuggingFaceStorageReader loads them.

Cost: a file is mapped, and only the parts that a rank asks for are read. On saving, tensors are
copied to the CPU, a file's worth (VOLUME) at a time, where they are not there already.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from training.launch import RunError, UserError

VOLUME = 1 << 30  # bytes after which a rank begins another file
SUFFIX = ".safetensors"

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes of a rectangle
StoredBox = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # name, whole shape, box


class CheckpointError(UserError):
    """A checkpoint that is not what was written, or not of this model."""


class SaveError(RunError):
    """A checkpoint could not be written. Nothing is left of it."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A rectangle of the tensor `name`, whose whole shape is `shape`: `tensor` holds what begins
    at `offsets`. It is saved, or loaded into."""

    name: str
    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return self.offsets, tuple(self.tensor.shape)


def whole(name: str, tensor: Tensor) -> Piece:
    """The piece that is all of the tensor."""
    return Piece(name, tensor, (0,) * tensor.dim(), tuple(tensor.shape))


def flat_pieces(name: str, shape: Sequence[int], start: int, values: Tensor) -> list[Piece]:
    """The pieces of a rank that holds elements start, start + 1, ... of the flattened tensor, as
    views of `values`. Where they begin and end inside a row, a matrix gives up to three."""
    pieces, done = [], 0
    for offsets, sizes in _rectangles(tuple(shape), start, start + values.numel()):
        part = values[done : done + math.prod(sizes)].view(sizes)
        pieces.append(Piece(name, part, offsets, tuple(shape)))
        done += part.numel()
    return pieces


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cuts a range of a flattened tensor into rectangles, in order."""
    if len(shape) < 2:
        if start < stop:
            yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    while start < stop:
        i, column = divmod(start, row)
        rows = 0 if column else (stop - start) // row
        if rows:
            yield (i, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start += rows * row
        else:
            end = min(stop - i * row, row)
            for offsets, sizes in _rectangles(shape[1:], column, end):
                yield (i, *offsets), (1, *sizes)
            start = i * row + end


def deal(pieces: Iterable[Piece], rank: int, world_size: int) -> list[Piece]:
    """The share that `rank` writes of pieces that every rank holds: as many bytes as any other, to
    within the largest piece."""
    filled = [0] * world_size
    mine = []
    for piece in sorted(pieces, key=lambda p: (-p.tensor.nbytes, p.name, p.offsets)):
        least = filled.index(min(filled))
        filled[least] += piece.tensor.nbytes
        if least == rank:
            mine.append(piece)
    return mine


class StoredTensors:
    """The tensors in the files of a folder."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        self.folder = folder
        self._boxes: dict[str, dict[Box, str]] = {}  # which file has it: one, if several do
        for file in files:
            with safe_open(folder / file, framework="pt") as f:
                for name, at in json.loads(f.metadata()["DCP_SHARDING_INFO"]).items():
                    box = tuple(at["saved_offsets"]), tuple(f.get_slice(name).get_shape())
                    self._boxes.setdefault(name, {})[box] = file

    def __contains__(self, name: str) -> bool:
        return name in self._boxes

    def __iter__(self) -> Iterator[str]:
        return iter(self._boxes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of the tensor `name`."""
        ends = zip(*(map(sum, zip(*box, strict=True)) for box in self._boxes[name]), strict=True)
        return tuple(max(end) for end in ends)

    def slots(self, prefix: str, name: str) -> list[str]:
        """Every `slot` for which there is a tensor `prefix.slot.name`."""
        found = [n for n in self._boxes if n.startswith(f"{prefix}.") and n.endswith(f".{name}")]
        middles = [n[len(prefix) + 1 : -len(name) - 1] for n in found]
        return sorted(middle for middle in middles if middle and "." not in middle)

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """The whole tensor `name`, on the CPU."""
        value = torch.empty(self.shape(name) if name in self else (), dtype=dtype)
        self.load([whole(name, value)])
        return value

    @torch.no_grad()
    def load(self, pieces: Iterable[Piece]) -> None:
        """Fills the pieces' tensors.

        Raises:
            CheckpointError: a tensor is not in the checkpoint, or is of another shape or type.
        """
        with ExitStack() as opened:

            @cache
            def open_file(name: str) -> Any:
                return opened.enter_context(safe_open(self.folder / name, framework="pt"))

            for piece in pieces:
                self._check(piece)
                missing = piece.tensor.numel()
                for box, file in self._boxes[piece.name].items():
                    missing -= _copy(open_file(file), box, piece)
                if missing:
                    raise self._unfit(f"lacks {missing} elements of {piece.name}")

    def _check(self, piece: Piece) -> None:
        if piece.name not in self:
            raise self._unfit(f"holds no {piece.name}")
        if (shape := self.shape(piece.name)) != piece.shape:
            raise self._unfit(f"has {piece.name} of shape {shape}, not {piece.shape}")

    def _unfit(self, why: str) -> CheckpointError:
        return CheckpointError(f"--resume: {self.folder} {why}: it is of another model")


def _copy(file: Any, box: Box, piece: Piece) -> int:
    """Copies what the rectangle `box` in `file` has of the piece; returns how many elements."""
    common = [
        (max(a, c), min(a + b, c + d)) for a, b, c, d in zip(*piece.box, *box, strict=True)
    ]  # fmt: skip
    if any(start >= stop for start, stop in common):
        return 0
    here = tuple(slice(a - o, b - o) for (a, b), o in zip(common, piece.offsets, strict=True))
    there = tuple(slice(a - o, b - o) for (a, b), o in zip(common, box[0], strict=True))
    found: Tensor = file.get_slice(piece.name)[there] if there else file.get_tensor(piece.name)
    if found.dtype != piece.tensor.dtype:
        raise CheckpointError(
            f"--resume: {piece.name} is saved in {found.dtype}, and needed in {piece.tensor.dtype}"
        )
    piece.tensor[here].copy_(found)
    return found.numel()


def check_whole(boxes: Iterable[StoredBox]) -> None:
    """Raises ValueError, a mistake of the caller's, unless the boxes make whole tensors. Ranks may
    hand over the same one; others must not overlap."""
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, set[Box]] = {}
    for name, shape, offsets, sizes in boxes:
        if shapes.setdefault(name, shape) != shape:
            raise ValueError(f"{name} has shape {shape} on one rank, {shapes[name]} on another")
        parts.setdefault(name, set()).add((offsets, sizes))
    for name, shape in shapes.items():
        held = sum(math.prod(sizes) for _, sizes in parts[name])
        if held != math.prod(shape):
            raise ValueError(f"the ranks hold {held} elements of {name}, whose shape is {shape}")
        for a, b in combinations(parts[name], 2):
            if all(max(i, j) < min(i + n, j + m) for i, n, j, m in zip(*a, *b, strict=True)):
                raise ValueError(f"the ranks hold parts of {name} that overlap: {a} and {b}")


def _volumes(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Groups pieces into files, in each of which a name can stand once."""
    waiting = [piece for piece in pieces if piece.tensor.numel()]
    while waiting:
        volume: dict[str, Piece] = {}
        rest, size = [], 0
        for piece in waiting:
            if piece.name in volume or (volume and size + piece.tensor.nbytes > VOLUME):
                rest.append(piece)
            else:
                volume[piece.name] = piece
                size += piece.tensor.nbytes
        yield list(volume.values())
        waiting = rest


def save_pieces(folder: Path, prefix: str, pieces: Iterable[Piece]) -> dict[str, list[StoredBox]]:
    """Writes pieces into as many files as they need. Returns what is in each, on the disk now."""
    volumes = list(_volumes(pieces))
    saved = {}
    for i, volume in enumerate(volumes, 1):
        file = f"{prefix}-model-{i:05d}-of-{len(volumes):05d}{SUFFIX}"
        offsets = {piece.name: {"saved_offsets": piece.offsets} for piece in volume}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        save_file({piece.name: _own(piece.tensor) for piece in volume}, folder / file, metadata)
        with (folder / file).open("rb+") as f:
            os.fsync(f.fileno())
        saved[file] = [(piece.name, piece.shape, *piece.box) for piece in volume]
    return saved


def _own(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, with memory of its own: safetensors refuses views of one buffer."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
