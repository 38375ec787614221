"""Dropout whose mask depends on the examples, never on the rank that computes it.

Problem. A mask drawn from a rank's generator depends on the rank's examples, on the order of its
draws, and on the heads or positions it holds. Two layouts then train with different masks, and
their losses cannot be compared.

Idea. Do not draw: hash. Whether an activation is kept is a function of the example's key, of the
site in the model, and of the activation's coordinates (head, position, channel). A rank with some
of the heads or positions computes exactly its part of one process's mask.

    row    = hash(key of the example, site, head, position)     one number per row
    kept   = hash(row + hash(channel)) >= p * 2^32               one per activation

Cost: six passes over 32-bit integers. For 384 positions of width 256 on one core 0.4 ms, where
torch's own dropout takes 1.0 to 1.5 ms; autograd keeps one byte per activation.

On a GPU each pass is a kernel, and fused attention takes no mask. There torch's own kernels draw,
from a generator seeded before each draw: by one number for all examples of the micro-batch, by the
site, and by the first head or position that this rank holds. Masks are then equal if these three
are equal: in one process and in stages, and for the residual stream also over tensor-parallel
ranks. A batch that is cut differently has different masks.

Shapes: B examples, T positions, C channels, H heads. The mixing constants are from Chris Wellons,
"Prospecting for Hash Functions" (lowbias32).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import partial
from itertools import zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.documents import SHORT, in_stretches, seen, starts_at

_M1, _M2 = 0x7FEB352D, 0x846CA68B - 2**32  # as signed 32-bit numbers


def site_of(name: str) -> int:
    """The number of a dropout in the model, from its name, e.g. "h.3.attn"."""
    return zlib.crc32(name.encode())


def mixed(number: int, site: int, index: int) -> int:
    """A well-spread 63-bit seed for draws at a place, such as a layer and a micro-batch. `index`
    is below 2^32. (The finaliser of splitmix64.)"""
    z = (number + 0x9E3779B97F4A7C15 * ((site << 32) + index + 1)) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) >> 1


Keys = Tensor | int | None
"""[B], int64: a number per example and epoch, to hash. Or, on a GPU, one number below 2^63 for all
examples, to seed draws. None: draw from torch's generator as it is."""


Index = Tensor | int
"""Where a part of a tensor is in the whole, along a dimension: the number of its first element, or
the numbers of all its elements, if these are not consecutive."""


def dropout(x: Tensor, p: float, keys: Keys, where: int, *index: Index) -> Tensor:
    """`x` with each element set to 0 with probability `p`, the others divided by 1 - p.

    Args:
        x: [B, T, C], or [B, H, T, C].
        where: the `site_of` this dropout.
        index: where `x` is in the whole tensor along dimension 1 (positions or heads), then along
            dimension 2, and so on; by default at 0.
    """
    if p == 0:
        return x
    if not isinstance(keys, Tensor):
        first = index[0] if index and isinstance(index[0], int) else 0
        return drawn(lambda: F.dropout(x, p), x.device, keys, where, first)
    # Nothing is drawn here: a mode that looks for draws (randomness.py) would double the time.
    with torch._C.DisableTorchFunction():
        row = _mix(_low(keys) ^ _low(keys >> 32) ^ _low(torch.tensor(where)))  # [B]
        *rows, channels = (
            _mix(_low(_numbers(at, size, x.device)) + 1)
            for size, at in zip_longest(x.shape[1:], index, fillvalue=0)
        )
        for numbers in rows:
            row = _mix(row[..., None] + numbers)  # [B, T]; or [B, H], [B, H, T]
        kept = _mix(row[..., None] + channels) >= round(p * 2**32) - 2**31  # int32: from -2**31
    return torch.where(kept, x * (1 / (1 - p)), 0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    keys: Keys,
    where: int,
    first: int = 0,
    starts: Tensor | None = None,
) -> Tensor:
    """Attention with dropout on its weights: [B, H, T, E], the shape of the queries.

    Args:
        mask: added to the scores, only if p is 0; None: position t sees positions 0 to t.
        p, keys, where: see `dropout`.
        first: the number of the first of these heads in the model.
        starts: where the document of each position starts, [B, T], if no document sees another
            (runtime/documents.py).
    """
    T = q.size(-2)
    if starts is not None:
        at = torch.arange(T, device=q.device)
        starts = starts_at(starts, at)
        fixed = T <= SHORT or not len(q) or q.device.type != "cpu" or torch.compiler.is_compiling()
        if p == 0 and not fixed:
            return in_stretches(q, k, v, starts)
        mask = seen(starts, at, at)
    if mask is not None and T == 1 and q.device.type == "cpu":
        # One position: the fused kernel, made for many, takes up to twice as long.
        return ((q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1) + mask).softmax(-1) @ v
    if p == 0 or not isinstance(keys, Tensor):
        fused = partial(
            F.scaled_dot_product_attention, q, k, v,
            attn_mask=mask, dropout_p=p, is_causal=mask is None,
        )  # fmt: skip
        return drawn(fused, q.device, keys if p else None, where, first)
    scores = (q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1)  # [B, H, queries, keys]
    if mask is None:
        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()  # [queries, keys]
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return dropout(weights, p, keys, where, first) @ v


def drawn(
    draw: Callable[[], Tensor], device: torch.device, keys: Keys, where: int, first: int
) -> Tensor:
    """What `draw` returns. If `keys` is a number, the generator is first seeded by it, by the site
    `where`, and by the `first` head or position. Compiled code cannot seed: it draws from the
    generator as it is. So does a CPU stage of a pipeline with GPUs, from the stage's generator."""
    if torch.compiler.is_compiling() or not isinstance(keys, int) or device.type == "cpu":
        return draw()
    # Bypasses the stage's seeds (randomness.py). The host seeds: no kernel runs, and nobody waits.
    with torch._C.DisableTorchFunction(), torch.random.fork_rng([device], device_type=device.type):
        seed_gpu(device, mixed(keys, where, first))
        return draw()  # afterwards the generator is as before


def seed_gpu(device: torch.device, seed: int) -> None:
    """Seeds the generator of the device, if it is a GPU."""
    if device.type != "cpu":
        with torch.accelerator.device_index(device.index):
            torch.get_device_module(device).manual_seed(seed)


def _numbers(at: Index, size: int, device: torch.device) -> Tensor:
    return at if isinstance(at, Tensor) else torch.arange(at, at + size, device=device)


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
