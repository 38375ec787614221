"""Fixtures of these tests: tiny runs of the programs as a person starts them, which all share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.project.programs import PAIRS, PLAIN, TEXT, run
from tests.warm import run_warm

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "project" / "run_data_parallel.py")
SIZES = {"train": 40, "validation": 9, "test": 7}
TINY = [
    "--model", "gpt2-mini", "--n_layer", "1", "--n_embd", "32", "--n_head", "2",
    "--vocab_size", "320", "--model_max_length", "32", "--batch_size", "8", "--n_epochs", "2",
    "--learning_rate", "1e-2", "--seed", "11", "--device", "cpu", "--timeout", "60",
]  # fmt: skip

# The program, but rank 1 kills itself after step 7: once, which a file remembers.
KILLED = """
import os, signal, sys
from pathlib import Path

sys.path.insert(0, {root!r})
from project.run_data_parallel import main
from project.utils import run_program
from training.saving import Saving

after_step = Saving.after_step

def kill(self, *args):
    after_step(self, *args)
    mark = Path({mark!r})
    if self.world.rank == 1 and self.optimizer.steps == 7 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

Saving.after_step = kill
run_program(main)
"""


@dataclass(frozen=True)
class Run:
    """A finished program."""

    workdir: Path
    status: int
    stdout: str
    stderr: str


def write_pairs(folder: Path) -> Path:
    """Parallel lines: 40, 9 and 7 pairs, and an empty one in train."""
    folder.mkdir()
    for split, n in SIZES.items():
        de = [f"Wir sehen {i} Häuser und {split}." for i in range(n)]
        en = [f"We see {i} houses and {split}." for i in range(n)]
        if split == "train":
            de, en = ["", *de], ["nothing", *en]
        (folder / f"{split}.de").write_text("\n".join(de), encoding="utf-8")
        (folder / f"{split}.en").write_text("\n".join(en), encoding="utf-8")
    return folder


def start(workdir: Path, *command: str) -> Run:
    """Runs a program of this repository, from elsewhere, to its end."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": ""}
    environment.pop("TOKENIZERS_PARALLELISM", None)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=workdir.parent, env=environment, capture_output=True, text=True, timeout=110,
        check=False,
    )  # fmt: skip
    return Run(workdir, done.returncode, done.stdout, done.stderr)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default workdir is made in the current folder. Nobody was started by torchrun, and there
    is no network, and no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@dataclass(frozen=True)
class Learned:
    """What one process has learned: with which options, and its workdir."""

    line: str
    workdir: Path


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Learned]:
    """By one process, the whole batch at once: pairs, with or without dropout, or plain text."""
    folder = tmp_path_factory.mktemp("learned")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    lines = {
        "pairs": PAIRS + "--dropout 0", "dropout": PAIRS + "--dropout 0.1",
        "text": f"--dataset {folder}/text.txt {PLAIN} --dropout 0",
    }  # fmt: skip

    @cache
    def learn(what: str) -> Learned:
        workdir = folder / what
        where = f"--num_microbatches 1 --workdir {workdir}"
        printed, error = run(f"train single {lines[what]} {where}")
        assert error is None, printed
        return Learned(lines[what], workdir)

    return learn


@pytest.fixture(scope="session")
def pairs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("texts") / "pairs")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, pairs_folder: Path) -> Run:
    """Two epochs on two ranks, with a timeline, where an earlier, larger run has left results."""
    workdir = tmp_path_factory.mktemp("trained") / "work"
    workdir.mkdir()
    for stale in ("rank2_results_epoch0.json", "timeline_rank5.json", "metrics.jsonl"):
        (workdir / stale).write_text("{}")
    (workdir / "notes.txt").write_text("mine")
    done = run_warm(
        [PROGRAM, "--dataset", str(pairs_folder), "--workdir", str(workdir),
         "--num_workers", "2", "--timeline", "2", *TINY],
        workdir.parent,
    )  # fmt: skip
    return Run(workdir, done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def trained_by_torchrun(tmp_path_factory: pytest.TempPathFactory, pairs_folder: Path) -> Run:
    """The same options again, without a timeline, the ranks started by torchrun; and started again,
    since rank 1 is killed in the second epoch."""
    folder = tmp_path_factory.mktemp("torchrun")
    script, workdir = folder / "killed.py", folder / "work"
    script.write_text(KILLED.format(root=str(ROOT), mark=str(folder / "mark")))
    return start(
        workdir, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", "3", str(script), "--dataset", str(pairs_folder),
        "--workdir", str(workdir), *TINY, "--resume", "--save_every", "3",
    )  # fmt: skip
