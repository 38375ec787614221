"""When a wait times out, a table says what each rank did last, and so who is the culprit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.project.programs import ROOT, TINY
from tests.warm import run_warm
from training.launch.last_actions import table, verdict
from training.launch.world import LastAction


def test_the_columns_of_the_table() -> None:
    """Below where to look; where all wait, or none does, nobody is to blame."""
    last = (LastAction * 2)()
    assert not verdict([*last])
    for action in last:
        action.note("receive")
    assert not verdict([*last])
    last = (LastAction * 2)()
    last[1].note("reduce-scatter", 12, 3, 0)
    last[1].begun -= 61
    assert table([*last], first_rank=8).splitlines() == [
        "1 of 2 ranks wait in reduce-scatter of step 0; look at rank 8",
        "rank  last action               stage, layer or bucket  micro-batch  peer  begun",
        "   8                                                                       not yet",
        "   9  reduce-scatter                                12            3     0  61.0 s ago",
    ]


HANG = """
import runpy, sys, time
from torch.nn import functional
from training.resume import Saving

after_step = Saving.after_step

def hang(self, *args):
    after_step(self, *args)
    if self.world.rank == 1 and self.optimizer.steps == 3:
        functional.layer_norm = lambda *_: time.sleep(600)

Saving.after_step = hang
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# The last action of each rank: of which stage, layer or bucket, micro-batch, and peer.
WAITING = {
    "ddp": ["0 all-reduce 0", "1 forward 0"],  # a bucket
    "pipeline": ["0 receive 0 0 1", "1 forward 1 0"],
    "context": ["0 all-to-all", "1 forward 0 0"],  # in the ring
}


@pytest.mark.parametrize("strategy", WAITING)
def test_a_hang_costs_the_time_out_of_a_step_and_is_seen_in_the_table(
    strategy: str, tmp_path: Path
) -> None:
    """In a collective, and in a message of a pipeline."""
    (tmp_path / "hang.py").write_text(HANG)
    program = f"{ROOT}/project/train.py {strategy} {TINY} --benchmark_only --workdir work"
    line = f"{program} --timeout 600 --step_timeout 3"
    start = time.monotonic()
    ended = run_warm([str(tmp_path / "hang.py"), *line.split()], tmp_path)
    assert ended.returncode == 1 and time.monotonic() - start < 50
    lines, n = ended.stderr.splitlines(), len(WAITING[strategy])
    (at,) = (i for i, line in enumerate(lines) if line.endswith("of step 4; look at rank 1"))
    assert lines[at].startswith(f"{n - 1} of {n} ranks wait in {WAITING[strategy][0].split()[1]}")
    rows = lines[at + 2 : at + 2 + n]
    assert [" ".join(row.rpartition("  ")[0].split()) for row in rows] == WAITING[strategy]
