"""A rank that hangs costs --step_timeout, and the others say who it is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.training.launch.test_notice import ROOT, SMALL
from tests.warm import run_warm

HANG = """
import runpy, sys, time
from training.resume import Saving

after_step = Saving.after_step

def hang(self, *args):
    after_step(self, *args)
    if self.world.rank == 1 and self.optimizer.steps == 3:
        time.sleep(600)

Saving.after_step = hang
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("strategy", ["fsdp", "3d --dp 2 --pp 2 --tp 1 --zero 1"])
def test_a_hang_costs_the_time_out_of_a_step(strategy: str, tmp_path: Path) -> None:
    """In a collective, and in a message of a pipeline."""
    (tmp_path / "hang.py").write_text(HANG)
    line = f"{strategy} {SMALL} --benchmark_only --timeout 600 --step_timeout 4"
    words = [str(ROOT / "project" / "train.py"), *line.split(), "--workdir", str(tmp_path / "work")]
    start = time.monotonic()
    ended = run_warm([str(tmp_path / "hang.py"), *words], tmp_path)
    assert ended.returncode == 1 and time.monotonic() - start < 50
    n = 4 if "3d" in strategy else 2
    told = [line for line in ended.stderr.splitlines() if "elsewhere: look there" in line]
    assert len(told) == 1, ended.stderr
    assert told[0].startswith(f"{n - 1} of {n} ranks wait") and "of step 4; rank 1 is" in told[0]
