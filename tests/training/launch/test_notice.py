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


def test_notice_is_passed_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one, as SIGTERM after SIGUSR1, might find a process at its end, and kill it."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda *call: sent.append(call))
    with heeded(processes=[psutil.Process()]) as came:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert [*came] == [signal.SIGUSR1, signal.SIGTERM]
    assert sent == [(os.getpid(), signal.SIGUSR1)]


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


@pytest.mark.parametrize(
    ("program", "number", "doing"),
    [
        ("run_data_parallel", signal.SIGTERM, "Validating"),  # to all, the program twice
        ("train 3d --dp 2 --pp 1 --tp 1", signal.SIGUSR1, "Translating"),  # to one rank
    ],
)
def test_notice_ends_an_evaluation(program: str, number: int, doing: str, tmp_path: Path) -> None:
    """All ranks end at the same batch or token. What was trained had been saved before."""
    more = "--n_train 12 --n_layer 4 --n_embd 128 "
    more += "--n_validation 500" if doing == "Validating" else "--n_test 40 --model_max_length 300"
    run = Terminal([*command(program, tmp_path / "work"), *more.split()], tmp_path)
    run.until(rf"Epoch 1(?s:.)*{doing}")
    if doing == "Validating":  # as `timeout` does
        os.kill(run.process.pid, number)
        os.killpg(run.process.pid, number)
    else:
        os.kill(rank_1(run), number)
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


SRUN = f"""#!{sys.executable}
import subprocess, sys, time
from pathlib import Path
of_torchrun = sys.argv[2 : sys.argv.index("project/train.py")]
of_torchrun[of_torchrun.index("--nproc-per-node") + 1] = "2"
program = {[*command("train ddp", Path("workdir_job"), PICTURES), "--resume"]}
run = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *of_torchrun, *program])
metrics = Path("workdir_job/metrics.jsonl")
while run.poll() is None and not (metrics.exists() and metrics.read_text().count("loss") > 1):
    time.sleep(0.01)
run.terminate()
sys.exit(run.wait())
"""
SCONTROL = """#!/bin/bash
echo "$@" > asked
"""


def test_notice_to_a_job_of_slurm_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun gives torchrun notice after two steps. The script asks for the job to be requeued."""
    alone, work = tmp_path / "alone", tmp_path / "workdir_job"
    assert run_warm(command("train ddp", alone, PICTURES), tmp_path).returncode == 0
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    for name, body in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(body)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SLURM_JOB_NAME", "job")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    job = ["bash", str(ROOT / "examples" / "slurm" / "one_node.sbatch")]
    run = subprocess.run(job, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    said, done = run.stderr, len(losses(work))
    assert run.returncode == 1 and done < 50, said
    assert said.count(f"asked to end: step {done} is saved") == 1 and (work / ENDED).is_file()
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    again = run_warm([*command("train ddp", work, PICTURES), "--resume"], tmp_path)
    assert again.returncode == 0
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
