"""Ring attention: keys and values go from rank to rank, and each computes a block of attention.

Problem. The queries of a rank need the keys and values of all earlier positions, which other ranks
have. If they were gathered, every rank would hold all of them.

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
round once more. Their gradients follow them, every rank adds its part, and they end on their own
rank.

Cost, c ranks, keys and values of G bytes on each: a rank sends G (c-1) in forward and 2 G (c-1) in
backward. Besides its own keys and values it holds 2 G in forward: those that leave and those that
arrive. In backward gradients travel, too, so both are twice as large, and two sums stay. Where
dropout is on, masks are hashed from the positions of query and key. No fused kernel does that, so
blocks are plain products. On a GPU, where examples have no keys to hash, a fused kernel draws the
mask of each block, and backward draws it again (blocks.py).

Where documents do not see each other (runtime/documents.py), keys still pass every rank, but a rank
computes scores only from the start of each query's document on, and needs a mask only where a
document begins within a block, and on the diagonal. On a GPU the host waits for the starts, and
blocks with a mask are plain products.

Papers: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023;
Brandon et al., "Striped Attention", 2023 (equal work).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from context_parallel import blocks
from context_parallel.positions import refuse_attention, zigzag
from runtime.communicator import Communicator, Finish
from runtime.documents import seen, starts_at
from runtime.dropout import Keys, drawn, dropout
from runtime.sums import wide

ALL = slice(None)
QUERIES = 256  # of a block within documents
DroppedBlock = Callable[..., Tensor] | None
"""Drops weights of attention over the keys of the rank `owner`, of which a block is some rows and
columns."""

Rectangle = tuple[slice, slice, bool, Tensor | None]
"""Scores that are computed together: their rows (queries), their columns (keys), whether they are
causal, and a mask, as `blocks.forward` takes it."""

BlocksOf = Callable[[int], Iterable[Rectangle]]
"""The blocks over the keys of a rank."""


class Ring:
    """Attention of this rank's positions over those of all `ranks`. It takes the place of
    `runtime.dropout.attention`, and has its arguments."""

    def __init__(self, ranks: Communicator) -> None:
        self.ranks = ranks

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: None, p: float, mask_keys: Keys, where: int,
        first: int = 0, starts: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[B, H, T, E], like q, k and v. T, the number of this rank's positions, is even.
        `mask_keys`: the `keys` of dropout. `starts`: of all positions of the sequences."""
        ranks = self.ranks
        refuse_attention(q, k, v, mask, p, starts, self.ranks.size)
        length = ranks.size * q.size(2)
        positions = [zigzag(r, ranks.size, length, q.device) for r in range(ranks.size)]
        blocks_of: BlocksOf = partial(_causal_blocks, ranks.rank, q.size(2))
        if starts is not None:
            of_queries = starts_at(starts, positions[ranks.rank])
            blocks_of = partial(_blocks_of_documents, positions, ranks.rank, of_queries, q.dtype)
        if p == 0:
            return _RingAttention.apply(q, k, v, ranks, blocks_of, None, 0.0)
        hashed = isinstance(mask_keys, Tensor)
        of_examples = _hashable(mask_keys, q)

        def dropped(weights: Tensor, owner: int, rows: slice, columns: slice) -> Tensor:
            of_queries, of_keys = positions[ranks.rank][rows], positions[owner][columns]
            return dropout(weights, p, of_examples, where, first, of_queries, of_keys)

        def attend() -> Tensor:
            return _RingAttention.apply(q, k, v, ranks, blocks_of, dropped, 0.0 if hashed else p)

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
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranks: Communicator, blocks_of: BlocksOf,
        dropped: DroppedBlock, p: float,
    ) -> Tensor:  # fmt: skip
        kv = torch.stack([k, v])  # [2, B, H, T, E]: those that are here
        out = torch.zeros_like(q, dtype=wide(q))
        log_sum = torch.full_like(out[..., 0], -math.inf)
        states = list[blocks.Drawn]()  # of the generator, by block
        for turn in range(ranks.size):
            finish = _to_next(kv[:0] if turn == ranks.size - 1 else kv, ranks)
            owner = (ranks.rank - turn) % ranks.size  # of the keys that are here
            for rows, columns, causal, mask in blocks_of(owner):
                drop = dropped and partial(dropped, owner=owner, rows=rows, columns=columns)
                k_here, v_here = kv[..., columns, :]
                *block, state = blocks.forward(q[:, :, rows], k_here, v_here, causal, drop, p, mask)
                _join(out[:, :, rows], log_sum[:, :, rows], *block)
                states.append(state)
            kv = finish()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.ranks, ctx.blocks_of, ctx.dropped, ctx.p = ranks, blocks_of, dropped, p
        ctx.states = states
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        """Sums of 16-bit numbers that stay here are 32-bit; those that travel are rounded."""
        q, k, v, out, log_sum = ctx.saved_tensors
        ranks, dropped, kv = ctx.ranks, ctx.dropped, torch.stack([k, v])
        states = iter(ctx.states)
        d_q = torch.zeros_like(q, dtype=wide(q))
        d_own = d_kv = kv[:0]  # d_own: of this rank's keys and values, which stay here
        for turn in range(ranks.size):
            leaving = kv[:0] if turn == ranks.size - 1 else kv
            finish = _to_next(leaving, ranks, d_kv)  # d_kv: of the keys of the turn before
            owner = (ranks.rank - turn) % ranks.size
            d_here = torch.zeros_like(kv, dtype=wide(kv))  # of those that are here, by this rank
            for rows, columns, causal, mask in ctx.blocks_of(owner):
                drop = dropped and partial(dropped, owner=owner, rows=rows, columns=columns)
                k_here, v_here = kv[..., columns, :]
                d_queries, *d_keys = blocks.backward(
                    d_out[:, :, rows], q[:, :, rows], k_here, v_here, out[:, :, rows],
                    log_sum[:, :, rows], causal, drop, ctx.p, next(states), mask,
                )  # fmt: skip
                d_q[:, :, rows] += d_queries
                for d_sum, d_block in zip(d_here, d_keys, strict=True):
                    d_sum[..., columns, :] += d_block
            # What has arrived: the next keys and values; and from the ranks before this one, their
            # part of the gradients of the keys and values that are here.
            kv, d_arrived = finish().tensor_split([len(leaving)])
            if turn == 0:
                d_own = d_here
            else:
                d_kv = d_arrived.add_(d_here) if len(d_arrived) else d_here.to(q.dtype)
        if ranks.size > 1:
            d_own += _to_next(d_kv, ranks)()  # to their own rank
        return d_q.to(q.dtype), *d_own.to(q.dtype), None, None, None, None


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


def _causal_blocks(rank: int, T: int, owner: int) -> Iterator[Rectangle]:
    """What `rank` computes over the keys of `owner`, where all earlier keys are seen: one block."""
    rows = slice(T // 2, None) if owner > rank else ALL
    columns = slice(T // 2) if owner < rank else ALL
    yield rows, columns, owner == rank, None


def _blocks_of_documents(
    positions: Sequence[Tensor], rank: int, starts: Tensor, dtype: torch.dtype, owner: int
) -> Iterator[Rectangle]:
    """The same within documents: some of a stretch's queries at a time, over the keys from the
    start of the first query's document on. Keys that none of these queries sees are in no block;
    where every query sees all, there is no mask.

    Args:
        positions: of every rank.
        starts: of the documents of this rank's positions, [B, T]. The host reads them.
    """
    if not len(starts):
        return  # no example: no row has a first and a last start
    queries, keys = positions[rank].tolist(), positions[owner].tolist()
    first, last = starts.amin(0).tolist(), starts.amax(0).tolist()  # over the rows; they ascend
    half, T = len(queries) // 2, len(queries)
    for begin in (*range(0, half, QUERIES), *range(half, T, QUERIES)):
        rows = slice(begin, min(begin + QUERIES, half if begin < half else T))
        end = rows.stop - 1
        columns = slice(bisect_left(keys, first[begin]), bisect_right(keys, queries[end]))
        if there := keys[columns]:
            mask = None
            if there[0] < last[end] or there[-1] > queries[begin]:
                allowed = seen(starts[:, rows], positions[rank][rows], positions[owner][columns])
                mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
                mask.masked_fill_(~allowed, torch.finfo(dtype).min)
            yield rows, columns, False, mask


def _join(out: Tensor, log_sum: Tensor, other: Tensor, other_sum: Tensor) -> None:
    """Joins a block with others, in place."""
    joined = torch.logaddexp(log_sum, other_sum)
    out *= (log_sum - joined).exp()[..., None]
    out += other * (other_sum - joined).exp()[..., None]
    log_sum.copy_(joined)
