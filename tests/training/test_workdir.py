"""The workdir of a run is its own while it runs, and holds nothing half written after it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.project.programs import names_in
from tests.ranks import under_torchrun
from training.launch.errors import Interrupted, UserError, handled, signals_end
from training.options import Options
from training.workdir import alone_in_workdir

HALF = (
    "work/checkpoints/.000002-epoch1.part/state.json", "work/summary.json.part",
    "work/tokens/text/pairs/train.0.part/ids",
)  # fmt: skip
WHOLE = (
    "work/checkpoints/000001-epoch0/state.json", "work/mine.part", "work/summary.json",
    "work/tokens/text/pairs/ids",
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> Iterator[None]:
    """Whatever other tests have done to signals."""
    default: Any = signal.SIG_DFL
    with handled((signal.SIGTERM, signal.SIGHUP), default):
        yield


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


def test_nothing_half_written_stays_but_what_other_ranks_may_be_writing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = Options(workdir=Path("work"))
    for file in (*HALF, *WHOLE):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    with under_torchrun(1), signals_end(), alone_in_workdir(args), alone_in_workdir(args):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # it ends at once
    taken = pytest.raises(UserError)  # the lock, which rank 0 alone takes
    with under_torchrun(0), alone_in_workdir(args), taken, alone_in_workdir(args):
        pass
    assert files() == sorted((*HALF, *WHOLE))

    with pytest.raises(Interrupted), alone_in_workdir(args):
        raise Interrupted(128 + signal.SIGTERM)
    assert (files(), names_in(".")) == (list(WHOLE), ["work"])
    assert capsys.readouterr().err == (
        "\nInterrupted; --resume continues from 000001-epoch0. (Ctrl-C saves nothing; SIGTERM "
        "saves the step first, and --save_every every so many.)\n"
    )


@pytest.mark.parametrize(
    ("there", "left"), [("mine/work", ["mine", "mine/work"]), ("mine", ["mine"])]
)
def test_only_empty_folders_that_the_run_has_made_go(there: str, left: list[str]) -> None:
    Path(there).mkdir(parents=True)
    with pytest.raises(UserError), alone_in_workdir(Options(workdir=Path("mine/work"))):
        raise UserError("there are no data")
    with alone_in_workdir(Options(workdir=Path("other/work/3"))):
        Path("other/notes.txt").touch()
    assert sorted(str(path) for path in Path().rglob("*")) == [*left, "other", "other/notes.txt"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_process_by_an_exception_unless_it_is_ignored(
    number: signal.Signals,
) -> None:
    """What the end of the terminal breaks besides is not the reason."""
    with pytest.raises(Interrupted) as end, signals_end():
        try:
            os.kill(os.getpid(), number)
        finally:
            if number == signal.SIGHUP:
                raise OSError("a progress bar that cannot be drawn any more")
    assert end.value.code == 128 + number
    assert signal.getsignal(number) is signal.SIG_DFL
    signal.signal(number, signal.SIG_IGN)  # as under nohup
    with signals_end():
        os.kill(os.getpid(), number)
