"""Attention by heads: positions are exchanged for heads, and back.

Problem. A rank has some positions of every head; attention needs all positions of a head.

Idea. Heads do not need each other. In an all-to-all each rank gives every other its heads of the
positions it has, and so gets all positions of H/c heads. It computes plain attention with them, by
whatever kernel there is, and a second all-to-all gives the results back to the ranks that have the
positions.

    rank 0   positions 0 3, heads a b              positions 0 1 2 3, head a
    rank 1   positions 1 2, heads a b     ->       positions 0 1 2 3, head b

Cost, c ranks, keys of K bytes on each: a rank sends 4 K (c-1)/c forward (queries, keys, values,
results) and as much backward. A ring sends 2 K (c-1) forward and 4 K (c-1) backward: the more ranks
there are, the larger the difference. But c must divide the heads of a rank, nothing travels while
it computes, and a rank holds all positions of its heads.

Paper: Jacobs et al., "DeepSpeed Ulysses", 2023.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from context_parallel.positions import refuse_attention, zigzag
from runtime.communicator import Communicator
from runtime.dropout import Keys, attention
from runtime.paired import paired

HEADS, POSITIONS = -3, -2  # dimensions


class Heads:
    """Attention of this rank's positions over those of all `ranks`. It takes the place of
    `runtime.dropout.attention`, and has its arguments."""

    def __init__(self, ranks: Communicator) -> None:
        self.ranks = ranks

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: None, p: float, keys: Keys, where: int,
        first: int = 0, starts: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[B, H, T, E], like q, k and v. T, the number of this rank's positions, is even, and H is
        a multiple of the number of ranks."""
        refuse_attention(q, k, v, mask, p, starts, self.ranks.size)
        heads, size = q.size(HEADS), self.ranks.size
        if rest := heads % size:
            fits = heads - rest + size
            raise ValueError(f"{heads} heads cannot be cut over {size} ranks; {fits} can")
        there, back = partial(to_heads, ranks=self.ranks), partial(to_positions, ranks=self.ranks)
        q, k, v = paired(torch.stack([q, k, v]), there, back)  # each [B, H/c, c T, E]
        first += self.ranks.rank * q.size(HEADS)
        return paired(attention(q, k, v, mask, p, keys, where, first, starts), back, there)


def to_heads(x: Tensor, ranks: Communicator) -> Tensor:
    """[..., H, T, E] to [..., H/c, c T, E], all positions in their order."""
    gathered = _exchange(x, ranks, HEADS, POSITIONS)
    return gathered.index_select(POSITIONS, _by_rank(gathered, ranks).argsort())


def to_positions(x: Tensor, ranks: Communicator) -> Tensor:
    """Back: [..., H/c, c T, E] to [..., H, T, E]."""
    return _exchange(x.index_select(POSITIONS, _by_rank(x, ranks)), ranks, POSITIONS, HEADS)


def _exchange(x: Tensor, ranks: Communicator, given: int, gathered: int) -> Tensor:
    """Gives every rank its part along one dimension; gathers along the other."""
    parts = torch.stack(x.chunk(ranks.size, given))  # by receiver
    one_each = [[1] * ranks.size] * ranks.size
    return torch.cat(ranks.all_to_all(parts, one_each).unbind(), gathered)


def _by_rank(x: Tensor, ranks: Communicator) -> Tensor:
    """The positions of all ranks, one rank's after the other's."""
    length = x.size(POSITIONS)
    return torch.cat([zigzag(r, ranks.size, length, x.device) for r in range(ranks.size)])
