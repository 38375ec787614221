"""The CUDA streams on which the workers of a Pipe compute: the caller's.

Streams are thread-local: a worker would use the default streams, whatever its caller chose, and
neither would wait for the other's kernels. So during a call every worker uses the caller's current
streams of all devices (a copy uses the streams of both ends). Work on one stream runs in launch
order, so no event is needed.

An autograd thread calls the backward, which uses the streams of its forward, as autograd's own
nodes do. They first wait for that thread's current streams, which in the end wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import cuda


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
        here = Streams()  # of the thread that runs backward
        self._wait_for(here)  # its kernels so far come before ours
        with self.enter():
            yield
        here._wait_for(self)  # ours come before its next ones

    def _wait_for(self, others: Streams) -> None:
        # one of the two may be empty: made before CUDA was used
        for own, other in zip(self._streams, others._streams, strict=False):
            if own != other:
                own.wait_stream(other)  # the GPU waits, not this thread
