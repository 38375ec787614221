"""Ring attention: keys and values go from rank to rank, and each computes a block of attention.

Problem. The queries of a rank need the keys and values of all earlier positions, which other ranks
have. Gathered, those would be whole on every rank.

Idea. In c turns every rank's keys and values pass every rank. A turn computes attention over those
that are there, a block, while the next ones travel. A block knows the sum of its exponentials, so
blocks are joined exactly: with s the logarithm of that sum,

    s = logaddexp(s1, s2)        out = out1 exp(s1 - s) + out2 exp(s2 - s)

    turn        the keys that are there     computed (a rank has two stretches: positions.py)
    0           the rank's own              its own block, with the causal mask
    1 to c-1    an earlier rank's           all queries, the first half of the keys
                a later rank's              the last half of the queries, all keys

Only the first block needs a mask, nothing is computed that a mask would hide, and in every turn all
ranks have equal work. Backward computes the blocks again, from the joined sums. Keys and values go
round once more; behind them go their gradients, to which every rank adds, and which end at home.

Cost, c ranks, keys and values of G bytes on each: a rank sends G (c-1) forward and 2 G (c-1)
backward. Beside its own it holds 2 G forward; backward, what leaves and arrives with gradients is
twice as much, and two sums stay. Where dropout is on, masks are hashed from the positions of query
and key, which no fused kernel does: blocks are plain products. On a GPU, where examples have no
keys to hash, a fused kernel draws the mask of each block, and backward draws it again (blocks.py).

Papers: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023;
Brandon et al., "Striped Attention", 2023 (equal work).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from context_parallel import blocks
from context_parallel.positions import refuse_attention, zigzag
from runtime.communicator import Communicator, Finish
from runtime.dropout import Keys, drawn, dropout
from runtime.sums import wide

ALL = slice(None)
DroppedBlock = Callable[..., Tensor] | None
"""Drops weights of attention over the keys of the rank `owner`, of which a block is some rows and
columns."""


class Ring:
    """Attention of this rank's positions over those of all `ranks`. It takes the place of
    `runtime.dropout.attention`, and has its arguments."""

    def __init__(self, ranks: Communicator) -> None:
        self.ranks = ranks

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: None, p: float, mask_keys: Keys, where: int,
        first: int = 0,
    ) -> Tensor:  # fmt: skip
        """[B, H, T, E]: T, an even number, are this rank's positions, also of q, k and v.
        `mask_keys`: the `keys` of dropout."""
        ranks = self.ranks
        refuse_attention(q, k, v, mask)
        if p == 0:
            return _RingAttention.apply(q, k, v, ranks, None, 0.0)
        length = ranks.size * q.size(2)
        positions = [zigzag(r, ranks.size, length, q.device) for r in range(ranks.size)]
        hashed = isinstance(mask_keys, Tensor)
        of_examples = _hashable(mask_keys, q)

        def dropped(weights: Tensor, owner: int, rows: slice, columns: slice) -> Tensor:
            of_queries, of_keys = positions[ranks.rank][rows], positions[owner][columns]
            return dropout(weights, p, of_examples, where, first, of_queries, of_keys)

        def attend() -> Tensor:
            return _RingAttention.apply(q, k, v, ranks, dropped, 0.0 if hashed else p)

        return drawn(attend, q.device, mask_keys, where, first)


def _hashable(mask_keys: Keys, q: Tensor) -> Tensor:
    """A key for each example, also where there is one number for all of them, or none."""
    if isinstance(mask_keys, Tensor):
        return mask_keys
    if mask_keys is None:
        return torch.randint(2**62, (len(q),), device=q.device)
    return mask_keys + torch.arange(len(q), device=q.device) * 0x9E3779B1


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranks: Communicator, dropped: DroppedBlock,
        p: float,
    ) -> Tensor:  # fmt: skip
        kv = torch.stack([k, v])  # [2, B, H, T, E]: those that are here
        out = log_sum = q  # until the first block
        states = list[blocks.Drawn]()  # of the generator, by turn
        for turn in range(ranks.size):
            is_last = turn == ranks.size - 1
            finish = _to_next(kv[:0] if is_last else kv, ranks)
            rows, columns, drop = _block(turn, ranks, q.size(2), dropped)
            k_here, v_here = kv[..., columns, :]
            *block, state = blocks.forward(q[:, :, rows], k_here, v_here, turn == 0, drop, p)
            states.append(state)
            if turn == 0:
                out, log_sum = (t.to(wide(t)) for t in block)
            else:
                _join(out[:, :, rows], log_sum[:, :, rows], *block)
            kv = finish()
        out = out.to(q.dtype)
        seeds, offsets = zip(*states, strict=True) if any(states) else ((), ())
        ctx.save_for_backward(q, k, v, out, log_sum, *seeds, *offsets)
        ctx.ranks, ctx.dropped, ctx.p = ranks, dropped, p
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        """Sums of 16-bit numbers that stay here are 32-bit; those that travel are rounded."""
        q, k, v, out, log_sum, *states = ctx.saved_tensors
        ranks, kv = ctx.ranks, torch.stack([k, v])
        of_turn = [states[s :: ranks.size] for s in range(ranks.size)]
        d_q = d_own = d_kv = kv[:0]  # d_own: of this rank's keys and values, which stay at home
        for turn in range(ranks.size):
            leaving = kv[:0] if turn == ranks.size - 1 else kv
            finish = _to_next(leaving, ranks, d_kv)  # d_kv: of the keys of the turn before
            rows, columns, drop = _block(turn, ranks, q.size(2), ctx.dropped)
            k_here, v_here = kv[..., columns, :]
            d_queries, *d_here = blocks.backward(
                d_out[:, :, rows], q[:, :, rows], k_here, v_here, out[:, :, rows],
                log_sum[:, :, rows], turn == 0, drop, ctx.p, of_turn[turn],
            )  # fmt: skip
            d_block = torch.stack(d_here)
            # What has arrived: the next keys and values, and the gradients of those that are here
            # from the ranks before this one, which add to them.
            kv, d_arrived = finish().tensor_split([len(leaving)])
            if turn == 0:
                d_q, d_own = (t.to(wide(t)) for t in (d_queries, d_block))
                continue
            d_q[:, :, rows] += d_queries
            if len(d_arrived):
                d_arrived[..., columns, :] += d_block
                d_kv = d_arrived
            else:
                d_kv = F.pad(d_block, (0, 0, 0, q.size(2) - d_block.size(3)))
        if ranks.size > 1:
            d_own += _to_next(d_kv, ranks)()  # home
        return d_q.to(q.dtype), *d_own.to(q.dtype), None, None, None


def _to_next(x: Tensor, ranks: Communicator, *others: Tensor) -> Finish:
    """Begins to send rows to the next rank, those of all tensors that have some, and to receive as
    many from the previous one."""
    sent = [t for t in (x, *others) if len(t)]
    if not sent:
        return lambda: x
    rows = torch.cat(sent) if len(sent) > 1 else sent[0]
    size = ranks.size
    lengths = [[len(rows) * (to == (r + 1) % size) for to in range(size)] for r in range(size)]
    return ranks.start_all_to_all(rows, lengths)


def _block(
    turn: int, ranks: Communicator, T: int, dropped: DroppedBlock
) -> tuple[slice, slice, blocks.Dropped]:
    """What a rank computes in a turn: rows are queries, columns keys."""
    owner = (ranks.rank - turn) % ranks.size  # of the keys that are here
    rows = slice(T // 2, None) if owner > ranks.rank else ALL
    columns = slice(T // 2) if owner < ranks.rank else ALL
    drop = partial(dropped, owner=owner, rows=rows, columns=columns) if dropped else None
    return rows, columns, drop


def _join(out: Tensor, log_sum: Tensor, other: Tensor, other_sum: Tensor) -> None:
    """Joins a block with others, in place."""
    joined = torch.logaddexp(log_sum, other_sum)
    out *= (log_sum - joined).exp()[..., None]
    out += other * (other_sum - joined).exp()[..., None]
    log_sum.copy_(joined)
