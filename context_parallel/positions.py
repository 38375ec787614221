"""Which positions of a sequence a rank has.

Problem. With a causal mask, position t sees t + 1 positions. A rank with the last half of a
sequence has three times the attention of one with the first half, and all wait for it.

Idea. The sequence is cut into 2c stretches, and rank r has one from each end, r and 2c - 1 - r. A
late stretch makes up for an early one, so that every rank has equal work:

    c = 2, stretches 0 1 2 3        rank 0: 0 and 3     rank 1: 1 and 2

Source: Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def multiple(size: int, tensor_ranks: int = 1) -> int:
    """The lengths that can be cut over `size` ranks, and each rank's positions again over
    `tensor_ranks`, are the multiples of this."""
    return size * (2 if tensor_ranks % 2 else 1) * tensor_ranks


def zigzag(rank: int, size: int, length: int, device: torch.device | None = None) -> Tensor:
    """The positions that a rank has of a sequence of `length`, a multiple of 2 `size`, ascending:
    [length / size]. Raises ValueError if the length is no such multiple, or there is no such rank.
    """
    if rank not in range(size):
        raise ValueError(f"rank {rank} of {size}: its number must be one of 0 to {size - 1}")
    if rest := length % (2 * size):
        raise ValueError(
            f"{length} positions cannot be cut over {size} ranks, two equal stretches each; "
            f"{length - rest + 2 * size} can, with padding"
        )
    half = length // (2 * size)
    first = torch.arange(rank * half, (rank + 1) * half, device=device)
    return torch.cat([first, first + (2 * size - 1 - 2 * rank) * half])


def refuse_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, starts: Tensor | None, size: int
) -> None:
    """ValueError for what attention over `size` ranks does not compute."""
    if mask is not None:
        raise ValueError("attention over several ranks is causal, and takes no mask: give None")
    if q.dim() != 4:
        raise ValueError(f"q has {q.dim()} dimensions: it takes 4, [B, H, T, E]")
    if q.size(-2) % 2 or not q.size(-2):  # a kernel of the CPU divides by the positions
        raise ValueError(
            f"{q.size(-2)} positions on a rank: it needs an even number, half of them from each "
            f"end of the sequence; {max(2, q.size(-2) + 1)} work"
        )
    if not 0 <= p < 1:
        raise ValueError(f"p is {p}: dropout keeps some weights; 0 or more and less than 1 works")
    if starts is not None and starts.size(-1) > size * q.size(-2):  # fewer: the rest pads
        raise ValueError(
            f"starts has {starts.size(-1)} positions, and the whole sequence {size * q.size(-2)}: "
            "give one number for each of these"
        )
    if not q.shape == k.shape == v.shape or not q.dtype == k.dtype == v.dtype:
        kinds = (f"{list(t.shape)} of {t.dtype}".replace("torch.", "") for t in (q, k, v))
        raise ValueError(
            f"q, k and v are {', '.join(kinds)}: over several ranks they must have one shape and "
            "type, since each rank has the same positions and heads of all three"
        )
