"""Deals a dataset out to the ranks.

Problem: W ranks train on one dataset. Exactly one rank must use each example, and the k-th
*global* batch must not depend on W: otherwise two runs that differ only in the number of ranks
see different data and cannot be compared.

Idea: shuffle the indices once, with a seed that all ranks share, and deal them out like cards: rank
r takes places r, r+W, r+2W, ... of the shuffled order (`Batches`). Its k-th batch is its part of
places k*B ... (k+1)*B - 1, and the ranks' k-th batches together are that stretch, for every W.

A rank's part of a batch is cut into micro-batches later (training/tasks/sequences.py).

Cost: on every rank the order takes 40 bytes per example, or 4 bytes if there are more than a
million examples. A batch is picked, sorted and dealt when its turn comes; the examples are not
copied.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from runtime.even import even_sizes

FEW = 1_000_000  # examples that Python may shuffle: a microsecond and 40 bytes each


@lru_cache(maxsize=1)
def shuffled_indices(n: int, seed: int) -> Sequence[int]:
    """The order in which n examples are dealt: a permutation of range(n), the same everywhere."""
    if n > FEW:  # RandomState: numpy promises never to change what it draws
        bits = np.random.MT19937(np.random.SeedSequence(seed))
        order: Any = np.arange(n, dtype=np.int32 if n < 1 << 31 else np.int64)
        np.random.RandomState(bits).shuffle(order)
        return memoryview(order)  # of Python's integers
    indices = list(range(n))
    random.Random(seed).shuffle(indices)
    return indices


def global_batches(n: int, batch_size: int, seed: int, start: int = 0) -> Iterator[Sequence[int]]:
    """The examples of each global batch of an epoch, from the batch with the number `start` on.
    Everything that is dealt is dealt in this order."""
    order = shuffled_indices(n, seed)
    for first in range(start * batch_size, n, batch_size):
        yield order[first : first + batch_size]


def even_slices(n: int, parts: int) -> list[slice]:
    """n examples cut into `parts` consecutive parts whose sizes differ by at most one, the larger
    first. With fewer examples than parts, one part per example."""
    edges = accumulate(even_sizes(n, min(parts, n)) if n else [], initial=0)
    return [slice(a, b) for a, b in pairwise(edges)]


@dataclass(frozen=True)
class Batches:
    """The batches of one rank in an epoch, as indices; see `partition_dataset`."""

    rank: int
    world_size: int
    dataset: Any
    batch_size: int
    seed: int
    by_length: bool
    start: int

    def __iter__(self) -> Iterator[list[int]]:
        n, size = len(self.dataset), self.batch_size
        batches = global_batches(n, size, self.seed, self.start)
        for number, batch in enumerate(batches, self.start):
            if self.by_length:
                lengths, _ = self.dataset.sizes(batch)
                batch = [batch[i] for i in np.argsort(lengths, kind="stable")]
            first = number * size
            # Rank r has the places r, r + W, r + 2 W, ... of the epoch.
            if share := list(batch[(self.rank - first) % self.world_size :: self.world_size]):
                yield share

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self.batch_size)
        has_rest = rest > (self.rank - whole * self.batch_size) % self.world_size
        return max(0, whole + has_rest - self.start)


def partition_dataset(
    rank: int,
    world_size: int,
    dataset: Sequence[Any],
    batch_size: int = 128,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    *,
    seed: int = 1234,
    by_length: bool = False,
    start: int = 0,
) -> DataLoader[Any]:
    """The batches of one rank in an epoch.

    Args:
        batch_size: of the global batch. A rank's batches hold batch_size // world_size examples;
            if the world size does not divide it, some hold one more.
        collate_fn: makes a batch from a list of examples.
        seed: of the shuffle.
        by_length: sort each global batch by length before dealing, so that all ranks get similar
            examples. The dataset has a method `sizes` of indices, which returns the examples'
            lengths and something else. By default the batch stays shuffled.
        start: the number of the first batch, for a resumed run.

    A rank without an example in the last, smaller batch has one batch less.

    Raises:
        ValueError: the batch is smaller than the number of ranks, or there is no such rank.
    """
    if not 1 <= world_size <= batch_size:
        raise ValueError(
            f"batch size {batch_size} on {world_size} ranks: each rank needs an example of every "
            f"batch; a batch size of {max(world_size, 1)} or more works"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size} ranks: they are 0 to {world_size - 1}")
    data: Any = dataset
    batches: Any = Batches(rank, world_size, dataset, batch_size, seed, by_length, start)
    # Its own generator: a DataLoader draws a seed even without workers, and dropout must not
    # depend on how often the run was resumed.
    return DataLoader(
        data, batch_sampler=batches, collate_fn=collate_fn, generator=torch.Generator()
    )


# Classes that the course asks for; no run uses them


class Partition(Subset[Any]):
    """The examples of `data` at the places `index`, in that order. Nothing is copied."""

    def __init__(self, data: Any, index: Sequence[int]) -> None:
        super().__init__(data, index)
        self.data, self.index = data, index


class DataPartitioner:
    """Cuts `data` into shuffled, disjoint partitions. Equal ones are dealt out like cards; others
    are consecutive stretches of the shuffled order.

    Args:
        data: anything with a length and integer indices.
        sizes: the fraction of the data in each partition. They must be positive and sum to at
            most 1. If they sum to 1, every example is in exactly one partition, for any length
            of the data.
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
        self.partitions: list[Sequence[int]]
        if math.isclose(math.fsum(sizes), 1, abs_tol=1e-9) and max(sizes) - min(sizes) < 1e-12:
            self.partitions = [indices[r :: len(sizes)] for r in range(len(sizes))]  # like cards
        else:
            # Cut at the rounded running sums: rounding each size on its own could lose or repeat
            # examples.
            ends = [round(math.fsum(sizes[: r + 1]) * len(indices)) for r in range(len(sizes))]
            self.partitions = [indices[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    def use(self, partition: int) -> Partition:
        """The partition of rank `partition`. Raises IndexError if there is no such rank."""
        if not 0 <= partition < len(self.partitions):
            raise IndexError(f"partition {partition} of {len(self.partitions)}, counted from 0")
        return Partition(self.data, self.partitions[partition])
