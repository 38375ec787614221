"""Matrices of which every rank has a part.

Problem. A linear layer y = x w + b is to be computed by t ranks, each with 1/t of w and the work.

Idea. There are two ways to cut w, and they fit together:

    column-parallel   w = [w0 | w1]    y = [x w0 | x w1]       every rank has x, and a part of y
    row-parallel      w = [w0 / w1]    y = x0 w0 + x1 w1       every rank has a part of x, and y

Attention and MLP are both: a matrix, something that works on each head or neuron by itself, and a
matrix. So the first is cut by columns and the second by rows, and between the two nothing need be
said. The bias of a row-parallel layer is added once, after the sum.

With `sequence_parallel` each rank has some positions of what stands between such pairs (norms,
dropout, the residual stream): the sum after the pair is scattered over the sequence and gathered
before the next. Those activations take 1/t of the memory. As many bytes travel, and in backward the
inputs of column-parallel matrices once more.

In backward the gradient of x is summed over the ranks while that of w is computed.

Shapes: B examples, T positions, C width, K features in, N features out, t ranks. Weights are K N,
as those of GPT-2's `Conv1D`.

Paper: Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.ranks import Ranks
from tensor_parallel.collectives import add_up, scatter

SEQUENCE = 1  # the dimension of positions


class _CutLayer(nn.Module):
    """A layer of whose `weight` the `ranks` have a part each."""

    def __init__(self, weight: nn.Parameter, ranks: Ranks, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight, self.ranks, self.sequence_parallel = weight, ranks, sequence_parallel

    @property
    def scattered(self) -> bool:
        """Whether each rank has a part of the positions outside, as it does only in training."""
        return self.sequence_parallel and self.training

    def summed(self, y: Tensor) -> Tensor:
        """The sum of all ranks' [B, T, C]; or, scattered, this rank's [B, T/t, C] of it."""
        return scatter(y, self.ranks, SEQUENCE) if self.scattered else add_up(y, self.ranks)


class ColumnParallelLinear(_CutLayer):
    """[B, T, K] to this rank's columns, [B, T, N/t]; with `sequence_parallel` of [B, T/t, K].

    Args:
        weight, bias: [K, N/t] and [N/t], of this rank.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter, ranks: Ranks, sequence_parallel: bool
    ) -> None:
        super().__init__(weight, ranks, sequence_parallel)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
        y: Tensor = _Columns.apply(x, weight, bias, self.ranks, self.scattered)
        return y


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, ranks: Ranks, scattered: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ranks, ctx.scattered = ranks, scattered
        if scattered:
            x = ranks.all_gather(x, SEQUENCE)
        y = torch.addmm(bias, x.reshape(-1, x.size(-1)), weight)
        return y.view(*x.shape[:-1], y.size(-1))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ranks, scattered = ctx.ranks, ctx.scattered
        rows = dy.reshape(-1, dy.size(-1))
        if scattered:  # only the rank's part was kept, which takes 1/t of the memory
            x = ranks.all_gather(x, SEQUENCE)
        dx = (rows @ weight.t()).view(x.shape)
        finish = (
            ranks.start_reduce_scatter(dx, SEQUENCE) if scattered else ranks.start_all_reduce(dx)
        )
        dw = x.reshape(-1, x.size(-1)).t() @ rows  # while the others come to their sum
        db = rows.sum(0)
        return finish(), dw, db, None, None


class RowParallelLinear(_CutLayer):
    """This rank's [B, T, K/t] to the sum over all ranks, [B, T, N]; with `sequence_parallel` to
    [B, T/t, N].

    Args:
        weight: [K/t, N], of this rank.
        bias: [N], the same on all ranks.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter, ranks: Ranks, sequence_parallel: bool
    ) -> None:
        super().__init__(weight, ranks, sequence_parallel)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        y = torch.mm(x.reshape(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)
        return self.summed(y) + self.bias  # after the sum: once, and not once per rank


class VocabularyParallelEmbedding(_CutLayer):
    """Token ids [B, T] to their rows of the embedding, [B, T, C]; with `sequence_parallel`
    [B, T/t, C].

    Every rank has the rows of some tokens and contributes nothing for the others.

    Args:
        weight: [rows, C], of this rank; rank r has those of tokens r * rows and after.
    """

    def __init__(self, weight: nn.Parameter, ranks: Ranks, sequence_parallel: bool) -> None:
        super().__init__(weight, ranks, sequence_parallel)
        self.rows = len(weight)
        self.first = ranks.rank * self.rows

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        elsewhere = (local < 0) | (local >= self.rows)
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.summed(rows.masked_fill(elsewhere[..., None], 0))
