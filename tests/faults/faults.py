"""What can happen to a run under torchrun, in calls that read as sentences, and what comes of it.

    found = run(LAYOUTS["fsdp"], 2, kill(rank=1, step=3), cut_link(host=1, seconds=40, step=5))
    assert found.weights == run(LAYOUTS["fsdp"], 2).weights

Each fault strikes once, after the given step, while the first rank that it concerns waits in a trap
(tests/faults/program.py). So a sentence does the same to a run on every machine.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.programs import TORCHRUN
from tests.chaos.run import Run, scratch, until
from tests.faults.hosts import Hosts, command
from tests.project.programs import weights
from training.files import METRICS
from training.results import read_metrics

START = 240.0  # seconds that a run may take to the step of its next fault
TIMEOUT = 20.0  # --timeout
LIMIT = 240.0  # seconds that a run may take after its last fault
STEPS, SAVE_EVERY, STRUCK = 12, 2, 5  # a checkpoint every other step; faults strike after the fifth
TMPFS = "16m"  # the disk of a host whose disk becomes full
OPTIONS = (
    "--batch_size", "12", "--n_train", "96", "--n_validation", "12", "--device", "cpu",
    "--num_batches", str(STEPS), "--save_every", str(SAVE_EVERY), "--resume",
)  # fmt: skip
GPT2 = (
    "--model", "gpt2-mini", "--n_layer", "2", "--n_embd", "48", "--n_head", "6",
    "--vocab_size", "384", "--model_max_length", "32", "--n_test", "6",
)  # fmt: skip
VGG16 = ("--model", "vgg16", "--vgg_width", "4", "--optimizer", "sgd", "--learning_rate", "0.02")


@dataclass(frozen=True)
class Layout:
    """A program of project/, its options, and how many ranks it takes on one host, and on each of
    several."""

    words: tuple[str, ...]
    alone: int = 2
    each: int = 1


TRAINED = (*GPT2, "--benchmark_only")  # and not evaluated
LAYOUTS = {
    "evaluated": Layout(("run_data_parallel", *GPT2)),
    "pictures": Layout(("train", "ddp", *VGG16)),  # whose ranks import little
    "ddp": Layout(("train", "ddp", *TRAINED)),
    "fsdp": Layout(("train", "fsdp", *TRAINED)),
    "pipeline": Layout(("train", "pipeline", *TRAINED)),
    "tensor": Layout(("train", "tensor", *TRAINED)),
    "3d": Layout(("train", "3d", "--tp", "2", *TRAINED), alone=4, each=2),  # dp follows
}


class Cluster:
    """A run on several hosts: torchrun on each."""

    def __init__(self, layout: Layout, hosts: Hosts, folder: Path, nodes: str, forks: bool) -> None:
        self.layout, self.hosts, self.folder, self.nodes = layout, hosts, folder, nodes
        self.forks = forks
        self.each = layout.alone if hosts.number == 1 else layout.each  # ranks of a host
        self.runs: dict[int, Run] = {}
        self.all: list[Run] = []
        self.caught = 0  # the process id of the rank that waits in a trap
        self.port = 29400 + os.getpid() % 1000

    def start(self, host: int) -> None:
        """Starts torchrun there, for the first time or again."""
        folder = self.folder / f"host{host}"
        (folder / f"start{len(self.all)}").mkdir(parents=True)
        trapped = [sys.executable, "-m", "tests.faults.program"]
        program, *options = self.layout.words
        torchrun = (
            f"torchrun --nnodes {self.nodes} --nproc-per-node {self.each} --max-restarts 5 "
            f"--rdzv-backend c10d --rdzv-endpoint {self.hosts.address(0)}:{self.port} "
            f"--rdzv-conf join_timeout=120,last_call_timeout=5,is_host={int(host == 0)} "
            f"--rdzv-id faults --local-addr {self.hosts.address(host)} --shutdown-timeout 5 "
            f"--monitor-interval 0.2 -m tests.faults.program project/{program}.py"
        ).split()
        options += [*OPTIONS, "--timeout", str(TIMEOUT)]
        environment = [
            "env", f"FAULTS={self.folder}", f"FORK={'yes' * self.forks}",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",  # see docs/faults.md
        ]  # fmt: skip
        line = [*self.hosts.inside(host), *environment, *trapped, *torchrun, *options]
        run = Run([*line, "--workdir", str(folder / "work")], folder / f"start{len(self.all)}",
                  TORCHRUN)  # fmt: skip
        self.runs[host] = run
        self.all.append(run)

    def close(self) -> None:
        """Kills what is left of it."""
        for run in self.all:
            run.__exit__()

    def said(self) -> str:
        """By all hosts."""
        return "".join(run.said() for run in self.all)

    def steps(self) -> list[tuple[int, float]]:
        """The steps that were done by rank 0, in order, and when. A start counts as step 0."""
        path = self.folder / "steps0"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(line.split()[0]), float(line.split()[1])) for line in lines]

    def over(self) -> bool:
        """Whether all hosts have ended."""
        return all(run.process.poll() is not None for run in self.runs.values())

    def trap(self, fault: Fault, name: str = "trap") -> Path:
        """The file for which the rank waits that a fault concerns; see tests/faults/program.py."""
        rank = fault.host * self.each if fault.rank is None else fault.rank
        return self.folder / f"{name}-{rank}-{fault.step}"

    def strike(self, fault: Fault) -> float:
        """Strikes when the rank has come to its trap, and returns when that was."""
        caught = self.trap(fault, "caught")
        until(lambda: caught.exists() or self.over(), START)
        struck = time.monotonic()
        if not caught.exists():  # what the run said shows why
            return struck
        self.caught = int(caught.read_text())
        fault.strike(self)
        caught.unlink(missing_ok=True)
        if fault.undo is not None:
            until(self.over, fault.seconds)
            fault.undo(self)
        return struck


@dataclass(frozen=True)
class Fault:
    """Strikes while a rank waits after `step`, the given one or the first of the host; after so
    many seconds it is undone.

    Attributes:
        disk: the host has a small disk of its own.
    """

    step: int
    strike: Callable[[Cluster], object]
    rank: int | None = None
    host: int = 0
    seconds: float = 0.0
    undo: Callable[[Cluster], object] | None = None
    disk: bool = False


def kill(rank: int, step: int = STRUCK) -> Fault:
    """The system kills a rank, as when memory is short."""
    return Fault(step, lambda c: os.kill(c.caught, signal.SIGKILL), rank)


def stop(rank: int, step: int = STRUCK) -> Fault:
    """A rank does nothing any more, and does not end."""
    return Fault(step, lambda c: os.kill(c.caught, signal.SIGSTOP), rank)


def kill_host(host: int, seconds: float, step: int = STRUCK) -> Fault:
    """A host is without power, and is back after so many seconds."""

    def strike(cluster: Cluster) -> None:
        cluster.hosts.cut(host)  # nobody hears of it
        for process in cluster.runs[host].processes():
            with suppress(psutil.Error):
                process.kill()

    def undo(cluster: Cluster) -> None:
        cluster.hosts.mend(host)
        cluster.start(host)

    return Fault(step, strike, host=host, seconds=seconds, undo=undo)


def cut_link(host: int, seconds: float, step: int = STRUCK) -> Fault:
    """A host is not reached for so many seconds."""
    undo: Any = lambda c: c.hosts.mend(host)  # noqa: E731
    return Fault(step, lambda c: c.hosts.cut(host), host=host, seconds=seconds, undo=undo)


def fill_disk(host: int, seconds: float, step: int = STRUCK) -> Fault:
    """The disk with a host's workdir and temporary files is full for so many seconds."""

    def filler(cluster: Cluster) -> Path:
        return cluster.folder / f"host{host}" / "filler"

    def strike(cluster: Cluster) -> None:
        with suppress(OSError), filler(cluster).open("wb", buffering=0) as file:
            while file.write(bytes(1 << 14)):
                pass

    undo: Any = lambda c: filler(c).unlink()  # noqa: E731
    return Fault(step, strike, host=host, seconds=seconds, undo=undo, disk=True)


def notice(step: int = STRUCK) -> Fault:
    """All hosts get notice, and are back when the run has ended."""

    def strike(cluster: Cluster) -> None:
        for run in cluster.runs.values():
            run.process.send_signal(signal.SIGTERM)
        until(lambda: not [*cluster.folder.glob("caught-*")], START)  # the rank has it

    def undo(cluster: Cluster) -> None:
        for host in list(cluster.runs):
            cluster.start(host)

    return Fault(step, strike, seconds=LIMIT, undo=undo)


def leave(host: int, step: int) -> Fault:
    """A host is taken away, with notice."""
    return Fault(step, lambda c: c.runs[host].process.send_signal(signal.SIGTERM))


def join(host: int, step: int) -> Fault:
    """A host is there, for the first time or again. The others have not ended before it is."""

    def strike(cluster: Cluster) -> None:
        cluster.start(host)
        until(lambda: not psutil.pid_exists(cluster.caught), START)

    return Fault(step, strike)


@dataclass(frozen=True)
class Found:
    """What has come of a run.

    Attributes:
        statuses: of the torchrun of each host that was there in the end.
        starts: of rank 0.
        seconds: from the first fault to the next new step of rank 0, or to the end without one.
        lost: steps that were done twice.
        weights: a hash of all weights in the last checkpoint.
        losses: of all steps.
        scores: validation loss and BLEU or accuracy after each epoch, where the run is evaluated.
        left: processes, files and shared memory that are still there.
    """

    statuses: list[int | None]
    starts: int
    seconds: float
    lost: int
    weights: str
    losses: list[float]
    scores: list[tuple[float, float]]
    left: list[str]
    said: str
    workdirs: list[list[str]]


def run(
    layout: Layout, hosts: int, *faults: Fault, elastic: bool = False, forks: bool = False
) -> Found:
    """Starts the run, does everything to it in the order of the steps, and waits for its end.
    Elastic: hosts may be fewer. Forks: ranks do not start from nothing (tests/faults/program.py).
    Raises MissingError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(scratch()))
        machines = stack.enter_context(Hosts(hosts))
        nodes = f"1:{hosts}" if elastic else str(hosts)
        cluster = Cluster(layout, machines, folder, nodes, forks)
        for fault in faults:
            cluster.trap(fault).touch()
            if fault.disk:
                disk = folder / f"host{fault.host}"
                disk.mkdir()
                command(f"mount -t tmpfs -o size={TMPFS} none {disk}")
                stack.callback(command, f"umount -l {disk}")
        stack.callback(cluster.close)
        for host in range(hosts):
            cluster.start(host)
        struck = [cluster.strike(fault) for fault in faults]
        ended = until(cluster.over, LIMIT)
        return _found(cluster, min(struck, default=0.0), ended)


def hash_of(workdir: Path) -> str:
    """A hash of all weights in the newest checkpoint; of nothing if there is no checkpoint."""
    digest = hashlib.sha256()
    with suppress(AssertionError):  # no checkpoint
        for name, tensor in sorted(weights(workdir).items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def scores_of(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Validation loss and score of each epoch, of the lines of metrics.jsonl."""
    return [
        (row["validation_loss"], row[name])
        for row in rows
        for name in ("bleu", "accuracy")
        if name in row
    ]


def _found(cluster: Cluster, struck: float, ended: bool) -> Found:
    """What is left of a run that has ended, or should have."""
    for run in cluster.runs.values():
        run.wait(2.0)
    end = time.monotonic()
    every = cluster.steps()
    steps = [(step, when) for step, when in every if step]
    done = max((step for step, when in steps if when <= struck), default=0)
    new = [when for step, when in steps if when > struck and step > done]
    workdirs = [cluster.folder / f"host{host}" / "work" for host in range(cluster.hosts.number)]
    rows = read_metrics(workdirs[0]) if (workdirs[0] / METRICS).exists() else []
    return Found(
        statuses=[run.process.poll() for run in cluster.runs.values()],
        starts=len(every) - len(steps),
        seconds=(new[0] if new else end) - struck,
        lost=len(steps) - len({step for step, _ in steps}),
        weights=hash_of(workdirs[0]) if ended else "the run has not ended",
        losses=[row["loss"] for row in rows if "loss" in row],
        scores=scores_of(rows),
        left=[what for run in cluster.all for what in run.leftovers()],
        said=cluster.said(),
        workdirs=[sorted(p.name for p in w.glob("checkpoints/*")) for w in workdirs],
    )
