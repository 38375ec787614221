"""Chapter 5: tensor parallelism. Two processes, each with half of every block's matrices.

    python tutorial/5_tensor_parallel.py

What differs from chapter 2: both ranks have the whole batch, and divide the arithmetic of a layer.
Attention and MLP are each a matrix, an operation head by head or element by element, and a second
matrix. Cut the first by outputs and the second by inputs, and nothing is exchanged in between:

    x ──┬─▸ A0 ─▸ gelu ─▸ B0 ──┬─▸ sum          rank 0 has A0 and B0, rank 1 A1 and B1
        └─▸ A1 ─▸ gelu ─▸ B1 ──┘

`AllReduce` is the sum; its backward passes on the gradient, which is the same on every rank.
`Replicate` is the fork: it does nothing in forward, and adds both branches' gradients in backward.
All ranks compute what lies outside the cut matrices (norms, embedding, head), with equal results.

Left out: a number of heads that W does not divide; embedding and head cut by words; sequence
parallelism. Full versions: tensor_parallel/collectives.py (the fork and the sum),
tensor_parallel/layers.py (the matrices), tensor_parallel/loss.py (never holds all the logits).
"""

import importlib
from typing import Any

import environment  # isort: skip  # noqa: F401
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

one = importlib.import_module("1_one_process")
two = importlib.import_module("2_data_parallel")
W = two.W


class Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.clone()  # autograd may use the same tensor elsewhere
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # noqa: ARG004
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return gradient, None


def part(p: Tensor, rank: int, dim: int = 0) -> nn.Parameter:
    """This rank's part of a parameter; parts may differ by one row."""
    return nn.Parameter(p.detach().tensor_split(W, dim)[rank].clone())


class Columns(nn.Module):
    """This rank's outputs of each of the `blocks` of a matrix: (B, T, K) -> (B, T, N/W)."""

    def __init__(self, whole: Any, rank: int, group: Any, blocks: int = 1) -> None:
        super().__init__()
        self.weight = part(whole.weight.unflatten(0, (blocks, -1)), rank, 1)  # (blocks, N/W, K)
        self.bias = part(whole.bias.unflatten(0, (blocks, -1)), rank, 1)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(
            Replicate.apply(x, self.group), self.weight.flatten(0, 1), self.bias.flatten()
        )


class Rows(nn.Module):
    """This rank's inputs of a matrix, then a sum over all ranks: (B, T, K/W) -> (B, T, C)."""

    def __init__(self, whole: Any, rank: int, group: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.group = part(whole.weight, rank, 1), whole.bias, group

    def forward(self, x: Tensor) -> Tensor:
        return AllReduce.apply(F.linear(x, self.weight), self.group) + self.bias  # the bias once


def cut(model: nn.Sequential, rank: int, group: Any = None) -> nn.Sequential:
    """Cuts each block to this rank's part. Attention sees H/W heads, the GELU 4C/W elements."""
    _, *blocks, _ = model
    for block in blocks:
        block.c_attn = Columns(block.c_attn, rank, group, 3)  # heads of q, of k and of v
        block.c_proj = Rows(block.c_proj, rank, group)
        block.mlp[0] = Columns(block.mlp[0], rank, group)
        block.mlp[2] = Rows(block.mlp[2], rank, group)
    return model


def main(rank: int) -> None:
    text, V = one.read_text()
    model = cut(one.build_model(V), rank)
    optimizer = torch.optim.AdamW(model.parameters(), one.LEARNING_RATE)
    losses = []
    for step in range(one.STEPS):
        inputs, targets = one.get_batch(text, step)  # the same on all ranks
        loss = one.loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # replicated parameters got equal gradients, so they stay equal
        losses.append(loss.item())
    if rank == 0:
        one.compare(tensor_parallel=losses)


if __name__ == "__main__":
    two.launch(main)
