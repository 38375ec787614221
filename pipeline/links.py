"""The channels of dataflow.py where one end is in another process.

A value, that is tuples, lists and dicts of tensors and anything else, is taken apart by the sender
and put together by the receiver, who knows from analysis.py what it is: only tensors travel, and
of the way back only gradients of those that have one; integers never do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .analysis import Message, TensorKind, assemble, describe
from .parcels import Layout, PeerError, Receiver, Sender

Record = Callable[[str, int, float, float], None]  # kind, micro-batch, start, end


class MismatchError(RuntimeError):
    """A stage made something else than its dry forward did."""


class Activations:
    """How the output of a stage travels."""

    def __init__(self, message: Message) -> None:
        self._message = message
        self.layout = Layout([(kind.shape, kind.dtype) for kind in message.tensors])

    def pack(self, value: Any) -> list[Tensor | None]:
        made = describe(value)
        grad = torch.is_grad_enabled()
        if _comparable(made, grad) != _comparable(self._message, grad):
            raise MismatchError(
                f"it made {_in_words(made)} where the dry forward made "
                f"{_in_words(self._message)}: what passes between stages must follow from the "
                "shapes of the batch. Where a layer compares a size with a limit, "
                "generalize_shapes=False looks at each shape; where contents decide, only the last "
                "stage may have that layer"
            )
        leaves = zip(pytree.tree_leaves(value), self._message.leaves, strict=True)
        return [leaf for leaf, kind in leaves if isinstance(kind, TensorKind)]

    def unpack(self, tensors: Sequence[Tensor | None]) -> Any:
        received = []
        for kind, tensor in zip(self._message.tensors, tensors, strict=True):
            assert tensor is not None
            wanted = kind.requires_grad and torch.is_grad_enabled()
            # They lie in one message, but to write to one is not to write to all: hence `data`.
            received.append(tensor.data.requires_grad_(wanted))
        return assemble(self._message, received)


class GradientsOf:
    """How the gradients of these activations travel: a list, None for leaves without one."""

    def __init__(self, message: Message) -> None:
        self._size = len(message.leaves)
        self._positions = []
        kinds = []
        for k, leaf in enumerate(message.leaves):
            if isinstance(leaf, TensorKind) and leaf.requires_grad:
                self._positions.append(k)
                kinds.append((leaf.shape, leaf.dtype))
        self.layout = Layout(kinds)

    def pack(self, value: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [value[k] for k in self._positions]

    def unpack(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        gradients: list[Tensor | None] = [None] * self._size
        for k, tensor in zip(self._positions, tensors, strict=True):
            gradients[k] = tensor
        return gradients


class One:
    """How a tensor of known shape and type travels, or None."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.layout = Layout([(shape, dtype)])

    def pack(self, value: Tensor | None) -> list[Tensor | None]:
        return [value]

    def unpack(self, tensors: Sequence[Tensor | None]) -> Tensor | None:
        return tensors[0]


NUMBER = One((), torch.float64)
Parcel = Activations | GradientsOf | One


class Outbox:
    """The end of a channel where stage ``own`` puts ``what`` for stage ``peer``."""

    def __init__(self, sender: Sender, own: int, peer: int, what: str, record: Record) -> None:
        self._sender, self._record = sender, record
        self._way = f"handing {what} from stage {own} to stage {peer}"
        self._parcels: Mapping[int, Parcel] = {}

    def expect(self, parcels: Mapping[int, Parcel], order: Sequence[int], capacity: int) -> None:
        """What is going to be put, and in which order."""
        self._parcels = parcels
        try:
            self._sender.expect([(i, parcels[i].layout) for i in order], capacity)
        except PeerError as error:
            raise PeerError(f"{self._way}: {error}") from None

    def put(self, i: int, value: Any, parcel: Parcel | None = None) -> None:
        """``parcel`` is of a message that was not announced."""
        parcel = parcel or self._parcels[i]
        start = time.perf_counter()
        try:
            self._sender.send(i, parcel.layout, parcel.pack(value))
        except (PeerError, MismatchError) as error:
            raise type(error)(f"{self._way}, micro-batch {i}: {error}") from None
        self._record("send", i, start, time.perf_counter())

    def flush(self) -> None:
        """At the end of a step."""
        try:
            self._sender.flush()
        except PeerError as error:
            raise PeerError(f"{self._way}: {error}") from None

    def stop(self) -> None:
        """Whoever ends the step tells the others, and why: `Neighbours.fail`."""


class Inbox:
    """The end of a channel where stage ``own`` gets ``what`` of stage ``peer``."""

    def __init__(self, receiver: Receiver, own: int, peer: int, what: str, record: Record) -> None:
        self._receiver, self._record = receiver, record
        self._way = f"stage {own} waited for {what} of stage {peer}"
        self._parcels: Mapping[int, Parcel] = {}

    def expect(self, parcels: Mapping[int, Parcel], order: Sequence[int], _: int) -> None:
        """What is going to come, in the order in which it is sent."""
        self._parcels = parcels
        try:
            self._receiver.expect([(i, parcels[i].layout) for i in order])
        except PeerError as error:
            raise PeerError(f"{self._way}: {error}") from None

    def get(self, i: int, parcel: Parcel | None = None) -> Any:
        """``parcel`` is of a message that was not announced."""
        parcel = parcel or self._parcels[i]
        start = time.perf_counter()
        try:
            tensors = self._receiver.receive(i, parcel.layout)
        except PeerError as error:
            raise PeerError(f"{self._way}, micro-batch {i}: {error}") from None
        self._record("receive", i, start, time.perf_counter())
        return parcel.unpack(tensors)

    def stop(self) -> None:
        """As Outbox.stop."""


def _comparable(message: Message, with_gradients: bool) -> tuple[Any, ...]:
    leaves = (
        (leaf.shape, leaf.dtype, leaf.requires_grad and with_gradients)
        if isinstance(leaf, TensorKind)
        else leaf
        for leaf in message.leaves
    )
    return (message.tree, *leaves)


def _in_words(message: Message) -> str:
    kinds = [
        f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
        + (" with a gradient" if leaf.requires_grad else "")
        for leaf in message.tensors
    ]
    others = [repr(leaf) for leaf in message.leaves if not isinstance(leaf, TensorKind)]
    return ", ".join(kinds + others) or "nothing"
