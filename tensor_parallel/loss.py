"""Cross-entropy over a vocabulary cut over the ranks, fused with the head.

Problem. Logits are the largest tensor of a small GPT-2: N positions times V tokens, 200 MB for a
thousand positions of the published vocabulary. Gathering the ranks' parts and computing the whole
softmax on every rank multiplies memory, traffic and time by t.

Idea. The loss of a position needs two numbers from each rank: the logsumexp of its logits and the
label's logit, or -inf on a rank without the label.

    loss = log(e^a0 + e^a1) - max(b0, b1)    a: logsumexp of a rank's logits; b: the label's

The gradient of a logit is its softmax, minus 1 at the label: known as soon as the loss is. So
forward works through the positions in chunks. It computes a chunk's logits, its losses, and its
part of the gradients of hidden states and weights, and drops the logits. No rank ever holds more
than one chunk of its logits, forward or backward.

Cost, t ranks, N positions: three products of N C V/t, as without fusion; 2 N numbers sent by each
rank. Memory: a chunk of logits; between forward and backward, per micro-batch, the gradients of the
rank's part of the weights, C V/t, and of the hidden states, N C.

The fusion is from Hsu et al., "Liger Kernel", 2024; Shoeybi et al., 2019, send three numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from runtime.communicator import Communicator
from runtime.sums import narrowed, wide

# Logits at a time: what stays in a CPU's cache; on a GPU 512 MB, for which it launches once.
LOGITS_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 27}


def head_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, ranks: Communicator, first: int
) -> Tensor:
    """The sum of the cross-entropies at N positions, on every rank: a scalar.

    Args:
        hidden: [N, C], the same on all ranks. Each rank gets its part of the gradient; `replicate`
            sums them.
        weight: [rows, C], this rank's rows of the output embedding.
        labels: [N], the token to predict at each position. For a token that no rank has, such as
            -100, the loss is infinite.
        first: the token of the first row.

    Raises ValueError if the rank has no rows.
    """
    # Cast once, not for each chunk.
    loss: Tensor = _HeadLoss.apply(narrowed(hidden), narrowed(weight), labels, ranks, first)
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, ranks: Communicator, first: int
    ) -> Tensor:
        dtype = wide(hidden)
        d_hidden = torch.empty_like(hidden)  # [N, C], from this rank's tokens only
        d_weight = torch.zeros_like(weight, dtype=dtype)  # a sum over the chunks
        total = hidden.new_zeros((), dtype=dtype)
        for at in _chunks(len(hidden), weight, ranks, first):
            chunk = _Chunk.of(hidden[at], weight, labels[at], ranks, first)
            total += chunk.losses.sum()
            # softmax, minus 1 at the label, if this rank has it
            d_logits = chunk.exps.mul_(torch.exp(chunk.largest - chunk.log_sum)[:, None])
            d_logits.scatter_add_(1, chunk.column, -chunk.is_own.to(dtype)[:, None])
            d_logits = d_logits.to(weight.dtype)  # the type of the products
            torch.mm(d_logits, weight, out=d_hidden[at])
            if weight.dtype == dtype:
                d_weight.addmm_(d_logits.t(), hidden[at])
            else:  # addmm_ adds only to its own type
                d_weight += d_logits.t() @ hidden[at]
        ctx.gradients, ctx.dtype = (d_hidden, d_weight), weight.dtype  # until backward
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of the head are made once: no second backward")
        (d_hidden, d_weight), ctx.gradients = ctx.gradients, None
        # Multiply before rounding: a rounded dy would scale all gradients of the step.
        both = [d.to(dy.dtype).mul_(dy).to(ctx.dtype) for d in (d_hidden, d_weight)]
        return *both, None, None, None


@torch.no_grad()
def measure(
    hidden: Tensor, weight: Tensor, labels: Tensor, ranks: Communicator, first: int
) -> Tensor:
    """[3], float64, on the CPU: the loss of `head_loss`, the number of positions whose label is the
    most probable token, and N. Waits once for a GPU. Raises ValueError like `head_loss`."""
    hidden, weight = narrowed(hidden), narrowed(weight)
    total = hidden.new_zeros(2, dtype=torch.float64)
    for at in _chunks(len(hidden), weight, ranks, first):
        chunk = _Chunk.of(hidden[at], weight, labels[at], ranks, first)
        largest = ranks.all_gather(chunk.largest[None], 0).amax(0)  # [n], now over all tokens
        right = (chunk.at_label == largest).sum()
        total += torch.stack([chunk.losses.sum().double(), right.double()])
    return torch.tensor([*total.tolist(), len(hidden)], dtype=torch.float64)


def argmax(logits: Tensor, num_tokens: int, ranks: Communicator, first: int) -> Tensor:
    """[N], on every rank: the token below `num_tokens` with the largest logit on any rank.
    `logits`: [N, rows], this rank's, for the tokens from `first` on. Raises ValueError if there is
    no such token."""
    if num_tokens < 1:
        raise ValueError(f"the largest logit of {num_tokens} tokens: 1 or more work")
    known = logits[:, : max(0, num_tokens - first)]  # may be empty: [N, 0]
    if known.size(1):
        value, token = known.max(-1)
        both = torch.stack([value.double(), token.double() + first])  # [2, N]; both are exact
    else:
        both = logits.new_full((2, len(logits)), -torch.inf, dtype=torch.float64)  # never largest
    values, tokens = ranks.all_gather(both[None], 0).unbind(1)  # each [t, N]
    return tokens.gather(0, values.argmax(0, keepdim=True))[0].long()


class _Chunk(NamedTuple):
    """The logits of n positions, for this rank's `rows` tokens, reduced for the loss."""

    exps: Tensor  # [n, rows]: e^(logit - largest)
    largest: Tensor  # [n]: the largest of this rank's logits
    log_sum: Tensor  # [n]: logsumexp of all ranks' logits
    at_label: Tensor  # [n]: the label's logit, from the rank that has it
    column: Tensor  # [n, 1]: the label's place among this rank's tokens; any, if it is elsewhere
    is_own: Tensor  # [n]: whether this rank has the label
    losses: Tensor  # [n]

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, labels: Tensor, ranks: Communicator, first: int
    ) -> _Chunk:
        logits = hidden @ weight.t()  # [n, rows]
        logits = logits.to(wide(logits))
        local = labels - first
        is_own = (local >= 0) & (local < len(weight))
        column = local.clamp(0, len(weight) - 1)[:, None]
        own_logit = logits.gather(1, column)[:, 0].masked_fill(~is_own, -torch.inf)
        largest = logits.amax(-1)
        exps = logits.sub_(largest[:, None]).exp_()  # overwrites logits, not read any more
        two = torch.stack([largest + exps.sum(-1).log(), own_logit])  # [2, n]
        log_sums, labelled = ranks.all_gather(two[None], 0).unbind(1)  # each [t, n]
        log_sum, at_label = log_sums.logsumexp(0), labelled.amax(0)
        return cls(exps, largest, log_sum, at_label, column, is_own, log_sum - at_label)


def _chunks(positions: int, weight: Tensor, ranks: Communicator, first: int) -> list[slice]:
    """The same chunks on all ranks, though the last rank may have fewer rows."""
    if not len(weight):
        raise ValueError("0 rows of the embedding on a rank: 1 or more work (see `degrees`)")
    rows = first // ranks.rank if ranks.rank else len(weight)  # of rank 0: a full part
    size = max(1, LOGITS_AT_ONCE[weight.device.type] // rows)
    return [slice(begin, begin + size) for begin in range(0, positions, size)]
