"""How a strategy reports its actions: what runs now, and what ran when."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

Recorder = Callable[[str, int, int, float, float], None]
"""Called with (kind, place, micro-batch, start, end). The place is a stage, a layer or a bucket;
start and end are seconds of perf_counter. Place and micro-batch are -1 if there is none. For a
collective that is started and waited for later, start to end includes what the rank computes
meanwhile; the sharded strategies report only their own work and waiting.

A recorder whose attribute `recording` is false is not called. On a GPU the clock is read after
waiting for the kernels, and only while recording. If the recorder has a method
`around(kind, place, micro-batch, peer)`, every action runs in the context manager it returns.
"""


@contextmanager
def acting(
    recorder: Recorder | None,
    kind: str,
    place: int = -1,
    microbatch: int = -1,
    peer: int = -1,
    device: torch.device | None = None,
    start: float | None = None,
) -> Iterator[None]:
    """Reports the body of the `with` to the recorder, unless it raises.

    Args:
        peer: the rank waited for, or sent to.
        device: its kernels are waited for before the clock is read.
        start: of an action that began before the `with`.
    """
    around = getattr(recorder, "around", None)
    with around(kind, place, microbatch, peer) if around is not None else nullcontext():
        start = time.perf_counter() if start is None else start
        yield
        if recorder is not None and getattr(recorder, "recording", True):
            if device is not None and device.type != "cpu":
                # Kernels run later than they are launched. Those of this stream alone: NCCL's of a
                # message run until another rank receives it, which may wait for this rank.
                torch.accelerator.current_stream(device).record_event().synchronize()
            recorder(kind, place, microbatch, start, time.perf_counter())
