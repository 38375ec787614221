"""--profile N: what every operator of N steps took, by `torch.profiler`.

A timeline says what a rank did; a profile says of which operators and kernels that consists. The
actions of the strategies (forward 2 of stage 1, all-reduce of bucket 3) are ranges around their
operators: `Timeline.around` opens them.

Cost: these steps and the one before take longer. Without it: nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch

from training.timeline import Timeline


class Profile:
    """Of one rank: the first step warms up, then `num_steps` are profiled, or what is left of the
    run, and profile_rank{r}.json is written, for https://ui.perfetto.dev. What comes between two
    steps, such as an evaluation, is in it, too."""

    def __init__(self, timeline: Timeline, num_steps: int, workdir: Path) -> None:
        self._timeline, self._profiler = timeline, None
        if not num_steps:
            return
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import profile, schedule

        timeline.range = torch.profiler.record_function
        path = workdir / f"profile_rank{timeline.rank}.json"
        self._profiler = profile(
            schedule=schedule(wait=0, warmup=1, active=num_steps, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
            experimental_config=_ExperimentalConfig(profile_all_threads=True),  # stages in threads
        )
        self._profiler.start()

    def step(self) -> None:
        """A step has been made."""
        if self._profiler is not None:
            self._profiler.step()

    def close(self) -> None:
        """There are no more steps."""
        if self._profiler is not None:
            self._profiler.stop()
