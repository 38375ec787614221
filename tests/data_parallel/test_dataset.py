"""Every example to exactly one rank, and the same global batches whatever the number of ranks."""

from __future__ import annotations

import pytest
import torch

from data_parallel.dataset import (
    DataPartitioner,
    Partition,
    even_slices,
    partition_dataset,
    shuffled_indices,
    split_batch_size,
)

pytestmark = [pytest.mark.a4_1_1, pytest.mark.a5_1_1]


def test_a_partition_is_a_view_in_the_order_of_its_index() -> None:
    part = Partition("abcde", [3, 0, 4])
    assert len(part) == 3
    assert [part[0], part[1], part[2]] == ["d", "a", "e"]


def test_equal_sizes_are_dealt_in_turn() -> None:
    order = shuffled_indices(7, seed=1234)
    partitioner = DataPartitioner(list(range(7)), [0.5, 0.5])
    assert partitioner.use(0).index == [order[0], order[2], order[4], order[6]]
    assert partitioner.use(1).index == [order[1], order[3], order[5]]


@pytest.mark.parametrize(
    ("n", "parts", "sizes"),
    [
        (9, 4, [3, 2, 2, 2]), (8, 5, [2, 2, 2, 1, 1]), (32, 24, [2] * 8 + [1] * 16),
        (6, 3, [2, 2, 2]), (3, 8, [1, 1, 1]), (5, 1, [5]), (0, 4, []),
    ],
)  # fmt: skip
def test_even_slices_are_as_many_as_asked_for(n: int, parts: int, sizes: list[int]) -> None:
    slices = even_slices(n, parts)
    assert [len(range(n)[at]) for at in slices] == sizes
    assert [i for at in slices for i in range(n)[at]] == list(range(n))


def test_there_is_at_least_one_slice() -> None:
    with pytest.raises(ValueError, match="parts=0: at least 1"):
        even_slices(3, 0)


def test_the_order_is_a_shuffle_that_the_seed_fixes() -> None:
    assert shuffled_indices(8, seed=1234) == [1, 3, 2, 4, 5, 6, 0, 7]
    assert shuffled_indices(8, seed=1235) != shuffled_indices(8, seed=1234)
    assert sorted(shuffled_indices(1000, seed=7)) == list(range(1000))


@pytest.mark.parametrize("n", [0, 1, 2, 5, 16, 97])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_partitions_are_disjoint_and_together_everything(n: int, parts: int) -> None:
    data = [f"example {i}" for i in range(n)]
    partitioner = DataPartitioner(data, [1 / parts] * parts)
    dealt = [partitioner.use(r) for r in range(parts)]
    everything = [part[i] for part in dealt for i in range(len(part))]
    assert sorted(everything) == sorted(data)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        ([0.7, 0.2, 0.1], [70, 20, 10]),
        ([0.5, 0.25], [50, 25]),
        ([1 / 3, 1 / 3, 1 / 3], [34, 33, 33]),
        ([0.333, 0.333, 0.334], [33, 34, 33]),
        ([1.0], [100]),
    ],
)
def test_other_sizes(sizes: list[float], lengths: list[int]) -> None:
    partitioner = DataPartitioner(range(100), sizes)
    dealt = [partitioner.use(r).index for r in range(len(sizes))]
    assert [len(part) for part in dealt] == lengths
    assert len({i for part in dealt for i in part}) == sum(lengths)


@pytest.mark.parametrize("sizes", [[], [0.6, 0.6], [0.5, -0.5], [0.0, 1.0], [float("nan")]])
def test_sizes_that_are_no_fractions(sizes: list[float]) -> None:
    with pytest.raises(ValueError, match=r"sum to at most 1, for example \[0.5, 0.5\]"):
        DataPartitioner(range(10), sizes)


@pytest.mark.parametrize("rank", [-1, 2, 100])
def test_an_unknown_rank(rank: int) -> None:
    with pytest.raises(IndexError, match="ranks go from 0 to 1"):
        DataPartitioner(range(10), [0.5, 0.5]).use(rank)
    with pytest.raises(IndexError, match="ranks go from 0 to 1"):
        partition_dataset(rank, 2, list(range(10)), batch_size=2)


@pytest.mark.parametrize(
    ("batch_size", "world_size", "works"), [(5, 2, 4), (128, 3, 126), (1, 2, 2), (0, 2, 2)]
)
def test_a_batch_that_the_ranks_cannot_share(batch_size: int, world_size: int, works: int) -> None:
    with pytest.raises(ValueError, match=f"batch size {batch_size} .* for example {works}"):
        partition_dataset(0, world_size, list(range(10)), batch_size=batch_size)
    assert split_batch_size(works, world_size) == works // world_size


def test_a_rank_loads_batches_of_its_share() -> None:
    loader = partition_dataset(1, 2, list(range(21)), batch_size=8, collate_fn=list)
    order = shuffled_indices(21, seed=1234)[1::2]
    assert list(loader) == [order[0:4], order[4:8], order[8:10]]


def test_without_a_collate_function_batches_are_stacked() -> None:
    loader = partition_dataset(0, 1, [torch.tensor(i) for i in range(4)], batch_size=4)
    (batch,) = list(loader)
    assert batch.tolist() == shuffled_indices(4, seed=1234)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(world_size: int) -> None:
    order = shuffled_indices(43, seed=5)
    loaders = [
        list(partition_dataset(r, world_size, list(range(43)), 8, list, seed=5))
        for r in range(world_size)
    ]
    for k in range(5):  # five whole batches of 8, and one of 3
        together = [i for batches in loaders for i in batches[k]]
        assert sorted(together) == sorted(order[8 * k : 8 * k + 8])
