"""When a wait times out, a table says what each rank did last, and so who is the culprit."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.ddp import DistributedDataParallel
from pipeline.processes.process import ProcessPipe
from runtime.ranks import Ranks as Group
from tests.pipeline.pipeline_models import batch, square_error, tower
from tests.project.programs import ROOT, TINY
from tests.ranks import Ranks
from tests.warm import run_warm
from training.launch.last_actions import in_file, of_all_machines, table, verdict
from training.launch.world import LastAction, World
from training.timeline import Timeline

TIMEOUT = 1.5  # seconds: a busy machine may need one for what takes milliseconds


class Hangs(nn.Module):
    """Hangs in its second backward, until the file is there."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, self.calls = file, 0

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(self.hang)
        return x * 1

    def hang(self, _: Tensor) -> None:
        self.calls += 1
        while self.calls == 2 and not self.file.exists():
            time.sleep(0.01)


def _hang(rank: int, size: int, strategy: str, folder: Path) -> str:
    """The table of a rank that has waited in vain."""
    last = in_file(folder / "last", size)
    timeline = Timeline(World(last=last[rank]), num_steps=0)
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    hangs: Any = Hangs(folder / "enough") if rank == size - 1 else nn.Identity()
    x, y = batch(8)

    def work() -> None:
        if strategy == "pipeline":
            layers, sizes = list(tower()), [2, 2, 2]
            layers[5] = nn.Sequential(layers[5], hangs)
            with ProcessPipe(
                nn.Sequential(*layers), sizes, recorder=timeline, timeout=TIMEOUT
            ) as pipe:
                pipe.train_step(x, y, square_error, "1f1b", 4)
        elif strategy == "ddp":
            model = DistributedDataParallel(
                nn.Sequential(tower(), hangs), group, bucket_bytes=100, recorder=timeline
            )
            for i in range(2):
                with timeline.span("B", microbatch=i):
                    model(x).sum().backward()
                model.average_gradients()
        else:
            together = Group(group, recorder=timeline)
            with timeline.span("F", microbatch=2):
                for _ in range(2):
                    hangs.hang(x) if rank == size - 1 else None
                    together.all_reduce(x)

    try:
        work()
    except Exception:
        text = table(last)
        if rank == 0:
            (folder / "enough").touch()
        return text
    return "no error"


WAITING = {  # where to look; and each rank
    "pipeline": [
        "2 of 3 ranks wait in receive",
        "0 receive 0 1 1",
        "1 receive 1 1 2",
        "2 backward (input) 2 1",
    ],
    "ddp": ["2 of 3 ranks wait in all-reduce", "0 all-reduce 0", "1 all-reduce 0", "2 backward 1"],
    "tensor": [
        "2 of 3 ranks wait in all-reduce",
        "0 all-reduce",
        "1 all-reduce",
        "2 after all-reduce",
    ],
}


@pytest.mark.parametrize("strategy", WAITING)
def test_who_hangs_is_seen_in_the_table(three_ranks: Ranks, strategy: str, tmp_path: Path) -> None:
    where, _, *rows = three_ranks.run(_hang, strategy, tmp_path)[0].splitlines()
    waits, *seen = WAITING[strategy]
    assert where == f"{waits} of step 0; rank 2 is elsewhere: look there"
    assert [" ".join(row.rpartition("  ")[0].split()) for row in rows] == seen


def test_the_columns_of_the_table() -> None:
    """And nobody is elsewhere where nobody waits, or all do."""
    last = (LastAction * 2)()
    for action in last:
        action.note("receive")
    assert not verdict(list(last))
    last = (LastAction * 2)()
    last[1].note("reduce-scatter", 12, 3, 0)
    last[1].begun -= 61
    assert table(list(last), first_rank=8).splitlines() == [
        "rank  last action               stage, layer or bucket  micro-batch  peer  begun",
        "   8                                                                       not yet",
        "   9  reduce-scatter                                12            3     0  61.0 s ago",
    ]


def test_a_machine_that_says_nothing_is_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three machines with two ranks each; of the last, which is gone, nobody hears."""
    monkeypatch.setattr("training.launch.last_actions.SAID", 1.0)
    store = dist.HashStore()  # type: ignore[attr-defined]
    last = (LastAction * 6)()
    for action in last:
        action.step = 7
        action.note("all-reduce")
    with ThreadPoolExecutor(2) as threads:
        found = list(
            threads.map(lambda k: of_all_machines(store, last[k : k + 2], k, 6, True), (0, 2))
        )
    assert [table(last[:2], 0, everyone).splitlines()[0] for everyone in found] == [
        "4 of 6 ranks wait in all-reduce of step 7; ranks [4, 5] are elsewhere: look there"
    ] * 2


def test_a_rank_that_fails_alone_blames_nobody() -> None:
    """It tells the others its action, and does not wait for theirs. A store may be gone."""
    store, last = dist.HashStore(), (LastAction * 2)()  # type: ignore[attr-defined]
    last[0].note("forward")
    last[1].note("all-reduce")
    begun = time.monotonic()
    assert of_all_machines(store, [*last], 0, 4, False) == []
    assert time.monotonic() - begun < 1
    last[0].note("all-reduce")
    (first, *_), gone = of_all_machines(store, last[1:], 1, 2, True), Mock()
    assert first.name == b"forward"
    gone.set.side_effect = RuntimeError("the connection was closed")
    assert of_all_machines(gone, [*last], 0, 4, True) == []


def test_a_store_that_does_not_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.launch.last_actions.SAID", 0.1)
    frozen, last, answer = Mock(), (LastAction * 2)(), Event()

    def check(_: list[str]) -> bool:
        answer.wait()
        raise RuntimeError("the connection was closed")

    frozen.check.side_effect = check
    assert of_all_machines(frozen, [*last], 0, 4, True) == []
    answer.set()


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


@pytest.mark.parametrize(("n", "strategy"), [(2, "fsdp"), (4, "3d --dp 2 --pp 2 --zero 1")])
def test_a_hang_costs_the_time_out_of_a_step(n: int, strategy: str, tmp_path: Path) -> None:
    """In a collective, and in a message of a pipeline."""
    (tmp_path / "hang.py").write_text(HANG)
    program = f"{ROOT}/project/train.py {strategy} {TINY} --benchmark_only --workdir work"
    line = f"{program} --timeout 600 --step_timeout 3"
    start = time.monotonic()
    ended = run_warm([str(tmp_path / "hang.py"), *line.split()], tmp_path)
    assert ended.returncode == 1 and time.monotonic() - start < 50
    told = [line for line in ended.stderr.splitlines() if "elsewhere: look there" in line]
    assert len(told) == 1, ended.stderr
    assert told[0].startswith(f"{n - 1} of {n} ranks wait") and "of step 4; rank 1 is" in told[0]
