"""Draws every figure from the result files of runs, never from numbers typed in.

    python project/plot.py data_parallel --single workdir_1 --multiple workdir_2
    python project/plot.py pipeline --model_parallel workdir_mp --pipeline_parallel workdir_pp
    python project/plot.py training workdir              of several: their losses beside each other
    python project/plot.py schedule --schedule 1f1b --num_devices 4 --num_microbatches 8
    python project/plot.py timeline workdir_pp           draws into workdir_pp
    python project/plot.py split_time ddp=1,ddp=2     also throughput, memory, timeline pipeline=3

All but `timeline` of a folder draw into submit_figures/, unless --output says otherwise. `make
figures` makes all runs and draws all figures. ddp=2 is the run that `python project/train.py ddp
--world_size 2` leaves in workdir/ddp2. Bars are means, error bars standard deviations; the first
epoch or step is slower and left out.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.schedules.catalogue import SCHEDULES
from project.command_line import Parser
from training.options import count

OUTPUT = Path("submit_figures")
MOST_STAGES, MOST_CELLS = 64, 2048  # drawn in seconds, and legible
OF_TRAIN = {  # figures of runs of train.py
    "split_time": "computation, exposed communication and idle time of a step",
    "throughput": "examples per second of runs, beside the ideal",
    "memory": "parameters, gradients, optimizer state and peak of each rank",
}


def parse_plot(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="figure", required=True, metavar="COMMAND")

    def command(name: str, text: str, where: str = str(OUTPUT)) -> Callable[..., argparse.Action]:
        added = commands.add_parser(name, help=text)
        added.add_argument("--output", type=Path, metavar="PATH",
            help=f"the picture, or a folder for it ({where})")  # fmt: skip
        return added.add_argument

    # fmt: off
    run: dict[str, Any] = {"type": Path, "metavar": "DIR", "help": "workdir of this run"}
    root: dict[str, Any] = {"type": Path, "metavar": "DIR", "default": Path("workdir"),
                            "help": "folder of the runs' folders (%(default)s)"}
    option = command("data_parallel", "time and throughput of one process against several")
    option("--single", required=True, **run)
    option("--multiple", required=True, **run)
    option = command("pipeline", "time and throughput of a pipeline against one stage at a time")
    option("--model_parallel", required=True, **run)
    option("--pipeline_parallel", required=True, **run)
    option = command("training", "losses and score of runs after each epoch")
    option("workdir", nargs="+", **run)
    option = command("schedule", "clock table of a pipeline schedule, printed and drawn")
    option("--schedule", choices=list(SCHEDULES), default="1f1b", help="which (1f1b)")
    option("--num_devices", "--stages", type=count, metavar="K", default=4, help="stages (4)")
    option("--num_microbatches", "--n_chunk", type=count, metavar="M", default=8,
           help="micro-batches (8)")
    option("--chunks", type=count, metavar="V", help="chunks per rank, of interleaved (2)")
    where = f"RUN's own folder; {OUTPUT} for e.g. pipeline=3"
    option = command("timeline", "what each worker did when in one step, beside the ideal", where)
    option("run", metavar="RUN", help="the workdir of a run with --timeline, or e.g. pipeline=3")
    option("--step", type=count, metavar="K", help="which step, from 1 (a typical one)")
    option("--workdir", **root)
    for name, text in OF_TRAIN.items():
        option = command(name, text)
        option("runs", nargs="+", help="e.g. ddp=1,ddp=2, or ddp=1 ddp=2")
        option("--workdir", **root)
    # fmt: on
    args = parser.parse_args(argv)
    of_one = args.figure == "timeline" and is_folder(args.run)  # where its trace is written, too
    args.output = args.output or (Path(args.run) if of_one else OUTPUT)
    if args.figure == "schedule":
        n, m = args.num_devices, args.num_microbatches
        if n > MOST_STAGES or n * m > MOST_CELLS:
            parser.error(
                f"--num_devices {n} --num_microbatches {m}: a picture has room for {MOST_STAGES} "
                f"stages, and for {MOST_CELLS} micro-batches over all stages; --num_devices 4 "
                "--num_microbatches 8 works"
            )
    return args


def is_folder(run: str) -> bool:
    """Whether this is a workdir, which may be called lr=0.1, and no name such as ddp=2."""
    return "=" not in run or Path(run).is_dir()


if __name__ == "__main__":
    parse_plot()  # before torch and matplotlib are imported, which takes seconds

from project.figures.bars import Bar, draw_bars
from project.figures.compared import compare_step
from project.figures.gantt import draw_step, plot_schedule
from project.figures.perfetto import write_trace
from project.figures.recorded import Run, mean_and_std, speed_up
from project.figures.steps import in_step, shares, steps_of
from project.figures.style import plot_training, readable
from project.strategies import PAGES
from training.files import SUMMARY
from training.launch.errors import UserError, counted

STRATEGIES = [name for name in PAGES if name != "3d"]  # whose runs a number of ranks names
YLABELS = {
    "training_time": "training time of an epoch (s)",
    "tokens_per_sec": "tokens per second, with padding",
}
ALIKE = (  # options that must be the same in all runs of a figure
    "model", "precision", "vgg_width", "n_layer", "n_embd", "n_head", "vocab_size", "dataset",
    "n_train",
)  # fmt: skip
FACTS = (  # of the line below a picture
    "model", "strategy", "world_size", "pp", "tp", "num_devices", "schedule", "num_microbatches",
    "batch_size",
)  # fmt: skip
FORMATS = (".png", ".pdf", ".svg")
TIMES = ("forward", "recompute", "backward", "optimizer", "communication", "idle")


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
    return draw_bars(Path(fig_name), bars, title="", foot="", ylabel=ylabel)


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
    return plot(means, stds, list(metrics_data), fig_name or OUTPUT / f"{metric}.png", ylabel)


def describe(run: Run) -> str:
    """What was trained and how, in a line: options that are not 1."""
    used = {name: run.summary.get(name) for name in FACTS}
    return ", ".join(f"{name} {value}" for name, value in used.items() if value not in (None, 1))


def check_alike(runs: Sequence[Run], names: Sequence[str] = ALIKE) -> None:
    """Raises UserError if runs differ in one of these options: they trained different models, in
    different precision, or on different data."""
    for name in names:
        given = [(run.summary.get(name), run.folder) for run in runs]
        held = {str(value): folder for value, folder in given if value is not None}
        if len(held) > 1:
            found = ", ".join(f"{folder} {value}" for value, folder in held.items())
            raise UserError(f"only runs of the same {name} compare, and these differ: {found}")


# A run of a course's program against its baseline


def plot_data_parallel(single: Run, multiple: Run, output: Path) -> list[Path]:
    """Draws training time and throughput of one process against several; returns the paths.
    Raises UserError if result files are missing or cannot be compared."""
    one, n = (run.summary.get("world_size", 1) for run in (single, multiple))
    if one != 1 or n == 1:
        raise UserError(
            f"--single {single.folder} has {counted(one, 'rank')}, --multiple {multiple.folder} "
            f"has {n}; needed are 1 and 2 or more"
        )
    labels = ("1 process", f"{n} processes")
    return plot_speed_up("data_parallel", (single, multiple), labels, n, output)


def plot_pipeline(model_parallel: Run, pipeline_parallel: Run, output: Path) -> list[Path]:
    """Draws training time and throughput of the pipeline against one stage at a time; returns the
    paths. Raises UserError if result files are missing or cannot be compared.

    With m micro-batches and n stages the ideal speed-up is n*m/(m+n-1): m+n-1 clocks, not n*m.
    """
    runs = (model_parallel, pipeline_parallel)
    for run, mode in zip(runs, ("model_parallel", "pipeline_parallel"), strict=True):
        if (found := run.summary.get("model_parallel_mode")) != mode:
            raise UserError(f"--{mode} {run.folder}: that run has --model_parallel_mode {found}")
    check_alike(runs, ["batch_size"])
    m, n = (pipeline_parallel.summary[name] for name in ("num_microbatches", "num_devices"))
    labels = ("model parallel", "pipeline")
    return plot_speed_up("pipeline", runs, labels, n * m / (m + n - 1), output)


def plot_speed_up(
    name: str, runs: tuple[Run, Run], labels: tuple[str, str], ideal: float, output: Path
) -> list[Path]:
    """Draws {name}_training_time.png and {name}_throughput.png of a baseline and a measured run:
    means over all epochs but the first, and standard deviations. The `ideal` speed-up is drawn if
    processes have equally many cores, and batches are of one size, in both."""
    check_alike(runs)
    baseline, measured = runs
    if min(len(run.epochs) for run in runs) < 2:
        raise UserError(
            f"{baseline.folder} and {measured.folder}: both need 2 epochs or more, as the first is "
            "left out"
        )
    alike = all(len({run.summary.get(key) for run in runs}) == 1 for key in ("cores", "batch_size"))
    paths = []
    for metric, file, power in (
        ("training_time", "training_time", -1),
        ("tokens_per_sec", "throughput", 1),
    ):
        base, spread = baseline.over_epochs(metric)
        shown = {labels[1]: measured.over_epochs(metric)}
        if metric == "training_time" and len(measured.epochs[0]) > 1:
            ranks = zip(*measured.epochs[1:], strict=True)
            shown = {
                f"rank {r}": mean_and_std([epoch[metric] for epoch in rank])
                for r, rank in enumerate(ranks)
            }
        bars = [Bar(labels[0], {"baseline": base}, spread)]
        for label, (mean, std) in shown.items():
            bars.append(Bar(label, {"measured": mean}, std, f"{(mean / base) ** power:.2f}x"))
        if alike:
            bars.append(Bar("ideal", {"ideal": base * ideal**power}, inside=f"{ideal:.3g}x"))
        title = f"speed-up of {labels[1]} over {labels[0]}: "
        title += f"{speed_up(measured, baseline, metric):.2f}x"
        paths.append(output / f"{name}_{file}.png")
        draw_bars(paths[-1], bars, title=title, foot=describe(measured), ylabel=YLABELS[metric])
    return paths


# Runs of train.py


def named(name: str, root: Path) -> Run:
    """A run of train.py, such as ddp=2. Raises UserError if there is no such run, with the command
    that makes it."""
    strategy, _, workers = name.partition("=")
    if strategy not in STRATEGIES or not workers.isdecimal():
        raise UserError(
            f"{name}: it must be a strategy ({', '.join(STRATEGIES)}) with its number of "
            "processes, as ddp=2"
        )
    folder = root / f"{strategy}{workers}"
    if not (folder / SUMMARY).is_file():
        model = " --model gpt2-mini" if strategy == "tensor" else ""  # vgg16 cannot be cut
        raise UserError(
            f"no finished run in {folder}; make it with: python project/train.py {strategy} "
            f"--world_size {workers}{model} --num_batches 9 --timeline 8 "
            f"--workdir {shlex.quote(str(folder))}"
        )
    return Run(folder)


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
    return draw_bars(path, bars, title=title, foot=foot, ylabel="a step (ms)")


def plot_throughput(runs: Sequence[Run], path: Path) -> Path:
    """Draws the examples per second of each run. The ideal scales the run of the same strategy with
    the fewest workers by the number of workers."""
    bars = []
    for run in runs:
        mean, std = run.speed()
        alike = [other for other in runs if other.summary["strategy"] == run.summary["strategy"]]
        base = min(alike, key=lambda other: other.summary["world_size"])
        if run is base:
            role = "baseline" if len(alike) > 1 else "measured"
            bars.append(Bar(run.name, {role: mean}, std))
            continue
        before, _ = base.speed()
        ideal = run.summary["world_size"] / base.summary["world_size"]
        bars.append(Bar(run.name, {"measured": mean}, std, f"{mean / before:.2f}x"))
        bars.append(Bar("ideal", {"ideal": before * ideal}, inside=f"{ideal:.3g}x"))
    found = ", ".join(f"{run.name} {readable(run.speed()[0])}" for run in runs)
    ylabel = "all workers together"
    return draw_bars(path, bars, title=f"examples per second: {found}", foot="", ylabel=ylabel)


def plot_memory(
    runs: Sequence[Run], path: Path, predicted: Sequence[float] = (), limit: float = 0.0
) -> Path:
    """Draws parameters, gradients, optimizer state and the rest of the peak, for each rank of each
    run; and lines for the bytes that a planner `predicted` of the ranks, and for their limit."""
    bars, most = [], list[str]()
    for run in runs:
        state, peaks = run.summary["state_bytes"], run.summary["peak_rss_bytes"]
        for rank, peak in enumerate(peaks):
            parts = {kind: values[rank] / 1e6 for kind, values in state.items()}
            parts["rest of the peak"] = peak / 1e6 - sum(parts.values())
            planned = predicted[rank] / 1e6 if predicted else 0.0
            bars.append(Bar(f"{run.name}, rank {rank}", parts, predicted=planned))
        held = max(map(sum, zip(*state.values(), strict=True)))
        most.append(f"{run.name} {readable(held / 1e6)}")
    title = f"MB of state per rank: {', '.join(most)}"
    foot = "rest of the peak: activations, Python and libraries"
    if limit:
        foot += f"; the limit is {readable(limit / 1e6)} MB"
    return draw_bars(path, bars, title=title, foot=foot, ylabel="MB", limit=limit / 1e6)


# The command line

COMPARED = {"split_time": plot_split_time, "throughput": plot_throughput, "memory": plot_memory}


def draw_figure(args: argparse.Namespace) -> list[Path]:
    """Draws what the command line asks for; returns the paths."""
    name, output = args.figure, args.output
    is_picture = output.suffix in FORMATS
    if is_picture and name in ("data_parallel", "pipeline"):
        raise UserError(f"--output {output}: {name} draws two pictures; name a folder")

    def path(stem: str) -> Path:
        return output if is_picture else output / f"{stem}.png"

    if name == "data_parallel":
        return plot_data_parallel(Run(args.single), Run(args.multiple), output)
    if name == "pipeline":
        return plot_pipeline(Run(args.model_parallel), Run(args.pipeline_parallel), output)
    if name == "training":
        stem = "losses" if len(args.workdir) > 1 else "training"
        return [plot_training(path(stem), args.workdir, describe(Run(args.workdir[-1])))]
    if name == "schedule":
        sizes = args.num_devices, args.num_microbatches, args.chunks
        return [plot_schedule(args.schedule, *sizes, path(f"schedule_{args.schedule}"))]
    if name == "timeline":
        run = Run(Path(args.run)) if is_folder(args.run) else named(args.run, args.workdir)
        step = compare_step(run, step=args.step and args.step - 1)  # files count from 0
        drawn = draw_step(path(f"timeline_{run.name}"), step, "ideal", foot=describe(run))
        print(f"wrote {write_trace(run.folder, run.timeline)}: open it in https://ui.perfetto.dev")
        return [drawn]
    runs = [named(run, args.workdir) for run in ",".join(args.runs).split(",")]
    check_alike(runs)
    return [COMPARED[name](runs, path(name))]


def main() -> None:
    """The program."""
    for path in draw_figure(parse_plot()):
        print(f"drew {path}")


if __name__ == "__main__":
    from project.utils import run_program

    run_program(main)
