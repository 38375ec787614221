"""Runs torchrun or, on its ranks, a program of the project, where faults can strike it.

FAULTS names a folder, in which a rank writes down the steps that it has done. After a step for
which there is a file `trap-RANK-STEP`, the rank waits: it puts its process id into the file,
renames the file to `caught-...`, and goes on when the file is gone, or when it is given notice.

With FORK the ranks are forks of torchrun, which has imported what they need. Otherwise the imports
of four ranks take sixteen seconds of a core.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def set_traps(folder: Path) -> None:
    """Makes this rank write its steps down, and wait where there is a trap."""
    from training.launch.signals import NOTICES_GIVEN
    from training.resume import Saving

    rank, after_step = os.environ["RANK"], Saving.after_step

    def note(step: int) -> None:
        with (folder / f"steps{rank}").open("a") as file:
            file.write(f"{step} {time.monotonic()}\n")

    def caught(self: Saving, *args: Any) -> None:
        after_step(self, *args)
        note(self.optimizer.steps)
        trap = folder / f"trap-{rank}-{self.optimizer.steps}"
        if trap.exists():
            trap.write_text(str(os.getpid()))
            there = trap.rename(folder / trap.name.replace("trap", "caught"))
            while there.exists() and not NOTICES_GIVEN:
                time.sleep(0.01)
            there.unlink(missing_ok=True)

    note(0)  # the start
    Saving.after_step = caught  # type: ignore[assignment, method-assign]


class Fork(subprocess.Popen[str]):
    """A rank, as torchrun starts it: `python -u -m tests.faults.program PROGRAM OPTIONS`, with a
    session and an environment of its own."""

    def __init__(self, args: tuple[str, ...], env: dict[str, str]) -> None:
        self.environment = env
        super().__init__(args)

    def _execute_child(self, args: tuple[str, ...], *_: Any) -> None:
        self.pid = os.fork()
        self._child_created = True  # so that it is waited for
        if self.pid:
            return
        status = 1
        try:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)  # torchrun has handlers
            os.environ.clear()
            os.environ.update(self.environment)
            main(list(args[4:]))
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)  # what torchrun has open is not this process' to close


def fork_ranks() -> None:
    """Makes torchrun fork them. Their libraries are here, and no thread of an operator."""
    import torch._dynamo
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    import project.train  # noqa: F401

    torch.set_num_threads(1)
    SubprocessHandler._popen = lambda _, args, env: Fork(args, env)  # type: ignore[assignment, method-assign]


def main(words: list[str]) -> None:
    """Runs a command line: `torchrun`, or a program, and its options."""
    sys.argv = words
    if words[0] == "torchrun":
        if os.environ.get("FORK"):
            fork_ranks()
        runpy.run_module("torch.distributed.run", run_name="__main__")
    else:
        if faults := os.environ.get("FAULTS"):
            set_traps(Path(faults))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
