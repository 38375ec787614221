"""run_pipeline.py: what it leaves, what repeats itself, and that no thread is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from project.figures.recorded import read_timelines
from tests.project.programs import FLOW, TINY, names_in, run

LINE = f"run_pipeline {FLOW} {TINY} --n_epochs 1 "


@pytest.fixture(autouse=True)
def no_thread_is_left(elsewhere: None) -> Iterator[None]:
    del elsewhere
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before]
    assert [t.name for t in left if type(t).__name__ != "TMonitor"] == []


@pytest.mark.parametrize(
    ("options", "about", "kinds"),
    [
        ("--schedule zb --balance 1,1", ("pipeline_parallel", "zb"), "FIW"),
        ("--pipeline blocks", ("pipeline_parallel", "gpipe"), "FB"),
    ],
)
def test_a_timeline_has_every_action_of_the_schedule(
    options: str, about: tuple[str, str], kinds: str
) -> None:
    """Of the steps alone: validation runs through the same stages and is not recorded."""
    run(f"{LINE} --n_chunk 3 --timeline 1 {options}")
    assert names_in("work") == [  # programs.py leaves out the picture
        "checkpoints", "config.json", "eval_results_epoch0.json", "gen_epoch0.json",
        "metrics.jsonl", "options.json", "summary.json", "timeline_rank0.json", "tokenizer.json",
        "tokenizer_config.json", "tokens",
    ]  # fmt: skip
    workers, told = read_timelines(Path("work"))
    names = ("strategy", "schedule", "num_microbatches", "ranks")
    assert told == dict(zip(names, (*about, 3, None), strict=True))
    work = [e for events in workers.values() for e in events if e.kind != "optimizer"]
    assert sorted((e.step, e.kind, e.stage, e.microbatch) for e in work) == sorted(
        (step, kind, stage, i)
        for step in range(2) for stage in range(2) for kind in kinds for i in range(3)
    )  # fmt: skip
    assert list(workers) == ["stage 0", "stage 1"]
    assert "optimizer" in {event.kind for event in workers["stage 0"]}
