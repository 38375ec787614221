"""What a strategy tells a recorder of itself: who did what when."""

from __future__ import annotations

from collections.abc import Callable

Recorder = Callable[[str, int, int, float, float], None]
"""Called with (kind, place, micro-batch, start, end). The place is a stage, a layer or a bucket;
start and end are seconds of perf_counter. Place and micro-batch are -1 where there is none. Of
collectives it is told the time in which a rank works on them or waits for them, and not what
travels while the rank computes.

A recorder whose attribute `recording` is false is not called. To record on a GPU means to wait for
its kernels before reading the clock: done for `listening` recorders only."""


def listening(recorder: Recorder | None) -> Recorder | None:
    """The recorder, while it records."""
    return recorder if getattr(recorder, "recording", True) else None
