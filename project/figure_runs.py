"""The runs that the figures are drawn from, and the figures: tables, and what makes the runs.

A run is made once and kept; it is made again when the table gives it other options.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from project.comparison import read_json
from project.runs import SUMMARY
from training.launch import UserError, choose_device, core_slice
from training.record import OPTIONS, read_results
from training.timeline import file_name

WORKDIRS = Path("workdir_figures")


@dataclass(frozen=True)
class Run:
    """A run that figures need: a program, its options, and the results that it writes."""

    what: str
    program: str
    options: Mapping[str, str | int]
    results: tuple[str, ...]  # one result file per epoch each
    arguments: tuple[str, ...] = ()

    def command(self, folder: Path, device: str) -> list[str]:
        """The command line, but for the interpreter."""
        options = {**self.options, "device": device, "workdir": folder}
        words = (f"--{key}={value}" for key, value in options.items())
        return [self.program, *self.arguments, *words]

    def done(self, folder: Path, device: str) -> bool:
        """Whether the folder holds all results of this very run."""
        saved = read_json(folder / OPTIONS)
        same = all(saved.get(k) == v for k, v in {**self.options, "device": device}.items())
        epochs = self.options["n_epochs"]
        recorded = "timeline" not in self.options or (folder / file_name(0)).is_file()
        return (
            same
            and recorded
            and all(len(read_results(folder, name)) == epochs for name in self.results)
        )


class TrainedRun(Run):
    """A run of project/train.py, which writes a summary and no results of epochs."""

    def done(self, folder: Path, device: str) -> bool:  # noqa: ARG002
        """Whether the folder holds this very run, as far as its summary tells."""
        summary = read_json(folder / SUMMARY)
        told = {k: v for k, v in self.options.items() if k in summary}
        files = [file_name(rank) for rank in range(int(self.options["num_workers"]))]
        return (
            bool(summary)
            and all(summary[k] == v for k, v in told.items())
            and len(summary["step_seconds"]) == self.options["num_batches"]
            and all((folder / name).is_file() for name in files)
        )


ROOT = Path(__file__).resolve().parents[1]
# Nearly all time goes into training; a model that is trained so shortly translates nothing.
_SHORT = {
    "n_epochs": 5, "batch_size": 128, "n_train": 3000, "n_validation": 100, "n_test": 10,
}  # fmt: skip


def _trained(strategy: str, num_workers: int) -> TrainedRun:
    """VGG16, a core per worker: the throughput of several is compared with one's."""
    return TrainedRun(
        what=f"VGG16, {strategy}, {num_workers} worker{'s' if num_workers > 1 else ''}",
        program="project/train.py",
        arguments=(strategy,),
        options={
            "num_workers": num_workers, "num_batches": 9, "batch_size": 32, "model": "vgg16",
            "timeline": 8, "keep": 0, **({"num_microbatches": 4} if strategy == "pipeline" else {}),
        },
        results=(),
    )  # fmt: skip


def _data_parallel(world_size: int) -> Run:
    """One core per process: one process is what one core does, and N can be N times as fast."""
    return Run(
        what=f"data parallel, {world_size} process{'es' if world_size > 1 else ''}, a core each",
        program="project/run_data_parallel.py",
        options={"world_size": world_size, "cores_per_rank": 1, "timeline": 3, **_SHORT},
        results=tuple(f"rank{rank}_results" for rank in range(world_size)),
    )


def _pipeline(mode: str) -> Run:
    """Two stages, a core each. The eight blocks outweigh the head enough to be cut evenly."""
    return Run(
        what=f"{mode.replace('_', ' ')}, 2 stages, a core each",
        program="project/run_pipeline.py",
        options={
            "model_parallel_mode": mode, "num_devices": 2, "n_chunk": 8, "n_layer": 8,
            "n_embd": 256, "n_head": 4, **_SHORT, "batch_size": 64, "n_train": 1500, "timeline": 3,
        },
        results=("eval_results",),
    )  # fmt: skip


_PROGRAMS = {
    "dp1": _data_parallel(1),
    "dp2": _data_parallel(2),
    "mp": _pipeline("model_parallel"),
    "pp": _pipeline("pipeline_parallel"),
}
TRAINED = {
    f"{strategy}{n}": _trained(strategy, n)
    for strategy, n in (
        ("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2), ("model", 2), ("pipeline", 2)
    )
}  # fmt: skip
RUNS: dict[str, Run] = {**_PROGRAMS, **TRAINED}
_DP1, _DP2, _MP, _PP = (WORKDIRS / name for name in _PROGRAMS)
_ALL = "ddp=1,ddp=2,fsdp=1,fsdp=2,model=2,pipeline=2"
TRAINED_FIGURES = tuple(
    (figure, runs, f"--workdir={WORKDIRS}")
    for figure, runs in (
        ("split_time", _ALL),
        ("throughput", _ALL),
        ("memory", "ddp=2,fsdp=2"),
        ("timeline", "pipeline=2"),
        ("timeline", "fsdp=2"),
    )
)
FIGURES = (  # command lines of plot.py, less --output
    ("data_parallel", f"--single={_DP1}", f"--multiple={_DP2}"),
    ("pipeline", f"--model_parallel={_MP}", f"--pipeline_parallel={_PP}"),
    ("schedule", "--schedule=gpipe"),
    ("schedule", "--schedule=1f1b"),
    ("timeline", str(_DP2)),
    ("timeline", str(_PP)),
    *TRAINED_FIGURES,
)


def make_runs(device: str, again: bool = False) -> None:
    """Makes the runs that are missing, or all of them `again`, saying which.

    Raises:
        UserError: a run failed.
    """
    if device == "auto":  # the runs write down what it means
        device = choose_device(device, 0, 1).type
    missing = [name for name, run in RUNS.items() if again or not run.done(WORKDIRS / name, device)]
    if missing and device == "cpu" and len(core_slice(0, 1)) == 1:
        print("Only one core may be used here: several processes will not be faster than one.")
    for i, name in enumerate(missing):
        run, folder = RUNS[name], WORKDIRS / name
        command = run.command(folder, device)
        print(f"[{i + 1}/{len(missing)}] {run.what}\npython {' '.join(command)}", flush=True)
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, ROOT / command[0], *command[1:]], check=False)
        if done.returncode:
            for name in (OPTIONS, SUMMARY):  # what it left counts for nothing
                (folder / name).unlink(missing_ok=True)
            raise UserError(f"status {done.returncode} from: python {' '.join(command)}")
        print(f"[{i + 1}/{len(missing)}] took {time.perf_counter() - begin:.0f} s\n", flush=True)
