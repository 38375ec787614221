"""Dropout whose mask depends on the example, never on the rank that computes it.

Problem. A mask drawn from a rank's generator depends on the rank's examples, on the order of its
draws, and on the heads or positions it holds. Two layouts then train with different masks, and
their losses cannot be compared.

Idea. Do not draw: hash. Whether an activation is kept is a function of the example's key, of the
place in the model, and of the activation's coordinates (head, position, channel). A rank with some
of the heads or positions computes exactly its part of one process's mask.

    row    = hash(key of the example, place, head, position)     one number per row
    kept   = hash(row + hash(channel)) >= p * 2^32               one per activation

Cost: six passes over 32-bit integers. For 384 positions of width 256 on one core 0.4 ms, where
torch's own dropout takes 1.0 to 1.5 ms; autograd keeps one byte per activation. A GPU keeps its
fused attention, whose masks come from the device's generator and depend on the layout.

Shapes: B examples, T positions, C channels, H heads. The mixing constants are from Chris Wellons,
"Prospecting for Hash Functions" (lowbias32).
"""

from __future__ import annotations

import math
import zlib

import torch
import torch.nn.functional as F
from torch import Tensor

_M1, _M2 = 0x7FEB352D, 0x846CA68B - 2**32  # as signed 32-bit numbers


def place(name: str) -> int:
    """The number of a dropout in the model, from its name, e.g. "h.3.attn"."""
    return zlib.crc32(name.encode())


def dropout(x: Tensor, p: float, keys: Tensor | None, where: int, *indices: Tensor) -> Tensor:
    """`x` with each element set to 0 with probability `p`, the others divided by 1 - p.

    Args:
        x: [B, ..., C].
        keys: [B], int64: a number per example and step; None: draw from torch's generator.
        where: the `place` of this dropout.
        indices: for every dimension of `x` between the first and the last, its indices in the
            whole tensor: positions; or heads and positions.
    """
    if p == 0:
        return x
    if keys is None:
        return F.dropout(x, p)
    row = _mix(_low(keys) ^ _low(keys >> 32) ^ _low(torch.tensor(where)))  # [B]
    for index in indices:
        row = _mix(row[..., None] + _mix(_low(index) + 1))  # [B, T]; or [B, H], [B, H, T]
    channels = _mix(_low(torch.arange(x.size(-1), device=x.device)) + 1)  # [C]
    kept = _mix(row[..., None] + channels) >= round(p * 2**32) - 2**31  # int32: from -2**31
    return torch.where(kept, x * (1 / (1 - p)), 0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    keys: Tensor | None,
    where: int,
    heads: Tensor,
) -> Tensor:
    """Attention with dropout on its weights: [B, H, T, E], the shape of the queries.

    Args:
        mask: added to the scores, where p is 0; None: position t sees positions 0 to t.
        p, keys, where: see `dropout`.
        heads: [H], the numbers of these heads in the model.
    """
    T = q.size(-2)
    if mask is not None and T == 1 and q.device.type == "cpu":
        # One position: the fused kernel, made for many, takes up to twice as long.
        return ((q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1) + mask).softmax(-1) @ v
    if p == 0 or keys is None or q.device.type != "cpu":
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=p, is_causal=mask is None
        )
    scores = (q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1)  # [B, H, queries, keys]
    future = torch.ones(T, T, dtype=torch.bool).triu(1)  # [queries, keys]
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    # `dropout` takes the indices of heads and queries, and numbers the keys itself.
    return dropout(weights, p, keys, where, heads, torch.arange(T)) @ v


def _low(x: Tensor) -> Tensor:
    """The low 31 bits, so that the result is not negative."""
    return (x & 0x7FFFFFFF).to(torch.int32)


def _mix(h: Tensor) -> Tensor:
    """Spreads every bit of a 32-bit number over the upper ones; `h` is overwritten."""
    h ^= h >> 16
    h *= _M1
    h ^= h >> 15
    h *= _M2
    return h
