"""What a strategy tells a recorder of itself: who does what, and who did what when."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

Recorder = Callable[[str, int, int, float, float], None]
"""Called with (kind, place, micro-batch, start, end). The place is a stage, a layer or a bucket;
start and end are seconds of perf_counter. Place and micro-batch are -1 where there is none. Of
collectives it is told the time in which a rank works on them or waits for them, and not what
travels while the rank computes.

A recorder whose attribute `recording` is false is not called. To record on a GPU means to wait for
its kernels before reading the clock: done while it records only. Where it has a method
`around(kind, place, micro-batch, peer)`, every action runs in the context that this returns.
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
    """Tells the recorder what is done in the `with`, if it does not fail.

    Args:
        peer: the rank that is waited for, or sent to.
        device: whose kernels are waited for.
        start: of an action that has begun before.
    """
    around = getattr(recorder, "around", None)
    with around(kind, place, microbatch, peer) if around is not None else nullcontext():
        start = time.perf_counter() if start is None else start
        yield
        if recorder is not None and getattr(recorder, "recording", True):
            if device is not None and device.type == "cuda":
                torch.cuda.synchronize(device)  # kernels run later than they are launched
            recorder(kind, place, microbatch, start, time.perf_counter())
