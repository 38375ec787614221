"""Draws every figure from the result files of runs, never from numbers typed in.

    python project/plot.py data_parallel --single workdir_1 --multiple workdir_2
    python project/plot.py pipeline --model_parallel workdir_mp --pipeline_parallel workdir_pp
    python project/plot.py training workdir              of several: their losses beside each other
    python project/plot.py schedule --schedule 1f1b --num_devices 4 --num_microbatches 8
    python project/plot.py timeline workdir_pp
    python project/plot.py split_time ddp=1,ddp=2     also throughput, memory, timeline pipeline=3

`make figures` makes all runs and draws all figures. ddp=2 is the run that `python project/train.py
ddp --world_size 2` leaves in workdir/ddp2. Bars are means, error bars standard deviations; the
first epoch or step is slower and left out.
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

from pipeline.schedules.catalogue import SCHEDULES, in_words
from project.command_line import Parser, count

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

    def command(name: str, text: str) -> Callable[..., argparse.Action]:
        added = commands.add_parser(name, help=text)
        added.add_argument("--output", type=Path, metavar="PATH",
            help=f"the picture, or a folder for it ({OUTPUT}; of training: the run's)")  # fmt: skip
        return added.add_argument

    # fmt: off
    run: dict[str, Any] = {"type": Path, "metavar": "DIR", "help": "workdir of this run"}
    option = command("data_parallel", "time and throughput of one process against several")
    option("--single", required=True, **run)
    option("--multiple", required=True, **run)
    option = command("pipeline", "time and throughput of a pipeline against one stage at a time")
    option("--model_parallel", required=True, **run)
    option("--pipeline_parallel", required=True, **run)
    option = command("training", "loss and score of a run after each epoch; of runs, their losses")
    option("workdir", nargs="+", **run)
    option = command("schedule", "clock table of a pipeline schedule, printed and drawn")
    option("--schedule", choices=list(SCHEDULES), default="1f1b", help="which (1f1b)")
    option("--num_devices", "--stages", type=count, metavar="K", default=4, help="stages (4)")
    option("--num_microbatches", "--n_chunk", type=count, metavar="M", default=8,
           help="micro-batches (8)")
    option("--chunks", type=count, metavar="V", help="chunks per rank, of interleaved (2)")
    root: dict[str, Any] = {"type": Path, "metavar": "DIR", "default": Path("workdir"),
                            "help": "folder of the runs' folders (%(default)s)"}
    for name, text in OF_TRAIN.items():
        option = command(name, text)
        option("runs", nargs="+", help="e.g. ddp=1,ddp=2, or ddp=1 ddp=2")
        option("--workdir", **root)
    option = command("timeline", "what each worker did when in one step, beside the ideal")
    option("run", help="the workdir of a run with --timeline, or e.g. pipeline=3")
    option("--step", type=count, metavar="K", help="which step, from 1 (a typical one)")
    option("--workdir", **root)
    # fmt: on
    args = parser.parse_args(argv)
    if args.figure == "schedule":
        n, m = args.num_devices, args.num_microbatches
        if n > MOST_STAGES or n * m > MOST_CELLS:
            few = min(n, MOST_STAGES)
            parser.error(
                f"--num_devices {n} --num_microbatches {m}: a picture has room for {MOST_STAGES} "
                f"stages, and for {MOST_CELLS} micro-batches over all stages; --num_devices {few} "
                f"--num_microbatches {min(m, MOST_CELLS // few)} works"
            )
    return args


if __name__ == "__main__":
    parse_plot()  # before torch and matplotlib are imported, which takes seconds

from project.figures.bars import LINES, Bar, draw_bars, unit_of
from project.figures.epochs import read_epochs
from project.figures.perfetto import write_trace
from project.figures.recorded import THROUGHPUT, TIME, Run, mean_and_std, speed_up
from project.figures.steps import draw_step, in_step, plot_schedule, shares, steps_of
from project.figures.style import finish_panel, picture, plot_training, readable
from training.files import SUMMARY
from training.launch.errors import UserError

STRATEGIES = ("single", "ddp", "model", "fsdp", "pipeline", "tensor")
YLABELS = {TIME: "training time of an epoch (s)", THROUGHPUT: "tokens per second, with padding"}
ALIKE = (  # options that must be the same in all runs of a figure
    "model", "precision", "vgg_width", "n_layer", "n_embd", "n_head", "vocab_size", "dataset",
    "n_train",
)  # fmt: skip
FORMATS = (".png", ".pdf", ".svg")
TIMES = ("forward", "recompute", "backward", "optimizer", "communication", "idle")


def plot(
    means: Sequence[float],
    stds: Sequence[float],
    labels: Sequence[str],
    fig_name: str | Path,
    ylabel: str = YLABELS[TIME],
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
    """What was trained and how, in a line."""
    options = run.summary
    facts = [options["model"]] if "model" in options else []
    if "batch_size" in options:
        facts.append(f"batches of {options['batch_size']}")
    if options.get("strategy") == "3d":
        facts.append("data {dp} x pipeline {pp} x tensor {tp}".format(**options))
    stages = options.get("num_devices") or options.get("pp") or options.get("world_size", 1)
    if options.get("schedule") and stages > 1:
        words = in_words(stages, options.get("chunks") or 1)
        facts.append(f"{words}, {options['schedule']}, {options['num_microbatches']} micro-batches")
    return "; ".join(facts)


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
            f"--single {single.folder} has {one} rank(s), --multiple {multiple.folder} has {n}; "
            "needed are 1 and 2 or more"
        )
    return compare("data_parallel", (single, multiple), ("1 process", f"{n} processes"), n, output)


def plot_pipeline(model_parallel: Run, pipeline_parallel: Run, output: Path) -> list[Path]:
    """Draws training time and throughput of the pipeline against one stage at a time; returns the
    paths. Raises UserError if result files are missing or cannot be compared.

    With m micro-batches and n stages the ideal speed-up is n*m/(m+n-1): m+n-1 clocks, not n*m.
    """
    runs = (model_parallel, pipeline_parallel)
    for run, mode in zip(runs, ("model_parallel", "pipeline_parallel"), strict=True):
        if (found := run.summary.get("model_parallel_mode")) != mode:
            raise UserError(f"--{mode} {run.folder}: that run has --model_parallel_mode {found}")
    check_alike(runs, (*ALIKE, "batch_size"))
    m, n = (pipeline_parallel.summary[name] for name in ("num_microbatches", "num_devices"))
    labels, ideal = ("model parallel", "pipeline"), n * m / (m + n - 1)
    return compare("pipeline", runs, labels, ideal, output)


def compare(
    name: str, runs: tuple[Run, Run], labels: tuple[str, str], ideal: float, output: Path
) -> list[Path]:
    """Draws {name}_training_time.png and {name}_throughput.png of a baseline and a measured run:
    means over all epochs but the first, and standard deviations. The `ideal` speed-up is drawn if
    processes have equally many cores, and batches are of one size, in both."""
    check_alike(runs)
    baseline, measured = runs
    if min(len(run.epochs()) for run in runs) < 2:
        raise UserError(
            f"{baseline.folder} and {measured.folder}: both need 2 epochs or more, as the first is "
            "left out"
        )
    alike = all(len({run.summary.get(key) for run in runs}) == 1 for key in ("cores", "batch_size"))
    paths = []
    for metric, file in ((TIME, "training_time"), (THROUGHPUT, "throughput")):
        (base, std), after = (run.over_epochs(metric) for run in runs)
        shown = {labels[1]: after}
        if metric == TIME and 1 < len(measured.ranks) <= 4:
            times = ([epoch[TIME] for epoch in rank[1:]] for rank in measured.ranks)
            shown = {f"rank {r}": mean_and_std(seconds) for r, seconds in enumerate(times)}
        sign = -1 if metric == TIME else 1  # of time, less is better
        bars = [Bar(labels[0], {"baseline": base}, std)]
        bars += [
            Bar(label, {"measured": mean}, std, f"{(mean / base) ** sign:.2f}x")
            for label, (mean, std) in shown.items()
        ]
        verb = "as fast as" if metric == TIME else "the tokens/s of"
        title = f"{labels[1]}: {speed_up(measured, baseline, metric):.2f}x {verb} {labels[0]}"
        if alike:
            bars.append(Bar("ideal", {"ideal": base * ideal**sign}, inside=f"{ideal:.3g}x"))
            title += f" (ideal {ideal:.3g}x)"
        paths.append(output / f"{name}_{file}.png")
        draw_bars(paths[-1], bars, title=title, foot=describe(measured), ylabel=YLABELS[metric])
    return paths


def plot_losses(runs: Sequence[Run], path: Path, names: Sequence[str] | None = None) -> Path:
    """Draws the losses of runs side by side, labelled by `names`, or by their folders."""
    names = names or [run.folder.name for run in runs]
    if len({*names}) < len(names):
        names = [str(run.folder) for run in runs]
    losses = {name: read_epochs(run.folder) for name, run in zip(names, runs, strict=True)}
    ends = ", ".join(
        f"{epochs[-1]['validation_loss']:.3f} ({name}, epoch {epochs[-1]['epoch']})"
        for name, epochs in losses.items()
    )
    with picture(path, f"validation loss: {ends}", "", (12, 5.6), ncols=2) as (_, axes):
        for ax, kind in zip(axes, ("training", "validation"), strict=True):
            for k, (name, epochs) in enumerate(losses.items()):
                width = max(1.5, 9 - 2.3 * k)  # a wide line shows under the narrow ones on it
                numbers = [epoch["epoch"] for epoch in epochs]
                values = [epoch[f"{kind}_loss"] for epoch in epochs]
                look: dict[str, Any] = {"color": LINES[k % len(LINES)], "lw": width, "marker": "o"}
                ax.plot(numbers, values, ms=width + 4, label=name, **look)
            finish_panel(ax, f"{kind} loss (nats per target)")
        axes[0].legend()
    return path


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
    times = {}
    for run in runs:
        workers, _ = run.timeline
        steps = [shares(in_step(workers, step)) for step in steps_of(workers)]
        times[run.label] = {kind: fmean(step[kind] for step in steps) for kind in TIMES}
    factor, unit = unit_of(max(sum(parts.values()) for parts in times.values()))
    bars = [
        Bar(label, {kind: factor * value for kind, value in parts.items() if value})
        for label, parts in times.items()
    ]
    last = bars[-1]
    sent, idle = (last.parts.get(kind, 0) / last.total for kind in ("communication", "idle"))
    return draw_bars(
        path,
        bars,
        ylabel=f"a step ({unit})",
        title=f"{last.label}: communication {sent:.0%} of a step, idle {idle:.0%}",
        foot="communication: exchange and waiting that no computation hides",
    )


def plot_throughput(runs: Sequence[Run], path: Path) -> Path:
    """Draws the examples per second of each run. The ideal scales the run of the same strategy with
    the fewest workers by the number of workers."""
    title = "; ".join(f"{run.label}: {readable(run.speed()[0])} examples/s" for run in runs)
    bars = []
    for run in runs:
        alike = [other for other in runs if other.summary["strategy"] == run.summary["strategy"]]
        base = min(alike, key=lambda other: other.summary["world_size"])
        mean, std = run.speed()
        if run is base:
            role = "baseline" if len(alike) > 1 else "measured"
            bars.append(Bar(run.label, {role: mean}, std))
            continue
        one, n = (r.summary["world_size"] for r in (base, run))
        before, _ = base.speed()
        bars.append(Bar(run.label, {"measured": mean}, std, f"{mean / before:.2f}x"))
        bars.append(Bar("ideal", {"ideal": before * n / one}, inside=f"{n / one:.3g}x"))
        title = f"{run.label}: {mean / before:.2f}x the examples/s of "
        title += f"{'one' if one == 1 else one} (ideal {n / one:.3g}x)"
    return draw_bars(
        path, bars, title=title, foot="", ylabel="examples per second, all workers together"
    )


def plot_memory(runs: Sequence[Run], path: Path) -> Path:
    """Draws parameters, gradients, optimizer state and peak in bytes, for each rank of each run."""
    bars, most = [], {}
    for run in runs:
        state, peaks = run.summary["state_bytes"], run.summary["peak_rss_bytes"]
        for rank, peak in enumerate(peaks):
            parts = {kind: values[rank] / 1e6 for kind, values in state.items()}
            bars.append(Bar(f"{run.label}, rank {rank}", parts))
            bars.append(Bar("peak", {"peak resident": peak / 1e6}))
        most[run.label] = max(bar.total for bar in bars[-2 * len(peaks) :: 2])
    first, last = runs[0].label, runs[-1].label
    title = f"{first}: {readable(most[first])} MB of state per rank"
    if first != last:
        title = f"{last}: {most[last] / most[first]:.0%} of the state per rank of {first}"
    return draw_bars(
        path, bars, title=title, ylabel="MB",
        foot="peak resident: of the whole process, with Python, libraries and activations",
    )  # fmt: skip


# The command line

COMPARED = {
    "split_time": plot_split_time, "throughput": plot_throughput, "memory": plot_memory,
}  # fmt: skip


def draw_figure(args: argparse.Namespace) -> list[Path]:
    """Draws what the command line asks for; returns the paths."""
    name, output = args.figure, args.output or OUTPUT

    is_picture = output.suffix.lower() in FORMATS and not output.is_dir()
    if is_picture and name in ("data_parallel", "pipeline"):
        raise UserError(f"--output {output}: {name} draws two pictures; name a folder")
    if output.suffix and not is_picture and not output.is_dir():
        raise UserError(
            f"--output {output}: it must be a folder, or a picture that ends in "
            f"{', '.join(FORMATS)}"
        )

    def path(stem: str) -> Path:
        return output if is_picture else output / f"{stem}.png"

    if name == "data_parallel":
        return plot_data_parallel(Run(args.single), Run(args.multiple), output)
    if name == "pipeline":
        return plot_pipeline(Run(args.model_parallel), Run(args.pipeline_parallel), output)
    if name == "training":
        runs = [Run(folder) for folder in args.workdir]
        if len(runs) > 1:
            return [plot_losses(runs, path("losses"))]
        (run,) = runs
        steps = run.summary.get("num_batches")
        return [plot_training(run.folder, describe(run), steps, args.output and path("training"))]
    if name == "schedule":
        sizes = args.num_devices, args.num_microbatches, args.chunks
        return [plot_schedule(args.schedule, *sizes, path(f"schedule_{args.schedule}"))]
    if name == "timeline":
        run = named(args.run, args.workdir) if "=" in args.run else Run(Path(args.run))
        workers, about = run.timeline
        step = args.step and args.step - 1  # files count from 0
        drawn = draw_step(path(f"timeline_{run.folder.name}"), workers, about, describe(run), step)
        print(f"wrote {write_trace(run.folder, workers)}: open it in https://ui.perfetto.dev")
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
