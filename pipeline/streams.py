"""The CUDA streams on which the workers of a Pipe compute: those of whoever calls it.

Streams are thread-local: a worker would use the default ones whatever its caller chose, and neither
would wait for what the other launches. During a call every worker uses the caller's current streams
of all devices (a copy goes by the streams of both ends). What is on one stream runs in the order in
which it was launched, so no event is needed.

A backward is called by a thread of autograd's. It uses the streams of its forward, as autograd does
for each of its own nodes; these wait for what is current there, and it for them.
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
