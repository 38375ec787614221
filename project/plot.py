"""Draws every figure from the result files of runs, never from numbers typed in.

    python project/plot.py data_parallel --single workdir_1 --multiple workdir_2
    python project/plot.py pipeline --model_parallel workdir_mp --pipeline_parallel workdir_pp
    python project/plot.py training workdir              of several: their losses beside each other
    python project/plot.py schedule --schedule 1f1b --num_devices 4 --num_microbatches 8
    python project/plot.py timeline workdir_pp
    python project/plot.py split_time ddp=1 ddp=2        also throughput, memory

A run is its folder; or ddp=2, which is what `python project/train.py ddp --world_size 2` leaves in
workdir/ddp2; or ddp, which is that with the most processes. A picture goes into the folder of the
first run, unless -o says otherwise. `make figures` makes all runs and draws all figures. Bars are
means, error bars standard deviations; the first epoch or step is slower and left out.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.schedules.catalogue import SCHEDULES
from project.command_line import Parser
from runtime.axes import AXES
from training.options import count

OUTPUT = Path("submit_figures")  # of the course's functions
WORKDIR = Path("workdir")
MOST_RANKS, MOST_CELLS = 64, 2048  # drawn in seconds, and legible
FORMATS = (".png", ".pdf", ".svg")
OF_RUNS = {
    "training": "losses and score of runs after each epoch",
    "timeline": "what each worker did when in one step, beside the ideal",
    "split_time": "computation, exposed communication and idle time of a step",
    "throughput": "examples per second of runs, beside the ideal",
    "memory": "parameters, gradients, optimizer state and peak of each rank",
}
PAIRS = {
    "data_parallel": ("single", "multiple", "one process against several"),
    "pipeline": ("model_parallel", "pipeline_parallel", "a pipeline against one stage at a time"),
}


def parse_plot(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="figure", required=True, metavar="COMMAND")

    def command(name: str, text: str, where: str) -> Callable[..., argparse.Action]:
        option = commands.add_parser(name, help=text).add_argument
        option("-o", "--output", type=Path, metavar="PATH",
            help=f"the picture, or a folder for it; default: {where}")  # fmt: skip
        return option

    for name, (*runs, text) in PAIRS.items():
        option = command(name, f"time and throughput of {text}", "the first run's folder")
        for run in runs:
            option(f"--{run}", type=Path, required=True, metavar="DIR", help="a run's workdir")
    for name, text in OF_RUNS.items():
        option = command(name, text, "the first run's folder")
        option("runs", nargs=1 if name == "timeline" else "+", metavar="RUN",
               help="a run's workdir; or e.g. ddp=1 ddp=2, or ddp fsdp")  # fmt: skip
        option("--workdir", type=Path, metavar="DIR", default=WORKDIR,
               help="folder of the runs' folders (%(default)s)")  # fmt: skip
        if name == "timeline":
            option("--step", type=count, metavar="K", help="which step, from 1 (a typical one)")
    option = command("schedule", "clock table of a schedule, printed and drawn", str(WORKDIR))
    option("--schedule", choices=list(SCHEDULES), default="1f1b", help="which (1f1b)")
    option("--num_devices", "--stages", type=count, metavar="K", default=4,
           help="ranks; each has one stage, two where they stand in a V (4)")  # fmt: skip
    option("--num_microbatches", "--n_chunk", type=count, metavar="M", default=8, help="(8)")
    option("--chunks", type=count, metavar="V", help="stages per rank, of interleaved (2)")
    args = parser.parse_args(argv)
    if args.figure == "schedule":
        n, m = args.num_devices, args.num_microbatches
        if n > MOST_RANKS or n * m > MOST_CELLS:
            parser.error(
                f"--num_devices {n} --num_microbatches {m}: a picture has room for {MOST_RANKS} "
                f"ranks, and for {MOST_CELLS} micro-batches over all ranks; --num_devices 4 "
                "--num_microbatches 8 works"
            )
    if args.output and args.output.suffix in FORMATS and args.figure in PAIRS:
        parser.error(f"--output {args.output}: {args.figure} draws two pictures; name a folder")
    return args


if __name__ == "__main__":
    parse_plot()  # before torch and matplotlib are imported, which takes seconds

from project.figures.bars import Bar, draw_bars
from project.figures.compared import compare_step
from project.figures.gantt import draw_step, plot_schedule
from project.figures.perfetto import write_trace
from project.figures.runs import Run, in_step, mean_and_std, shares, speed_up, steps_of
from project.figures.style import plot_training, readable
from project.strategies import STRATEGIES
from training.files import SUMMARY
from training.launch.errors import UserError, counted

NUMBERED = [name for name, row in STRATEGIES.items() if row.axis]  # whose runs a number names
YLABELS = {
    "training_time": "training time of an epoch (s)",
    "tokens_per_sec": "tokens per second, with padding",
}
ALIKE = (  # options that must be the same in all runs of a figure
    "model", "precision", "vgg_width", "n_layer", "n_embd", "n_head", "vocab_size", "dataset",
    "n_train",
)  # fmt: skip
FACTS = (  # of the line below a picture
    "model", "strategy", "world_size", *(axis for axis in AXES if axis != "dp"), "num_devices",
    "schedule", "num_microbatches", "batch_size",
)  # fmt: skip
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
        folders = {str(value): folder for value, folder in given if value is not None}
        if len(folders) > 1:
            said = ", ".join(f"{folder} {value}" for value, folder in folders.items())
            raise UserError(f"only runs of the same {name} compare, and these differ: {said}")


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
    return plot_speed_up("data_parallel", single, multiple, f"{n} processes", n, output)


def plot_pipeline(model_parallel: Run, pipeline_parallel: Run, output: Path) -> list[Path]:
    """Draws training time and throughput of the pipeline against one stage at a time; returns the
    paths. Raises UserError if result files are missing or cannot be compared.

    With m micro-batches and n stages the ideal speed-up is n*m/(m+n-1): m+n-1 clocks, not n*m.
    """
    runs = (model_parallel, pipeline_parallel)
    for run, mode in zip(runs, ("model_parallel", "pipeline_parallel"), strict=True):
        if (other := run.summary.get("model_parallel_mode")) != mode:
            raise UserError(f"--{mode} {run.folder}: that run has --model_parallel_mode {other}")
    check_alike(runs, ["batch_size"])
    m, n = (pipeline_parallel.summary[name] for name in ("num_microbatches", "num_devices"))
    return plot_speed_up("pipeline", *runs, "pipeline", n * m / (m + n - 1), output)


def plot_speed_up(
    name: str, baseline: Run, measured: Run, label: str, ideal: float, output: Path
) -> list[Path]:
    """Draws {name}_training_time.png and {name}_throughput.png of a baseline and a measured run:
    means over all epochs but the first, and standard deviations. The `ideal` speed-up is drawn if
    processes have equally many cores, and batches are of one size, in both."""
    runs = (baseline, measured)
    check_alike(runs)
    if min(len(run.epochs) for run in runs) < 2:
        raise UserError(
            f"{baseline.folder} and {measured.folder}: both need 2 epochs or more, as the first is "
            "left out"
        )
    alike = all(len({run.summary.get(key) for run in runs}) == 1 for key in ("cores", "batch_size"))
    before = "model parallel" if name == "pipeline" else "1 process"
    paths = []
    for metric, ylabel in YLABELS.items():
        power = -1 if metric == "training_time" else 1
        base, spread = baseline.over_epochs(metric)
        shown = {label: measured.over_epochs(metric)}
        if metric == "training_time" and len(measured.epochs[0]) > 1:
            ranks = zip(*measured.epochs[1:], strict=True)
            shown = {
                f"rank {r}": mean_and_std([epoch[metric] for epoch in rank])
                for r, rank in enumerate(ranks)
            }
        bars = [Bar(before, {"baseline": base}, spread)]
        for bar, (mean, std) in shown.items():
            bars.append(Bar(bar, {"measured": mean}, std, f"{(mean / base) ** power:.2f}x"))
        if alike:
            bars.append(Bar("ideal", {"ideal": base * ideal**power}, inside=f"{ideal:.3g}x"))
        gain = speed_up(measured, baseline, metric)
        title = f"speed-up of {label} over {before}: {gain:.2f}x"
        kind = "throughput" if metric == "tokens_per_sec" else metric
        path = output / f"{name}_{kind}.png"
        paths.append(draw_bars(path, bars, title, ylabel, describe(measured)))
    return paths


# Any runs


def run_of(word: str, root: Path) -> Run:
    """The run of a folder, or of train.py by strategy and number of processes: ddp=2; ddp is that
    with the most. Raises UserError if there is none, with the command that makes it."""
    strategy, _, workers = word.partition("=")
    if strategy not in NUMBERED or not (workers.isdecimal() or word == strategy):
        if word and Path(word).is_dir():
            return Run(Path(word))
        raise UserError(
            f"{word}: it must be the workdir of a run, or a strategy ({', '.join(NUMBERED)}), "
            "also with its number of processes, as ddp=2"
        )
    made = [int(number) for path in root.glob(f"{strategy}*/{SUMMARY}")
            if (number := path.parent.name.removeprefix(strategy)).isdecimal()]  # fmt: skip
    usual = STRATEGIES[strategy].usual.get("world_size", 2)
    n = int(workers or max(made, default=usual))
    folder = root / f"{strategy}{n}"
    if n not in made:
        model = " --model gpt2-mini" if strategy == "tensor" else ""  # vgg16 cannot be cut
        size = "" if usual == 1 else f" --world_size {n}"
        raise UserError(
            f"no finished run in {folder}; make it with: python project/train.py {strategy}{size}"
            f"{model} --num_batches 9 --timeline 8 --workdir {shlex.quote(str(folder))}"
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
    return draw_bars(path, bars, title, "a step (ms)", foot)


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
    speeds = ", ".join(f"{run.name} {readable(run.speed()[0])}" for run in runs)
    return draw_bars(path, bars, f"examples per second: {speeds}", "all workers together")


def plot_memory(runs: Sequence[Run], path: Path) -> Path:
    """Draws parameters, gradients, optimizer state and the rest of the peak, for each rank of each
    run."""
    bars, most = [], list[str]()
    for run in runs:
        state = run.summary["state_bytes"]
        for rank, peak in enumerate(run.summary["peak_rss_bytes"]):
            parts = {kind: values[rank] / 1e6 for kind, values in state.items()}
            parts["rest of the peak"] = peak / 1e6 - sum(parts.values())
            bars.append(Bar(f"{run.name}, rank {rank}", parts))
        held = max(map(sum, zip(*state.values(), strict=True)))
        most.append(f"{run.name} {readable(held / 1e6)}")
    title = f"MB of state per rank: {', '.join(most)}"
    foot = "rest of the peak: activations, Python and libraries"
    return draw_bars(path, bars, title, "MB", foot)


# The command line

COMPARED = {"split_time": plot_split_time, "throughput": plot_throughput, "memory": plot_memory}


def draw_figure(args: argparse.Namespace) -> list[Path]:
    """Draws what the command line asks for; returns the paths."""
    name = args.figure
    if name in PAIRS:
        baseline, measured = (Run(getattr(args, option)) for option in PAIRS[name][:2])
        draw = plot_data_parallel if name == "data_parallel" else plot_pipeline
        return draw(baseline, measured, args.output or baseline.folder)

    def path(folder: Path, stem: str) -> Path:
        output = args.output or folder
        return output if output.suffix in FORMATS else output / f"{stem}.png"

    if name == "schedule":
        sizes = args.num_devices, args.num_microbatches, args.chunks
        picture = path(WORKDIR, f"schedule_{args.schedule}")
        return [plot_schedule(args.schedule, *sizes, picture)]
    words = ",".join(args.runs).split(",")
    runs = [run_of(word, args.workdir) for word in words]
    first = runs[0].folder
    if name == "training":
        stem = "losses" if len(runs) > 1 else "training"
        folders = [run.folder for run in runs]
        return [plot_training(path(first, stem), folders, describe(runs[-1]))]
    if name == "timeline":
        (run,) = runs
        step = compare_step(run, step=args.step and args.step - 1)  # files count from 0
        drawn = draw_step(path(first, f"timeline_{run.name}"), step, "ideal", describe(run))
        print(f"wrote {write_trace(run.folder, run.timeline)}: open it in https://ui.perfetto.dev")
        return [drawn]
    check_alike(runs)
    for run in runs:
        if "step_seconds" not in run.summary:
            raise UserError(f"{run.folder} has no {SUMMARY}; name the --workdir of a finished run")
    return [COMPARED[name](runs, path(first, name))]


def main() -> None:
    """The program."""
    for path in draw_figure(parse_plot()):
        print(f"drew {path}")


if __name__ == "__main__":
    from project.utils import run_program

    run_program(main)
