"""A scheduler takes the machine away: the run saves the step and ends, and loses nothing. (Under
torchrun: tests/test_faults.py. How a Slurm script goes on from there: tests/test_examples.py.)"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import Mock, call

import psutil
import pytest
import torch.distributed as dist

from project.train import parse_train
from project.utils import run_program
from tests.project.programs import ROOT, TINY, run
from tests.ranks import Ranks, under_torchrun
from tests.warm import Terminal
from training.checkpoint import Saver
from training.files import ENDED
from training.launch.errors import GRACE, UserError
from training.launch.signals import NOTICES_GIVEN, Ended, notice_raises, notice_sets_flag
from training.launch.world import World
from training.resume import Saving


def losses(workdir: Path) -> list[float]:
    """The losses of the steps so far; a line may be half written."""
    file = workdir / "metrics.jsonl"
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row["loss"] for row in rows if "loss" in row]


def test_notice_is_passed_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one, as SIGTERM after SIGUSR1, might find a process at its end, and kill it. And
    SIGTERM twice, as `timeout` sends it, is one."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda *call: sent.append(call))
    with notice_sets_flag([psutil.Process()]):
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        assert [*NOTICES_GIVEN] == [signal.SIGUSR1, signal.SIGTERM]
    assert sent == [(os.getpid(), signal.SIGUSR1)]


def test_notice_costs_no_step(ranks: Ranks, tmp_path: Path) -> None:
    """To a program, which passes it on to its ranks. The losses are those of a run that was left
    alone, bit for bit."""
    line = f"train pipeline {TINY} --n_train 240 --benchmark_only --async_save --workdir "
    alone, work = tmp_path / "alone", tmp_path / "work"
    _, *words = f"{line}{work} --world_size 2".split()
    program = Terminal([str(ROOT / "project" / "train.py"), *words], tmp_path)
    while len(losses(work)) < 3:
        assert program.process.exitcode is None, program.text
        time.sleep(0.01)
    os.kill(program.process.pid, signal.SIGTERM)
    program.until(None)
    assert program.process.exitcode == os.EX_TEMPFAIL, program.text
    done = len(losses(work))
    said = f"The run was asked to end: step {done} is saved, and --resume goes on from there."
    assert said in program.text and "Traceback" not in program.text
    assert done < 38 and (work / ENDED).is_file()
    for workdir in (work, alone):
        assert run(f"{line}{workdir} --resume", ranks, stop_at=done + 2)[1] is None
    assert losses(work) == losses(alone) and len(losses(work)) == done + 2
    assert not (work / ENDED).exists()


SAVE, STEP = "training.resume.Saving.save", "training.optimization.GlobalOptimizer.step"
BATCH = "training.layouts.replicated.Replicated.measure"
WORD = "training.tasks.generation.Cache.extend"


def to_ranks(
    rank: int, patches: pytest.MonkeyPatch, to: tuple[int, ...], function: str, call: int
) -> None:
    """Notice, as they call a function for the so many-th time since the first checkpoint."""
    calls: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        original = resolve_name(name)

        def noted(*args: Any) -> Any:
            calls.append(name)
            if rank in to and SAVE in calls and calls[calls.index(SAVE) :].count(function) == call:
                signal.raise_signal(signal.SIGUSR1)
            return original(*args)

        return noted

    for name in (SAVE, function):
        patches.setattr(name, noting(name))


@pytest.mark.parametrize(
    ("line", "to", "function", "call", "saved"),
    [
        ("train tensor --save_every 2", (1,), STEP, 2, 5),
        ("run_data_parallel", (0, 1), BATCH, 1, 6),  # in the validation
        ("train 3d --dp 2", (0, 1), WORD, 2, 6),  # in the translation
    ],
)
def test_notice_ends_all(
    ranks: Ranks,
    tmp_path: Path,
    line: str,
    to: tuple[int, ...],
    function: str,
    call: int,
    saved: int,
) -> None:
    """One rank's, after a step; in an evaluation, which a checkpoint precedes, each its own."""
    line += f" {TINY} --n_train 36 --n_validation 36 --workdir {tmp_path}"
    printed, error = run(line, ranks, partial(to_ranks, to=to, function=function, call=call))
    said = f"The run was asked to end: step {saved} is saved, and --resume goes on from there."
    assert error == said, printed
    assert len(losses(tmp_path)) == saved and (tmp_path / ENDED).is_file()


def test_whatever_a_scheduler_sends_is_notice() -> None:
    sent = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
    with notice_sets_flag():
        assert [number for number in sent if callable(signal.getsignal(number))] == sent


def test_notice_hides_no_error(tmp_path: Path) -> None:
    """Nor does a run that has saved nothing say that it has."""
    args = parse_train(["single", "--model", "gpt2-mini", "--workdir", str(tmp_path)])
    saving = object.__new__(Saving)
    saving.world, saving.args, saving.saver, saving.saved = World(), args, Saver(tmp_path), 0
    with notice_sets_flag(), pytest.raises(RuntimeError, match="a bug"), saving.before_the_end():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert NOTICES_GIVEN
        raise RuntimeError("a bug")
    assert not NOTICES_GIVEN  # what comes after the run, in this process, is not asked to end
    with pytest.raises(Ended, match="no step is saved"), saving.before_the_end():
        raise Ended
    assert not (tmp_path / ENDED).exists()


def test_in_an_evaluation_a_rank_ends_that_waited_for_one_that_has_ended() -> None:
    """If it was given notice, too."""
    lost = dist.HashStore()  # type: ignore[attr-defined]
    lost.set_timeout(timedelta(seconds=0.3))
    with notice_sets_flag():
        with pytest.raises(dist.DistError), notice_raises():
            lost.get("the other")
        with pytest.raises(Ended), notice_raises():
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            lost.get("the other")
        with pytest.raises(Ended), notice_raises():  # it was given notice before
            pass


def test_on_several_hosts_torchrun_is_to_restart_a_rank_that_was_asked_to_end() -> None:
    """Not on one: see the next test."""
    with under_torchrun(each=1):
        assert Ended().status == os.EX_TEMPFAIL


@pytest.mark.parametrize(
    ("local_rank", "said", "waits"), [(0, "It has ended.\n", []), (1, "", [call(GRACE)])]
)
def test_under_torchrun_the_first_rank_of_a_host_says_how_the_run_has_ended(
    local_rank: int,
    said: str,
    waits: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Torchrun ends the others meanwhile, if it was a mistake of the user's."""
    monkeypatch.setattr("os._exit", sys.exit)
    with under_torchrun(local_rank, 2, local_rank), pytest.raises(SystemExit) as end:
        run_program(Mock(side_effect=Ended("It has ended.")))
    assert (end.value.code, capsys.readouterr().err) == (0, said)
    sleep = Mock()
    monkeypatch.setattr("time.sleep", sleep)
    with under_torchrun(local_rank, 2, local_rank), pytest.raises(SystemExit) as end:
        run_program(Mock(side_effect=UserError("--model x")))
    assert (end.value.code, sleep.mock_calls) == (2, waits)
