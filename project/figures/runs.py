"""What a run left in its folder, read back: options and results, timelines, where time went."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from runtime.axes import ranks_of, sizes
from training.files import OPTIONS, SUMMARY
from training.launch.errors import UserError
from training.timeline import EVENT_KINDS, Event

from .epochs import read_epochs, read_json

ACTIONS = ("F", "B", "I", "W", "R")  # a schedule's actions, and recomputation
Workers = Mapping[str, Sequence[Event]]  # the events of each worker, by its name


def mean_and_std(values: list[float]) -> tuple[float, float]:
    """The mean, and the standard deviation of a sample; 0 for a single value."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Run:
    """What a run left in its folder. Its files are read when they are first asked for, and once."""

    folder: Path
    label: str = ""

    @property
    def name(self) -> str:
        """Its label, or else the name of its folder."""
        return self.label or self.folder.absolute().name

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Its summary.json or, if it did not finish, options.json: the options are in both. Raises
        UserError if there is no such folder, or a file cannot be read."""
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: there is no such folder; name the --workdir of a run")
        return read_json(self.folder / SUMMARY) or read_json(self.folder / OPTIONS)

    @property
    def finished(self) -> dict[str, Any]:
        """Its summary.json. Raises UserError if there is none."""
        if "step_seconds" not in self.summary:
            raise UserError(f"{self.folder} has no {SUMMARY}; name the --workdir of a finished run")
        return self.summary

    @property
    def seconds(self) -> float:
        """The seconds of a step: the median of all but the first."""
        steps = self.finished["step_seconds"]
        return median(steps[1:] or steps)

    @property
    def shape(self) -> dict[str, int]:
        """The number of ranks, or of stages in threads, on each axis."""
        if stages := self.summary.get("num_devices"):
            return sizes(pp=stages)
        return ranks_of(self.summary)

    @cached_property
    def epochs(self) -> list[tuple[dict[str, float], ...]]:
        """Per epoch, the results of the ranks, or of the pipeline. Raises UserError if some are
        missing."""
        names = [f"rank{rank}_results" for rank in range(self.summary.get("world_size", 1))]
        if any(self.folder.glob("eval_results_*")):
            names = ["eval_results"]
        ranks = [read_epochs(self.folder, name) for name in names]
        if len({len(rank) for rank in ranks}) > 1:  # interrupted, or resumed on more or fewer
            raise UserError(
                f"{self.folder}: its ranks have results of different epochs; make it again"
            )
        return list(zip(*ranks, strict=True))

    @cached_property
    def timeline(self) -> dict[str, list[Event]]:
        """The events of its workers by name: `rank 0`, or `stage 0` if stages are threads of one
        rank. If threads have several stages, `ranks` in `about` gives each stage's rank. Raises
        UserError if the file of a rank is missing or cannot be read."""
        workers: dict[str, list[Event]] = {}
        for rank in range(self.summary.get("world_size", 1)):
            path = self.folder / f"timeline_rank{rank}.json"
            if not (content := read_json(path)):
                raise UserError(f"{path} is missing; make the run again, with --timeline 10")
            ranks = content["about"].get("ranks")
            for event in starmap(Event, content["events"]):
                s = max(0, event.stage)  # without a stage it counts for the first one
                thread = f"rank {ranks[s]}" if ranks else f"stage {s}"
                name = f"rank {rank}" if content["workers"] == "rank" else thread
                workers.setdefault(name, []).append(event)
        return dict(sorted(workers.items(), key=lambda item: int(item[0].split()[1])))

    def speed_in(self, metric: str) -> tuple[float, float]:
        """For `throughput`, examples per second over all steps but the first, and their standard
        deviation over steps; raises UserError if the run has not finished. Else mean and deviation
        over all epochs but the first, or of the only one: of the slowest rank's time, or of the
        throughput summed over the ranks."""
        if metric == "throughput":
            size, seconds = self.finished["batch_size"], self.finished["step_seconds"]
            seconds = seconds[1:] or seconds
            return size * len(seconds) / sum(seconds), mean_and_std([size / s for s in seconds])[1]
        combine = max if metric == "training_time" else sum
        epochs = self.epochs[1:] or self.epochs
        return mean_and_std([combine(rank[metric] for rank in epoch) for epoch in epochs])

    def same(self, other: Run, *options: str) -> bool:
        """Whether two runs have the same values of some options."""
        return all(self.summary.get(name) == other.summary.get(name) for name in options)


def steps_of(workers: Workers) -> list[int]:
    """The recorded steps without the first, which is slower; if it is the only one, the first."""
    steps = sorted({event.step for events in workers.values() for event in events})
    return steps[1:] or steps


def in_step(workers: Workers, step: int) -> dict[str, list[Event]]:
    """What each worker did in one step, in seconds from the first start."""
    rows = {name: [e for e in events if e.step == step] for name, events in workers.items()}
    origin = min((event.start for events in rows.values() for event in events), default=0.0)
    return {
        name: [e._replace(start=e.start - origin, end=e.end - origin) for e in events]
        for name, events in rows.items()
    }


def actions_of(workers: Workers) -> dict[str, list[Event]]:
    """The actions of a schedule: forwards, backwards and recomputation."""
    return {name: [e for e in events if e.kind in ACTIONS] for name, events in workers.items()}


def duration(workers: Workers) -> float:
    """Seconds from the first start to the last end."""
    events = [event for row in workers.values() for event in row]
    return max((e.end for e in events), default=0.0) - min((e.start for e in events), default=0.0)


def spent(events: Iterable[Event]) -> float:
    """Seconds in which at least one of the events was in progress."""
    total, until = 0.0, -math.inf
    for start, end in sorted((event.start, event.end) for event in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def bubbles(workers: Workers) -> dict[str, float]:
    """Per worker, the share of a step in which it runs no action (F, B, I, W, R): it may wait, send
    or receive. The step lasts from the first action of any worker to the last."""
    actions = actions_of(workers)
    total = duration(actions) or 1.0
    return {name: 1 - spent(events) / total for name, events in actions.items()}


def shares(workers: Workers) -> dict[str, float]:
    """Seconds of one step by category, the mean over the workers; they add up to its duration.

    If two things happen at once, the one whose category is listed first counts, so `communication`
    is the part that no computation hides.
    """
    kinds = {"recompute": "R", "forward": "F", "backward": "BIW", "optimizer": ["optimizer"]}
    total, rows = duration(workers), []
    for events in workers.values():
        row, before, claimed = {}, 0.0, list[Event]()
        for category, members in {**kinds, "communication": EVENT_KINDS}.items():
            claimed += [event for event in events if event.kind in members]
            row[category], before = spent(claimed) - before, spent(claimed)
        rows.append(row | {"idle": total - before})
    return {category: fmean(row[category] for row in rows) for category in rows[0]}
