"""Values that are sent between processes, as self-describing bytes.

A value is a tensor, or whatever can be pickled and holds tensors: tuples, lists, dicts,
NamedTuples, numbers. Its head is its pickle, with a place instead of each tensor: shape, dtype, and
the offset of its elements in the body, where they lie in order. So nothing is agreed on beforehand:
shapes may change in every micro-batch, and a tensor that appears twice is one tensor on the other
side too.

    head: (tensor at 0: float32 [8, 128, 256], tensor at 1048576: int64 [8, 128], None)
    body: | tensor | tensor |

Unpickling can run code, here as in torch's own object collectives, which compare the ranks at the
start of a run: the network between the ranks must be a trusted one.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import torch
from torch import Tensor

from runtime.guards import refuse_other_layouts
from runtime.shared_memory import ALIGNMENT, aligned

_Place = tuple[int, tuple[int, ...], torch.dtype, bool]  # offset in bytes, shape, requires_grad


class Message(pickle.Pickler):
    """A value to send: its `head`, and a body of `nbytes`."""

    def __init__(self, value: Any) -> None:
        file = io.BytesIO()
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.nbytes = 0
        self._tensors: dict[int, tuple[Tensor, _Place]] = {}  # by id; alive, so ids stay unique
        self.dump(value)
        self.head = file.getvalue()

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        refuse_other_layouts(value, "a stage")
        if id(value) not in self._tensors:
            place = self.nbytes, tuple(value.shape), value.dtype, value.requires_grad
            self._tensors[id(value)] = value, place
            # an empty tensor takes bytes too: its offset is its key on the other side
            self.nbytes += max(ALIGNMENT, aligned(value.numel() * value.itemsize))
        return self._tensors[id(value)][1]

    def write(self, body: Tensor) -> None:
        """Copies the tensors into `body`, a tensor of bytes."""
        for tensor, place in self._tensors.values():
            _at(body, place).copy_(tensor.detach())


class Received(pickle.Unpickler):
    """A value on the other side. Its tensors are views of `body`."""

    def __init__(self, head: bytes, body: Tensor) -> None:
        super().__init__(io.BytesIO(head))
        self._body = body
        self._tensors: dict[int, Tensor] = {}  # by offset

    def persistent_load(self, place: _Place) -> Tensor:
        begin, *_, requires_grad = place
        if begin not in self._tensors:  # else it came before: the same tensor
            # They share one body, but a write to one must not count for all: hence `data`.
            self._tensors[begin] = _at(self._body, place).data.requires_grad_(requires_grad)
        return self._tensors[begin]


def _at(body: Tensor, place: _Place) -> Tensor:
    begin, shape, dtype, _ = place
    return body[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
