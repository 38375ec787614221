"""Deals a dataset out to the ranks.

Problem: W ranks train on one dataset. Every example must be used by exactly one of them, and
the examples that make up the k-th *global* batch must not depend on W, or two runs that differ
only in the number of ranks see different data and cannot be compared.

Idea: shuffle the indices once, by a seed that all ranks share, then

- equal sizes: deal them out in turn, as cards: rank r takes places r, r+W, r+2W, ... Its k-th
  batch of B/W examples is then its part of places k*B ... (k+1)*B - 1 of the shuffled order,
  and the ranks' k-th batches together are that stretch, for every W that divides B;
- other sizes: consecutive stretches of the shuffled order, as long as the sizes say.

A rank's part of a batch is cut into micro-batches of sizes that differ by at most one.

Cost: one list of indices per rank; the examples are not copied.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch.utils.data import DataLoader, Dataset


def shuffled_indices(n: int, seed: int) -> list[int]:
    """The order in which n examples are dealt: a permutation of range(n), the same everywhere."""
    indices = list(range(n))
    random.Random(seed).shuffle(indices)
    return indices


def even_slices(n: int, parts: int) -> list[slice]:
    """n examples in consecutive parts whose sizes differ by at most one, the larger first: exactly
    `parts` of them, or where there are fewer examples, one each. ValueError for less than a part.
    """
    if parts < 1:
        raise ValueError(f"parts={parts}: at least 1 is needed, for example 4")
    parts = min(parts, n)
    size, larger = divmod(n, parts or 1)
    return [slice(a, b) for a, b in pairwise(i * size + min(i, larger) for i in range(parts + 1))]


class Partition(Dataset[Any]):
    """The examples of `data` at the places `index`, in that order. Nothing is copied."""

    def __init__(self, data: Sequence[Any], index: Sequence[int]) -> None:
        self.data = data
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> Any:
        return self.data[self.index[index]]


class DataPartitioner:
    """Cuts `data` into shuffled, disjoint partitions.

    Args:
        data: anything with a length and integer indices.
        sizes: the fraction of the data in each partition. They must be positive and sum to at
            most 1; where they sum to 1 every example is in exactly one partition, whatever
            the length of the data.
        seed: of the shuffle; the same on all ranks.

    Raises:
        ValueError: sizes that are not positive, or sum to more than 1.
    """

    def __init__(self, data: Sequence[Any], sizes: Sequence[float], seed: int = 1234) -> None:
        if not sizes or any(not size > 0 for size in sizes) or math.fsum(sizes) > 1 + 1e-9:
            raise ValueError(
                f"sizes {list(sizes)} sum to {math.fsum(sizes):g}: the fractions must be positive "
                f"and sum to at most 1, for example [0.5, 0.5]"
            )
        self.data = data
        indices = shuffled_indices(len(data), seed)
        self.partitions: list[list[int]]
        if math.isclose(math.fsum(sizes), 1, abs_tol=1e-9) and max(sizes) - min(sizes) < 1e-12:
            self.partitions = [indices[r :: len(sizes)] for r in range(len(sizes))]
        else:
            # Cutting at the rounded running sums loses nothing and repeats nothing; rounding
            # each size on its own would.
            ends = [round(math.fsum(sizes[: r + 1]) * len(indices)) for r in range(len(sizes))]
            self.partitions = [indices[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    def use(self, partition: int) -> Partition:
        """The partition of rank `partition`. Raises IndexError where there is no such rank."""
        if not 0 <= partition < len(self.partitions):
            raise IndexError(
                f"partition {partition} of {len(self.partitions)}: "
                f"ranks go from 0 to {len(self.partitions) - 1}"
            )
        return Partition(self.data, self.partitions[partition])


def split_batch_size(batch_size: int, world_size: int) -> int:
    """The examples per rank of a global batch. Raises ValueError where they are not whole."""
    if world_size < 1 or batch_size < 1 or batch_size % world_size:
        below = max(world_size, batch_size - batch_size % max(world_size, 1))
        raise ValueError(
            f"batch size {batch_size} on {world_size} ranks: both must be positive and the "
            f"world size must divide the batch size, for example {below}"
        )
    return batch_size // world_size


def partition_dataset(
    rank: int,
    world_size: int,
    dataset: Sequence[Any],
    batch_size: int = 128,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    *,
    seed: int = 1234,
) -> DataLoader[Any]:
    """The batches of one rank.

    Args:
        batch_size: of the global batch; the loader's batches hold batch_size // world_size.
        collate_fn: makes a batch of a list of examples.

    Raises:
        ValueError: the world size does not divide the batch size.
        IndexError: no such rank.
    """
    per_rank = split_batch_size(batch_size, world_size)
    partitioner = DataPartitioner(dataset, [1 / world_size] * world_size, seed=seed)
    return DataLoader(partitioner.use(rank), batch_size=per_rank, collate_fn=collate_fn)
