"""Stands for FlashAttention on the device: computes what CUDA's kernels compute, and checks what
they take for granted.

They read memory by address. A tensor that they would misread in silence is refused here. As in
torch's aten/src/ATen/native/transformers/cuda: q, k, v, the output and its gradient may have any
strides but the last; the log-sums are float32 and dense, [B, H, T]; a batch is not empty; a head
has 8, 16, ... channels. Dropout draws from the device's generator, and backward draws the same from
the seed that forward returned.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False, *_: Any,
    generator: torch.Generator | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    _refuse(q, k, v)
    seed = torch.randint(2**62, (2,), generator=generator).to(torch.uint64)
    scores = _scores(q, k, causal)
    log_sum = scores.logsumexp(-1).contiguous()
    weights = (scores - log_sum[..., None]).exp() * _mask(scores, p, seed)
    out = (weights @ v.float()).to(q.dtype)
    return (
        out,
        log_sum,
        None,
        None,
        q.size(2),
        k.size(2),
        seed,
        seed.new_empty(()),
        out.new_empty(0),
    )


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, _q: None,
    _k: None, max_q: int, max_k: int, p: float, causal: bool, seed: Tensor, _: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _refuse(d_out, q, k, v, out)
    if log_sum.dtype != torch.float32 or not log_sum.is_contiguous():
        raise RuntimeError(
            "FlashAttention reads the log-sums by address, as a dense float32 [B, H, T]: these are "
            f"{log_sum.dtype} with strides {log_sum.stride()} for {tuple(log_sum.shape)}"
        )
    assert (max_q, max_k) == (q.size(2), k.size(2))
    scores = _scores(q, k, causal)
    mask = _mask(scores, p, seed)
    weights = (scores - log_sum[..., None]).exp()
    d_weights = mask * (d_out.float() @ v.float().transpose(-2, -1))
    mean = (d_out.float() * out.float()).sum(-1, keepdim=True)
    d_scores = weights * (d_weights - mean) / math.sqrt(q.size(-1))
    d_q, d_k = d_scores @ k.float(), d_scores.transpose(-2, -1) @ q.float()
    d_v = (weights * mask).transpose(-2, -1) @ d_out.float()
    return d_q.to(q.dtype), d_k.to(q.dtype), d_v.to(q.dtype)


def _refuse(*tensors: Tensor) -> None:
    channels = tensors[0].size(-1)
    fits = {
        "must have a contiguous last dimension": all(t.stride(-1) == 1 for t in tensors),
        "must have one 16-bit type": {t.dtype for t in tensors} < {torch.bfloat16, torch.float16},
        "batch size must be positive": all(t.numel() for t in tensors),
        "head_size should be a multiple of 8, and at most 256": channels in range(8, 257, 8),
    }
    for rule, holds in fits.items():
        if not holds:
            raise RuntimeError(f"FlashAttention: {rule}")


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.size(-1))
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf) if causal else scores


def _mask(scores: Tensor, p: float, seed: Tensor) -> Tensor:
    """0 with probability p, else 1 / (1 - p)."""
    generator = torch.Generator().manual_seed(int(seed.view(torch.int64)[0]))
    draws = torch.empty_like(scores).uniform_(generator=generator)
    return (draws >= p) / (1 - p)
