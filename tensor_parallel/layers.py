"""Matrices cut over the ranks.

Problem. t ranks compute a linear layer y = x w + b, each with 1/t of w and of the work.

Idea. There are two ways to cut w, and they fit together:

    column-parallel   w = [w0 | w1]    y = [x w0 | x w1]       every rank has x, and a part of y
    row-parallel      w = [w0 / w1]    y = x0 w0 + x1 w1       every rank has a part of x, and y

Attention and MLP are both a matrix, an operation on each head or neuron by itself, and a second
matrix. With the first cut by columns and the second by rows, nothing is exchanged between the two.
The bias of a row-parallel layer is added once, after the sum.

With `sequence_parallel` each rank holds some positions of the activations between such pairs
(norms, dropout, the residual stream): the sum after a pair is scattered over the sequence and
gathered before the next pair. These activations take 1/t of the memory. The same number of bytes is
sent; in backward, the inputs of column-parallel matrices are sent once more.

Backward of a column-parallel matrix: each rank has one term of dx. Their sum travels while the rank
computes dw (through a process group; through shared memory a rank only waits less for a late one):

    compute     dx = dy w' │ dw = x' dy              │ dx goes on to the layer before
    exchange               └ sum of dx over the ranks ┘
                           start                      finish

`ColumnParallelLinear` says which sum (an `AroundProduct`); the product starts and finishes it
(`backward` in runtime/linear.py). If dw is left for later, the sum is finished at once.

Shapes: B examples, T positions, C width, K features in, N features out, t ranks. Weights are K N,
like GPT-2's `Conv1D`.

Paper: Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from runtime.communicator import Communicator
from runtime.linear import ONE_MATRIX, AroundProduct, linear, multiplied
from tensor_parallel.collectives import all_reduce, scatter

SEQUENCE = 1  # the dimension of positions


class _CutLayer(nn.Module):
    """A layer whose `weight` is cut over the `ranks`."""

    bias: nn.Parameter | None

    def __init__(
        self,
        weight: nn.Parameter,
        ranks: Communicator,
        sequence_parallel: bool,
        bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.ranks, self.sequence_parallel = weight, ranks, sequence_parallel
        self.register_parameter("bias", bias)

    @property
    def scattered(self) -> bool:
        """Whether activations between the pairs are split by positions; only in training."""
        return self.sequence_parallel and self.training

    def summed(self, y: Tensor) -> Tensor:
        """The sum of all ranks' y, [B, T, C]; if scattered, this rank's [B, T/t, C] of the sum."""
        return scatter(y, self.ranks, SEQUENCE) if self.scattered else all_reduce(y, self.ranks)


class ColumnParallelLinear(_CutLayer):
    """[B, T, K] to this rank's columns, [B, T, N/t]; with `sequence_parallel` from [B, T/t, K].

    Args:
        weight, bias: [K, N/t] and [N/t], this rank's columns.
    """

    def forward(self, x: Tensor) -> Tensor:
        ranks = self.ranks
        if self.scattered:  # kept for backward: this rank's positions, which are gathered again
            exchange = AroundProduct(
                partial(ranks.all_gather, dim=SEQUENCE),
                partial(ranks.start_reduce_scatter, dim=SEQUENCE),
            )
        else:
            exchange = AroundProduct(lambda x: x, ranks.start_all_reduce)
        return multiplied(ONE_MATRIX[False], x, self.weight, self.bias, exchange)


class RowParallelLinear(_CutLayer):
    """This rank's [B, T, K/t] to the sum over all ranks, [B, T, N]; with `sequence_parallel` to
    [B, T/t, N].

    Args:
        weight: [K/t, N], this rank's rows.
        bias: [N], the same on all ranks; or None.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = self.summed(linear(x, self.weight))
        return y if self.bias is None else y + self.bias  # after the sum: once, not once per rank


class VocabularyParallelEmbedding(_CutLayer):
    """Token ids [B, T] to their rows of the embedding, [B, T, C]; with `sequence_parallel`
    [B, T/t, C].

    Every rank has the rows of some tokens and contributes zeros for the others.

    Args:
        weight: [rows, C], this rank's rows; those of rank r start at token r * rows.
        vocabulary: the number of tokens.

    Raises:
        IndexError: an id is no token's. Not on a GPU, where the host would wait for the ids: there
            its row is 0.
    """

    def __init__(
        self, weight: nn.Parameter, ranks: Communicator, sequence_parallel: bool, vocabulary: int
    ) -> None:
        super().__init__(weight, ranks, sequence_parallel)
        self.vocabulary = vocabulary

    def forward(self, ids: Tensor) -> Tensor:
        if ids.device.type == "cpu" and ids.numel():
            for token in (int(ids.min()), int(ids.max())):
                if not 0 <= token < self.vocabulary:
                    raise IndexError(f"there is no token {token}; 0 to {self.vocabulary - 1} work")
        local = ids - self.ranks.rank * len(self.weight)  # [B, T]: rows here, or outside
        elsewhere = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)  # row 0 as a stand-in
        return self.summed(rows.masked_fill(elsewhere[..., None], 0))  # zeros, except on one rank
