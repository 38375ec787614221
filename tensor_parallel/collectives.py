"""Collectives between the ranks that share a layer, and their gradients.

Problem. A cut layer needs collectives in forward and others in backward. The forward determines
those of the backward, and a mistake there gives a wrong gradient and no error.

Idea. Two pairs of functions, each the other's backward, so that a layer need only write its
forward:

    function        forward             backward            where
    replicate       nothing             all-reduce          before the head
    all_reduce      all-reduce          nothing             after the embedding and row-parallel
    gather          all-gather          reduce-scatter      the same places, if each rank has a
    scatter         reduce-scatter      all-gather          part of the sequence in between

A column-parallel matrix writes its backward, too: its collective is started before its second
product and finished after it (`linear` in runtime/linear.py). Through a process group it travels in
between; through shared memory a rank only waits less for one that is late.

Papers: Shoeybi et al., "Megatron-LM", 2019 (its f and g are `replicate` and `all_reduce`);
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022 (`gather`,
`scatter`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runtime.communicator import Communicator


def replicate(x: Tensor, ranks: Communicator) -> Tensor:
    """`x`, the same on all ranks; its gradient is the sum of the ranks' gradients."""
    return x if ranks.size == 1 else _Replicate.apply(x, ranks)


def all_reduce(x: Tensor, ranks: Communicator) -> Tensor:
    """The sum of all ranks' `x`."""
    return x if ranks.size == 1 else _AllReduce.apply(x, ranks)


def gather(x: Tensor, ranks: Communicator, dim: int) -> Tensor:
    """All ranks' parts along `dim`; the gradients of the whole are summed and split."""
    return x if ranks.size == 1 else _Gather.apply(x, ranks, dim)


def scatter(x: Tensor, ranks: Communicator, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum of all ranks' `x`."""
    return x if ranks.size == 1 else _Scatter.apply(x, ranks, dim)


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)  # nothing is sent

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.ranks.all_reduce(dy), None  # each rank has one addend of it


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator) -> Tensor:  # noqa: ARG004
        return ranks.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # noqa: ARG004
        return dy, None  # the same on all ranks


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return ranks.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.ranks.reduce_scatter(dy, ctx.dim), None, None  # each rank has used the whole


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return ranks.reduce_scatter(x, dim)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.ranks.all_gather(dy, ctx.dim), None, None
