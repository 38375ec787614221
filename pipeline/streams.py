"""The CUDA streams of a Pipe: workers compute on the caller's, and copy on streams of their own.

Streams are thread-local: a worker would use the default streams, whatever its caller chose, and
neither would wait for the other's kernels. So during a call every worker uses the caller's current
streams of all devices. Work on one stream runs in launch order, so no event is needed.

An autograd thread calls the backward, which uses the streams of its forward, as autograd's own
nodes do. They first wait for that thread's current streams, which in the end wait for them.

What a stage hands to another GPU goes through a `CopyingChannel`: a `Copier` copies it, on a
stream of each end. On compute streams a copy would wait for all that its receiver has launched, and
what its sender launches next would wait for the copy. Activations and gradients go in opposite
directions, over two copiers. (To and from the CPU, stages copy themselves.) The method is
torchgpipe's (Kim et al., 2020):

    sender's compute      F0 ─┐ F1 ─┐ F2 ─┐            ┐ the copy waits for the event of its F alone
    copier                    └ c0 ┐└ c1 ┐└ c2 ┐
    receiver's compute             └ F0   └ F1  └ F2   ┘ and is waited for by the next F alone
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, cuda
from torch.utils import _pytree as pytree

from .executor import Channel


class Streams:
    """The current stream of every device, in the thread that makes this."""

    def __init__(self) -> None:
        devices = range(cuda.device_count() if cuda.is_initialized() else 0)  # not in use: none
        self._streams = [cuda.current_stream(device) for device in devices]

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Inside, these streams are current in this thread."""
        others = [s for s in self._streams if s != cuda.current_stream(s.device)]
        with ExitStack() as stack:
            if others:  # do not touch a device that has the right stream
                device = cuda.current_device()
                for stream in others:
                    stack.enter_context(cuda.stream(stream))  # makes its device current, too
                stack.enter_context(cuda.device(device))
            yield

    @contextmanager
    def resume(self) -> Iterator[None]:
        """Like `enter`, but after the work of the current streams and before their next work."""
        callers = Streams()  # of the thread that runs backward
        self._wait_for(callers)  # its kernels so far come before ours
        with self.enter():
            yield
        callers._wait_for(self)  # ours come before its next ones

    def _wait_for(self, others: Streams) -> None:
        # one of the two may be empty: made before CUDA was used
        for own, other in zip(self._streams, others._streams, strict=False):
            if own != other:
                own.wait_stream(other)  # the GPU waits, not this thread


class Copier:
    """Copies values from one GPU to another. One thread sends and one receives. The streams, one on
    each, last as long as the copier."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source, self._target = source, target
        self._streams = cuda.Stream(source), cuda.Stream(target)

    def send(self, value: Any) -> tuple[Any, cuda.Event | None]:
        """Launch the copy of ``value`` after what the current stream has been given so far; return
        the copy, and the event after which it is there. Tensors keep ``requires_grad``, and one at
        two places stays one.
        """
        leaves, spec = pytree.tree_flatten(value)
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        strided = all(t.layout == torch.strided for t in tensors.values())
        if not tensors or not strided:
            return value, None
        self._streams[0].wait_stream(cuda.current_stream(self._source))
        with cuda.stream(self._streams[0]), cuda.stream(self._streams[1]):  # a copy uses both
            copies = {key: self._copy(t) for key, t in tensors.items()}
            arrived = self._streams[1].record_event()
        moved = [copies.get(id(leaf), leaf) for leaf in leaves]
        return pytree.tree_unflatten(moved, spec), arrived

    def _copy(self, tensor: Tensor) -> Tensor:
        copy = tensor.detach().to(self._target, non_blocking=True)
        # The sender may free the tensor before the copy has run. Its memory then belongs to the
        # compute stream, whose next kernel could take it: it will wait for the copy.
        tensor.record_stream(self._streams[0])
        return copy.requires_grad_(tensor.requires_grad)

    def receive(self, value: Any, arrived: cuda.Event) -> None:
        """Let the current stream wait for a copy."""
        stream = cuda.current_stream(self._target)
        stream.wait_event(arrived)
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                # Its memory belongs to the copier's stream, on which the next copy could take it as
                # soon as it is freed here, where that only means: launched. Now it will wait for
                # what this stream has been given by then.
                leaf.record_stream(stream)


class CopyingChannel(Channel):
    """A channel to another GPU, over its copier."""

    def __init__(self, copier: Copier) -> None:
        super().__init__()
        self._copier = copier

    def put(self, i: int, value: Any) -> None:
        super().put(i, self._copier.send(value))

    def get(self, i: int) -> Any:
        """Wait for micro-batch i, as the receiver's device does for its copy."""
        value, arrived = super().get(i)
        if arrived is not None:
            self._copier.receive(value, arrived)
        return value
