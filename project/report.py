"""Makes the runs of CMU 11-868, assignment 4, and one page of their figures, tables and answers.

    python project/report.py                         writes workdir_report/report.html
    python project/report.py --n_epochs 2 --n_train 200        smaller runs

One process and two, one stage at a time and a pipeline train the same model on the same batches,
each process on one core, each stage on an equal share of all. Two short runs leave the gradients of
their first step. A finished run is kept and used again as long as its options are the same, so the
program may be interrupted and started again; a run that was interrupted begins anew, since its
times would not compare. The page needs no network and no JavaScript, and every number in it comes
from the files of the runs.
"""

from __future__ import annotations

import argparse
import base64
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.schedules.catalogue import find
from pipeline.schedules.schedule import bubble
from project import plot
from project.command_line import Parser, count
from project.figures.recorded import THROUGHPUT, TIME, Run, speed_up
from project.figures.steps import bubbles, draw_step, in_step, plot_schedule, steps_of
from project.figures.style import readable, with_error
from project.plot import OUTPUT, YLABELS, describe
from training.files import SUMMARY, writing
from training.launch.errors import RunError, say

ROOT = Path(__file__).resolve().parents[1]
REAL = "real_tokens_per_sec"
COMMON = {  # options of all runs
    "model": "gpt2-mini", "batch_size": "128", "n_validation": "100", "n_test": "10",
    "device": "cpu",
}  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--workdir", type=Path, default=Path("workdir_report"), metavar="DIR",
        help="folder for the runs and the page [%(default)s]")  # fmt: skip
    add("--output", type=Path, default=OUTPUT, metavar="DIR", help="of the figures [%(default)s]")
    add("--n_train", type=count, default=1536, metavar="N", help="training examples [%(default)s]")
    add("--n_epochs", type=count, default=4, metavar="N", help="2 or more [%(default)s]")
    args = parser.parse_args(argv)
    if args.n_epochs < 2:
        parser.error("--n_epochs 1: the first epoch is left out of all times, so take 2 or more")
    return args


@dataclass(frozen=True)
class MadeRun(Run):
    """A run of the report: its folder, name, options and output files; and, once it is made, what
    it left."""

    name: str
    options: dict[str, str]
    leaves: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The command line after `python`."""
        program = "run_pipeline" if "num_devices" in self.options else "run_data_parallel"
        given = [f"--{name}={value}" for name, value in self.options.items()]
        return [f"project/{program}.py", *given, f"--workdir={self.folder}"]

    def finished(self) -> bool:
        """Whether its files exist and come from a run with the same options."""
        if not all((self.folder / name).is_file() for name in self.leaves):
            return False
        found = Run(self.folder).summary  # not its own: the run may yet be made again
        return all(str(found.get(name)) == value for name, value in self.options.items())

    def shown(self, metric: str, unit: str = "") -> str:
        """The mean over all epochs but the first and its spread: of the slowest rank's time, or of
        the ranks' sum."""
        mean, std = self.over_epochs(metric)
        return f"{with_error(mean, std if len(self.ranks[0]) > 2 else 0.0)}{unit}"

    def positions(self) -> float:
        """Positions of an epoch, over all ranks, padding included."""
        return fmean(sum(e[TIME] * e[THROUGHPUT] for e in es) for es in self.epochs()[1:])

    def bubbles(self) -> tuple[float, float]:
        """The idle part of a step: the mean over workers and recorded steps but the first; and that
        of the schedule, if all actions take equally long."""
        workers, _ = self.timeline
        idle = [fmean(bubbles(in_step(workers, k)).values()) for k in steps_of(workers)]
        used = self.summary
        schedule = find(used["schedule"], used["chunks"])
        return fmean(idle), float(bubble(schedule(used["num_devices"], used["num_microbatches"])))


def planned(workdir: Path, n_train: int, n_epochs: int) -> dict[str, MadeRun]:
    """All runs by key, in order."""
    common = COMMON | {"n_train": str(n_train)}
    one, two = ({"world_size": n, "cores_per_rank": "1"} for n in "12")
    long = common | {"n_epochs": str(n_epochs), "timeline": "3", "keep": "0"}
    flow = long | {"num_devices": "2", "num_microbatches": "8"}
    short = common | {"num_batches": "1", "pytest": "True"}
    files = ("options.json", *(f"tests/model{rank}_gradients.pth" for rank in range(2)))
    runs = (
        ("dp1", "one process", long | one, (SUMMARY,)),
        ("dp2", "two processes", long | two, (SUMMARY,)),
        ("mp", "model parallel", flow | {"model_parallel_mode": "model_parallel"}, (SUMMARY,)),
        ("pp", "pipeline", flow | {"model_parallel_mode": "pipeline_parallel"}, (SUMMARY,)),
        ("gradients1", "gradients of one process", short | one, files[:2]),
        ("gradients2", "gradients of two processes", short | two, files),
    )
    return {key: MadeRun(workdir / key, *about) for key, *about in runs}  # type: ignore[arg-type]


def make(run: MadeRun) -> None:
    """Runs the program to its end, in the run's folder, as gradients go to the current folder.
    Raises RunError if it fails."""
    with writing(run.folder):
        run.folder.mkdir(parents=True, exist_ok=True)
    for name in run.leaves:
        (run.folder / name).unlink(missing_ok=True)
    program, *options = run.command
    options[-1] = f"--workdir={run.folder.resolve()}"
    command = [sys.executable, str(ROOT / program), *options]
    with subprocess.Popen(command, cwd=run.folder) as process:
        try:
            status = process.wait()
        except BaseException:  # e.g. Ctrl-C; the run ends its own ranks, and is waited for
            process.terminate()
            say("Runs that have finished are kept: the same command makes the others.\n")
            raise
    if status:
        raise RunError(
            f"the run {run.folder.name} ended with status {status}; its command was: python "
            f"{shlex.join(run.command)}"
        )


def compare_gradients(one: MadeRun, two: MadeRun) -> list[dict[str, Any]]:
    """Per parameter: its largest gradient on one process; the largest difference between the two
    ranks, and between the first rank and one process."""
    alone, *ranks = (
        torch.load(run.folder / name, weights_only=True)
        for run in (one, two)
        for name in run.leaves
        if name.endswith(".pth")
    )
    return [
        {
            "name": name,
            "largest": float(gradient.abs().max()),
            "ranks": max(float((other[name] - ranks[0][name]).abs().max()) for other in ranks),
            "alone": float((ranks[0][name] - gradient).abs().max()),
        }
        for name, gradient in alone.items()
    ]


def draw_all(runs: dict[str, MadeRun], output: Path) -> list[Path]:
    """Draws the figures; returns their paths."""
    flow, long = runs["pp"].summary, [runs[key] for key in ("dp1", "dp2", "mp", "pp")]
    sizes = flow["num_devices"], flow["num_microbatches"], flow["chunks"]
    paths = plot.plot_data_parallel(runs["dp1"], runs["dp2"], output)
    paths += plot.plot_pipeline(runs["mp"], runs["pp"], output)
    paths.append(plot.plot_losses(long, output / "losses.png", [run.name for run in long]))
    for key in ("dp2", "pp"):
        path = output / f"timeline_{key}.png"
        paths.append(draw_step(path, *runs[key].timeline, run=describe(runs[key])))
    return [*paths, plot_schedule(flow["schedule"], *sizes, output / "schedule_pp.png")]


def write_page(runs: dict[str, MadeRun], page: Path, output: Path) -> Path:
    """Draws the figures into `output` and writes the page, which embeds them; returns its path.
    Raises UserError if a run's files are missing or cannot be compared."""
    figures = draw_all(runs, output)
    long = {key: run for key, run in runs.items() if SUMMARY in run.leaves}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["number"] = readable
    environment.filters["tiny"] = lambda value: f"{value:.1e}" if value else "0"
    environment.filters["share"] = lambda value: f"{value:.1%}"

    def furthest(run: MadeRun) -> float:  # from the losses of one process, relative
        losses = zip(run.summary["loss"], long["dp1"].summary["loss"], strict=True)
        return max(abs(loss - alone) / abs(alone) for loss, alone in losses)

    text = environment.get_template("report.html").render(
        about=describe(long["dp2"]),
        runs=long,
        load=max(run.summary["load"] for run in long.values()),
        cores=os.cpu_count() or 1,
        dp={metric: speed_up(long["dp2"], long["dp1"], metric) for metric in (*YLABELS, REAL)},
        pp={metric: speed_up(long["pp"], long["mp"], metric) for metric in YLABELS},
        apart={key: furthest(run) for key, run in long.items()},
        gradients=compare_gradients(runs["gradients1"], runs["gradients2"]),
        images={path.stem: base64.b64encode(path.read_bytes()).decode() for path in figures},
        commands=[shlex.join(["python", *run.command]) for run in runs.values()],
        TIME=TIME, THROUGHPUT=THROUGHPUT, REAL=REAL,
    )  # fmt: skip
    with writing(page):
        page.write_text(text, encoding="utf-8")
    return page


def main(argv: Sequence[str] | None = None) -> None:
    """The program."""
    args = parse(argv)
    runs = planned(args.workdir, args.n_train, args.n_epochs)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 0.3 * cores:
        print(f"The load of this machine is {load:.1f}, on {cores} cores: times will be off.")
    for number, run in enumerate(runs.values(), 1):
        what = f"[{number}/{len(runs)}] {run.name}"
        if run.finished():
            print(f"{what}: finished before, in {run.folder}/", flush=True)
            continue
        print(f"{what}: python {shlex.join(run.command)}", flush=True)
        start = time.perf_counter()
        make(run)
        print(f"{what}: {time.perf_counter() - start:.0f} s\n", flush=True)
    page = write_page(runs, args.workdir / "report.html", args.output)
    print(f"The figures are in {args.output}/, the page is {page}.")


if __name__ == "__main__":
    from project.utils import run_program

    run_program(main)
