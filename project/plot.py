"""Draws every figure from the result files of runs, never from numbers typed in.

    python project/plot.py training_time workdir_1 workdir_2    also tokens_per_sec
    python project/plot.py training workdir              several runs: a curve for each
    python project/plot.py schedule --schedule 1f1b --num_devices 4 --num_microbatches 8
    python project/plot.py timeline workdir_pp
    python project/plot.py split_time ddp=1 ddp=2        also throughput, memory

A run is named by its folder; or as ddp=2, the run that `python project/train.py ddp --world_size 2`
leaves in workdir/ddp2; or as ddp, its run with the most processes. A picture goes into the folder
of the first run, unless -o says otherwise. `make figures` makes all runs and draws all figures.
Bars are means, error bars standard deviations; the first epoch or step is slower and left out.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.schedules.catalogue import SCHEDULES
from pipeline.schedules.written import label_of
from project.command_line import Parser
from runtime.axes import AXES
from training.launch.signals import ENDING_SIGNALS, end_process, set_handlers
from training.options import count

WORKDIR = Path("workdir")
FORMATS = (".png", ".pdf", ".svg")
FIGURES = {
    "training_time": "seconds per epoch of each run, beside the ideal",
    "tokens_per_sec": "tokens per second of each run, padding included, beside the ideal",
    "throughput": "examples per second of each run, beside the ideal",
    "training": "losses and score of each run after each epoch",
    "timeline": "what each worker did in one step, and when; a pipeline's above its ideal",
    "split_time": "computation, exposed communication and idle time of a step",
    "memory": "parameters, gradients, optimizer state and peak of each rank",
    "schedule": "clock table of a schedule, printed and drawn",
}


def parse_plot(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="figure", required=True, metavar="COMMAND")
    for name, text in FIGURES.items():
        option = commands.add_parser(name, help=text).add_argument
        where = str(WORKDIR) if name == "schedule" else "the first run's folder"
        option("-o", "--output", type=Path, metavar="PATH",
               help=f"the picture, or a folder for it; default: {where}")  # fmt: skip
        if name == "schedule":
            break
        option("runs", nargs=1 if name == "timeline" else "+", metavar="RUN",
               help="a run's workdir; or e.g. ddp=1 ddp=2, or ddp fsdp")  # fmt: skip
        option("--workdir", type=Path, metavar="DIR", default=WORKDIR,
               help="folder of the runs' folders; default: workdir")  # fmt: skip
        if name == "timeline":
            option("--step", type=count, metavar="K", help="from 1; default: the median step")
    names = ", ".join(SCHEDULES)
    option("--schedule", default="1f1b", help=f"{names}, or a file; default: 1f1b")
    option("--num_devices", "--stages", type=count, metavar="K",
           help="ranks; each has one stage, or two if the schedule is a V; default: 4")  # fmt: skip
    option("--num_microbatches", "--n_chunk", type=count, metavar="M", help="default: 8")
    option("--chunks", type=count, metavar="V", help="stages per rank, if interleaved; default: 2")
    return parser.parse_args(argv)


if __name__ == "__main__":  # before torch and matplotlib are imported, which takes seconds
    set_handlers(ENDING_SIGNALS, end_process)
    parse_plot()

from project.figures.bars import Bar, draw_bars
from project.figures.compared import compare_step
from project.figures.epochs import plot_training
from project.figures.gantt import draw_step, plot_schedule
from project.figures.runs import Run, in_step, mean_and_std, shares, steps_of
from project.figures.style import readable
from project.strategies import STRATEGIES
from training.files import SUMMARY
from training.launch.errors import UserError

YLABELS = {
    "training_time": "training time of an epoch (s)",
    "tokens_per_sec": "tokens per second, with padding",
    "throughput": "examples per second",
}
ALIKE = (  # options that must be equal for times to be comparable
    "model", "precision", "vgg_width", "n_layer", "n_embd", "n_head", "vocab_size", "dataset",
    "n_train", "num_devices",
)  # fmt: skip
FACTS = (  # for the line below a picture
    "model", "strategy", "world_size", *(axis for axis in AXES if axis != "dp"), "num_devices",
    "schedule", "num_microbatches", "batch_size",
)  # fmt: skip
TIMES = ("forward", "recompute", "backward", "optimizer", "communication", "idle")  # in a bar


def plot(
    means: Sequence[float],
    stds: Sequence[float],
    labels: Sequence[str],
    fig_name: str | Path,
    ylabel: str = YLABELS["training_time"],
) -> Path:
    """The course's function: a bar with its error bar per label, saved as `fig_name`. Raises
    ValueError if the three differ in length."""
    values = zip(labels, means, stds, strict=True)
    bars = [Bar(label, {"measured": mean}, std) for label, mean, std in values]
    return draw_bars(Path(fig_name), bars, "", ylabel)


def plot_results(
    metrics_data: Mapping[str, Sequence[Mapping[str, float]]],
    metric: str,
    fig_name: str | Path | None = None,
) -> Path:
    """The course's function: a bar per run for one metric, with its spread over the epochs.

    Args:
        metrics_data: per label, the results of the epochs that count, as a run writes them.
        metric: training_time, tokens_per_sec, validation_loss, bleu or another of their keys.
        fig_name: by default submit_figures/{metric}.png.
    """
    values = [mean_and_std([epoch[metric] for epoch in run]) for run in metrics_data.values()]
    means, stds = [mean for mean, _ in values], [std for _, std in values]
    ylabel = YLABELS.get(metric, metric.replace("_", " "))
    fig_name = fig_name or Path("submit_figures") / f"{metric}.png"
    return plot(means, stds, list(metrics_data), fig_name, ylabel)


def describe(*runs: Run) -> str:
    """What was trained and how, in a line: the options that all runs share and that are not 1."""
    shared = {name: {run.summary.get(name) for run in runs} for name in FACTS}
    shared["schedule"] = {name and label_of(name) for name in shared["schedule"]}
    return ", ".join(
        f"{name} {value}"
        for name, (value, *others) in shared.items()
        if not others and value not in (None, 1)
    )


def run_of(word: str, root: Path) -> Run:
    """The run that a word names: a folder, also one in `root`, such as ddp2; or a run of train.py
    by its strategy and number of processes, as ddp=2, where ddp alone is the one with the most. If
    there is none, raises UserError with the command that makes it."""
    strategy, _, ranks = word.partition("=")
    if strategy not in STRATEGIES:
        folder = root / word
        return Run(folder if folder.is_dir() else Path(word))
    made = {}
    for path in root.glob(f"{strategy}*/{SUMMARY}"):  # ddp2, or 3d2x1x2-cp2: ranks on each axis
        lengths = path.parent.name.removeprefix(strategy)
        if re.fullmatch(r"\d+((x|-[a-z]+)\d+)*", lengths):
            made[math.prod(map(int, re.findall(r"\d+", lengths)))] = path.parent
    if ranks:
        made = {number: folder for number, folder in made.items() if str(number) == ranks}
    if not made:
        own = STRATEGIES[strategy].axis
        size = f" --{'world_size' if own else 'dp'} {ranks}" if ranks else ""
        into = "" if root == WORKDIR else f" --workdir {shlex.quote(f'{root}/{strategy}{ranks}')}"
        raise UserError(
            f"no finished run in {root}/{strategy}{ranks or 'N'}; make it with: python "
            f"project/train.py {strategy}{size} --num_batches 9 --timeline 8{into}"
        )
    return Run(made[max(made)])


def plot_split_time(runs: Sequence[Run], path: Path) -> Path:
    """Draws where the time of a step goes: a stacked bar per run."""
    bars = []
    for run in runs:
        steps = [shares(in_step(run.timeline, step)) for step in steps_of(run.timeline)]
        bars.append(Bar(run.name, {kind: 1e3 * fmean(s[kind] for s in steps) for kind in TIMES}))
    last = bars[-1]
    sent, idle = (last.parts[kind] / last.total for kind in ("communication", "idle"))
    title = f"{last.label}: communication {sent:.0%} of a step, idle {idle:.0%}"
    foot = "communication: exchange and waiting that no computation hides"
    return draw_bars(path, bars, title, "a step (ms)", foot)


def comparable(run: Run, other: Run) -> bool:
    """Whether two runs did the same work in the same way, apart from the number of ranks or, with
    stages in threads, the schedule."""
    threads = run.summary.get("num_devices")
    return run.same(other, *ALIKE) and bool(threads or run.same(other, "strategy"))


def ideal_speed(run: Run) -> float:
    """How many times as fast as one worker a run could be. With m micro-batches a pipeline of n
    stages takes m+n-1 clocks, where one stage at a time takes n*m."""
    used = run.summary
    if used.get("model_parallel_mode") != "pipeline_parallel":
        return float(used.get("world_size", 1))
    m, n = used["num_microbatches"], used["num_devices"]
    return float(n * m / (m + n - 1))


def plot_speed(runs: Sequence[Run], path: Path, metric: str) -> Path:
    """Draws the time or the throughput of runs. Runs that are `comparable` are compared with the
    one of lowest `ideal_speed`, such as one process: the speed-up is written into the bar. The
    ideal stands beside it; for epochs only if both runs have as many cores per process and as large
    batches."""
    power = -1 if metric == "training_time" else 1  # of a time, less is better
    bars, said = list[Bar](), []
    for run in runs:
        mean, std = run.speed_in(metric)
        said.append(f"{run.name} {readable(mean)}")
        alike = [other for other in runs if comparable(run, other)]
        base = min(alike, key=ideal_speed)
        if run is base:
            role = "baseline" if len(alike) > 1 else "measured"
            bars.append(Bar(run.name, {role: mean}, std))
            continue
        before, _ = base.speed_in(metric)
        shown = {run.name: (mean, std)}
        if metric == "training_time" and len(run.epochs[0]) > 1:
            ranks = enumerate(zip(*(run.epochs[1:] or run.epochs), strict=True))
            shown = {
                f"{run.name}, rank {r}": mean_and_std([epoch[metric] for epoch in epochs])
                for r, epochs in ranks
            }
        for label, (value, spread) in shown.items():
            faster = f"{(value / before) ** power:.2f}x"
            bars.append(Bar(label, {"measured": value}, spread, faster))
        if metric == "throughput" or run.same(base, "cores", "batch_size"):
            ideal = ideal_speed(run) / ideal_speed(base)
            bars.append(Bar("ideal", {"ideal": before * ideal**power}, inside=f"{ideal:.3g}x"))
    title = f"{YLABELS[metric]}: {', '.join(said)}"
    return draw_bars(path, bars, title, YLABELS[metric], describe(*runs))


def plot_memory(runs: Sequence[Run], path: Path) -> Path:
    """Draws parameters, gradients, optimizer state and the rest of the peak, for each rank of each
    run."""
    bars, most = [], list[str]()
    for run in runs:
        state = run.finished["state_bytes"]
        for rank, peak in enumerate(run.summary["peak_rss_bytes"]):
            parts = {kind: values[rank] / 1e6 for kind, values in state.items()}
            parts["rest of the peak"] = peak / 1e6 - sum(parts.values())
            bars.append(Bar(f"{run.name}, rank {rank}", parts))
        held = max(map(sum, zip(*state.values(), strict=True)))
        most.append(f"{run.name} {readable(held / 1e6)}")
    title = f"MB of state per rank: {', '.join(most)}"
    foot = "rest of the peak: activations, Python and libraries"
    return draw_bars(path, bars, title, "MB", foot)


def draw_figure(args: argparse.Namespace) -> Path:
    """Draws what the command line asks for; returns the path."""
    name = args.figure

    def path(folder: Path, stem: str = name) -> Path:
        output = args.output or folder
        if output.suffix in FORMATS:
            return output
        if args.output and output.suffix and not output.is_dir():
            ends = ", ".join(FORMATS)
            raise UserError(f"--output {output}: a picture ends in {ends}; a folder must exist")
        return output / f"{stem}.png"

    if name == "schedule":
        sizes = args.num_devices, args.num_microbatches, args.chunks
        stem = f"schedule_{Path(args.schedule.partition(':')[0]).stem}"
        return plot_schedule(args.schedule, *sizes, path(WORKDIR, stem))
    runs = [run_of(word, args.workdir) for word in ",".join(args.runs).split(",")]
    first = runs[0].folder
    if name == "training":
        picture = path(first, "losses" if len(runs) > 1 else "training")
        return plot_training(picture, [run.folder for run in runs], describe(*runs))
    if name == "timeline":
        (run,) = runs
        step = compare_step(run, step=args.step and args.step - 1)  # files count from 0
        return draw_step(path(first, f"timeline_{run.name}"), step, "ideal", describe(run))
    if name in YLABELS:
        return plot_speed(runs, path(first), name)
    return (plot_memory if name == "memory" else plot_split_time)(runs, path(first))


def main() -> None:
    """The program."""
    print(f"drew {draw_figure(parse_plot())}")


if __name__ == "__main__":
    from project.utils import run_program

    run_program(main)
