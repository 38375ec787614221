"""Runs torchrun, or on its ranks a program of the project, where faults can strike it.

FAULTS names the folder in which a rank writes down the steps that it has done, and waits after
those for which there is a file `trap-RANK-STEP`: it puts its process id there, renames the file to
`caught-...`, and goes on when the file is gone, or it was given notice.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
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


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "torchrun":
        runpy.run_module("torch.distributed.run", run_name="__main__")
    else:
        if faults := os.environ.get("FAULTS"):
            set_traps(Path(faults))
        runpy.run_path(sys.argv[0], run_name="__main__")
