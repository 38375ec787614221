"""The recorder, and its files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

from project.figures.runs import Run
from tests.project.programs import names_in
from tests.ranks import Ranks
from training.launch.world import World
from training.timeline import Event, Timeline, clock_offset, profiled


def test_steps_of_several_epochs_are_numbered_on_until_enough_are_recorded() -> None:
    timeline = Timeline(num_steps=3)
    nothing = Timeline(World(1, 2), num_steps=0)
    seen = []
    for _ in range(2):
        for item in "xy":
            timeline.begin_step()
            nothing.begin_step()
            timeline(item, 0, 0, 0.0, 0.0)
            with nothing.span("F"):
                nothing(item, 0, 0, 0.0, 0.0)
            seen.append((item, timeline.recording))
            timeline.end_step()
        timeline("evaluation", 0, 0, 0.0, 0.0)
    assert [(e.kind, e.step) for e in timeline.events()] == [("x", 0), ("y", 1), ("x", 2)]
    assert seen == [("x", True), ("y", True), ("x", True), ("y", False)]
    assert (nothing.events(), nothing.recording) == ([], False)


def test_rank_0_writes_what_all_ranks_have_recorded(tmp_path: Path) -> None:
    """If there was a step; the events of each by their start, on the clock of rank 0."""
    events = [Event("F", 0, 0, 100.0, 103.0, 0), Event("all_reduce", 1, -1, 100.75, 101.75, 0)]
    contents: list[dict[str, Any]] = []
    for rank, offset in ((1, -5000.0), (0, 0.0)):
        world = mock.Mock(rank=rank, world_size=2, is_main=True, gather=lambda _: contents[::-1])
        timeline = Timeline(world, offset=offset)
        timeline.save(tmp_path)
        timeline.begin_step()
        for kind, stage, microbatch, start, end, _ in reversed(events):
            timeline(kind, stage, microbatch, start - offset, end - offset)
        contents.append(timeline.content())
    assert names_in(tmp_path) == []
    timeline.save(tmp_path)
    assert names_in(tmp_path) == ["timeline_rank0.json", "timeline_rank1.json"]
    (tmp_path / "timeline_rank2.json").write_text("an earlier run had three")
    (tmp_path / "options.json").write_text('{"world_size": 2}')
    assert Run(tmp_path).timeline == {"rank 0": events, "rank 1": events}


def test_each_rank_profiles_its_steps_into_a_file_of_its_own(tmp_path: Path) -> None:
    """Also the second rank of another host; the first step warms up."""
    done = mock.Mock()
    with (
        mock.patch("torch.profiler.profile") as profile,
        profiled(Timeline(World(3, 4, 1)), 2, tmp_path),
    ):
        settings = profile.call_args.kwargs
    settings["on_trace_ready"](done)
    done.export_chrome_trace.assert_called_once_with(str(tmp_path / "profile_rank3.json"))
    actions = [settings["schedule"](step).name for step in range(5)]
    assert actions == ["WARMUP", "RECORD", "RECORD_AND_SAVE", "NONE", "NONE"]


def offset(rank: int, world_size: int, ahead: list[float]) -> tuple[float, float]:
    """What a rank finds if its clock is ahead, and how long all took."""
    now, start = time.perf_counter, time.perf_counter()
    with mock.patch("training.timeline.time.perf_counter", lambda: now() + ahead[rank]):
        return clock_offset(World(rank, world_size)), now() - start


def test_each_rank_finds_how_far_its_clock_is_off(three_ranks: Ranks) -> None:
    """To half a round trip; less than that is taken to be nothing, as on one machine. Clocks are
    compared as of the same round."""
    clocks = [float(second) for second in range(20)]
    world: Any = mock.Mock(gather=lambda _: [[clock + 1000.25 for clock in clocks]])
    with mock.patch("training.timeline.time.perf_counter", mock.Mock(side_effect=clocks)):
        assert clock_offset(world) == 1000.25
    ahead = [0.0, 1000.0, -25.0]
    found = three_ranks.run(offset, ahead)
    assert found[0][0] == 0.0
    for (seconds, took), off in zip(found, ahead, strict=True):
        assert abs(seconds + off) <= took / 2
    assert [seconds for seconds, _ in three_ranks.run(offset, [0.0] * 3)] == [0.0] * 3
