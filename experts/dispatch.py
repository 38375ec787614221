"""Rows travel to the ranks that have their experts, and back.

Problem. Experts lie on the ranks of an axis: of E experts and W ranks, rank r has E/W. A rank's
positions may choose experts anywhere, each of them as often as chance has it.

Idea. Rows are sorted by expert, and so by rank. The ranks tell each other how many rows there are
for each expert, E numbers per rank; then an all-to-all moves the rows. They arrive by sender, those
of one sender by expert, and are computed as they lie (on a GPU in a different order: grouped.py). A
second all-to-all, the first one's mirror image, brings the results to the places where the rows
were:

    rank 0   rows of experts 0 1 | 2 3 ──┐        ┌── of 0 1 from rank 0 | of 0 1 from rank 1
                                         ├ all-to-all
    rank 1   rows of experts 0 1 | 2 3 ──┘        └── of 2 3 from rank 0 | of 2 3 from rank 1

Backward goes through the same exchanges with senders and receivers swapped.

Cost, a rank with N positions of C numbers, each sent to k experts, chosen evenly: N k C (W-1)/W
numbers sent, four times per layer and micro-batch (there and back, forward and backward), and the
counts. The host waits for the counts, on a GPU once per layer: no rank knows the lengths of its
messages before.

All ranks must take part; one without positions sends nothing, and may get rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from runtime.communicator import Communicator, Lengths
from runtime.paired import paired

Segments = Sequence[tuple[int, int]]
"""How rows lie: (number of the expert among this rank's, number of rows), one after the other."""


def experts_per_rank(num_experts: int, num_ranks: int) -> int:
    """Raises ValueError if the ranks do not divide the experts."""
    if rest := num_experts % num_ranks:
        raise ValueError(
            f"{num_experts} experts cannot be shared by {num_ranks} ranks; "
            f"{num_experts - rest + num_ranks} can"
        )
    return num_experts // num_ranks


def segments_of(counts: Sequence[Sequence[int]], rank: int) -> tuple[Lengths, Segments]:
    """How many rows each rank sends to each, and how those lie that `rank` receives.

    Args:
        counts: by sender, the number of its rows for each of all experts.

    Raises ValueError if the ranks do not divide the experts, or there is no such rank.
    """
    size = len(counts)
    own = experts_per_rank(len(counts[0]), size)
    if rank not in range(size):
        raise ValueError(f"rank {rank} of {size}: 0 to {size - 1} work")
    by_receiver = [[row[r * own : (r + 1) * own] for r in range(size)] for row in counts]
    lengths = [[sum(part) for part in parts] for parts in by_receiver]
    segments = [(e, n) for parts in by_receiver for e, n in enumerate(parts[rank])]
    return lengths, segments


def exchange(rows: Tensor, ranks: Communicator, lengths: Lengths) -> Tensor:
    """Sends this rank's rows to their ranks, those for rank 0 first; returns the rows from all
    ranks, those from rank 0 first. `lengths`: by sender and receiver."""
    there = partial(ranks.all_to_all, lengths=lengths)
    back = partial(ranks.all_to_all, lengths=swapped(lengths))
    return rows if ranks.size == 1 else paired(rows, there, back)


def swapped(lengths: Lengths) -> Lengths:
    """By receiver and sender: the lengths of the way back."""
    return [list(column) for column in zip(*lengths, strict=True)]


def put_back(rows: Tensor, order: Tensor) -> Tensor:
    """Rows that were taken in an `order`, at the places where they had been."""
    return torch.empty_like(rows).index_copy(0, order, rows)
