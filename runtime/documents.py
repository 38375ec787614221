"""Attention within documents: a row holds several documents, and none sees another.

Problem. A row of plain text is filled with documents. A causal mask lets each document see all
earlier ones, which have nothing to do with it. A mask for every row could say which keys a query
may see, but a fused kernel that takes a mask computes all T^2 scores; a causal one computes half.

Idea. One number for each position is enough: where its document starts in the row. Query t sees the
keys from start[t] to t.

    ids      <end> a  b  <end> c  d  e  <end> f          a mask: t sees start[t] ... t
    start       0  0  0     3  3  3  3     7  7

No score between documents is wanted, so rows are cut at starts into stretches. A stretch is either
a few documents, short enough to be computed with a mask, or one document, which is causal.

Cost of a row with documents of L positions: T L / 2 scores; it would be T^2 / 2 if documents saw
each other. Short rows use a mask and compute all T^2 scores. So do GPUs and compiled code, since
to cut a row the host would have to wait for its starts.

Shapes: B rows, T positions, H heads, E channels of a head.

Papers: Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021; Llama Team,
"The Llama 3 Herd of Models", 2024, section 3.2 (the mask, for 8,192 positions and more).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT = 256  # positions of a row that one kernel computes with a mask
STRETCH = 128  # positions, at least, of a stretch; docs/log.md has other values


def starts_at(starts: Tensor, positions: Tensor) -> Tensor:
    """[B, N]: where the documents of N positions start. `starts` says so for all positions of the
    rows, [B, T]. Padding belongs to a row's last document."""
    return starts[:, positions.clamp(max=starts.size(1) - 1)]


def seen(starts: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """[B, 1, N, S]: whether a query sees a key. `queries` and `keys` are N and S positions; the
    queries' documents start at `starts`, [B, N]."""
    return ((keys <= queries[:, None]) & (keys >= starts[..., None]))[:, None]


def in_stretches(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Attention of whole rows, [B, H, T, E], without dropout, on a CPU."""
    B, H, T, _ = q.shape
    of_row = torch.arange(0, B * T, T, device=starts.device)[:, None]
    first = (starts + of_row).flatten()  # by position, rows end to end: a row starts a document
    edges = [0]
    for start in first.unique_consecutive().tolist():
        if start - edges[-1] >= STRETCH:
            edges.append(start)
    sizes = [b - a for a, b in zip(edges, [*edges[1:], B * T], strict=True)]
    # Each stretch is 1 H n E: with three dimensions no fused kernel runs.
    lines = (x.transpose(0, 1).flatten(1, 2)[None].split(sizes, 2) for x in (q, k, v))
    results = []
    for of_q, of_k, of_v, begins in zip(*lines, first.split(sizes), strict=True):
        n = torch.arange(len(begins))
        begins = begins - begins[0]
        mask = seen(begins[None], n, n) if begins[-1] else None
        results.append(
            F.scaled_dot_product_attention(of_q, of_k, of_v, mask, is_causal=mask is None)
        )
    return torch.cat(results, 2).view(H, B, T, -1).transpose(0, 1)
