"""Records who did what when, as a run goes on, and writes it down for pictures and for Perfetto.

Problem. Where does a step's time go? A profiler tells of thousands of operators and slows the run
down. What one asks of a parallel run is coarser: which rank computed, sent or waited for which
micro-batch, and what of it happened at the same time.

Idea. Whoever does something calls a recorder with (kind, stage or layer, micro-batch, start, end);
a `Timeline` is one, and keeps the five in a list: some 0.3 microseconds, where the work takes
milliseconds. All ranks' times are put on rank 0's clock (clock.py).

    timeline = Timeline(world.rank, world.world_size, about={"strategy": "ddp"})
    pipe = Pipe(module, recorder=timeline)            # and whatever else takes a recorder
    timeline.watch(optimizer)
    for k, batch in enumerate(batches):
        with timeline.step(k):                        # or timeline.step(k) alone: a mark
            with timeline.span("F"):
                loss = model(batch)
    timeline.save(workdir)                            # timeline_rank{r}.json, and trace.json

Kinds that are known are in KINDS; what idles is what is not recorded. On a GPU a recorder's caller
waits for the kernels before it reads the clock, since they run later than they are launched; but
only while the timeline is `recording`.

The Chrome trace is opened by https://ui.perfetto.dev: a process per worker, that is per rank, or
per stage where the stages are threads of one rank; in it a thread for what it computes and one for
what it sends, or several where things that were sent overlap.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from training.clock import Clock, measure_clock
from training.record import write_text

T = TypeVar("T")
COMPUTE, COMMUNICATION = "compute", "communication"
LANES = (COMPUTE, COMMUNICATION)
KINDS = {  # kind: its name, its lane, and the nearest of the colours that chrome://tracing has
    "F": ("forward", COMPUTE, "thread_state_running"),
    "B": ("backward", COMPUTE, "thread_state_iowait"),
    "I": ("backward of inputs", COMPUTE, "thread_state_iowait"),
    "W": ("backward of weights", COMPUTE, "good"),
    "R": ("recompute", COMPUTE, "yellow"),
    "optimizer": ("optimizer", COMPUTE, "grey"),
    "send": ("send", COMMUNICATION, "rail_animation"),
    "receive": ("receive", COMMUNICATION, "rail_load"),
    "all_reduce": ("all-reduce", COMMUNICATION, "terrible"),
    "all_gather": ("all-gather", COMMUNICATION, "rail_load"),
    "reduce_scatter": ("reduce-scatter", COMMUNICATION, "rail_animation"),
    "barrier": ("wait for all ranks", COMMUNICATION, "black"),
}
TRACE = "trace.json"
BEFORE = -1  # the step of what happened before the first one
DEFAULT_STEPS = 20


class Event(NamedTuple):
    """What a worker did; seconds of rank 0's clock. -1 where there is no stage or micro-batch."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float
    step: int = 0

    @property
    def lane(self) -> str:
        """`compute`, also for a kind that is not known, or `communication`."""
        return KINDS.get(self.kind, ("", COMPUTE))[1]


def file_name(rank: int) -> str:
    """Where a rank's timeline is, under the workdir."""
    return f"timeline_rank{rank}.json"


class Timeline:
    """The recorder of one rank: call it with (kind, stage or layer, micro-batch, start, end), in
    seconds of `time.perf_counter`; from any thread.

    Args:
        rank, world_size: who this is. With several ranks all must make their Timeline together,
            for they compare their clocks, over the default process group.
        num_steps: recording ends after so many steps; None: never; 0: nothing is recorded.
        workers: whose row an event belongs to: the `rank`'s, or the `stage`'s where the stages are
            threads of one rank.
        device: of this rank; `span` waits for its kernels.
        about: whatever a picture should know: strategy, schedule, num_microbatches ...

    `recording` says whether an event would be kept now: callers need not time any else.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        num_steps: int | None = DEFAULT_STEPS,
        workers: str = "rank",
        device: torch.device | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        if workers not in ("rank", "stage"):
            raise ValueError(f"workers={workers!r}: 'rank' or 'stage'")
        self.rank, self.world_size, self.workers = rank, world_size, workers
        self.device = device or torch.device("cpu")
        self.about = dict(about or {})
        self.recording = num_steps != 0
        self.clock = measure_clock(rank, world_size) if self.recording else Clock()
        self._num_steps = num_steps
        self._events: list[tuple[str, int, int, float, float]] = []
        self._marks: list[tuple[float, int]] = []  # when which step began

    def __call__(self, kind: str, stage: int, microbatch: int, start: float, end: float) -> None:
        if self.recording:
            self._events.append((kind, stage, microbatch, start, end))  # atomic among threads

    def step(self, k: int) -> Timeline:
        """Step k begins, and the one before has ended. In a `with`, nothing is recorded after it
        until the next begins: evaluation is not part of a step."""
        self.recording = self._num_steps is None or len(self._marks) < self._num_steps
        if self.recording:
            self._marks.append((time.perf_counter(), k))
        return self

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.recording = False

    def over(self, steps: Iterable[T]) -> Iterator[T]:
        """The same steps, each of them marked, and numbered on from the last one. What comes after
        them is not recorded."""
        for step in steps:
            self.step(self._marks[-1][1] + 1 if self._marks else 0)
            yield step
        self.recording = False

    @property
    def done(self) -> bool:
        """Whether there is something to save: all steps that were to be recorded have ended."""
        return not self.recording and 0 < len(self._marks) == self._num_steps

    @contextmanager
    def span(self, kind: str, stage: int = -1, microbatch: int = -1) -> Iterator[None]:
        """Records what happens in the `with`."""
        start = time.perf_counter()
        yield
        if self.recording:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self(kind, stage, microbatch, start, time.perf_counter())

    def watch(self, optimizer: torch.optim.Optimizer, stage: int = -1) -> None:
        """Records the steps of the optimizer, on whatever thread it is called."""
        if not self.recording:
            return
        open_spans: list[Any] = []

        def before(*_: object) -> None:
            open_spans.append(self.span("optimizer", stage))
            open_spans[-1].__enter__()

        def after(*_: object) -> None:
            open_spans.pop().__exit__(None, None, None)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def events(self) -> list[Event]:
        """All there is, in the order of their starts, on rank 0's clock."""
        begins = [begin for begin, _ in self._marks]
        steps = [BEFORE, *(k for _, k in self._marks)] if self._marks else [0]
        offset = self.clock.offset
        return [
            Event(kind, stage, i, a + offset, b + offset, steps[bisect_right(begins, a)])
            for kind, stage, i, a, b in sorted(self._events, key=lambda event: event[3])
        ]

    def write(self, workdir: Path) -> Path:
        """Writes timeline_rank{r}.json, and returns its path."""
        events = [
            [*event[:3], round(event.start, 7), round(event.end, 7), event.step]
            for event in self.events()
            if event.step != BEFORE
        ]
        content = {
            "rank": self.rank,
            "world_size": self.world_size,
            "workers": self.workers,
            "about": self.about,
            "clock": {"offset": self.clock.offset, "round_trip": self.clock.round_trip},
            "seconds_per_event": cost_per_event(),
            "columns": Event._fields,
        }
        head = json.dumps(content, indent=2).rstrip("}\n")
        lines = ",\n    ".join(map(json.dumps, events))
        path = workdir / file_name(self.rank)
        write_text(path, f'{head},\n  "events": [\n    {lines}\n  ]\n}}\n')
        return path

    def save(self, workdir: Path) -> None:
        """Writes the file of every rank, and the trace of all; all ranks call it together."""
        self.write(workdir)
        if self.world_size > 1:
            dist.barrier()
        if self.rank == 0:
            merge_trace(workdir)


OFF = Timeline(num_steps=0)  # records nothing


def cost_per_event(repeats: int = 2000) -> float:
    """Seconds that recording one event takes here: two looks at the clock, and the call."""
    timeline, now = Timeline(), time.perf_counter
    begin = now()
    for _ in range(repeats):
        start = now()
        timeline("F", 0, 0, start, now())
    return (now() - begin) / repeats


class RankTimeline(NamedTuple):
    """A rank's file, read back."""

    rank: int
    workers: str
    about: dict[str, Any]
    seconds_per_event: float
    events: list[Event]


def read_timelines(workdir: Path) -> list[RankTimeline]:
    """What all ranks of a run recorded, rank 0 first. Files of an earlier, larger run are left
    alone.

    Raises:
        FileNotFoundError: a rank's file is not there.
        ValueError: a file is not a timeline.
    """
    ranks: list[RankTimeline] = []
    world_size = 1
    while len(ranks) < world_size:
        path = workdir / file_name(len(ranks))
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            events = [Event(*event) for event in content["events"]]
            ranks.append(
                RankTimeline(
                    content["rank"], content["workers"], content["about"],
                    content["seconds_per_event"], events,
                )
            )  # fmt: skip
            world_size = content["world_size"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a timeline ({error!r})") from error
    return ranks


def by_worker(ranks: Sequence[RankTimeline]) -> dict[str, list[Event]]:
    """The events of each worker, by its name: `rank 0`, or `stage 0`. What a thread of stages did
    without a stage counts for the first."""
    workers: dict[str, list[Event]] = {}
    for rank in ranks:
        if rank.workers == "rank":
            workers[f"rank {rank.rank}"] = rank.events
            continue
        prefix = f"rank {rank.rank}, " if len(ranks) > 1 else ""
        for stage in sorted({max(0, event.stage) for event in rank.events}):
            name = f"{prefix}stage {stage}"
            workers[name] = [event for event in rank.events if max(0, event.stage) == stage]
    return workers


def merge_trace(workdir: Path) -> Path:
    """Writes trace.json, which Perfetto opens, from the files of all ranks; returns its path.

    Raises:
        FileNotFoundError, ValueError: as `read_timelines`.
    """
    workers = by_worker(read_timelines(workdir))
    origin = min((events[0].start for events in workers.values() if events), default=0.0)
    names: list[dict[str, Any]] = []
    slices: list[dict[str, Any]] = []
    for pid, (worker, events) in enumerate(workers.items(), 1):  # to Perfetto, 0 is Linux's idling
        names.append(_metadata("process_name", pid, 0, name=worker))
        names.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        for lane in LANES:
            rows = without_crossings([event for event in events if event.lane == lane])
            for number, row in enumerate(rows, 1):
                tid = 1000 * pid + 100 * LANES.index(lane) + number  # no other process has it
                name = f"{lane} {number}" if number > 1 else lane
                names.append(_metadata("thread_name", pid, tid, name=name))
                slices += [_slice(event, pid, tid, origin) for event in row]
    path = workdir / TRACE
    lines = ",\n".join(map(json.dumps, names + slices))
    write_text(path, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n')
    return path


def without_crossings(events: Sequence[Event], nested: bool = True) -> list[list[Event]]:
    """The events in as few rows as it takes for those of a row to lie one after the other or, if
    `nested`, one within the other: a trace viewer draws nothing else."""
    rows: list[list[Event]] = []
    open_ends: list[list[float]] = []  # per row, the ends of those that have not ended
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        for ends in open_ends:
            while ends and ends[-1] <= event.start:
                ends.pop()
        free = (k for k, e in enumerate(open_ends) if not e or (nested and event.end <= e[-1]))
        k = next(free, len(rows))
        if k == len(rows):
            rows.append([])
            open_ends.append([])
        rows[k].append(event)
        open_ends[k].append(event.end)
    return rows


def _metadata(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _slice(event: Event, pid: int, tid: int, origin: float) -> dict[str, Any]:
    """A box. Its name ends with the number of the micro-batch: Perfetto's colours are by name, the
    number left out. Start and end are whole microseconds: of a fraction a reader may lose a
    nanosecond, and a box that begins one before the end of another is not drawn."""
    start, end = (round((time - origin) * 1e6) for time in (event.start, event.end))
    name, lane, colour = KINDS.get(event.kind, (event.kind, COMPUTE, "generic_work"))
    args = {"micro-batch": event.microbatch, "stage or layer": event.stage, "step": event.step}
    return {
        "ph": "X",
        "name": f"{name} {event.microbatch}" if event.microbatch >= 0 else name,
        "cat": lane,
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": end - start,
        "cname": colour,
        "args": {key: value for key, value in args.items() if value >= 0},
    }
