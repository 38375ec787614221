"""Writes recorded steps as a trace for https://ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from training.files import write_text
from training.timeline import COMMUNICATION, COMPUTE, EVENT_KINDS, Event

from .runs import Workers

TRACE = "trace.json"


def write_trace(workdir: Path, workers: Workers) -> Path:
    """Writes the events of all workers to trace.json; returns its path. https://ui.perfetto.dev
    shows a process per worker (a rank, or a stage if stages are threads of one rank), with a thread
    for computation and one for communication, or more if events overlap.

    Times are whole microseconds: some readers round fractions, and an event that begins a
    nanosecond before the end of another is not drawn.
    """
    origin = min(event.start for events in workers.values() for event in events)
    trace: list[dict[str, Any]] = []
    tid = 0  # unique in all processes: Perfetto names threads by it
    for pid, (worker, events) in enumerate(workers.items(), 1):  # to Perfetto, 0 is the idle task
        trace.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": worker}})
        for lane in (COMPUTE, COMMUNICATION):
            for row in without_overlaps(event for event in events if event.lane == lane):
                tid += 1
                thread = {"pid": pid, "tid": tid}
                trace.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": lane}})
                for event in row:
                    start, end = (round(1e6 * (t - origin)) for t in (event.start, event.end))
                    name = EVENT_KINDS[event.kind][0]
                    if event.microbatch >= 0:
                        name += f" {event.microbatch}"
                    box = {"ts": start, "dur": end - start, "args": event._asdict()}
                    trace.append({"ph": "X", "name": name, **thread, **box})
    write_text(workdir / TRACE, json.dumps({"displayTimeUnit": "ms", "traceEvents": trace}))
    return workdir / TRACE


def without_overlaps(events: Iterable[Event]) -> list[list[Event]]:
    """The events in few rows; in a row, each begins after the end of the one before."""
    rows: list[list[Event]] = []
    for event in sorted(events, key=lambda event: event.start):
        row = next((row for row in rows if row[-1].end <= event.start), None)
        if row is None:
            row = []
            rows.append(row)
        row.append(event)
    return rows
