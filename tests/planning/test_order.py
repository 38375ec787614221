"""The search for an order of actions: never worse than what has a name, and what no order beats."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from pipeline.schedules.catalogue import SCHEDULES, find, is_own
from pipeline.schedules.schedule import stage_ranks, validate
from pipeline.schedules.written import read_schedule
from planning import order
from planning.order import bound, held, search_order, seconds_of
from planning.simulate import Work, with_times
from project.plan import main


def work_of(last: float, message: float, halves: tuple[float, float]) -> order.WorkOf:
    """F takes 1, or `last` on the last rank; so do I and W, times these."""

    def work(ranks: Sequence[int]) -> Work:
        n = max(ranks) + 1
        each = [(last if r == n - 1 else 1.0) * n / len(ranks) for r in ranks]
        late, early = ([x * half for x in each] for half in halves)
        return Work(with_times(each, late, early), lambda _: message)

    return work


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "DRAWN", 8)
    monkeypatch.setattr(order, "MOVED", 60)


def test_it_is_valid_holds_no_more_and_is_no_worse() -> None:
    """For sizes, stages, messages and memory of all kinds. The bound is below all of them."""
    better = 0
    for n, last, message, halves in product((2, 3), (1, 1.5), (0, 0.25), ((1, 1), (1.2, 0.8))):
        work = work_of(last, message, halves)
        for m, least in product((n, 2 * n), ("vmin", "zbv")):
            memory = held(find(least)(n, m)) + (0.25 if m > n else 0)
            found = search_order(n, m, work, memory)
            validate(found.lists, m)
            assert held(found.lists) <= memory + 1e-9
            assert found.seconds == pytest.approx(seconds_of(found.lists, work))
            named = [find(name)(n, m) for name in SCHEDULES]
            of_name = min(seconds_of(x, work) for x in named if held(x) <= memory + 1e-9)
            assert found.of_name == of_name >= found.seconds >= found.bound - 1e-9
            better += found.seconds < of_name - 1e-9
            for lists in named:
                if len(stage_ranks(lists)) in (n, 2 * n):
                    ranks = stage_ranks(lists)
                    lowest = bound(ranks, m, work(ranks), held(lists))
                    assert lowest <= seconds_of(lists, work) + 1e-9
    assert better > 10


def test_the_bound_is_reached_where_nothing_is_idle() -> None:
    """ZB-V idles n - 1 of 6m + n - 1 clocks. One micro-batch travels there and back."""
    work = work_of(1, 0, (1, 1))
    ranks = [0, 1, 2, 3, 3, 2, 1, 0]
    lists = find("zbv")(4, 8)
    assert bound(ranks, 8, work(ranks), 4) == seconds_of(lists, work)
    single = work_of(1, 0.5, (1, 1))
    assert bound([0, 1], 1, single([0, 1]), 1) == 2 + 0.5 + 2 + 0.5 + 1
    # A rank that holds one micro-batch at a time waits for each.
    assert bound([0, 1], 6, single([0, 1]), 1) == 6 * (2 + 0.5 + 2 + 0.5 + 1)


def test_the_command_writes_what_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(order, "DRAWN", 60)
    monkeypatch.setattr(order, "MOVED", 1500)
    sizes = "schedule --stages 2 --num_microbatches 4 "
    times = "--backward_input 1.2 --backward_weight 0.8 --transfer 0.1"
    main((sizes + times).split())
    said = capsys.readouterr().out
    path = Path("workdir/schedule_2x4.txt")
    assert f"--world_size 2 --num_microbatches 4 --schedule {path}\n" in said and is_own(str(path))
    lists, m = read_schedule(path.read_text("utf-8"), str(path))
    seconds = seconds_of(lists, work_of(1, 0.1, (1.2, 0.8)))
    assert m == 4 and f"found        {seconds:10.6g} " in said
    main(f"simulate --schedule {path} {times}".split())
    assert f"step                {seconds:10.6g}\n" in capsys.readouterr().out
    path.unlink()
    main(sizes.split())
    assert "No better order was found: take --schedule zbv" in capsys.readouterr().out
    assert not path.exists()
    for words, wrong in (
        (f"{sizes} --memory 0.5", "--memory 0.5: every schedule holds more; 1 works"),
        ("schedule", "--stages and --num_microbatches are needed"),
    ):
        with pytest.raises(SystemExit):
            main(words.split())
        assert wrong in capsys.readouterr().err
