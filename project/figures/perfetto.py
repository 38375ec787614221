"""Writes recorded steps as a trace for https://ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.files import write_text
from training.timeline import COMMUNICATION, COMPUTE, KINDS, Event

TRACE = "trace.json"
LANES = (COMPUTE, COMMUNICATION)


def write_trace(workdir: Path, workers: Mapping[str, Sequence[Event]]) -> Path:
    """Writes the events of all workers to trace.json; returns its path. https://ui.perfetto.dev
    shows a process per worker (a rank, or a stage if stages are threads of one rank), with a thread
    for computation and one for communication, or more if events cross.

    Times are whole microseconds: some readers round fractions, and an event that begins a
    nanosecond before the end of another is not drawn.
    """
    origin = min((events[0].start for events in workers.values() if events), default=0.0)
    names: list[dict[str, Any]] = []
    slices: list[dict[str, Any]] = []

    def name(what: str, pid: int, tid: int, **args: Any) -> None:
        names.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args})

    for pid, (worker, events) in enumerate(workers.items(), 1):  # to Perfetto, 0 is the idle task
        name("process_name", pid, 0, name=worker)
        name("process_sort_index", pid, 0, sort_index=pid)
        for lane in LANES:
            rows = without_crossings([event for event in events if event.lane == lane])
            for number, row in enumerate(rows, 1):
                tid = 1000 * pid + 100 * LANES.index(lane) + number  # unique in all processes
                name("thread_name", pid, tid, name=f"{lane} {number}" if number > 1 else lane)
                slices += [_slice(event, origin) | {"pid": pid, "tid": tid} for event in row]
    lines = ",\n".join(map(json.dumps, names + slices))
    write_text(workdir / TRACE, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n')
    return workdir / TRACE


def _slice(event: Event, origin: float) -> dict[str, Any]:
    """An event of the trace. Perfetto colours by name, ignoring the number at its end."""
    start, end = (round((time - origin) * 1e6) for time in (event.start, event.end))
    name, lane = KINDS[event.kind]
    args = {"micro-batch": event.microbatch, "stage or layer": event.stage, "step": event.step}
    return {
        "ph": "X", "name": f"{name} {event.microbatch}" if event.microbatch >= 0 else name,
        "cat": lane, "ts": start, "dur": end - start,
        "args": {key: value for key, value in args.items() if value >= 0},
    }  # fmt: skip


def without_crossings(events: Sequence[Event]) -> list[list[Event]]:
    """The events in few rows. Events of a row are disjoint or nested: a trace viewer draws nothing
    else."""
    rows: list[list[Event]] = []
    going_on: list[list[Event]] = []  # per row, its events that have not ended
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        for k in range(len(rows)):
            going_on[k] = [e for e in going_on[k] if e.end > event.start]
            if all(event.end <= e.end for e in going_on[k]):
                break
        else:
            k = len(rows)
            rows.append([])
            going_on.append([])
        rows[k].append(event)
        going_on[k].append(event)
    return rows
