"""Pieces: what ranks hold of a tensor, written by some ranks and read by others."""

from __future__ import annotations

import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from training import pieces
from training.pieces import (
    CheckpointError,
    Piece,
    StoredTensors,
    check_whole,
    deal,
    flat_pieces,
    save_pieces,
    whole,
)


def stored(folder: Path) -> StoredTensors:
    return StoredTensors(folder, sorted(path.name for path in folder.iterdir()))


@pytest.mark.parametrize("shape", [(), (5,), (1, 4), (3, 4), (4, 1), (2, 3, 4), (2, 1, 3)])
def test_every_range_of_a_flat_tensor_is_cut_into_rectangles(shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    whole_tensor = torch.arange(size).view(shape)
    for start, stop in itertools.combinations(range(size + 1), 2):
        values = torch.full((stop - start,), -1)
        parts = flat_pieces("x", shape, start, values)
        for part in parts:
            assert part.shape == shape
            here = tuple(slice(o, o + n) for o, n in zip(*part.box, strict=True))
            part.tensor.copy_(whole_tensor[here])  # through a view: fills `values`
        assert values.tolist() == list(range(start, stop))
        assert len(parts) <= max(1, 2 * len(shape) - 1)
    assert flat_pieces("x", shape, 0, torch.empty(0)) == []


TENSORS = {
    "matrix": torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    "cube": torch.arange(24, dtype=torch.float32).view(2, 3, 4),
    "norm": torch.tensor([1.5, -2.0, 0.1], dtype=torch.bfloat16),
    "count": torch.tensor(12345678901234567),
}


def shards(rank: int, world_size: int, tensors: dict[str, Tensor]) -> list[Piece]:
    """What a rank holds where each flattened tensor is cut into equal parts, inside rows too."""
    found = []
    for name, tensor in tensors.items():
        each = -(-tensor.numel() // world_size)
        part = tensor.reshape(-1)[rank * each : (rank + 1) * each]
        found += flat_pieces(name, tensor.shape, rank * each, part)
    return found


def columns(tensor: Tensor, start: int, stop: int) -> Piece:
    return Piece("matrix", tensor, (0, start), (5, stop))


def test_three_ranks_write_and_others_read(tmp_path: Path) -> None:
    for rank in range(3):
        save_pieces(tmp_path, f"shard-{rank}", shards(rank, 3, TENSORS))
    found = stored(tmp_path)
    for world_size in (1, 2, 4):  # the same way, cut elsewhere
        got = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
        for rank in range(world_size):
            found.load(shards(rank, world_size, got))
        assert {n: (t.dtype, t.tolist()) for n, t in got.items()} == {
            n: (t.dtype, t.tolist()) for n, t in TENSORS.items()
        }
    left, right = torch.zeros(5, 3, dtype=torch.float64), torch.zeros(5, 4, dtype=torch.float64)
    found.load([Piece("matrix", left, (0, 0), (5, 7)), Piece("matrix", right, (0, 3), (5, 7))])
    assert torch.equal(torch.cat([left, right], 1), TENSORS["matrix"])
    assert torch.equal(found.tensor("cube", torch.float32), TENSORS["cube"])
    assert [found.shape(name) for name in TENSORS] == [(5, 7), (2, 3, 4), (3,), ()]


def test_a_name_stands_once_in_a_file_and_files_have_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside_rows = flat_pieces("x", (3, 4), 1, torch.arange(10.0))
    saved = save_pieces(tmp_path, "shard-00001", [*inside_rows, whole("y", torch.ones(2))])
    assert saved == {
        "shard-00001-model-00001-of-00003.safetensors": [
            ("x", (3, 4), (0, 1), (1, 3)),
            ("y", (2,), (0,), (2,)),
        ],
        "shard-00001-model-00002-of-00003.safetensors": [("x", (3, 4), (1, 0), (1, 4))],
        "shard-00001-model-00003-of-00003.safetensors": [("x", (3, 4), (2, 0), (1, 3))],
    }
    monkeypatch.setattr(pieces, "VOLUME", 40)
    tensors = [whole(name, torch.zeros(n)) for name, n in (("a", 6), ("b", 50), ("c", 4))]
    files = save_pieces(tmp_path, "s", tensors)
    assert [[box[0] for box in boxes] for boxes in files.values()] == [["a", "c"], ["b"]]
    assert save_pieces(tmp_path, "none", []) == {}


def test_views_of_one_buffer_are_saved(tmp_path: Path) -> None:
    flat = torch.arange(6.0)
    turned = torch.arange(6.0).view(2, 3).t()
    save_pieces(tmp_path, "s", [whole("a", flat[:2]), whole("b", flat[2:]), whole("t", turned)])
    found = stored(tmp_path)
    values = [found.tensor(name, torch.float32).tolist() for name in "abt"]
    assert values == [[0, 1], [2, 3, 4, 5], [[0, 3], [1, 4], [2, 5]]]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_pieces(tmp_path, "s", [Piece("x", torch.zeros(2, 3), (0, 0), (4, 3)),
                                Piece("y", torch.zeros(1), (3,), (4,))])  # fmt: skip
    found = stored(tmp_path)
    for piece, why in [
        (whole("z", torch.zeros(1)), "holds no z"),
        (whole("x", torch.zeros(3, 2)), r"has x of shape \(2, 3\), not \(3, 2\)"),
        (whole("x", torch.zeros(2, 3).double()), "in torch.float32, and needed in torch.float64"),
        (whole("y", torch.zeros(4)), "lacks 3 elements of y"),
    ]:
        with pytest.raises(CheckpointError, match=why):
            found.load([piece])


def test_ranks_share_the_writing_of_what_all_hold() -> None:
    held = [whole(name, torch.zeros(n)) for name, n in (("a", 5), ("b", 9), ("c", 4), ("d", 5))]
    dealt = [[piece.name for piece in deal(held, rank, 2)] for rank in range(2)]
    assert dealt == [["b", "c"], ["a", "d"]]
    assert [p.name for p in deal(held, 0, 1)] == ["b", "a", "d", "c"]


def test_pieces_must_make_whole_tensors() -> None:
    top, bottom = ("x", (3, 2), (0, 0), (2, 2)), ("x", (3, 2), (2, 0), (1, 2))
    check_whole([top, bottom, bottom])  # two ranks may hold the same
    with pytest.raises(ValueError, match="hold 4 elements of x, whose shape is"):
        check_whole([top])
    with pytest.raises(ValueError, match="hold 10 elements of x"):
        check_whole([top, bottom, ("x", (3, 2), (1, 0), (2, 2))])
    with pytest.raises(ValueError, match="hold parts of x that overlap"):  # the last row is nowhere
        check_whole([top, ("x", (3, 2), (1, 0), (1, 2))])
    with pytest.raises(ValueError, match=r"x has shape \(4, 2\) on one rank, \(3, 2\) on another"):
        check_whole([top, ("x", (4, 2), (0, 0), (4, 2))])


def test_the_library_reads_the_files(tmp_path: Path) -> None:
    """A folder of ours is a checkpoint to torch.distributed.checkpoint."""
    for rank in range(3):
        save_pieces(tmp_path, f"shard-{rank}", shards(rank, 3, TENSORS))
    state: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert {n: t.tolist() for n, t in state.items()} == {n: t.tolist() for n, t in TENSORS.items()}
