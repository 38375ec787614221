"""run_data_parallel.py and run_pipeline.py, as a user runs them: what they print and leave."""

from __future__ import annotations

import gc
import math
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import Mock

import psutil
import pytest

from project.figures.runs import Run
from project.run_data_parallel import DataParallelOptions
from project.utils import evaluate_bleu
from tests.project.conftest import write_pairs
from tests.project.programs import FLOW, ROOT, TINY, names_in, on_rank, read_json, run
from tests.ranks import Ranks
from tests.warm import Terminal, run_warm
from training.launch.errors import RunError
from training.results import Results

PROGRAM = str(ROOT / "project" / "run_data_parallel.py")
LINE = TINY.replace("--n_train 20 --n_validation 9", "").replace("--n_test 3", "") + (
    "--batch_size 8 --n_epochs 2 --num_workers 2 --timeline 2 --dataset pairs --workdir work"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompletedProcess[str]]:
    """Two epochs on two ranks, with a timeline, where an earlier, larger run has left results: the
    workdir, and the finished program."""
    folder = tmp_path_factory.mktemp("program")
    write_pairs(folder / "pairs")
    work = folder / "work"
    work.mkdir()
    for stale in ("rank2_results_epoch0.json", "timeline_rank5.json", "metrics.jsonl"):
        (work / stale).write_text("{}")
    (work / "notes.txt").write_text("mine")
    return work, run_warm([PROGRAM, *LINE.split()], folder)


def test_what_it_prints(trained: tuple[Path, CompletedProcess[str]]) -> None:
    """To a file: nothing moves, and it has a line at once."""
    _, done = trained
    first, *progress, end = done.stderr.split("\n")
    assert (done.returncode, end) == (0, "")
    assert first == "run_data_parallel.py begins; it imports torch, then it reads its data."
    of_progress = r"[A-Z][\w ]+: [a-z]+ \d+( of|, )"  # on a machine that takes 10 s for something
    assert [line for line in progress if not re.match(of_progress, line)] == []
    layout, *lines = done.stdout.rstrip().split("\n")
    assert layout == "ddp: 2 ranks, micro-batches: automatic, 2 epochs"
    assert lines[-1] == "Results are in work/; the curves are drawn in work/training.png."


def test_it_leaves_exactly_the_files_of_this_run(
    trained: tuple[Path, CompletedProcess[str]],
) -> None:
    """Its options with what it chose itself; results of all ranks."""
    work, _ = trained
    german = (work.with_name("pairs") / "test.de").read_text("utf-8").splitlines()
    places = [(rank, epoch) for rank in range(2) for epoch in range(2)]
    of_epochs = [f"rank{r}_{kind}_epoch{e}.json" for r, e in places for kind in ("gen", "results")]
    others = [
        "checkpoints", "config.json", "earlier_1", "metrics.jsonl", "notes.txt", "options.json",
        "summary.json", "tokenizer.json", "tokenizer_config.json", "training.png",
        "timeline_rank0.json", "timeline_rank1.json", "tokens",
    ]  # fmt: skip
    assert names_in(work) == sorted(of_epochs + others)
    assert names_in(work / "checkpoints") == ["000001-epoch0-step5", "000002-epoch1-step5"]
    options = read_json(work / "options.json")
    expected = {"n_layer": 2, "world_size": 2, "strategy": "ddp", "gradient_sync": "overlap"}
    assert options.items() >= expected.items()
    names = {field.name for field in fields(DataParallelOptions)} - {"typed"}
    assert options.keys() == names | {"command"}
    for rank, epoch in places:
        result = read_json(work / f"rank{rank}_results_epoch{epoch}.json")
        assert result["tokens_per_sec"] >= result["real_tokens_per_sec"] > 0
        rows = read_json(work / f"rank{rank}_gen_epoch{epoch}.json")
        pairs = [row["example"] for row in rows]
        assert [pair["de"] for pair in pairs] == german  # all, in order
        bleu = evaluate_bleu(pairs, [row["gen"] for row in rows], "en")["bleu"]
        assert bleu == result["bleu"]
        first = read_json(work / f"rank0_results_epoch{epoch}.json")
        for key in ("training_loss", "validation_loss"):  # of all ranks together
            assert result[key] == first[key] < math.log(300)


def descriptors_left(rank: int, world_size: int, folder: Path) -> int:
    """The open descriptors of a rank whose run has ended by an error."""
    full = RunError("its disk is full")
    line = f"run_data_parallel {TINY} --world_size {world_size} --workdir {folder}/{rank}"
    _, error = on_rank(
        rank, world_size, line, lambda _, p: p.setattr(Results, "begin", Mock(side_effect=full)),
        local_rank=0,
    )  # fmt: skip
    assert error == "its disk is full"
    gc.collect()
    return psutil.Process().num_fds()


def test_a_run_that_fails_gives_its_shared_memory_back(ranks: Ranks, tmp_path: Path) -> None:
    _, second, third = (ranks.run(descriptors_left, tmp_path) for _ in range(3))
    assert second == third


LEFT = r"(\d\d:\d\d|\?) left"
MOVING = (
    r"Epoch 1 \|.*\| step [1-9]\d* of 30, loss \d\.\d\d\d, [\d,]+ positions/s, " + LEFT,
    r"Validating \|.*\| batch \d of 1, " + LEFT,
    r"Translating \|.*\| text \d+ of \d+, " + LEFT,
)


def test_on_a_terminal_a_line_moves_and_ctrl_c_leaves_nothing_of_it(tmp_path: Path) -> None:
    """Ranks are processes of their own, and the terminal's width is unknown."""
    more = "--n_epochs 999 --n_train 60 --batch_size 2"
    terminal = Terminal([PROGRAM, *TINY.split(), *more.split()], tmp_path)
    terminal.until("Epoch 2 .*step [1-9]")
    terminal.type("\x03")
    terminal.until(None)
    assert terminal.process.exitcode == 128 + signal.SIGINT
    for line in MOVING:
        assert re.search(line, terminal.text), line
    *rows, last, end = terminal.screen()
    assert last.startswith("Interrupted; --resume continues from 000001-epoch0-step30. (Ctrl-C")
    assert end == ""
    assert [row.split()[0] for row in rows if row][-3:] == ["epoch", "start", "1"]
    assert [row for row in rows if "left" in row or "|" in row] == []


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "nowhere"])
def test_figures_are_drawn_whatever_backend_the_environment_names(
    backend: str, tmp_path: Path
) -> None:
    """As a notebook does, for what it starts. It has only mattered after the training."""
    code = (
        "import sys; from pathlib import Path; from project.figures import style\n"
        "with style.picture(Path(sys.argv[1]), 'title', 'foot'): pass"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "picture.png")]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "MPLBACKEND": backend}, check=True)
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("options", "about", "kinds"),
    [
        ("--schedule zb --balance 1,1", ("pipeline_parallel", "zb"), "FIW"),
        ("--pipeline blocks", ("pipeline_parallel", "gpipe"), "FB"),
    ],
)
def test_a_pipeline_leaves_a_timeline_of_its_schedule_and_no_thread(
    options: str, about: tuple[str, str], kinds: str
) -> None:
    """Steps alone are recorded: validation runs through the same stages, and is not."""
    before = set(threading.enumerate())
    run(f"run_pipeline {FLOW} {TINY} --n_epochs 1 --n_chunk 3 --timeline 1 {options}")
    left = [t for t in threading.enumerate() if t not in before]
    assert [t.name for t in left if type(t).__name__ != "TMonitor"] == []
    assert names_in("work") == [  # programs.py leaves out the picture
        "checkpoints", "config.json", "eval_results_epoch0.json", "gen_epoch0.json",
        "metrics.jsonl", "options.json", "summary.json", "timeline_rank0.json", "tokenizer.json",
        "tokenizer_config.json", "tokens",
    ]  # fmt: skip
    workers = Run(Path("work")).timeline
    told = read_json(Path("work/timeline_rank0.json"))["about"]
    names = ("strategy", "schedule", "num_microbatches", "ranks")
    assert told == dict(zip(names, (*about, 3, None), strict=True))
    work = [e for events in workers.values() for e in events if e.kind != "optimizer"]
    assert sorted((e.step, e.kind, e.stage, e.microbatch) for e in work) == sorted(
        (step, kind, stage, i)
        for step in range(2) for stage in range(2) for kind in kinds for i in range(3)
    )  # fmt: skip
    assert list(workers) == ["stage 0", "stage 1"]
    assert "optimizer" in {event.kind for event in workers["stage 0"]}
