"""A scheduler takes the machine away: the run saves the step and ends, and loses nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.warm import Terminal, run_warm
from training.files import ENDED

ROOT = Path(__file__).resolve().parents[3]
SMALL = (
    "--device cpu --model gpt2-mini --n_layer 1 --n_embd 16 --n_head 2 --vocab_size 300 "
    "--n_epochs 1 --n_train 240 --n_validation 8 --n_test 2 --batch_size 6"
)


def command(program: str, workdir: Path) -> list[str]:
    """The command line of a program of this project."""
    name, *options = program.split()
    return [
        str(ROOT / "project" / f"{name}.py"),
        *options,
        *SMALL.split(),
        "--workdir",
        str(workdir),
    ]


def losses(workdir: Path) -> list[float]:
    """Of the steps so far."""
    file = workdir / "metrics.jsonl"
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize(
    ("program", "number", "who"),
    [
        ("run_data_parallel", signal.SIGTERM, "program"),
        ("train pipeline --world_size 2 --async_save true", signal.SIGUSR1, "a rank"),
    ],
)
def test_notice_costs_no_step(program: str, number: int, who: str, tmp_path: Path) -> None:
    """The losses are those of a run that was left alone, bit for bit."""
    alone, work = tmp_path / "alone", tmp_path / "work"
    assert run_warm(command(program, alone), tmp_path).returncode == 0
    run = Terminal(command(program, work), tmp_path)
    while len(losses(work)) < 3:
        assert run.process.exitcode is None, run.text
        time.sleep(0.01)
    main = psutil.Process(run.process.pid)
    ranks = [child for child in main.children(recursive=True) if not child.children()]
    os.kill(main.pid if who == "program" else ranks[-1].pid, number)
    run.until(None)
    assert run.process.exitcode == os.EX_TEMPFAIL, run.text
    done = len(losses(work))
    said = f"The run was asked to end: step {done} is saved, and --resume goes on from there."
    assert said in run.text and "Traceback" not in run.text
    assert done < 40 and (work / ENDED).is_file()
    assert run_warm([*command(program, work), "--resume"], tmp_path).returncode == 0
    assert losses(work) == losses(alone) and not (work / ENDED).exists()
