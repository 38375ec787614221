"""The CUDA streams of a Pipe: workers compute on the caller's, and copy on streams of their own.

Streams are thread-local: a worker would use the default streams, whatever its caller chose, and
neither would wait for the other's kernels. So during a call every worker uses the caller's current
streams of all devices. Work on one stream runs in launch order, so no event is needed.

An autograd thread calls the backward, which uses the streams of its forward, as autograd's own
nodes do. These streams first wait for that thread's current ones, which in the end wait for them.

What a stage hands to another GPU goes through a `CopyingChannel`, which copies it on a stream of
each end. On compute streams a copy would wait for all that its receiver has launched, and
what its sender launches next would wait for the copy. Activations and gradients go in opposite
directions, on two pairs of streams. (To and from the CPU, stages copy themselves.) The method is
torchgpipe's (Kim et al., 2020):

    sender's compute      F0 ─┐ F1 ─┐ F2 ─┐            ┐ the copy waits for the event of its F alone
    copies                    └ c0 ┐└ c1 ┐└ c2 ┐
    receiver's compute             └ F0   └ F1  └ F2   ┘ and is waited for by the next F alone
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, cuda
from torch.utils import _pytree as pytree

from runtime.guards import tensors_of

from .executor import Channel, LocalChannel


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


def channel_between(source: torch.device, target: torch.device) -> Channel:
    """A channel for stages whose tensors are in these memories. It copies if these are two GPUs."""
    copies = source != target and source.type == target.type == "cuda"
    return CopyingChannel(source, target) if copies else LocalChannel()


@cache  # torch has few streams, and its allocator keeps memory for each
def _copying_streams(source: torch.device, target: torch.device) -> tuple[cuda.Stream, cuda.Stream]:
    """The streams of all copies from one GPU to another."""
    return cuda.Stream(source), cuda.Stream(target)


class CopyingChannel(LocalChannel):
    """A channel from one GPU to another. One thread puts and one gets."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        super().__init__()
        self._source, self._target = source, target
        self._streams = _copying_streams(source, target)

    def put(self, i: int, value: Any) -> None:
        """Launches the copy of `value` after what the current stream has been given so far. Tensors
        keep `requires_grad`, and one at two places stays one."""
        copies: dict[int, Tensor] = {}  # by id
        self._streams[0].wait_stream(cuda.current_stream(self._source))
        with cuda.stream(self._streams[0]), cuda.stream(self._streams[1]):  # a copy uses both
            for t in tensors_of(value):
                if id(t) not in copies:
                    copies[id(t)] = self._copy(t)
            arrived = self._streams[1].record_event()
        moved = pytree.tree_map_only(Tensor, lambda t: copies[id(t)], value)
        super().put(i, (moved, arrived))

    def _copy(self, tensor: Tensor) -> Tensor:
        copy = tensor.detach().to(self._target, non_blocking=True)
        # The sender may free the tensor before the copy has run. Its memory belongs to the compute
        # stream, whose next kernel could take it; now that kernel will wait for the copy.
        tensor.record_stream(self._streams[0])
        return copy.requires_grad_(tensor.requires_grad)

    def get(self, i: int) -> Any:
        """Waits for micro-batch i, as the receiver's current stream does for its copy."""
        value, arrived = super().get(i)
        stream = cuda.current_stream(self._target)
        stream.wait_event(arrived)
        for tensor in tensors_of(value):
            # Its memory belongs to the stream of copies. When it is freed here, its last kernels
            # may only have been launched, and the next copy could take the memory. Now that copy
            # will wait for what this stream has been given by then.
            tensor.record_stream(stream)
        return value
