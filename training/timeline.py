"""Records what each rank did in a run, and when.

A profiler sees thousands of operators and slows the run down. For a parallel run less is enough:
which rank computed, sent or waited for which micro-batch, and what happened at the same time. So
every action calls a recorder with (kind, stage or layer, micro-batch, start, end). A `Timeline` is
such a recorder; a call takes about 0.3 microseconds, an action milliseconds.

    timeline = Timeline(world, about={"strategy": "ddp"})
    pipe = Pipe(module, recorder=timeline)            # or anything else that takes a recorder
    timeline.watch(optimizer)
    for batch in batches:
        timeline.begin_step()
        with timeline.span("F"):
            loss = model(batch)
        timeline.end_step()
    timeline.save(workdir)                            # timeline_rank{r}.json

Time without an event is idle time, or work that has no event, such as clipping. On a GPU kernels
run later than they are launched, so a caller synchronizes before it reads the clock, but only while
the timeline is `recording`.

A timeline shows a rank's actions; `--profile` shows their operators and kernels, by
`torch.profiler`, within ranges that are named after the actions (forward 2 of stage 1).
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runtime.recorder import acting
from training.files import write_text

from .launch.world import World

ROUNDS = 20  # rounds in which ranks compare their clocks
COMPUTE, COMMUNICATION = "compute", "communication"
EVENT_KINDS = {  # kind: its name, and its lane
    "F": ("forward", COMPUTE),
    "B": ("backward", COMPUTE),
    "I": ("backward (input)", COMPUTE),
    "W": ("backward (weight)", COMPUTE),
    "R": ("recompute", COMPUTE),
    "optimizer": ("optimizer", COMPUTE),
    "send": ("send", COMMUNICATION),
    "receive": ("receive", COMMUNICATION),
    "all_reduce": ("all-reduce", COMMUNICATION),
    "all_gather": ("all-gather", COMMUNICATION),
    "reduce_scatter": ("reduce-scatter", COMMUNICATION),
    "all_to_all": ("all-to-all", COMMUNICATION),
    "barrier": ("wait for all ranks", COMMUNICATION),
}


class Event(NamedTuple):
    """An action of a worker, in seconds of rank 0's clock; -1: no stage, or no micro-batch."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float
    step: int = 0

    @property
    def lane(self) -> str:
        """`communication` or `compute`."""
        return EVENT_KINDS[self.kind][1]


@dataclass(eq=False)
class Timeline:
    """The recorder of one rank: call it with (kind, stage or layer, micro-batch, start, end), in
    seconds of `time.perf_counter`, from any thread.

    Args:
        world: this rank; its device, for whose kernels `span` waits; and its last action, which is
            noted when it begins, even while nothing is recorded.
        num_steps: how many steps are recorded; None: all, and what comes before them.
        workers: `rank`, or `stage` if stages are threads of one rank: the rows of a picture.
        about: facts for a picture: strategy, schedule, num_microbatches ...
        offset: seconds from this rank's clock to rank 0's (`clock_offset`).

    `recording` says whether an event would be kept now; callers need not time anything otherwise.
    """

    world: World = field(default_factory=World)
    _: KW_ONLY
    num_steps: int | None = None
    workers: str = "rank"
    about: dict[str, Any] = field(default_factory=dict)
    offset: float = 0.0

    def __post_init__(self) -> None:
        self.last = self.world.last
        self.range: Callable[[str], AbstractContextManager[Any]] = nullcontext  # in a profile
        self.profiler: Any = None  # torch's
        self.recording = self.num_steps is None
        self._step, self._begun = 0, 0  # which step this is; how many were recorded
        self._events: list[Event] = []

    def __call__(self, kind: str, stage: int, microbatch: int, start: float, end: float) -> None:
        if self.recording:
            event = Event(kind, stage, microbatch, start, end, self._step)
            self._events.append(event)  # atomic among threads

    @contextmanager
    def around(self, kind: str, stage: int, microbatch: int, peer: int) -> Iterator[None]:
        """Notes the start and the end of an action, and makes it a range of the profile."""
        name = EVENT_KINDS.get(kind, (kind,))[0]
        self.last.note(name, stage, microbatch, peer)
        label = f"{name}, micro-batch {microbatch}" if microbatch >= 0 else name
        with self.range(f"{label}, stage, layer or bucket {stage}" if stage >= 0 else label):
            yield
        self.last.note(f"after {name}", stage, microbatch, peer)

    @property
    def complete(self) -> bool:
        """Whether the last step to record has at least begun."""
        return self._begun == self.num_steps

    def begin_step(self) -> None:
        """A step begins. The numbers of steps go on over all epochs."""
        self.recording = self.num_steps is None or self._begun < self.num_steps
        if self.recording:
            self._step, self._begun = self._begun, self._begun + 1

    def end_step(self) -> None:
        """The step has ended. What follows, such as an evaluation, is not recorded."""
        self.recording = False
        if self.profiler is not None:
            self.profiler.step()

    def span(self, kind: str, microbatch: int = -1) -> _GeneratorContextManager[None]:
        """Records what happens in the `with`, or in the decorated function."""
        return acting(self, kind, -1, microbatch, device=self.world.device)

    def watch(self, optimizer: torch.optim.Optimizer, stage: int = -1) -> None:
        """Records the steps of the optimizer, on any thread and on the device of its parameters."""
        device = next(p.device for group in optimizer.param_groups for p in group["params"])
        recorded = acting(self, "optimizer", stage, device=device)
        optimizer.step = recorded(optimizer.step)  # type: ignore[method-assign]

    def events(self) -> list[Event]:
        """All events, ordered by start, on rank 0's clock."""
        events = sorted(self._events, key=lambda event: event.start)
        return [e._replace(start=e.start + self.offset, end=e.end + self.offset) for e in events]

    def content(self) -> dict[str, Any]:
        """The content of this rank's file. An event is a list of the fields of `Event`."""
        return {"workers": self.workers, "about": self.about, "events": self.events()}

    def save(self, workdir: Path) -> None:
        """Rank 0 writes the files of all ranks, since hosts may share no folder; all ranks call it
        together. project/figures/runs.py reads them back. Without a step nothing is written."""
        if not self._begun:
            return
        contents = self.world.gather(self.content())
        for rank, content in enumerate(contents if self.world.is_main else []):
            write_text(workdir / f"timeline_rank{rank}.json", json.dumps(content))


OFF = Timeline(num_steps=0)  # records nothing


def clock_offset(world: World) -> float:
    """Seconds to add to this rank's `time.perf_counter` to get rank 0's. All ranks call it.

    Each round is an all-reduce, after which the ranks read their clocks. No rank leaves a round
    before all have entered it. So rank 0 leaves a round later than this rank has left the round
    before, and earlier than this rank leaves the next one. Of 20 rounds the one is used in which
    these two times are closest. Their distance is the largest possible error. A smaller offset
    counts as 0, as on one machine.
    """
    clocks = []
    for _ in range(ROUNDS):
        world.sum(torch.zeros(()))
        clocks.append(time.perf_counter())
    of_main = world.gather(clocks)[0]
    rounds = zip(clocks, clocks[1:], of_main[1:], clocks[2:], strict=False)
    error, offset = min((after - before, main - own) for before, own, main, after in rounds)
    return offset if abs(offset) > error else 0.0


@contextmanager
def profiled(timeline: Timeline, num_steps: int, workdir: Path) -> Iterator[None]:
    """Within it the first step warms up. Then `num_steps`, or the rest of the run, are profiled and
    written to profile_rank{r}.json for https://ui.perfetto.dev. Work between two steps, such as
    an evaluation, is included; these steps take longer. With 0 nothing is profiled."""
    if not num_steps:
        yield
        return
    from torch.profiler import profile, schedule

    path = workdir / f"profile_rank{timeline.world.rank}.json"
    with profile(
        schedule=schedule(wait=0, warmup=1, active=num_steps, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        timeline.range = torch.profiler.record_function
        timeline.profiler = profiler
        # Never freed: torch 2.13 (libkineto) crashes when a trace is freed, even much later.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(profiler))
        yield
