"""What data-parallel training tells a recorder of itself: who did what when."""

from __future__ import annotations

from collections.abc import Callable

Recorder = Callable[[str, int, int, float, float], None]
"""Called with (kind, layer or bucket, micro-batch, start, end), seconds of perf_counter; layer and
micro-batch are -1 where there is none. Of collectives, the time in which the rank works on them or
waits for them: what travels while it computes is not in it.

Where it has an attribute `recording` that is false, it is not called. On a GPU whoever records
waits for the kernels before reading the clock, and so for nobody else."""


def listening(recorder: Recorder | None) -> Recorder | None:
    """The recorder, while it records."""
    return recorder if getattr(recorder, "recording", True) else None
