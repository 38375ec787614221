"""Records which rank did what when in a run.

A profiler sees thousands of operators and slows the run down. For a parallel run less is enough:
which rank computed, sent or waited for which micro-batch, and what happened at the same time. So
every action calls a recorder with (kind, stage or layer, micro-batch, start, end). A `Timeline` is
such a recorder; a call takes about 0.3 microseconds, an action milliseconds.

    timeline = Timeline(world, about={"strategy": "ddp"})
    pipe = Pipe(module, recorder=timeline)            # or anything else that takes a recorder
    timeline.watch(optimizer)
    for batch in timeline.over(batches):              # marks every step
        with timeline.span("F"):
            loss = model(batch)
    timeline.save(workdir)                            # timeline_rank{r}.json

Time without an event is idle time, or work that has no event, such as clipping. On a GPU kernels
run later than they are launched, so a caller synchronizes before it reads the clock, but only while
the timeline is `recording`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from runtime.recorder import acting
from training.files import write_text

from .launch.world import World

T = TypeVar("T")
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


class Timeline:
    """The recorder of one rank: call it with (kind, stage or layer, micro-batch, start, end), in
    seconds of `time.perf_counter`, from any thread.

    Args:
        world: who this is; its device, for whose kernels `span` waits; and its last action, which
            is noted as it begins, also while nothing is recorded.
        num_steps: how many steps are recorded; None: all, and what comes before them.
        workers: `rank`, or `stage` if stages are threads of one rank: the rows of a picture.
        about: facts for a picture: strategy, schedule, num_microbatches ...
        offset: seconds from this rank's clock to rank 0's (launch/clocks.py).

    `recording` says whether an event would be kept now; callers need not time anything else.
    """

    def __init__(
        self,
        world: World | None = None,
        *,
        num_steps: int | None = None,
        workers: str = "rank",
        about: Mapping[str, Any] | None = None,
        offset: float = 0.0,
    ) -> None:
        self.world = world or World()
        self.last = self.world.last
        # Of a profiler: around every action, and after every step.
        self.range: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self.after_step: Callable[[], None] = lambda: None
        self.workers, self.about = workers, dict(about or {})
        self.recording = num_steps is None
        self.offset = offset
        self._num_steps = num_steps
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
        return self._begun == self._num_steps

    def step(self, k: int) -> None:
        """Step k begins, and the one before has ended."""
        self.recording = self._num_steps is None or self._begun < self._num_steps
        if self.recording:
            self._step, self._begun = k, self._begun + 1

    def over(self, steps: Iterable[T]) -> Iterator[T]:
        """The same steps, each marked; numbers continue over several calls. What follows the steps,
        such as evaluation, is not recorded."""
        for step in steps:
            self.step(self._begun)
            yield step  # the caller works on it here
            self.after_step()
        self.recording = False

    def span(self, kind: str, microbatch: int = -1) -> _GeneratorContextManager[None]:
        """Records what happens in the `with`, or in the decorated function."""
        return acting(self, kind, -1, microbatch, device=self.world.device)

    def watch(self, optimizer: torch.optim.Optimizer, stage: int = -1) -> None:
        """Records the steps of the optimizer, on any thread and on the device of its parameters."""
        spans: list[Any] = []
        device = optimizer.param_groups[0]["params"][0].device

        def before(*_: object) -> None:
            spans.append(acting(self, "optimizer", stage, device=device))  # at most one is open
            spans[-1].__enter__()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(lambda *_: spans.pop().__exit__(None, None, None))

    def events(self) -> list[Event]:
        """All events, ordered by start, on rank 0's clock."""
        here = sorted(self._events, key=lambda event: event.start)
        return [e._replace(start=e.start + self.offset, end=e.end + self.offset) for e in here]

    def content(self) -> dict[str, Any]:
        """Of this rank's file."""
        return {
            "rank": self.world.rank, "world_size": self.world.world_size, "workers": self.workers,
            "about": self.about, "columns": Event._fields, "events": self.events(),
        }  # fmt: skip

    def save(self, workdir: Path) -> None:
        """Rank 0 writes the files of all ranks, since hosts may share no folder; all ranks call it
        together. project/figures/runs.py reads them back. Without a step nothing is written."""
        if not self._begun:
            return
        contents = self.world.gather(self.content())
        for rank, content in enumerate(contents if self.world.is_main else []):
            write_text(workdir / f"timeline_rank{rank}.json", json.dumps(content))


OFF = Timeline(num_steps=0)  # records nothing
