"""Collectives between the ranks that share a layer, and their gradients.

A layer writes only its forward: each collective is paired with that of its backward
(runtime/paired.py). There are two pairs, to be used in either direction:

    function        forward             backward            where
    replicate       nothing             all-reduce          before the head
    all_reduce      all-reduce          nothing             after the embedding and row-parallel
    gather          all-gather          reduce-scatter      the same places, if each rank has a
    scatter         reduce-scatter      all-gather          part of the sequence in between

A column-parallel matrix writes its backward, too: the collective is started before the second
product of the backward and finished after it (`linear` in runtime/linear.py). Through a process
group it travels in between; through shared memory a rank only waits less for one that is late.

Papers: Shoeybi et al., "Megatron-LM", 2019 (its f and g are `replicate` and `all_reduce`);
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022 (`gather`,
`scatter`).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from runtime.communicator import Communicator
from runtime.paired import nothing, paired


def replicate(x: Tensor, ranks: Communicator) -> Tensor:
    """`x`, the same on all ranks; its gradient is the sum of the ranks' gradients."""
    return x if ranks.size == 1 else paired(x, nothing, ranks.all_reduce)


def all_reduce(x: Tensor, ranks: Communicator) -> Tensor:
    """The sum of all ranks' `x`."""
    return x if ranks.size == 1 else paired(x, ranks.all_reduce, nothing)


def gather(x: Tensor, ranks: Communicator, dim: int) -> Tensor:
    """All ranks' parts along `dim`; the gradients of the whole are summed and split."""
    there, back = partial(ranks.all_gather, dim=dim), partial(ranks.reduce_scatter, dim=dim)
    return x if ranks.size == 1 else paired(x, there, back)


def scatter(x: Tensor, ranks: Communicator, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum of all ranks' `x`."""
    there, back = partial(ranks.reduce_scatter, dim=dim), partial(ranks.all_gather, dim=dim)
    return x if ranks.size == 1 else paired(x, there, back)
