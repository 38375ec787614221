"""What a run left in its folder, read back: options and summary, results, timelines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from training.files import OPTIONS, SUMMARY
from training.launch.errors import UserError
from training.timeline import Event

from .epochs import read_epochs, read_json


def mean_and_std(values: list[float]) -> tuple[float, float]:
    """The mean, and the standard deviation of a sample; 0 for a single value."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Run:
    """What a run left in its folder. Its files are read when they are first asked for, and once."""

    folder: Path

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.folder.absolute().name

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Its summary.json or, if it did not finish, options.json: the options are in both. Raises
        UserError if there is no such folder, or they cannot be read."""
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: there is no such folder; name the --workdir of a run")
        found = [path for name in (SUMMARY, OPTIONS) if (path := self.folder / name).exists()]
        return read_json(found[0]) if found else {}

    @cached_property
    def epochs(self) -> list[tuple[dict[str, float], ...]]:
        """Per epoch, the results of the ranks, or of the pipeline. Raises UserError if some are
        missing."""
        if any(self.folder.glob("eval_results_*")):
            return [(epoch,) for epoch in read_epochs(self.folder, "eval_results")]
        numbers = range(self.summary.get("world_size", 1))
        ranks = [read_epochs(self.folder, f"rank{rank}_results") for rank in numbers]
        if len({len(rank) for rank in ranks}) > 1:  # interrupted, or resumed on another number
            raise UserError(
                f"{self.folder}: its ranks have results of different epochs; make it again"
            )
        return list(zip(*ranks, strict=True))

    @cached_property
    def timeline(self) -> dict[str, list[Event]]:
        """The events of its workers by name (`rank 0`, or `stage 0`). An event without a stage
        counts for the first one. If threads have several stages, `ranks` in `about` gives each
        stage's rank, and workers are called `rank 0`. Raises UserError if the file of a rank is
        missing or cannot be read."""
        workers: dict[str, list[Event]] = {}
        rank, world_size = 0, 1
        while rank < world_size:  # an earlier, larger run may have left more files
            path = self.folder / f"timeline_rank{rank}.json"
            if not path.is_file():
                raise UserError(f"{path} is missing; make the run again, with --timeline 10")
            content = read_json(path)
            ranks, world_size = content["about"].get("ranks"), content["world_size"]
            for event in (Event(*event) for event in content["events"]):
                s = max(0, event.stage)
                name = f"rank {ranks[s]}" if ranks else f"stage {s}"
                if content["workers"] == "rank":
                    name = f"rank {rank}"
                workers.setdefault(name, []).append(event)
            rank += 1
        return dict(sorted(workers.items(), key=lambda item: int(item[0].split()[1])))

    def over_epochs(self, metric: str) -> tuple[float, float]:
        """Mean and standard deviation over all epochs but the first: of the slowest rank's time, or
        of the throughput summed over the ranks."""
        combine = max if metric == "training_time" else sum
        return mean_and_std([combine(rank[metric] for rank in e) for e in self.epochs[1:]])

    def speed(self) -> tuple[float, float]:
        """Of a run of train.py: examples per second over all steps but the first, and the deviation
        of a step."""
        size, seconds = self.summary["batch_size"], self.summary["step_seconds"]
        seconds = seconds[1:] or seconds
        return size * len(seconds) / sum(seconds), mean_and_std([size / s for s in seconds])[1]


def speed_up(run: Run, baseline: Run, metric: str) -> float:
    """How much faster than the baseline a run is: of time, less is better; of throughput, more."""
    (before, _), (after, _) = baseline.over_epochs(metric), run.over_epochs(metric)
    return before / after if metric == "training_time" else after / before
