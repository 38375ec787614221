"""Tensors that share memory where a graph is cut.

Problem. At a cut every tensor is detached by itself, and autograd forgets that one is a view of
another. If a layer after the cut then writes to one, the gradient of the other is silently wrong.
Between processes each tensor is a copy, and even the values differ.

Idea. Autograd counts the writes to a tensor in ``_version``. A cut notes the counts of tensors that
share memory (`overlapping`) and compares them after every layer (`Watch`). Shared memory that
nobody writes to costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def overlapping(leaves: Sequence[Any]) -> tuple[int, ...]:
    """The positions of tensors whose memory overlaps another's; works on fake tensors too.

    The same tensor at several positions does not count. A tensor's memory reaches from its first
    element to its last, including the elements its strides skip.
    """
    places: dict[int, tuple[Any, Any, Any]] = {}  # storage, begin, end
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.numel():
            begin = leaf.storage_offset() * leaf.itemsize  # bytes from the start of the storage
            steps = zip(leaf.shape, leaf.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in steps)  # in elements
            end = begin + (last + 1) * leaf.itemsize
            places[id(leaf)] = (leaf.untyped_storage()._cdata, begin, end)
    shared = set[int]()
    for one, (storage, begin, end) in places.items():
        for other, (that, start, stop) in places.items():
            if one != other and storage == that and begin < stop and start < end:
                shared.add(one)
    return tuple(k for k, leaf in enumerate(leaves) if id(leaf) in shared)


class Watch:
    """Notices writes to tensors that share memory."""

    def __init__(self) -> None:
        self._versions: list[tuple[Tensor, int]] = []  # tensor, writes until `add`

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Watch these tensors too, from now on."""
        self._versions += [(t, t._version) for t in tensors if not t.is_inference()]

    def check(self, layer: str) -> None:
        """ValueError, naming the layer that has just run, if a watched tensor was written to."""
        if any(t._version != version for t, version in self._versions):
            raise ValueError(
                f"{layer} changes a tensor in place that shares memory with another one handed on "
                "beside it, whose gradient would be wrong: let the layer work out of place, e.g. "
                "x = x + 1, or hand on a copy, e.g. (h, h[..., :1].clone())"
            )
