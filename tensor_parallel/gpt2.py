"""GPT-2, its matrices cut over the ranks that share its layers.

Problem. A model has the same layers under every layout; only their matrices are cut: attention by
heads, the MLP by neurons, the embedding (which is also the head) by tokens.

Idea. `cut_matrices` takes the model of `transformers` on the meta device and replaces its matrices
by the layers of layers.py, under the same names. The code that runs the model does not change;
attention sees fewer heads. A `TensorShard` describes a rank's part of a parameter in terms of the
whole, so initial values, checkpoints and exports are the same as those of one process.

    parameter          of the whole      rank r of t has
    attn.c_attn        C x (q | k | v)   the columns of its heads in each of q, k and v
    attn.c_proj        C x C             the rows of its heads
    mlp.c_fc           C x 4C            columns
    mlp.c_proj         4C x C            rows
    wte, lm_head       V x C             rows of its tokens: V/t, rounded up
    norms, wpe, biases of c_proj         the whole parameter

If t does not divide V, the last rank's surplus rows belong to no token. They are 0, get no
gradient, are in no checkpoint, and are left out of the loss; generation ignores their logits.

Cost per block and micro-batch, activations of G bytes: two all-reduces of G forward and two
backward; with `sequence_parallel` four collectives of half the traffic forward and six backward,
since the inputs of column-parallel matrices are not kept but gathered again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.communicator import Communicator
from tensor_parallel.collectives import gather, replicate
from tensor_parallel.layers import (
    SEQUENCE,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
)
from tensor_parallel.loss import head_loss, measure


@dataclass(frozen=True)
class TensorShard:
    """A rank's part of a parameter that consists of equal `blocks` along dimension `dim`: its share
    of every block, concatenated.

    Attributes:
        shape: of the whole parameter.
        rank, size: the part's number, and the number of parts.

    Raises ValueError if the dimension has no such blocks, or there is no such part.
    """

    shape: tuple[int, ...]
    dim: int
    blocks: int
    rank: int
    size: int

    def __post_init__(self) -> None:
        if self.shape[self.dim] % self.blocks or self.rank not in range(self.size):
            raise ValueError(
                f"part {self.rank} of {self.size}, dimension {self.dim} of {self.shape} in "
                f"{self.blocks} blocks: parts 0 to {self.size - 1} work, and numbers of blocks "
                f"that divide {self.shape[self.dim]}"
            )

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Per block, the start of the part in the whole parameter, and its length."""
        block = self.shape[self.dim] // self.blocks
        length = -(-block // self.size)  # rounded up: the last rank may have fewer
        start = self.rank * length
        return [(k * block + start, min(length, block - start)) for k in range(self.blocks)]

    def of(self, whole: Tensor) -> Tensor:
        """The rank's part of the whole parameter, padded with zeros to the size of rank 0's."""
        ranges = torch.cat([whole.narrow(self.dim, *at) for at in self.ranges], self.dim)
        sizes = list(whole.shape)
        length = -(-(self.shape[self.dim] // self.blocks) // self.size)  # of one range on rank 0
        sizes[self.dim] = self.blocks * length - ranges.size(self.dim)
        return torch.cat([ranges, whole.new_zeros(sizes)], self.dim)

    def rectangles(
        self, offsets: Sequence[int], tensor: Tensor
    ) -> list[tuple[tuple[int, ...], Tensor]]:
        """Maps `tensor`, a rectangle at `offsets` of the rank's part, to the whole parameter: the
        offsets there, and a view of `tensor`, for each range that it overlaps."""
        rectangles = []
        begin, end = offsets[self.dim], offsets[self.dim] + tensor.size(self.dim)
        at_shard = 0  # the start of the range in the shard
        for start, length in self.ranges:
            first, last = max(begin, at_shard), min(end, at_shard + length)  # overlap, in the shard
            if first < last:
                at = list(offsets)
                at[self.dim] = start + first - at_shard
                view = tensor.narrow(self.dim, first - begin, last - first)
                rectangles.append((tuple(at), view))
            at_shard += length
        return rectangles


def degrees(num_heads: int, vocabulary: int) -> list[int]:
    """The numbers of ranks over which such a GPT-2 can be cut: the divisors of the number of heads
    that leave tokens for every rank."""
    divisors = [t for t in range(1, num_heads + 1) if num_heads % t == 0]
    return [t for t in divisors if (t - 1) * -(-vocabulary // t) < vocabulary]


def cut_matrices(
    model: Any, ranks: Communicator, sequence_parallel: bool = False
) -> dict[str, TensorShard]:
    """Replaces the matrices of a `GPT2LMHeadModel` on the meta device by those of this rank.

    Args:
        sequence_parallel: in training each rank holds a part of the positions between the
            matrices. The number of ranks must divide the positions.

    Returns:
        By name, this rank's part of each cut parameter; the rank has all others whole. With
        `sequence_parallel` the gradients of whole parameters must be summed over the ranks.

    Raises:
        ValueError: the number of ranks does not divide the number of heads or neurons, or leaves a
            rank without tokens; or the model is cut already.
    """
    config = model.config
    works = degrees(config.n_head, config.vocab_size)
    if ranks.size not in works:
        raise ValueError(
            f"{config.n_head} heads and {config.vocab_size} tokens cannot be cut over {ranks.size} "
            "ranks; these numbers work: "
            f"{', '.join(map(str, works))}"
        )
    if isinstance(model.lm_head, VocabularyParallelHead):
        raise ValueError("the model is cut already; cut_matrices takes one that is whole")
    if (neurons := config.n_inner or 4 * config.n_embd) % ranks.size:
        raise ValueError(
            f"{neurons} neurons (n_inner) cannot be cut over {ranks.size} ranks; "
            f"{-(-neurons // ranks.size) * ranks.size} can"
        )
    shards: dict[str, TensorShard] = {}

    def shard(name: str, p: Tensor, dim: int, blocks: int = 1) -> nn.Parameter:
        """This rank's part of each of the equal `blocks` of a parameter along `dim`."""
        shards[name] = TensorShard(tuple(p.shape), dim, blocks, ranks.rank, ranks.size)
        return nn.Parameter(shards[name].of(p.detach()), p.requires_grad)

    def columns(name: str, layer: Any, blocks: int = 1) -> ColumnParallelLinear:
        weight = shard(f"{name}.weight", layer.weight, 1, blocks)  # [K, N/t]
        bias = shard(f"{name}.bias", layer.bias, 0, blocks)  # [N/t]
        return ColumnParallelLinear(weight, ranks, sequence_parallel, bias)

    def rows(name: str, layer: Any) -> RowParallelLinear:
        weight = shard(f"{name}.weight", layer.weight, 0)  # [K/t, N]
        return RowParallelLinear(weight, ranks, sequence_parallel, layer.bias)  # whole bias

    body = model.transformer
    for k, block in enumerate(body.h):
        at = f"transformer.h.{k}"
        block.attn.c_attn = columns(f"{at}.attn.c_attn", block.attn.c_attn, 3)  # q, k, v
        block.attn.c_proj = rows(f"{at}.attn.c_proj", block.attn.c_proj)
        block.mlp.c_fc = columns(f"{at}.mlp.c_fc", block.mlp.c_fc)
        block.mlp.c_proj = rows(f"{at}.mlp.c_proj", block.mlp.c_proj)
    tied = model.lm_head.weight is body.wte.weight  # asked before wte changes
    wte = shard("transformer.wte.weight", body.wte.weight, 0)  # [rows, C]
    head = wte if tied else shard("lm_head.weight", model.lm_head.weight, 0)
    body.wte = VocabularyParallelEmbedding(wte, ranks, sequence_parallel, config.vocab_size)
    model.lm_head = VocabularyParallelHead(head, config.vocab_size, ranks)
    return shards


class VocabularyParallelHead(nn.Module):
    """Holds the output embedding, [rows, C] on this rank. `HeadAndLoss` multiplies by it.

    Attributes:
        first: the token of the first row.
        known: [at most rows, C], without the surplus rows.
    """

    def __init__(self, weight: nn.Parameter, vocabulary: int, ranks: Communicator) -> None:
        super().__init__()
        self.weight, self.ranks, self.vocabulary = weight, ranks, vocabulary
        self.first = ranks.rank * len(weight)

    @property
    def known(self) -> Tensor:
        return self.weight[: self.vocabulary - self.first]


class HeadAndLoss(nn.Module):
    """Final norm, and loss or logits. Takes `Sequences` of training/tasks/gpt2.py, and uses only
    their hidden states at targets.

    With labels it returns the summed loss, a scalar on every rank, or without grad mode the three
    numbers of `loss.measure`. Without labels it returns this rank's logits, [N, rows].
    """

    def __init__(
        self, ln_f: nn.LayerNorm, lm_head: VocabularyParallelHead, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.ln_f, self.lm_head, self.sequence_parallel = ln_f, lm_head, sequence_parallel

    def forward(self, x: Any) -> Tensor:
        hidden, targets, head = self.ln_f(x.hidden), x.targets, self.lm_head
        scattered = self.sequence_parallel and self.training
        if scattered:
            hidden = gather(hidden, head.ranks, SEQUENCE)  # [B, T/t, C] to [B, T, C]
        if targets.dim() == 2:
            targets = targets.flatten().nonzero()[:, 0]
        hidden = hidden.flatten(0, 1).index_select(0, targets)  # [N, C]
        if not scattered:  # else `gather` sums its gradients in backward
            hidden = replicate(hidden, head.ranks)
        if x.labels is None:
            return F.linear(hidden, head.weight)
        compute = head_loss if torch.is_grad_enabled() else measure
        return compute(hidden, head.known, x.labels, head.ranks, head.first)
