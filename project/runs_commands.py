"""The commands of plot.py that compare runs of project/train.py, and draw their timelines."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from project.comparison import read_json
from project.measured import plot_timeline
from project.options import whole_number
from project.runs import STRATEGIES, SUMMARY, WORKDIR, Spec, load_runs, specs, timelines_of
from project.runs_plot import plot_memory, plot_split_time, plot_throughput
from training.checkpoint import STATE, names
from training.launch import UserError
from training.record import OPTIONS
from training.timeline import by_worker

_RUNS = """\
ddp=2 is the run in workdir/ddp2, which this makes:

    python project/train.py ddp --num_workers 2 --timeline 10

"""
RUN_FIGURES = {
    "split_time": (
        "Where the time of a step goes, run by run",
        "Forward, backward, optimizer, communication that nothing hides, and idle time.",
        "ddp=1,ddp=2",
    ),
    "throughput": (
        "Examples per second, run by run, beside the ideal",
        "The ideal of N workers is N times the run with the fewest workers of the same strategy.",
        "fsdp=1,fsdp=2",
    ),
    "memory": (
        "Memory of each rank, run by run",
        "Bytes of parameters, gradients and optimizer state, and the peak that was resident.",
        "ddp=2,fsdp=2",
    ),
    "timeline": (
        "What each worker did when in one step, beside the ideal of its schedule",
        "RUN is pipeline=3, or the workdir of any run with --timeline.",
        "pipeline=3",
    ),
}


def _run(text: str) -> str:
    """One run, or a folder."""
    if "=" in text:
        found = specs(text)
        if len(found) > 1:
            raise argparse.ArgumentTypeError(f"{text!r}: one run is drawn, e.g. pipeline=3")
    return text


def add_run_commands(
    command: Callable[[str, str, str], argparse.ArgumentParser], output: Path
) -> None:
    """Adds the commands of RUN_FIGURES to the program's."""
    for name, (summary, details, example) in RUN_FIGURES.items():
        usage = f"    python project/plot.py {name} {example}"
        one = command(name, summary, f"{details} {_RUNS}{usage}\n")
        if name == "timeline":
            one.add_argument("runs", type=_run, metavar="RUN", help=f"{example}, or a folder")
            one.add_argument(
                "--step", type=whole_number, metavar="K", help="which step (a typical one)"
            )
        else:
            one.add_argument(
                "runs", type=specs, metavar="RUNS",
                help=f"as {example}; strategies: {', '.join(STRATEGIES)}",
            )  # fmt: skip
        one.add_argument(
            "--workdir", type=Path, default=WORKDIR, metavar="DIR",
            help=f"the folder of the runs' folders ({WORKDIR})",
        )  # fmt: skip
        one.add_argument(
            "--output", type=Path, metavar="FILE", help=f"the picture ({output}/{name}.png)"
        )
        one.set_defaults(pictures=output)


def picture_of(args: argparse.Namespace, folder: Path) -> Path:
    """Where the picture goes if the command line does not say."""
    run = ""
    if args.figure == "timeline":
        run = "_" + Path(args.runs.replace("=", "")).name
    return folder / f"{args.figure}{run}.png"


def draw_runs(args: argparse.Namespace) -> Path:
    """Draws what the command line asks for; returns the path.

    Raises:
        UserError: runs are missing, or do not compare.
    """
    path = args.output or picture_of(args, args.pictures)
    if args.figure == "timeline":
        return _draw_timeline(args, path)
    plot = {
        "split_time": plot_split_time, "throughput": plot_throughput, "memory": plot_memory
    }[args.figure]  # fmt: skip
    return plot(load_runs(args.runs, args.workdir), path)


def _draw_timeline(args: argparse.Namespace, path: Path) -> Path:
    if "=" in args.runs:
        (run,) = load_runs(specs(args.runs), args.workdir)
        ranks, about = run.timelines(), dict(run.summary)
    else:
        folder = Path(args.runs)
        if not folder.is_dir():
            raise UserError(
                f"{folder} is no folder; a run is named as pipeline=3, or by its workdir"
            )
        about = read_json(folder / SUMMARY) or read_json(folder / OPTIONS)
        ranks = timelines_of(folder, f"make it with: {_remedy(folder, about)}")
    about = {**about, **ranks[0].about}
    cost = max(rank.seconds_per_event for rank in ranks)
    return plot_timeline(by_worker(ranks), path, about, args.step, cost)


def _remedy(folder: Path, options: dict[str, Any]) -> str:
    """The command that makes the run again, as far as what is left of it tells; `options` are
    those of its summary, or of its options."""
    options = options or _options_of_checkpoint(folder)
    if "strategy" in options:
        spec = Spec(options["strategy"], options["num_workers"])
        return spec.command(folder, options)
    if "model_parallel_mode" in options:
        mode = options["model_parallel_mode"]
        return (
            f"python project/run_pipeline.py --model_parallel_mode {mode} --timeline 3 "
            f"--workdir {folder}"
        )
    named = re.fullmatch(rf"({'|'.join(STRATEGIES)})([1-9]\d*)", folder.name)
    if named and not options:  # as train.py names them
        return Spec(named[1], int(named[2])).command(folder)
    return f"python project/run_data_parallel.py --timeline 3 --workdir {folder}"


def _options_of_checkpoint(folder: Path) -> dict[str, Any]:
    """Those of the newest that an interrupted run has left, if they can be read."""
    from project.session import CHECKPOINTS  # here: it takes a second to import

    with suppress(IndexError, ValueError):
        newest = names(folder / CHECKPOINTS)[-1]
        return read_json(folder / CHECKPOINTS / newest / STATE).get("options", {})
    return {}
