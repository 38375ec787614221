"""The CUDA streams on which the workers of a Pipe compute: those of whoever calls it.

Problem. Which stream kernels go to is the calling thread's affair, device by device. A worker would
use the default streams whatever its caller chose, and nothing would make it wait for what the
caller had launched before, nor the caller for what it launches.

Idea. During a call every worker uses the caller's current streams. What is on one stream runs in
the order in which it was launched, so no event is needed, and memory stays with the stream that it
was allocated for. All devices' streams, not only that of the worker's own: a copy from another
device goes by the current streams of both.

A backward is called by a thread of autograd's. It uses the streams of its forward, as autograd does
for each of its own nodes; these wait for what is current there, and it for them.

Without a GPU, or before the first use of one, there is nothing to carry.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import cuda


class Streams:
    """The current stream of every device, in the thread that makes this."""

    def __init__(self) -> None:
        devices = range(cuda.device_count() if cuda.is_initialized() else 0)
        self._streams = [cuda.current_stream(device) for device in devices]

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Inside, they are current in this thread."""
        others = [s for s in self._streams if s != cuda.current_stream(s.device)]
        with ExitStack() as stack:
            if others:  # a device whose stream is as it should be is not even touched
                device = cuda.current_device()
                for stream in others:
                    stack.enter_context(cuda.stream(stream))  # makes its device current, too
                stack.enter_context(cuda.device(device))
            yield

    @contextmanager
    def resume(self) -> Iterator[None]:
        """As `enter`, where others are current: after their work, and before what they do next."""
        here = Streams()
        self._wait_for(here)
        with self.enter():
            yield
        here._wait_for(self)

    def _wait_for(self, others: Streams) -> None:
        for own, other in zip(self._streams, others._streams, strict=False):
            if own != other:
                own.wait_stream(other)
