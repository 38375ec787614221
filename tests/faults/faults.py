"""What can happen to a run under torchrun, as sentences, and what comes of it.

    found = Faults().kill(rank=1, step=3).cut_link(host=1, seconds=40).strike(LAYOUTS["fsdp"], 2)
    assert found.weights == Faults().strike(LAYOUTS["fsdp"], 2).weights

Each fault strikes once, after the given step, while the first rank that it concerns waits in a trap
(tests/faults/program.py). So the same sentence does the same to a run on every machine.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.programs import TORCHRUN
from tests.chaos.run import Run, scratch, until
from tests.faults.hosts import Hosts, command
from tests.project.programs import weights
from training.files import METRICS
from training.results import read_metrics

START = 120.0  # seconds that a run may take to the step of its next fault
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

    def __init__(
        self, layout: Layout, hosts: Hosts, folder: Path, nodes: str, timeout: float = TIMEOUT
    ) -> None:
        self.layout, self.hosts, self.folder, self.timeout = layout, hosts, folder, timeout
        self.nodes = nodes
        self.each = layout.alone if hosts.number == 1 else layout.each  # ranks of a host
        self.runs: dict[int, Run] = {}
        self.all: list[Run] = []
        self.clocks: dict[int, float] = {}
        self.hosts_join = False
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
        options += [*OPTIONS, "--timeout", str(self.timeout)]
        environment = [
            "env", f"FAULTS={self.folder}", f"FAULT_CLOCK={self.clocks.get(host, '')}",
            f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE={int(self.hosts_join)}",  # see docs/faults.md
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


@dataclass(frozen=True)
class Fault:
    """Strikes while `rank` waits after `step`; after so many seconds it is undone."""

    words: str
    host: int | None
    rank: int
    step: int
    strike: Callable[[Cluster], None]
    seconds: float = 0.0
    undo: Callable[[Cluster], None] | None = None


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

    @property
    def blamed(self) -> str:
        """The last line of each distinct error, without its numbers."""
        lines = re.findall(r"^(?:[\w.]+(?:Error|Exception)|--workdir .*?): .*$", self.said, re.M)
        lines += re.findall(r"^.*ranks? waits? in .*$", self.said, re.M)
        return "; ".join(dict.fromkeys(line[:110] for line in lines))


@dataclass
class Faults:
    """The faults of a run, in the order of their steps. Each method adds one and returns itself."""

    faults: list[Fault] = field(default_factory=list)
    clocks: dict[int, float] = field(default_factory=dict)
    hosts_join: bool = False

    def _add(
        self, words: str, step: int, strike: Callable[[Cluster], None], *, host: int | None = None,
        rank: int = 0, seconds: float = 0.0, undo: Callable[[Cluster], None] | None = None,
    ) -> Faults:  # fmt: skip
        self.faults.append(Fault(words, host, rank, step, strike, seconds, undo))
        return self

    def kill(self, rank: int, step: int = STRUCK) -> Faults:
        """The system kills a rank, as when memory is short."""
        return self._add(
            f"rank {rank} killed", step, lambda c: os.kill(c.caught, signal.SIGKILL), rank=rank
        )

    def stop(self, rank: int, step: int = STRUCK) -> Faults:
        """A rank does nothing any more, and does not end."""
        return self._add(
            f"rank {rank} stopped", step, lambda c: os.kill(c.caught, signal.SIGSTOP), rank=rank
        )

    def kill_host(self, host: int, seconds: float, step: int = STRUCK) -> Faults:
        """A host is without power, and is back after so many seconds."""

        def strike(cluster: Cluster) -> None:
            cluster.hosts.cut(host)  # nobody hears of it
            for process in cluster.runs[host].processes():
                with suppress(psutil.Error):
                    process.kill()

        def undo(cluster: Cluster) -> None:
            cluster.hosts.mend(host)
            cluster.start(host)

        self.hosts_join = True
        words = f"host {host} killed, back after {seconds:g} s"
        return self._add(words, step, strike, host=host, seconds=seconds, undo=undo)

    def cut_link(self, host: int, seconds: float, step: int = STRUCK) -> Faults:
        """A host is not reached for so many seconds."""
        return self._add(
            f"link of host {host} cut for {seconds:g} s", step, lambda c: c.hosts.cut(host),
            host=host, seconds=seconds, undo=lambda c: c.hosts.mend(host),
        )  # fmt: skip

    def slow_link(self, host: int, discipline: str, step: int = STRUCK) -> Faults:
        """A link is slow, in the words of `tc`."""
        return self._add(
            f"link of host {host}: {discipline}", step, lambda c: c.hosts.slow(host, discipline),
            host=host,
        )  # fmt: skip

    def fill_disk(self, host: int, seconds: float, step: int = STRUCK) -> Faults:
        """The disk with a host's workdir and temporary files is full for so many seconds."""

        def filler(cluster: Cluster) -> Path:
            return cluster.folder / f"host{host}" / "filler"

        def strike(cluster: Cluster) -> None:
            with suppress(OSError), filler(cluster).open("wb", buffering=0) as file:
                while file.write(bytes(1 << 14)):
                    pass

        return self._add(
            f"disk of host {host} full for {seconds:g} s", step, strike, host=host,
            seconds=seconds, undo=lambda c: filler(c).unlink(),
        )  # fmt: skip

    def shift_clock(self, host: int, hours: float) -> Faults:
        """The clock of a host is wrong, from the start."""
        self.clocks[host] = hours * 3600
        return self._add(f"clock of host {host} {hours:+g} h", STRUCK, lambda _: None, host=host)

    def notice(self, step: int = STRUCK) -> Faults:
        """All hosts get notice, and are back when the run has ended."""

        def strike(cluster: Cluster) -> None:
            for run in cluster.runs.values():
                run.process.send_signal(signal.SIGTERM)

        def undo(cluster: Cluster) -> None:
            for host in list(cluster.runs):
                cluster.start(host)

        return self._add("notice", step, strike, seconds=LIMIT, undo=undo)

    def leave(self, host: int, step: int) -> Faults:
        """A host is taken away, with notice."""

        def strike(cluster: Cluster) -> None:
            cluster.runs[host].process.send_signal(signal.SIGTERM)

        return self._add(f"host {host} leaves", step, strike, host=0)

    def join(self, host: int, step: int) -> Faults:
        """A host is there, for the first time or again. The others have not ended before it is."""

        def strike(cluster: Cluster) -> None:
            cluster.start(host)
            until(lambda: not psutil.pid_exists(cluster.caught), START)

        self.hosts_join = True
        return self._add(f"host {host} joins", step, strike, host=0)

    def __str__(self) -> str:
        return ", ".join(fault.words for fault in self.faults) or "none"

    def strike(
        self, layout: Layout, hosts: int = 1, *, elastic: bool = False, timeout: float = TIMEOUT
    ) -> Found:
        """Starts the run, does everything to it, and waits for its end. Elastic: hosts may be
        fewer. Raises MissingError."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(scratch()))
            machines = stack.enter_context(Hosts(hosts))
            cluster = Cluster(
                layout, machines, folder, f"1:{hosts}" if elastic else str(hosts), timeout
            )
            cluster.clocks, cluster.hosts_join = self.clocks, self.hosts_join
            for fault in self.faults:
                first = fault.rank if fault.host is None else fault.host * cluster.each
                (folder / f"trap-{first}-{fault.step}").touch()
                if "disk" in fault.words:
                    disk = folder / f"host{fault.host}"
                    disk.mkdir()
                    command(f"mount -t tmpfs -o size={TMPFS} none {disk}")
                    stack.callback(command, f"umount -l {disk}")
            stack.callback(cluster.close)
            for host in range(hosts):
                cluster.start(host)
            struck = [self._one(fault, cluster) for fault in self.faults]
            ended = until(lambda: _over(cluster), LIMIT)
            return _found(cluster, min(struck, default=0.0), ended)

    def _one(self, fault: Fault, cluster: Cluster) -> float:
        """Strikes when the rank has come to its trap, and returns when that was."""
        first = fault.rank if fault.host is None else fault.host * cluster.each
        caught = cluster.folder / f"caught-{first}-{fault.step}"
        until(lambda: caught.exists() or _over(cluster), START)
        struck = time.monotonic()
        if not caught.exists():  # what the run said shows why
            return struck
        cluster.caught = int(caught.read_text())
        fault.strike(cluster)
        caught.unlink(missing_ok=True)
        if fault.undo is not None:
            until(lambda: _over(cluster), fault.seconds)
            fault.undo(cluster)
        return struck


def hash_of(workdir: Path) -> str:
    """Of all weights in the newest checkpoint; of none if there is no checkpoint."""
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


def _over(cluster: Cluster) -> bool:
    return all(run.process.poll() is not None for run in cluster.runs.values())


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
