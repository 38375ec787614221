"""A block of attention that knows the sum of its exponentials, forward and backward.

    forward     out = softmax(q k^T / sqrt(E)) v, and log_sum = log(sum(exp(q k^T / sqrt(E))))
    backward    the gradients of q, k and v, from the output and the log_sum of *all* keys of a
                query, of which the block has some: its weights are exp(q k^T / sqrt(E) - log_sum)

torch's fused kernels do both and keep no scores: one for CPUs, and FlashAttention for 16-bit
numbers on GPUs, which draws its own dropout and says from which state of the generator. Plain
products hold a block's scores while they compute. They are for dropout masks that are hashed, and
for what no kernel takes: on GPUs an attention mask.

The kernels read memory by address, and do not check what they assume:

    q, k, v, d_out, out    the channels of a head lie side by side; other strides are free
    log_sum, on a GPU      float32, and dense: [B, H, T] with nothing in between

Shapes: B examples, H heads, T queries, S keys, E channels of a head. q and out are [B, H, T, E], k
and v [B, H, S, E], log_sum is [B, H, T].

Papers: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
"FlashAttention", 2022 (its backward).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from runtime.sums import wide

aten = torch.ops.aten
Dropped = Callable[[Tensor], Tensor] | None
"""Dropout of weights [B, H, T, S], with the same mask whenever it is called."""

Drawn = Sequence[Tensor]
"""The seed and offset of the generator from which a kernel on a GPU has drawn; else nothing."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, dropped: Dropped = None, p: float = 0.0,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Drawn]:  # fmt: skip
    """The output and log_sum, and what `backward` needs to drop the same.

    Args:
        causal: query t sees keys 0 to t.
        dropped: drops weights; None: nothing is dropped.
        p: with this probability a kernel may drop weights by itself, instead of `dropped`. 0: it
            may not.
        mask: added to the scores, [B, 1, T, S], of the type of q; finite. A query that sees none of
            the keys has an output that means nothing, and a log_sum that weighs it with 0.
    """
    q, k, v = map(_with_dense_heads, (q, k, v))
    if _on_cpu(q, dropped):
        attend = aten._scaled_dot_product_flash_attention_for_cpu
        return *attend(q, k, v, 0.0, causal, attn_mask=mask), ()
    if _on_gpu(q, dropped, p, mask):
        out, log_sum, _, _, _, _, *drawn, _ = aten._scaled_dot_product_flash_attention(
            q, k, v, p, causal
        )
        return out, log_sum, drawn
    scores = _scores(q, k, causal, mask)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum[..., None]).exp().to(v.dtype)
    return (dropped(weights) if dropped else weights) @ v, log_sum, ()


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, causal: bool,
    dropped: Dropped = None, p: float = 0.0, drawn: Drawn = (), mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v. `out` and `log_sum` are those of all keys, `drawn` is what
    `forward` returned."""
    d_out, q, k, v, out = map(_with_dense_heads, (d_out, q, k, v, out))
    saved = d_out, q, k, v, out, log_sum.contiguous()  # for some of the queries it is a view
    if _on_cpu(q, dropped):
        backward_of = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward_of(*saved, 0.0, causal, attn_mask=mask)
    if _on_gpu(q, dropped, p, mask):
        lengths = None, None, q.size(2), k.size(2)  # the same in the whole batch
        return aten._scaled_dot_product_flash_attention_backward(
            *saved, *lengths, p, causal, *drawn
        )
    weights = (_scores(q, k, causal, mask) - log_sum[..., None]).exp()
    kept = dropped(weights) if dropped else weights
    # The softmax: weights * (d_weights - sum of weights * d_weights over all keys). That sum is
    # d_out * out, with dropout, too.
    mean = (d_out.to(weights.dtype) * out).sum(-1, keepdim=True)
    d_scores = (kept * (d_out @ v.transpose(-2, -1)) - weights * mean) / math.sqrt(q.size(-1))
    d_scores = d_scores.to(q.dtype)
    d_v = kept.to(v.dtype).transpose(-2, -1) @ d_out
    return d_scores @ k, d_scores.transpose(-2, -1) @ q, d_v


def _on_cpu(q: Tensor, dropped: Dropped) -> bool:
    return dropped is None and q.device.type == "cpu"


def _on_gpu(q: Tensor, dropped: Dropped, p: float, mask: Tensor | None) -> bool:
    """FlashAttention takes 16-bit numbers, at least one example, heads of 8, 16, ... channels (up
    to 192 on every GPU), from compute capability 8.0 on."""
    return (
        mask is None
        and (dropped is None or p > 0)
        and q.device.type == "cuda"
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.numel() > 0
        and q.size(-1) in range(8, 193, 8)
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def _with_dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    """[B, H, T, S], in fp32 at least, with the mask; where a key is later than the query, -inf."""
    scores = (q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1)
    scores = scores.to(wide(scores))
    if mask is not None:
        scores = scores + mask
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores
