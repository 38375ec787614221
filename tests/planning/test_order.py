"""The search for an order of actions: never worse than a named schedule, never below its bound."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pipeline.schedules.catalogue import SCHEDULES, find, load
from pipeline.schedules.schedule import validate
from planning import order
from planning.order import RankTimes, bound, held, search_order, seconds_of
from project.plan import main
from tests.project.made_up import PIPELINE, write_run


def times_of(n: int, last: float, message: float, halves: tuple[float, float]) -> RankTimes:
    """F takes 1, or `last` on the last rank; so do I and W, times these."""
    forward = [1.0] * (n - 1) + [last]
    early, late = ([x * half for x in forward] for half in halves)
    return RankTimes(forward, early, late, [message] * n)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "MOVES", 150)


def test_it_is_valid_holds_no_more_and_is_no_worse() -> None:
    """For sizes, stages, messages and memory of all kinds. The bound is below all of them."""
    better = 0
    kinds = ((1, 0, (1, 1)), (1, 0.25, (1.2, 0.8)), (1.5, 0.25, (1.2, 0.8)))
    for n, kind in product((2, 3), kinds):
        times = times_of(n, *kind)
        for m, least in ((n, "zbv"), (2 * n, "vmin")):
            named = [find(name)(n, m) for name in SCHEDULES]
            memory = held(find(least)(n, m)) + (0.25 if m > n else 0)
            found = search_order(n, m, times, memory)
            validate(found.lists, m)
            assert held(found.lists) <= memory + 1e-9
            assert found.seconds == pytest.approx(seconds_of(found.lists, times))
            fitting = min(seconds_of(x, times) for x in named if held(x) <= memory + 1e-9)
            assert found.seconds_of_name == fitting >= found.seconds >= found.bound - 1e-9
            better += found.seconds < fitting - 1e-9
            assert found.bound <= min(seconds_of(x, times) for x in named) + 1e-9
    assert better >= 3


def test_the_bound_is_reached_where_nothing_is_idle() -> None:
    """ZB-V idles n - 1 of 6m + n - 1 clocks. One micro-batch travels there and back."""
    times = times_of(4, 1, 0, (1, 1))
    assert bound(find("zbv")(4, 1), 8, times) == seconds_of(find("zbv")(4, 8), times)
    assert bound(find("1f1b")(2, 1), 1, times_of(2, 1, 0.5, (1, 1))) == 2 + 0.5 + 2 + 0.5 + 1


def test_the_command_writes_what_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(order, "MOVES", 500)
    sizes = "schedule --stages 2 --num_microbatches 4 "
    times = "--backward_input 1.2 --backward_weight 0.8 --transfer 0.25"
    main((sizes + times).split())
    said = capsys.readouterr().out
    path = Path("workdir/schedule_2x4.txt")
    assert f"--world_size 2 --num_microbatches 4 --schedule {path}\n" in said
    seconds = seconds_of(load(str(path)), times_of(2, 1, 0.25, (1.2, 0.8)))
    assert f"found        {seconds:10.6g} " in said
    assert "   time\n" in said  # in the unit of those that are given
    main(f"simulate --schedule {path} {times}".split())
    assert f"step                {seconds:10.6g}\n" in capsys.readouterr().out
    path.unlink()
    main(sizes.split())
    assert "No better order was found: take --schedule zbv" in capsys.readouterr().out
    assert not path.exists()


def test_the_command_is_for_the_model_that_was_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages, GPipe: any order that begins backwards earlier is better."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(order, "MOVES", 500)
    size: dict[str, Any] = {"pp": 2, "schedule": "gpipe", "n_layer": None, "vgg_width": 64}
    narrow, deep = {"vgg_width": 8}, {"model": "gpt2", "n_layer": 30}
    for options, typed in (
        (size, "--model vgg16"),
        (size | narrow, "--model vgg16 --vgg_width 8"),
        (size | deep, "--model gpt2 --n_layer 30"),
    ):
        folder = write_run(tmp_path, "pipeline2", PIPELINE, num_microbatches=2, **options)
        main(f"schedule --stages 2 --num_microbatches 2 --times {folder}".split())
        said = capsys.readouterr().out
        assert f"\npython project/train.py pipeline {typed} --world_size 2 " in said
