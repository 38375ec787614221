"""trace.json by the rules of the Trace Event Format, read as strictly as Perfetto reads it.

Perfetto takes times as nanoseconds, some versions cut off what is finer, and drops a slice that
begins within another of its row and ends after it, be it by one nanosecond. Its older versions take
process and thread 0 for Linux's idling ones and do not show them, and name a thread by its number
alone, whatever its process is, when its metadata come up: those are to come first.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from training.clock import Clock
from training.timeline import Timeline, merge_trace

METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}
COLOURS = {  # of chrome://tracing's reserved ones, those that are used
    "thread_state_running", "thread_state_iowait", "good", "yellow", "grey", "rail_animation",
    "rail_load", "terrible", "black", "generic_work",
}  # fmt: skip


def broken_rules(trace: Any) -> list[str]:
    """What a strict reader would not take."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no traceEvents"]
    found = [] if trace.get("displayTimeUnit") in ("ms", "ns") else ["displayTimeUnit"]
    names: Counter[tuple[str, int, int]] = Counter()
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in trace["traceEvents"]:
        place = event.get("pid"), event.get("tid")
        if not all(type(number) is int and number >= 0 for number in place) or place[0] == 0:
            found.append(f"pid or tid: {event}")
        elif event.get("ph") == "M":
            found += [f"metadata after slices: {event}"] * bool(rows)
            value = event.get("args", {}).get(METADATA.get(event.get("name")))
            names[event["name"], place[0], place[1] * (event["name"] == "thread_name")] += 1
            if type(value) is not (int if event["name"].endswith("index") else str):
                found.append(f"metadata: {event}")
        elif event.get("ph") == "X":
            found += _slice_s(event)
            times = [event.get(key) for key in ("ts", "dur")]
            if all(type(time) in (int, float) and time >= 0 for time in times):
                start, length = (int(time * 1000) for time in times)
                rows.setdefault(place, []).append((start, start + length))
        else:
            found.append(f"phase: {event}")
    wanted = {("process_name", pid, 0) for pid, _ in rows}
    wanted |= {("process_sort_index", pid, 0) for pid, _ in rows}
    wanted |= {("thread_name", pid, tid) for pid, tid in rows}
    found += [f"unnamed: {key}" for key in sorted(wanted - set(names))]
    tids = Counter(tid for _, tid in rows)
    found += [f"of two processes: {tid}" for tid, count in tids.items() if count > 1]
    found += [f"named twice: {key}" for key, count in names.items() if count > 1]
    return found + [line for place, row in rows.items() for line in _crossings(place, row)]


def _slice_s(event: dict[str, Any]) -> list[str]:
    fine = (
        type(event.get("name")) is str
        and type(event.get("cat")) is str
        and type(event.get("args")) is dict
        and event.get("cname") in COLOURS
        and all(type(event.get(k)) in (int, float) and event[k] >= 0 for k in ("ts", "dur"))
    )
    return [] if fine else [f"slice: {event}"]


def _crossings(place: tuple[int, int], row: list[tuple[int, int]]) -> list[str]:
    open_ends: list[int] = []
    found = []
    if [start for start, _ in row] != sorted(start for start, _ in row):
        found.append(f"{place}: not in the order of time")
    for start, end in sorted(row, key=lambda slice: (slice[0], -slice[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if open_ends and end > open_ends[-1]:
            found.append(f"{place}: {start} to {end} ns begins before {open_ends[-1]}")
        open_ends.append(end)
    return found


def _record(workdir: Path, rank: int, world_size: int, begin: float, workers: str) -> None:
    """Actions that follow each other without a gap, as they do once times are rounded, transfers
    that cross each other, and optimizers within."""
    chooser = random.Random(rank)
    timeline = Timeline(num_steps=None, workers=workers)
    timeline.rank, timeline.world_size, timeline.clock = rank, world_size, Clock(0.25, 0.001)
    timeline.step(0)
    timeline._marks[0] = (begin, 0)
    for stage in range(3):
        now = begin
        for i in range(300):
            end = now + chooser.randrange(1, 5000) * 1e-7
            kind = chooser.choice(["F", "B", "I", "W", "a kind of its own"])
            timeline(kind, stage, i, now, end)
            if i % 10 == 0:
                timeline("optimizer", stage, -1, now, now + (end - now) / 2)
                timeline("send", stage, i, now, end + 2e-4)
                timeline("receive", stage, i, end, end)
            now = end
    timeline.write(workdir)


@pytest.mark.parametrize("workers", ["rank", "stage"])
@pytest.mark.parametrize("begin", [12.3456789, 12345678.9])
def test_a_strict_reader_takes_the_trace(tmp_path: Path, workers: str, begin: float) -> None:
    """Also of a computer that is up for half a year: its clock has few digits after the point."""
    for rank in range(2):
        _record(tmp_path, rank, 2, begin, workers)
    trace = json.loads(merge_trace(tmp_path).read_text("utf-8"))
    assert broken_rules(trace) == []
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == 2 * 3 * (300 + 3 * 30)
    assert min(event["ts"] for event in slices) == 0
    indices = [e["args"]["sort_index"] for e in trace["traceEvents"] if "sort" in e["name"]]
    assert indices == sorted(set(indices)) and len(indices) == (2 if workers == "rank" else 6)


def test_a_trace_of_nothing(tmp_path: Path) -> None:
    Timeline().write(tmp_path)
    assert broken_rules(json.loads(merge_trace(tmp_path).read_text("utf-8"))) == []


FINE: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "rank 0"}},
    {"ph": "M", "name": "process_sort_index", "pid": 1, "tid": 0, "args": {"sort_index": 0}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "compute"}},
    {"ph": "X", "name": "F", "cat": "c", "pid": 1, "tid": 7, "ts": 0, "dur": 4.5, "args": {},
     "cname": "good"},
    {"ph": "X", "name": "B", "cat": "c", "pid": 1, "tid": 7, "ts": 4.5, "dur": 2, "args": {},
     "cname": "good"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "change", "rule"),
    [
        (4, {"ts": 4.499}, "(1, 7): 4499 to 6499 ns begins before 4500"),
        (4, {"ts": -1}, "slice: "),
        (4, {"dur": "2"}, "slice: "),
        (4, {"tid": 8}, "unnamed: ('thread_name', 1, 8)"),
        (4, {"tid": "7"}, "pid or tid: "),
        (4, {"pid": 0}, "pid or tid: "),
        (4, {"pid": 2}, "of two processes: 7"),
        (2, {"ph": "X", "ts": 0, "dur": 0}, "slice: "),
        (4, {"ph": "B"}, "phase: "),
        (4, {"cname": "blue"}, "slice: "),
        (3, {"ts": 7}, "(1, 7): not in the order of time"),
        (0, {"args": {}}, "metadata: "),
        (1, {"name": "process_name", "args": {"name": "2"}}, "unnamed: ('process_sort_index', 1"),
        (1, {"name": "process_name", "args": {"name": "2"}}, "named twice: ('process_name', 1, 0)"),
    ],
)
def test_what_breaks_a_rule_is_found(changed: int, change: dict[str, Any], rule: str) -> None:
    events = [event | (change if k == changed else {}) for k, event in enumerate(FINE)]
    assert broken_rules({"displayTimeUnit": "ms", "traceEvents": FINE}) == []
    found = broken_rules({"displayTimeUnit": "ms", "traceEvents": events})
    assert any(line.startswith(rule) for line in found), found
