"""Tensors that share memory where a graph is cut.

Problem. At a cut every tensor is detached by itself, and autograd forgets that one is a view of
another. If a layer behind the cut then writes to one, the gradient of the other is wrong, without a
word. Between processes each has a copy, and even the values differ.

Idea. Autograd counts the writes to a tensor: ``_version``. Whoever cuts a graph notes those of the
tensors that share memory (`overlapping`) and looks again after every layer (`Watch`). Sharing that
nobody writes to costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def overlapping(leaves: Sequence[Any]) -> tuple[int, ...]:
    """The positions of tensors that lie in the memory of another; fake ones too.

    One tensor at several positions is no other. Memory counts from the first element to the last,
    with what a stride leaves out.
    """
    places: dict[int, tuple[Any, Any, Any]] = {}  # storage, begin, end
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.numel():
            begin = leaf.storage_offset() * leaf.itemsize
            steps = zip(leaf.shape, leaf.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in steps)
            end = begin + (last + 1) * leaf.itemsize
            places[id(leaf)] = (leaf.untyped_storage()._cdata, begin, end)
    shared = set[int]()
    for one, (storage, begin, end) in places.items():
        for other, (that, start, stop) in places.items():
            if one != other and storage == that and begin < stop and start < end:
                shared.add(one)
    return tuple(k for k, leaf in enumerate(leaves) if id(leaf) in shared)


class Watch:
    """Over tensors that share memory."""

    def __init__(self) -> None:
        self._versions: list[tuple[Tensor, int]] = []

    def add(self, tensors: Iterable[Tensor]) -> None:
        """From now on these too."""
        self._versions += [(t, t._version) for t in tensors if not t.is_inference()]

    def check(self, layer: str) -> None:
        """ValueError, naming the layer that has just run, if any was written to."""
        if any(t._version != version for t, version in self._versions):
            raise ValueError(
                f"{layer} changes a tensor in place that shares memory with another one handed on "
                "beside it, whose gradient would be wrong: let the layer work out of place, e.g. "
                "x = x + 1, or hand on a copy, e.g. (h, h[..., :1].clone())"
            )
