"""The recorder, its files, and the trace that Perfetto opens."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from training.clock import Clock
from training.timeline import (
    OFF,
    Event,
    Timeline,
    by_worker,
    cost_per_event,
    merge_trace,
    read_timelines,
    without_crossings,
)


def kinds(timeline: Timeline) -> list[tuple[str, int]]:
    return [(event.kind, event.step) for event in timeline.events()]


def tick(timeline: Timeline, kind: str, stage: int = 0, microbatch: int = 0) -> None:
    now = time.perf_counter()
    timeline(kind, stage, microbatch, now, now)


def test_an_event_belongs_to_the_step_in_which_it_began() -> None:
    timeline = Timeline()
    tick(timeline, "before")
    timeline.step(7)
    start = time.perf_counter()
    tick(timeline, "a")
    timeline.step(9)
    tick(timeline, "b")
    timeline("late", 0, 0, start, time.perf_counter())  # began in 7, is told in 9
    assert kinds(timeline) == [("before", -1), ("late", 7), ("a", 7), ("b", 9)]


def test_without_steps_all_is_one() -> None:
    timeline = Timeline()
    tick(timeline, "a")
    assert kinds(timeline) == [("a", 0)]


def test_recording_ends_after_so_many_steps() -> None:
    timeline = Timeline(num_steps=2)
    assert not timeline.done
    for k in range(4):
        timeline.step(k)
        tick(timeline, "a")
    assert kinds(timeline) == [("a", 0), ("a", 1)]
    assert timeline.done


def test_what_comes_after_a_step_is_not_recorded() -> None:
    timeline = Timeline(num_steps=2)
    for k in range(2):
        with timeline.step(k):
            tick(timeline, "a")
        tick(timeline, "evaluation")
    assert kinds(timeline) == [("a", 0), ("a", 1)]
    assert timeline.done


def test_steps_of_several_epochs_are_numbered_on() -> None:
    timeline = Timeline(num_steps=3)
    seen = []
    for _ in range(2):
        for item in timeline.over("xy"):
            tick(timeline, item)
            seen.append((item, timeline.done))
        tick(timeline, "evaluation")
    assert kinds(timeline) == [("x", 0), ("y", 1), ("x", 2)]
    assert seen == [("x", False), ("y", False), ("x", False), ("y", True)]


def test_nothing_is_recorded_where_nothing_is_asked_for() -> None:
    timeline = Timeline(rank=1, world_size=2, num_steps=0)  # and no clock is compared
    with timeline.step(0), timeline.span("F"):
        tick(timeline, "a")
    assert (timeline.events(), timeline.done, timeline.recording) == ([], False, False)
    assert (OFF.recording, OFF.events()) == (False, [])


def test_spans_and_optimizers() -> None:
    timeline = Timeline()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    timeline.watch(optimizer, 3)
    before = time.perf_counter()
    with timeline.span("F", 1, 2):
        weight.sum().backward()
    optimizer.step()
    assert weight.item() == 0.5
    first, second = timeline.events()
    assert (first[:3], second[:3]) == (("F", 1, 2), ("optimizer", 3, -1))
    assert before <= first.start <= first.end <= second.start <= second.end <= time.perf_counter()


def test_threads_record_at_once() -> None:
    timeline = Timeline()
    barrier = threading.Barrier(4)

    def work(stage: int) -> None:
        barrier.wait()
        for i in range(500):
            tick(timeline, "F", stage, i)

    threads = [threading.Thread(target=work, args=(stage,)) for stage in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = sorted((event.stage, event.microbatch) for event in timeline.events())
    assert found == [(stage, i) for stage in range(4) for i in range(500)]


def test_an_event_costs_microseconds() -> None:
    """Measured 0.3 on a quiet machine; a step has some hundred events and takes milliseconds."""
    assert min(cost_per_event(200) for _ in range(5)) < 2e-5


def record(rank: int, world_size: int, workdir: Path, offset: float = 0.0) -> Timeline:
    timeline = Timeline(num_steps=None, about={"strategy": "ddp"})  # no group: clocks are given
    timeline.rank, timeline.world_size, timeline.clock = rank, world_size, Clock(offset, 0.001)
    timeline("F", 0, 0, 100.0 - offset, 100.25 - offset)
    timeline("B", 0, 0, 100.25 - offset, 101.0 - offset)
    timeline("all_reduce", 0, -1, 100.5 - offset, 101.5 - offset)
    timeline("all_reduce", 1, -1, 100.75 - offset, 101.75 - offset)
    timeline.write(workdir)
    return timeline


def test_files_are_read_back_on_the_clock_of_rank_0(tmp_path: Path) -> None:
    for rank, offset in enumerate((0.0, -5000.0)):
        record(rank, 2, tmp_path, offset)
    (tmp_path / "timeline_rank2.json").write_text("an earlier run had three")
    ranks = read_timelines(tmp_path)
    assert [(r.rank, r.workers, r.about) for r in ranks] == [
        (rank, "rank", {"strategy": "ddp"}) for rank in range(2)
    ]
    assert [r.events for r in ranks] == [
        [
            Event("F", 0, 0, 100.0, 100.25, 0),
            Event("B", 0, 0, 100.25, 101.0, 0),
            Event("all_reduce", 0, -1, 100.5, 101.5, 0),
            Event("all_reduce", 1, -1, 100.75, 101.75, 0),
        ]
    ] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"timeline_rank{rank}.json" for rank in range(3)
    ]


def test_files_that_are_missing_or_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"timeline_rank0\.json"):
        read_timelines(tmp_path)
    record(0, 2, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"timeline_rank1\.json"):
        read_timelines(tmp_path)
    for text in ("{", "[]", "{}", '{"events": [[1, 2]]}'):
        (tmp_path / "timeline_rank1.json").write_text(text)
        with pytest.raises(ValueError, match=r"timeline_rank1\.json is not a timeline"):
            read_timelines(tmp_path)


def test_the_stages_of_one_rank_are_workers(tmp_path: Path) -> None:
    timeline = Timeline(workers="stage")
    for stage in (1, 0, 1, -1):
        tick(timeline, "F", stage)
    timeline.write(tmp_path)
    workers = by_worker(read_timelines(tmp_path))
    assert {name: [e.stage for e in events] for name, events in workers.items()} == {
        "stage 0": [0, -1], "stage 1": [1, 1]
    }  # fmt: skip
    with pytest.raises(ValueError, match="'rank' or 'stage'"):
        Timeline(workers="threads")


def entries(path: Path, phase: str) -> list[dict[str, Any]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return [entry for entry in content["traceEvents"] if entry["ph"] == phase]


def test_the_trace(tmp_path: Path) -> None:
    """A process per rank, a thread per lane, and another for what crosses; microseconds. No thread
    has the number of another, be it in another process: Perfetto names threads by it alone."""
    for rank in range(2):
        record(rank, 2, tmp_path)
    path = merge_trace(tmp_path)
    assert path == tmp_path / "trace.json"
    names = [(e["name"], e["pid"], e["tid"], *e["args"].values()) for e in entries(path, "M")]
    assert names == [
        (what, pid, tid, name)
        for pid in (1, 2)
        for what, tid, name in (
            ("process_name", 0, f"rank {pid - 1}"),
            ("process_sort_index", 0, pid),
            ("thread_name", 1000 * pid + 1, "compute"),
            ("thread_name", 1000 * pid + 101, "communication"),
            ("thread_name", 1000 * pid + 102, "communication 2"),
        )
    ]
    slices = [
        (e["name"], e["tid"], e["ts"], e["dur"], e["args"])
        for e in entries(path, "X")
        if e["pid"] == 2
    ]
    both = {"stage or layer": 0, "step": 0}
    assert slices == [
        ("forward 0", 2001, 0, 250000, {"micro-batch": 0, **both}),
        ("backward 0", 2001, 250000, 750000, {"micro-batch": 0, **both}),
        ("all-reduce", 2101, 500000, 1000000, both),
        ("all-reduce", 2102, 750000, 1000000, {"stage or layer": 1, "step": 0}),
    ]


def test_rows_have_no_crossings() -> None:
    def event(start: float, end: float) -> Event:
        return Event("F", 0, 0, start, end)

    outer, inner, after, crossing = event(0, 4), event(1, 2), event(4, 5), event(3, 4.5)
    assert without_crossings([inner, outer, after]) == [[outer, inner, after]]
    assert without_crossings([inner, outer, after], nested=False) == [[outer, after], [inner]]
    assert without_crossings([outer, crossing, after]) == [[outer, after], [crossing]]
    assert without_crossings([]) == []


def _save(rank: int, world_size: int, workdir: Path) -> float:
    timeline = Timeline(rank, world_size)
    timeline.step(0)
    tick(timeline, "F")
    timeline.save(workdir)
    return timeline.clock.round_trip


def test_ranks_save_together(ranks: Ranks, tmp_path: Path) -> None:
    trips = ranks.run(_save, tmp_path)
    assert trips[0] == 0 and trips[1] > 0
    assert {entry["pid"] for entry in entries(tmp_path / "trace.json", "X")} == {1, 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "timeline_rank0.json", "timeline_rank1.json", "trace.json"
    ]  # fmt: skip
