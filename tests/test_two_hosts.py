"""Two hosts that share no folder, and whose own names say nothing to each other.

Two network namespaces with one link between them, and torchrun on each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos.programs import TINY
from tests.project.programs import names_in, read_json, run
from tests.ranks import Ranks

ROOT = Path(__file__).resolve().parents[1]
MEET = "10.213.7.1"  # of the first; the other is 10.213.7.2
LIMIT = 150.0  # seconds
PROGRAM = [
    str(ROOT / "project" / "run_data_parallel.py"), *TINY, "--n_epochs", "1", "--timeout", "60",
]  # fmt: skip


def ip(words: str) -> None:
    """One command of `ip`."""
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two namespaces, whose hosts reach each other and nothing else."""
    names = [f"host{i}-{os.getpid()}" for i in range(2)]
    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"-n {names[0]} link add link0 type veth peer link1 netns {names[1]}")
        for i, name in enumerate(names):
            ip(f"-n {name} addr add 10.213.7.{i + 1}/30 dev link{i}")
            ip(f"-n {name} link set link{i} up")
            ip(f"-n {name} link set lo up")
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or error
        pytest.skip(f"NOT TESTED: no network namespaces here; it takes root and `ip` ({why})")
    else:
        yield names
    finally:
        for name in names:
            with suppress(OSError, subprocess.CalledProcessError):
                ip(f"netns del {name}")


def test_two_hosts_train_as_two_ranks_of_one(
    hosts: list[str], ranks: Ranks, tmp_path: Path
) -> None:
    folders, processes = [tmp_path / name for name in hosts], []
    try:
        for i, (host, folder) in enumerate(zip(hosts, folders, strict=True)):
            folder.mkdir()
            command = [
                "ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run",
                "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(i),
                "--rdzv-endpoint", f"{MEET}:29400", *PROGRAM, "--workdir", "work",
            ]  # fmt: skip
            environment = {**os.environ, "TMPDIR": str(folder)}  # torchrun leaves a folder there
            with (folder / "said").open("w") as said:
                process = subprocess.Popen(
                    command, cwd=folder, env=environment, stdout=said, stderr=said
                )
            processes.append(process)
        statuses = [process.wait(LIMIT) for process in processes]
    finally:
        for process in processes:  # torchrun ends its ranks
            process.terminate()
            process.wait()
    assert statuses == [0, 0], "\n".join((folder / "said").read_text() for folder in folders)
    alone = " ".join(["run_data_parallel", *PROGRAM[1:], "--workdir", str(tmp_path / "work")])
    assert run(alone, ranks)[1] is None
    for i, folder in enumerate(folders):
        results = f"work/rank{i}_results_epoch0.json"
        found, expected = (read_json(where / results) for where in (folder, tmp_path))
        for loss in ("training_loss", "validation_loss"):
            # Sums over a network are taken in another order than those in shared memory.
            assert found[loss] == pytest.approx(expected[loss], rel=1e-6)
    assert (folders[0] / "work" / "summary.json").exists()
    saved = [names_in(folder / "work" / "checkpoints") for folder in folders]
    assert saved == [["000001-epoch0-step8"], []]
