"""The workdir of a run is its own while it runs; a run that is interrupted says what is saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import under_torchrun
from tests.warm import run_warm
from training.launch.errors import UserError
from training.options import Options
from training.workdir import alone_in_workdir

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_what_a_killed_run_has_half_written_is_removed_by_the_next_one() -> None:
    """By rank 0, for which the others wait: it alone locks the folder."""
    args = Options(workdir=Path("work"))
    half, whole = Path("work/tokens/text/0.part/ids"), Path("work/tokens/text/1/ids")
    for file in (half, whole, Path("work/mine.part")):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    with under_torchrun(1), alone_in_workdir(args), alone_in_workdir(args):
        assert half.exists()
    taken = pytest.raises(UserError, match="another run is writing there; --workdir work_2 works")
    with under_torchrun(0), alone_in_workdir(args), taken, alone_in_workdir(args):
        pass
    assert not half.parent.exists() and whole.exists() and Path("work/mine.part").exists()


INTERRUPTED = """
import os, signal
from pathlib import Path
from training.launch.signals import ENDING_SIGNALS, set_handlers, end_process
from training.options import Options
from training.workdir import alone_in_workdir

for number, resume, aside in (
    (signal.SIGINT, True, False), (signal.SIGTERM, False, False), (signal.SIGTERM, False, True)
):
    for handler in (signal.SIG_DFL, signal.SIG_IGN):
        if child := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        signal.signal(number, handler)
        set_handlers(ENDING_SIGNALS, end_process)
        with alone_in_workdir(Options(workdir=Path("work"), resume=resume)):
            if aside:
                os.rename("work/checkpoints", f"work/earlier_{int(handler)}")
                os.makedirs("work/checkpoints/000001-epoch0-step4")
            try:
                os.kill(os.getpid(), number)
            finally:
                print("went on", end=" ", flush=True)
        os._exit(0)
"""


def test_a_signal_says_what_is_saved_and_ends_at_once_unless_it_is_ignored(tmp_path: Path) -> None:
    """As under nohup."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    Path("work/checkpoints/000001-epoch0-step4").mkdir(parents=True)
    done = run_warm([str(tmp_path / "interrupted.py")], tmp_path)
    assert done.stdout == f"{128 + 2}\nwent on 0\n{128 + 15}\nwent on 0\n{128 + 15}\nwent on 0\n"
    # A run that does not resume sets the earlier one's checkpoints aside, but not at once.
    has = "--resume continues from 000001-epoch0-step4"
    assert done.stderr == "".join(
        f"\nInterrupted; {then}. (Ctrl-C saves nothing; SIGTERM saves the current step, and "
        "--save_every N every N steps.)\n"
        for then in (has, "nothing is saved", has)
    )
