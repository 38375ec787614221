"""Every command on the pages of the courses runs, one after the other, on less data.

Those that compare with one process are run by test_train.py; `python -m pytest` by running the
tests, make and benchmarks by make.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from project import plot
from project.figures.style import STYLE
from tests.project.made_up import PIPELINE, SINGLE, write_epochs, write_one_and_two, write_timelines
from tests.project.programs import (
    TINY,
    VGG,
    course_commands,
    finish,
    in_folder,
    names_in,
    on_rank,
    parse,
    run,
    summary,
)
from tests.ranks import Ranks

# Checkpoints and translations would take most of the time.
SMALL = TINY + "--keep 0 --model_max_length 32 "
FILES = ("tests/model0_gradients.pth", "tests/model1_gradients.pth")


@pytest.fixture
def gradients(ranks: Ranks, tmp_path: Path) -> list[dict[str, Tensor]]:
    """What the code as it is now leaves under `python project/run_data_parallel.py --pytest True`,
    on less data. Files in tests/ may be those of other code."""
    (line,) = course_commands("cmu_11868", "--pytest True")
    line += " --n_train 48 --n_validation 2 --n_test 2 --batch_size 32 --world_size 2 "
    line += f"--device cpu --n_layer 2 --vocab_size 512 --workdir {tmp_path}/work"
    said = ranks.run(on_rank, line, partial(in_folder, tmp_path))
    assert said == [(f"rank {r} wrote {FILES[r]}\n", None) for r in range(2)]
    return [torch.load(tmp_path / file, weights_only=True) for file in FILES]


@pytest.mark.a4_1_2
@pytest.mark.a5_1_2
def test_gradients_are_the_same_on_all_ranks(gradients: list[dict[str, Tensor]]) -> None:
    """The course's own check."""
    first, second = gradients
    assert list(first) == list(second)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert {"transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"} <= first.keys()
    assert all(g.abs().sum() > 0 and g.isfinite().all() for g in first.values())


@pytest.mark.usefixtures("elsewhere")
def test_gradients_leave_the_options_of_a_run_alone() -> None:
    run(f"run_data_parallel {SMALL} --num_batches 1 --world_size 1 --workdir work")
    options = Path("work/options.json").read_bytes()
    on_rank(0, 1, f"run_data_parallel {SMALL} --pytest True --seed 5 --workdir work")
    assert Path("tests/model0_gradients.pth").exists()
    assert Path("work/options.json").read_bytes() == options


def draw(options: str) -> str:
    """The name of a figure, which is a PNG file."""
    path = plot.draw_figure(plot.parse_plot(options.split()))
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return path.name


def left_by_make_report() -> None:
    """The runs that the pictures of the first course are drawn from."""
    root = Path("workdir_report")
    write_one_and_two(root)
    sizes: dict[str, Any] = {"num_microbatches": 2, "num_devices": 2, "schedule": "gpipe"}
    for name, mode in (("mp", "model_parallel"), ("pp", "pipeline_parallel")):
        about = {"world_size": 2, "model_parallel_mode": mode, **sizes}
        write_epochs(root / name, "eval_results", SINGLE, **about)
        write_timelines(root / name, PIPELINE, schedule="gpipe")


@pytest.mark.usefixtures("elsewhere")
def test_cmu_11868(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STYLE, "savefig.dpi", 30)  # drawing takes longer than the runs
    left_by_make_report()
    trained, drawn = [], []
    for line in course_commands("cmu_11868"):
        program, _, options = line.partition(" ")
        if program == "plot":
            drawn.append(draw(options))
        elif "--pytest" not in options and "--benchmark_only" not in options:
            alone = program == "run_pipeline"
            printed = finish(f"{line} {SMALL} --n_epochs 1", None if alone else ranks)
            trained.append(printed.partition(":")[0])
    assert trained == ["ddp", "model_parallel", "pipeline_parallel", "pipeline_parallel"]
    assert drawn == [
        "data_parallel_training_time.png", "data_parallel_throughput.png", "schedule_gpipe.png",
        "pipeline_training_time.png", "pipeline_throughput.png", "timeline_pp.png",
    ]  # fmt: skip


# The benchmark script of the newest edition reads standard output with these.
OF_RANKS = r"Epoch (\d+) on Rank (\d+): Training Time = ([\d.]+), Tokens_per_sec = ([\d.]+)"
OF_A_PIPELINE = r"Epoch (\d+)(): Training Time = ([\d.]+), Tokens_per_sec = ([\d.]+)"


def script(printed: str, pattern: str) -> list[tuple[int, int]]:
    """The epochs and ranks that it finds. (Their numbers: tests/training/test_results.py.)"""
    matches = [match for line in printed.split("\n") if (match := re.fullmatch(pattern, line))]
    assert len(matches) == printed.count("Training Time")  # none is cut in two
    return [(int(match[1]), int(match[2] or 0)) for match in matches]


@pytest.mark.usefixtures("elsewhere")
def test_the_script_of_the_newest_edition_finds_its_lines(ranks: Ranks) -> None:
    """Its four commands, on a small model and less data."""
    lines = course_commands("cmu_11868", "--benchmark_only")
    programs = [line.partition(" ")[0] for line in lines]
    assert programs == ["run_data_parallel"] * 2 + ["run_pipeline"] * 2
    small = SMALL.replace("--batch_size 6 --n_train 20", "--n_train 300") + "--max_batches 2"
    for number, line in enumerate(lines):
        work, n = Path(f"work{number}").resolve(), 1 + ("--world_size 2" in line)
        printed = finish(f"{line} {small} --workdir {work}", ranks if n == 2 else None)
        found = script(printed, OF_A_PIPELINE if line.startswith("run_pipeline") else OF_RANKS)
        assert found == [(epoch, rank) for epoch in range(3) for rank in range(n)]
        # Nothing is validated or generated, and an epoch has two steps.
        assert len(summary(work)["loss"]) == 3 * 2
        assert summary(work)["validation_loss"] is None
        assert [name for name in names_in(work) if "gen" in name] == []
        assert "start" not in printed and printed.count("     -") == 3 * 2


@pytest.mark.usefixtures("elsewhere")
def test_brown_cs1390(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STYLE, "savefig.dpi", 30)
    drawn: list[str] = []
    seen: list[str] = []
    for line in course_commands("brown_cs1390"):
        program, _, options = line.partition(" ")
        if program == "plot":
            drawn.append(draw(options))
        elif "--check_weights" not in options:
            args = parse(line)
            n, folder = args.world_size, args.workdir.resolve()  # where it is by default
            seen.append(args.strategy)
            line += f" {VGG} --keep 0 --num_batches 3 --workdir {folder}"
            finish(line, ranks if n == 2 else None)
    assert seen == ["none", "ddp", "ddp", "ddp", "fsdp", "pipeline"]
    assert drawn == ["split_time.png", "throughput.png", "memory.png", "timeline_pipeline2.png"]
