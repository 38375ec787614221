"""An exchange in the middle of a layer, paired with the one that its gradient needs.

Problem. A layer that is cut over ranks exchanges activations in forward, and gradients in backward.
The first exchange determines the second. A mistake in the second gives a wrong gradient, no error.

Idea. Over all ranks together an exchange is a linear map, and gradients go through its transpose.
So exchanges are given in pairs, each the other's transpose, and one autograd function serves all:

    there                             back                                   where
    nothing                           all-reduce                             tensor_parallel/
    all-gather                        reduce-scatter                         tensor_parallel/
    heads for positions               positions for heads                    context_parallel/heads
    rows to the ranks of an expert    the same, sender and receiver swapped  experts/dispatch

The gradient of `back` is `there` again, so such a layer has second derivatives, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Exchange = Callable[[Tensor], Tensor]


def paired(x: Tensor, there: Exchange, back: Exchange) -> Tensor:
    """there(x), whose gradient goes through `back`. All ranks call it, and backward, together."""
    y: Tensor = _Paired.apply(x, there, back)
    return y


def nothing(x: Tensor) -> Tensor:
    """No exchange, for a tensor that is equal on all ranks."""
    return x


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Exchange, back: Exchange) -> Tensor:
        ctx.pair = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        there, back = ctx.pair
        return paired(dy, back, there), None, None
