"""When a wait times out, a table says what each rank did last, and so which rank is to blame."""

from __future__ import annotations

import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tests.chaos.run import until
from tests.project.programs import ROOT, TINY, run
from tests.ranks import Ranks
from tests.warm import run_warm
from training import loop
from training.checkpoint import Saver
from training.launch import compare_ranks
from training.launch.last_actions import LastAction, in_file, table, verdict
from training.launch.world import World
from training.optimization import GlobalOptimizer
from training.results import Results
from training.resume import Saving
from training.tasks import sequences
from training.tasks.sequences import SequenceTask

SECONDS = 240.0  # that others may take to where they are waited for: longer than any machine needs


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


def test_a_rank_that_is_stopped_is_named_wherever_it_is() -> None:
    """Though it has noted a wait; and one that died, or failed by itself, though others work."""
    last = (LastAction * 3)()
    for action in last:
        action.note("receive")
    with subprocess.Popen(["sleep", "60"]) as process:
        last[1].process = process.pid
        assert not verdict([*last])
        process.send_signal(signal.SIGSTOP)
        assert until(lambda: last[1].is_stopped, SECONDS)
        said = "2 of 3 ranks wait in receive of step 0; look at rank 1 (stopped)\n"
        assert verdict([*last]) == said
        process.kill()
    last[2].note("forward")
    assert verdict([*last]).endswith("look at rank 2\n")
    assert verdict([*last], first_rank=8, failed=9).endswith("look at rank 9\n")


# Where the second of three ranks is slow, and the others are not: a step, its last all-reduce, a
# checkpoint, the comparison of replicas, an evaluation, its score, and the end of an epoch.
SLOW = [
    (GlobalOptimizer, "zero_grad"), (GlobalOptimizer, "_norms"), (Saving, "save"),
    (FileSystemWriter, "write_data"),
    (compare_ranks, "_bytes"),
    (loop, "evaluate_loss"), (SequenceTask, "measure"), (sequences, "continue_all"),
    (Results, "_write_epoch"),
]  # fmt: skip


def be_slow(rank: int, patches: pytest.MonkeyPatch, folder: Path, background: str) -> None:
    """This rank waits in each place, once, until both others wait for it and it is blamed, and
    writes down what a failure there would say."""
    actions = in_file(folder / "actions", 3)
    patches.setattr("tests.project.programs.World", partial(World, last=actions[rank]))

    words = ""

    def blamed(where: str) -> bool:
        nonlocal words
        words = verdict(actions)
        waiting = words.startswith("2 of 3 ranks wait in ")  # and nobody is on the way there
        return waiting and words.endswith(f"{where}; look at rank {rank}\n")

    def slow(owner: Any, name: str, where: str = "") -> None:
        """`where` the others wait: before, they may be seen on their way there."""
        original, done = getattr(owner, name), list[str]()

        def call(*args: Any, **options: Any) -> Any:
            if not done and loop_runs:
                done.append(name)
                assert until(partial(blamed, where), SECONDS), f"{name}: {table(actions)}"
                with (folder / "said").open("a") as file:
                    file.write(f"{name}: {words}")
            return original(*args, **options)

        patches.setattr(owner, name, call)

    loop_runs: list[bool] = []
    begin = Results.begin

    def noted(*args: Any) -> None:
        begin(*args)
        loop_runs.append(True)

    patches.setattr(Results, "begin", noted)
    if rank == 0 and not background:  # it gives a checkpoint its name
        slow(Saver, "_complete", "wait in wait for all ranks of step 2")
    for owner, name in SLOW if rank == 1 else ():
        slow(owner, name)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("background", ["", "--async_save"])
def test_whoever_is_slow_is_named_and_nobody_who_waits(
    background: str, three_ranks: Ranks, tmp_path: Path
) -> None:
    """In a step, in what ends it, in a checkpoint, and in all that follows an epoch. Nobody is in
    the next step before a checkpoint has its name."""
    line = f"train ddp {TINY} --num_batches 4 --save_every 2 {background}"
    tamper = partial(be_slow, folder=tmp_path, background=background)
    assert run(line, three_ranks, tamper)[1] is None
    said = (tmp_path / "said").read_text()
    found = dict(line.split(": ", 1) for line in said.splitlines())
    if not background:
        named = found.pop("_complete")
        assert named.endswith("wait in wait for all ranks of step 2; look at rank 0"), said
    assert {*found} == {name for _, name in SLOW}


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
    """In a collective, and in a message of a pipeline. (--timeout is longer than a test has.)"""
    (tmp_path / "hang.py").write_text(HANG)
    program = f"{ROOT}/project/train.py {strategy} {TINY} --benchmark_only --workdir work"
    line = f"{program} --timeout 600 --step_timeout 3"
    ended = run_warm([str(tmp_path / "hang.py"), *line.split()], tmp_path)
    assert ended.returncode == 1
    lines, n = ended.stderr.splitlines(), len(WAITING[strategy])
    (at,) = (i for i, line in enumerate(lines) if line.endswith("of step 4; look at rank 1"))
    assert lines[at].startswith(f"{n - 1} of {n} ranks wait in {WAITING[strategy][0].split()[1]}")
    rows = lines[at + 2 : at + 2 + n]
    assert [" ".join(row.rpartition("  ")[0].split()) for row in rows] == WAITING[strategy]
