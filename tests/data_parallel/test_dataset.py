"""Partitions: disjoint, complete, and the same global batches however many ranks there are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from data_parallel.dataset import DataPartitioner, even_slices, partition_dataset, shuffled_indices

pytestmark = [pytest.mark.a4_1_1, pytest.mark.a5_1_1]


def test_equal_sizes_are_dealt_in_turn() -> None:
    """The seed fixes the shuffle. A partition is a view, in the order of its index."""
    assert shuffled_indices(8, seed=1234) == [1, 3, 2, 4, 5, 6, 0, 7]
    partitioner = DataPartitioner("abcdefg", [0.5, 0.5])
    for rank in range(2):
        part = partitioner.use(rank)
        assert part.index == shuffled_indices(7, seed=1234)[rank::2]
        assert [part[i] for i in range(len(part))] == ["abcdefg"[i] for i in part.index]


def test_many_examples_are_shuffled_without_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bytes each; the draw is pinned, since runs resume in it."""
    monkeypatch.setattr("data_parallel.dataset.FEW", 7)
    order = shuffled_indices(8, seed=77)
    assert isinstance(order, memoryview)
    assert order.nbytes == 4 * 8
    assert list(order) == [5, 2, 4, 7, 1, 6, 3, 0]


@pytest.mark.parametrize(
    ("n", "parts", "sizes"),
    [(9, 4, [3, 2, 2, 2]), (8, 5, [2, 2, 2, 1, 1]), (3, 8, [1, 1, 1]), (5, 1, [5]), (0, 4, [])],
)
def test_even_slices_are_as_many_as_asked_for(n: int, parts: int, sizes: list[int]) -> None:
    slices = even_slices(n, parts)
    assert [len(range(n)[at]) for at in slices] == sizes
    assert [i for at in slices for i in range(n)[at]] == list(range(n))


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        ([0.7, 0.2, 0.1], [70, 20, 10]),
        ([0.5, 0.25], [50, 25]),
        ([1 / 7] * 7, [15, 15, 14, 14, 14, 14, 14]),
        ([0.333, 0.333, 0.334], [33, 34, 33]),
        ([1.0], [100]),
    ],
)
def test_partitions_are_disjoint(sizes: list[float], lengths: list[int]) -> None:
    partitioner = DataPartitioner(range(100), sizes)
    dealt = [partitioner.use(r).index for r in range(len(sizes))]
    assert [len(part) for part in dealt] == lengths
    assert len({i for part in dealt for i in part}) == sum(lengths)


def test_a_rank_loads_batches_of_its_share() -> None:
    """The last one is smaller; it can start later. Without a collate function they are stacked."""
    order = shuffled_indices(21, seed=1234)[1::2]
    batches = [order[0:4], order[4:8], order[8:10]]
    for start in (0, 2, 3):
        loader = partition_dataset(1, 2, list(range(21)), 8, list, start=start)
        assert list(loader) == list(loader) == batches[start:]
        assert len(loader) == 3 - start
    (stacked,) = partition_dataset(0, 1, [torch.tensor(i) for i in range(4)], batch_size=4)
    assert stacked.tolist() == shuffled_indices(4, seed=1234)


class Shorter(list[int]):
    """Examples, each shorter than the one before."""

    def sizes(self, numbers: Sequence[int]) -> tuple[Any, None]:
        """As of `training.tasks.tokens.Tokens`: first the lengths."""
        return 100 - np.array(numbers), None


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("by_length", [False, True])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(
    world_size: int, by_length: bool
) -> None:
    """Though 3 ranks do not divide it. Lengths sort it before it is dealt out."""
    examples, order = Shorter(range(43)), shuffled_indices(43, seed=5)
    loaders = [
        list(partition_dataset(r, world_size, examples, 8, list, seed=5, by_length=by_length))
        for r in range(world_size)
    ]
    for k in range(6):  # five whole batches of 8, and one of 3: of eight ranks five have none
        together = [batches[k] for batches in loaders if k < len(batches)]
        assert sorted(i for part in together for i in part) == sorted(order[8 * k : 8 * k + 8])
        if by_length:
            assert all(part == sorted(part, reverse=True) for part in together)
    had = [sum(map(len, batches)) for batches in loaders]  # in the epoch
    assert max(had) - min(had) <= 1


def test_mistakes() -> None:
    for sizes in ([], [0.6, 0.6], [0.5, -0.5], [0.0, 1.0], [math.nan]):
        with pytest.raises(ValueError, match=r"sum to at most 1, for example \[0.5, 0.5\]"):
            DataPartitioner(range(10), sizes)
    for rank in (-1, 2):
        with pytest.raises(IndexError, match=f"partition {rank} of 2, counted from 0"):
            DataPartitioner(range(10), [0.5, 0.5]).use(rank)
    for batch_size, ranks in ((1, 2), (0, 1), (3, 4)):
        with pytest.raises(ValueError, match=f"^batch size {batch_size} .* of {ranks} or more "):
            partition_dataset(0, ranks, range(10), batch_size)
    for rank in (-1, 4, 5):
        with pytest.raises(ValueError, match=f"^rank {rank} of 4 ranks: they are 0 to 3$"):
            partition_dataset(rank, 4, range(10), 4)
