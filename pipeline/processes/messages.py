"""Links between processes, and the values sent over them, as self-describing bytes.

A value is a tensor, or tuples, lists and dicts of tensors, numbers, texts, enumerations,
NamedTuples and what is registered with torch.utils._pytree. Its head is its pickle, with a place
instead of each tensor: shape, strides, dtype, and the offset of its contents in the body. So
nothing is agreed on beforehand: shapes may change in every micro-batch, and a tensor that appears
twice is one tensor on the other side too.

    head: (tensor at 0: float32 [8, 128, 256], tensor at 1048576: int64 [8, 128], None)
    body: | tensor | tensor |

Unpickling can run code: only classes of values are unpickled, see `_Received`. (Torch's own object
collectives, which compare the ranks at the start of a run, unpickle anything: the network between
the ranks must be a trusted one.)
"""

from __future__ import annotations

import io
import math
import pickle
import sys
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from runtime.shared_memory import ALIGNMENT, aligned


class PeerError(dist.DistError):
    """The other end of a link has failed, ended, or been silent for too long. A `DistError`, like
    torch's own errors of this kind: the cause is on another rank."""


class Message(pickle.Pickler):
    """A value to send: its ``head``, and a body of ``nbytes``."""

    def __init__(self, value: Any) -> None:
        file = io.BytesIO()
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.nbytes = 0
        self._tensors: dict[int, Any] = {}  # by id: its data to send, its place, itself
        self.dump(value)
        self.head = file.getvalue()

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._tensors:
            base = _unexpanded(value.detach())  # what is sent: one copy of repeated values
            # offset in the body, and layout there: see `_at`
            place = (self.nbytes, tuple(base.shape), _strides(base), base.dtype)
            self._tensors[id(value)] = base, place, value  # kept alive, so its id stays unique
            # an empty tensor takes bytes too: its place is its key on the other side
            self.nbytes += max(ALIGNMENT, aligned(base.numel() * base.itemsize))
        return self._tensors[id(value)][1], tuple(value.shape), value.requires_grad

    def write(self, body: Tensor) -> None:
        """Copy the tensors into ``body``, a tensor of bytes."""
        for tensor, place, _ in self._tensors.values():
            _at(body, *place).copy_(tensor)


class _Received(pickle.Unpickler):
    """A value on the other side. Its tensors are views of ``body``."""

    def __init__(self, head: bytes, body: Tensor) -> None:
        super().__init__(io.BytesIO(head))
        self._body = body
        self._tensors: dict[Any, Tensor] = {}  # by place

    def find_class(self, module: str, name: str) -> Any:
        """Only what a value is made of; nothing is imported for it."""
        found = super().find_class(module, name) if module in sys.modules else None
        if not (isinstance(found, torch.dtype) or _is_of_values(found)):
            raise TypeError(
                f"a message from another rank holds a {module}.{name}, which is not unpickled: "
                "hand on tensors, numbers, texts, enumerations, tuples, lists, dicts, NamedTuples, "
                "or what is registered with torch.utils._pytree"
            )
        return found

    def persistent_load(self, entry: Any) -> Tensor:
        place, shape, requires_grad = entry
        if place not in self._tensors:  # else it came before: the same tensor
            tensor = _at(self._body, *place).expand(shape)
            # They share one body, but a write to one must not count for all: hence `data`.
            self._tensors[place] = tensor.data.requires_grad_(requires_grad)
        return self._tensors[place]


def _is_of_values(kind: Any) -> bool:
    known = (complex, set, frozenset, slice, range, bytearray, torch.device, torch.Size)
    return isinstance(kind, type) and (
        kind in known
        or kind in pytree.SUPPORTED_NODES
        or issubclass(kind, Enum)
        or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    )


class Link:
    """Both directions between two ranks. Messages arrive in the order in which they were sent.

    `put`, `get` and `flush` raise `PeerError` if the other end is lost.
    """

    def __init__(self) -> None:
        self._early: dict[Any, Any] = {}  # by key: arrived before it was asked for

    def put(self, key: Any, value: Any) -> None:
        """Send a value; does not wait until it is received."""
        self.send(Message((key, value)))

    def get(self, key: Any) -> Any:
        """Wait for the value sent under ``key``."""
        while key not in self._early:
            arrived, value = _Received(*self.receive()).load()
            self._early[arrived] = value
        return self._early.pop(key)

    def send(self, message: Message) -> None:
        """Does not wait until it is received."""
        raise NotImplementedError

    def receive(self) -> tuple[bytes, Tensor]:
        """Wait for the next message: its head and its body."""
        raise NotImplementedError

    def flush(self) -> None:
        """At the end of a step: wait until this process may end without losing what it sent."""

    def fail(self, reason: str) -> None:
        """Tell the other end why nothing more will come, if this link can. Call `close` next."""

    def close(self) -> None:
        """Hang up."""
        raise NotImplementedError


def _at(
    body: Tensor,
    begin: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    end = begin + math.prod(shape) * dtype.itemsize  # bytes; no gaps, see below
    return body[begin:end].view(dtype).as_strided(shape, strides)  # a view


# A kernel may give other bits for another memory order, so the order is kept; gaps are dropped.


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor).stride()


def _unexpanded(tensor: Tensor) -> Tensor:
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:  # repeated along dim by expand
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
