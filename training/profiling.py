"""--profile N: times every operator of N steps with `torch.profiler`.

A timeline shows a rank's actions; a profile shows their operators and kernels. The actions of the
strategies (forward 2 of stage 1, all-reduce of bucket 3) are ranges around their operators, opened
by `Timeline.around`.

Cost: these steps and the one before take longer. Without it: nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch

from training.timeline import Timeline


class Profile:
    """One rank's profile. The first step warms up, then `num_steps` or the rest of the run are
    profiled, and written to profile_rank{r}.json for https://ui.perfetto.dev. Work between two
    steps, such as an evaluation, is included."""

    def __init__(self, timeline: Timeline, num_steps: int, workdir: Path) -> None:
        self._profiler = None
        if not num_steps:
            return
        from torch.profiler import profile, schedule

        timeline.range = torch.profiler.record_function
        path = workdir / f"profile_rank{timeline.world.rank}.json"
        self._profiler = profile(
            schedule=schedule(wait=0, warmup=1, active=num_steps, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        )
        self._profiler.start()
        timeline.after_step = self._profiler.step

    def close(self) -> None:
        """Call it after the last step."""
        if self._profiler is not None:
            self._profiler.stop()
