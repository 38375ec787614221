"""A scheduler takes the machine away: the run saves the step and ends, and loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from project.train import parse_train
from tests.warm import Terminal, run_warm
from training.checkpoint import Saver
from training.files import ENDED
from training.launch.notice import Ended, given, heeded
from training.launch.world import World
from training.resume import Saving

ROOT = Path(__file__).resolve().parents[3]
SMALL = (
    "--device cpu --model gpt2-mini --n_layer 1 --n_embd 16 --n_head 2 --vocab_size 300 "
    "--n_epochs 1 --n_train 240 --n_validation 8 --n_test 2 --batch_size 6"
)


PICTURES = (  # whose ranks import little
    "--device cpu --model vgg16 --vgg_width 4 --optimizer sgd --learning_rate 0.02 --n_epochs 1 "
    "--n_train 300 --n_validation 8 --batch_size 6"
)


def command(program: str, workdir: Path, options: str = SMALL) -> list[str]:
    """The command line of a program of this project."""
    name, *words = f"{program} {options}".split()
    return [str(ROOT / "project" / f"{name}.py"), *words, "--workdir", str(workdir)]


def losses(workdir: Path) -> list[float]:
    """Of the steps so far."""
    file = workdir / "metrics.jsonl"
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row["loss"] for row in rows if "loss" in row]


def rank_1(run: Terminal) -> int:
    """Its process."""
    children = psutil.Process(run.process.pid).children(recursive=True)
    return max(child.pid for child in children if not child.children())


def test_notice_costs_no_step(tmp_path: Path) -> None:
    """To one rank. The losses are those of a run that was left alone, bit for bit."""
    program = "train pipeline --world_size 2 --async_save true"
    alone, work = tmp_path / "alone", tmp_path / "work"
    assert run_warm(command(program, alone), tmp_path).returncode == 0
    run = Terminal(command(program, work), tmp_path)
    while len(losses(work)) < 3:
        assert run.process.exitcode is None, run.text
        time.sleep(0.01)
    os.kill(rank_1(run), signal.SIGUSR1)
    run.until(None)
    assert run.process.exitcode == os.EX_TEMPFAIL, run.text
    done = len(losses(work))
    said = f"The run was asked to end: step {done} is saved, and --resume goes on from there."
    assert said in run.text and "Traceback" not in run.text
    assert done < 40 and (work / ENDED).is_file()
    assert run_warm([*command(program, work), "--resume"], tmp_path).returncode == 0
    assert losses(work) == losses(alone) and not (work / ENDED).exists()


def test_notice_to_one_rank_ends_an_evaluation(tmp_path: Path) -> None:
    """All ranks end at the same batch. What was trained had been saved before."""
    more = "--n_train 12 --n_layer 4 --n_embd 128 --n_validation 500"
    line = command("run_data_parallel", tmp_path / "work")
    run = Terminal([*line, *more.split()], tmp_path)
    run.until(r"Epoch 1(?s:.)*Validating")
    os.kill(rank_1(run), signal.SIGTERM)
    run.until(None)
    assert run.process.exitcode == os.EX_TEMPFAIL, run.text
    assert "step 2 is saved, and --resume goes on from there" in run.text
    assert "Traceback" not in run.text and (tmp_path / "work" / ENDED).is_file()


def test_notice_hides_no_error(tmp_path: Path) -> None:
    """Nor does a run that has saved nothing say that it has."""
    args = parse_train(None, ["single", "--model", "gpt2-mini", "--workdir", str(tmp_path)])
    saving = object.__new__(Saving)
    saving.world, saving.args, saving.saver, saving.saved = World(), args, Saver(tmp_path), 0
    with heeded(), pytest.raises(RuntimeError, match="a bug"), saving.before_the_end():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert given()
        raise RuntimeError("a bug")
    assert not given()  # what comes after the run, in the same process, is not asked to end
    with pytest.raises(Ended, match="no step is saved"), saving.before_the_end():
        raise Ended
    assert not (tmp_path / ENDED).exists()


def test_notice_under_torchrun_costs_no_step(tmp_path: Path) -> None:
    """torchrun passes it on; the rest without torchrun."""
    alone, work = tmp_path / "alone", tmp_path / "work"
    assert run_warm(command("train ddp", alone, PICTURES), tmp_path).returncode == 0
    rest = [*command("train ddp", work, PICTURES), "--resume"]
    torchrun = "torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 2"
    again = [sys.executable, "-m", *torchrun.split(), *rest]
    with subprocess.Popen(again, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run:
        while len(losses(work)) < 2:
            assert run.poll() is None
            time.sleep(0.01)
        run.terminate()
        said = run.communicate()[1]
    done = len(losses(work))
    assert run.returncode == 1 and done < 50, said
    assert said.count(f"asked to end: step {done} is saved") == 1 and (work / ENDED).is_file()
    assert run_warm(rest, tmp_path).returncode == 0
    assert losses(work) == losses(alone) and not (work / ENDED).exists()


@pytest.mark.parametrize(("hosts", "status"), [("1", 0), ("2", 75), (None, 75)])
def test_only_on_several_hosts_torchrun_is_to_restart_a_rank_that_was_asked_to_end(
    hosts: str | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if hosts is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
        monkeypatch.setenv("GROUP_WORLD_SIZE", hosts)
    assert Ended().status == status
