"""Every command on the pages of the courses runs, one after the other, on less data.

Those that compare with one process are run by test_train.py, the one with `--pytest` by
test_a4_1_2.py; `python -m pytest` by running the tests, make and benchmarks by make.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from project import plot
from tests.project.made_up import PIPELINE, RANKS, SINGLE, write_epochs, write_timelines
from tests.project.programs import TINY, VGG, course_commands, run
from tests.ranks import Ranks
from training.curves import STYLE

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures, which take longer than the runs."""
    monkeypatch.setitem(STYLE, "savefig.dpi", 30)


def draw(options: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The names of the figures, which are there."""
    paths = plot.draw_figure(plot.parse(options.split()))
    assert [path for path in paths if not path.is_file()] == []
    capsys.readouterr()
    return [path.name for path in paths]


def left_by_make_report() -> None:
    """The runs that the pictures of the first course are drawn from."""
    root = Path("workdir_report")
    write_epochs(root / "dp1", "rank0_results", SINGLE, world_size=1)
    for rank, times in enumerate(RANKS):
        write_epochs(root / "dp2", f"rank{rank}_results", times, world_size=2)
    sizes: dict[str, Any] = {"num_microbatches": 2, "num_devices": 2}
    for name, mode in (("mp", "model_parallel"), ("pp", "pipeline_parallel")):
        write_epochs(root / name, "eval_results", SINGLE, model_parallel_mode=mode, **sizes)
        write_timelines(root / name, PIPELINE, schedule="gpipe")


def test_cmu_11868(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    left_by_make_report()
    trained, drawn = [], []
    for line in course_commands("cmu_11868"):
        program, _, options = line.partition(" ")
        if program == "plot":
            drawn += draw(options, capsys)
        elif "--pytest" not in options:
            alone = program == "run_pipeline"
            printed, error = run(f"{line} {TINY} --n_epochs 1", None if alone else ranks)
            assert error is None, printed
            trained.append(printed.partition(":")[0])
    assert trained == ["ddp", "model_parallel", "pipeline_parallel", "pipeline_parallel"]
    assert drawn == [
        "data_parallel_training_time.png", "data_parallel_throughput.png", "schedule_gpipe.png",
        "pipeline_training_time.png", "pipeline_throughput.png", "timeline_pp.png",
    ]  # fmt: skip


def test_brown_cs1390(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = []
    for line in course_commands("brown_cs1390"):
        program, _, options = line.partition(" ")
        if program == "plot":
            drawn += draw(options, capsys)
        elif "--check_weights" not in options:
            strategy, n = options.split()[0], options.partition("--num_workers ")[2][0]
            folder = Path("workdir", f"{strategy}{n}").resolve()  # where it is by default
            line += f" {VGG} --num_batches 3 --workdir {folder}"
            printed, error = run(line, ranks if n == "2" else None)
            assert error is None, printed
    assert drawn == ["split_time.png", "throughput.png", "memory.png", "timeline_pipeline2.png"]
