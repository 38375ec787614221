"""The workdir of a run is its own while it runs, and holds nothing half written after it."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from training.errors import Interrupted, UserError, signals_end
from training.workdir import alone_in_workdir

HALF = ("work/checkpoints/.000002-epoch1.part/state.json", "work/summary.json.part")
WHOLE = ("work/checkpoints/000001-epoch0/state.json", "work/summary.json", "work/mine.part")


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Options, and what a run with them has written when it is ended."""
    monkeypatch.chdir(tmp_path)
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for file in (*HALF, *WHOLE):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    return argparse.Namespace(workdir=Path("work"))


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


def test_nothing_half_written_stays_and_it_says_how_to_go_on(
    args: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Interrupted), alone_in_workdir(args):
        raise Interrupted(128 + signal.SIGTERM)
    assert files() == sorted(WHOLE)
    assert capsys.readouterr().err == "\nInterrupted; --resume continues from 000001-epoch0.\n"
    assert sorted(path.name for path in Path().iterdir()) == ["work"]
    shutil.rmtree("work/checkpoints/000001-epoch0")
    with alone_in_workdir(args):
        pass
    assert not Path("work/checkpoints").exists()


def test_torchruns_ranks_leave_what_is_half_written_to_those_that_come_next(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank may be writing. Rank 0 alone takes the lock."""
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with alone_in_workdir(args), alone_in_workdir(args):
        pass
    monkeypatch.setenv("RANK", "0")
    with alone_in_workdir(args), pytest.raises(UserError), alone_in_workdir(args):
        pass
    assert files() == sorted((*HALF, *WHOLE))


# A process that is asked to end does so by way of its own ends


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    """The signals are as in a new process, whatever other tests have done to them."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_being_asked_to_end(number: signal.Signals) -> None:
    """What the end of the terminal breaks besides is not the reason."""
    with pytest.raises(Interrupted) as end, signals_end():
        try:
            os.kill(os.getpid(), number)
        finally:
            if number == signal.SIGHUP:
                raise OSError("a progress bar that cannot be drawn any more")
    assert end.value.code == 128 + number
    assert signal.getsignal(number) is signal.SIG_DFL


def test_what_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_end():
        os.kill(os.getpid(), signal.SIGHUP)


def test_ranks_of_torchruns_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with signals_end():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
