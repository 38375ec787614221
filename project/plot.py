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
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.schedules.catalogue import SCHEDULES
from project.command_line import Parser
from runtime.axes import AXES
from training.options import count

WORKDIR = Path("workdir")
MOST_RANKS, MOST_CELLS = 64, 2048  # drawn in seconds, and legible
FORMATS = (".png", ".pdf", ".svg")
FIGURES = {
    "data_parallel": "time and throughput of one process against several",
    "pipeline": "time and throughput of a pipeline against one stage at a time",
    "training": "losses and score of runs after each epoch",
    "timeline": "what each worker did when in one step, beside the ideal",
    "split_time": "computation, exposed communication and idle time of a step",
    "throughput": "examples per second of runs, beside the ideal",
    "memory": "parameters, gradients, optimizer state and peak of each rank",
    "schedule": "clock table of a schedule, printed and drawn",
}
PAIRS = {  # figures of a run against its baseline: the options that name the two
    "data_parallel": ("single", "multiple"),
    "pipeline": ("model_parallel", "pipeline_parallel"),
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
        for run in PAIRS.get(name, ()):
            option(f"--{run}", type=Path, required=True, metavar="DIR", help="a run's workdir")
        if name in PAIRS or name == "schedule":
            continue
        option("runs", nargs=1 if name == "timeline" else "+", metavar="RUN",
               help="a run's workdir; or e.g. ddp=1 ddp=2, or ddp fsdp")  # fmt: skip
        option("--workdir", type=Path, metavar="DIR", default=WORKDIR,
               help="folder of the runs' folders (%(default)s)")  # fmt: skip
        if name == "timeline":
            option("--step", type=count, metavar="K", help="which step, from 1 (a typical one)")
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


def check_pair(figure: str, runs: Sequence[Run]) -> None:
    """Raises UserError if a run and its baseline cannot be compared, or are too short."""
    check_alike(runs)
    for run, option in zip(runs, PAIRS[figure], strict=True):
        ranks, mode = run.summary.get("world_size", 1), run.summary.get("model_parallel_mode")
        if figure == "data_parallel" and (ranks == 1) != (option == "single"):
            needed = "2 or more" if ranks == 1 else "1"
            raise UserError(f"--{option} {run.folder} has {counted(ranks, 'rank')}, not {needed}")
        if figure == "pipeline" and mode != option:
            raise UserError(f"--{option} {run.folder}: that run has --model_parallel_mode {mode}")
        if len(run.epochs) < 2:
            raise UserError(f"{run.folder}: 2 epochs or more are needed, the first is left out")
    if figure == "pipeline":
        check_alike(runs, ["batch_size"])


def plot_pair(figure: str, baseline: Run, measured: Run, output: Path) -> list[Path]:
    """Draws time and throughput of a run against its baseline: means over all epochs but the first,
    and standard deviations. Returns the paths; raises UserError as `check_pair` does.

    With m micro-batches a pipeline of n stages takes m+n-1 clocks, and one stage at a time n*m. The
    ideal is drawn if processes have equally many cores, and batches are of one size, in both."""
    runs, used = (baseline, measured), measured.summary
    check_pair(figure, runs)
    ideal = used.get("world_size", 1)
    before, label = "1 process", f"{ideal} processes"
    if figure == "pipeline":
        m, n = used["num_microbatches"], used["num_devices"]
        before, label, ideal = "model parallel", "pipeline", n * m / (m + n - 1)
    alike = all(len({run.summary.get(key) for run in runs}) == 1 for key in ("cores", "batch_size"))
    paths = []
    for metric, ylabel in YLABELS.items():
        base, spread = baseline.over_epochs(metric)
        power = -1 if metric == "training_time" else 1  # of a time, less is better
        shown = {label: measured.over_epochs(metric)}
        if metric == "training_time" and ideal == len(measured.epochs[0]):
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
        title = f"speed-up of {label} over {before}: {speed_up(measured, baseline, metric):.2f}x"
        stem = "throughput" if metric == "tokens_per_sec" else metric
        path = output / f"{figure}_{stem}.png"
        paths.append(draw_bars(path, bars, title, ylabel, describe(measured)))
    return paths


def run_of(word: str, root: Path) -> Run:
    """The run of a folder, or of train.py by strategy and number of processes: ddp=2; ddp is that
    with the most. Raises UserError if there is none, with the command that makes it."""
    strategy, _, ranks = word.partition("=")
    numbered = [name for name, row in STRATEGIES.items() if row.axis]
    if strategy not in numbered or not (ranks.isdecimal() or word == strategy):
        if word and Path(word).is_dir():
            return Run(Path(word))
        raise UserError(
            f"{word}: it must be the workdir of a run, or a strategy ({', '.join(numbered)}), "
            "also with its number of processes, as ddp=2"
        )
    found = [path.parent.name.removeprefix(strategy) for path in root.glob(f"*/{SUMMARY}")]
    made = [int(number) for number in found if number.isdecimal()]
    usual = STRATEGIES[strategy].usual.get("world_size", 2)
    n = int(ranks or max(made, default=usual))
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


COMPARED = {"split_time": plot_split_time, "throughput": plot_throughput, "memory": plot_memory}


def draw_figure(args: argparse.Namespace) -> list[Path]:
    """Draws what the command line asks for; returns the paths."""
    name = args.figure
    if name in PAIRS:
        baseline, measured = (Run(getattr(args, option)) for option in PAIRS[name])
        return plot_pair(name, baseline, measured, args.output or baseline.folder)

    def path(folder: Path, stem: str) -> Path:
        output = args.output or folder
        return output if output.suffix in FORMATS else output / f"{stem}.png"

    if name == "schedule":
        sizes = args.num_devices, args.num_microbatches, args.chunks
        picture = path(WORKDIR, f"schedule_{args.schedule}")
        return [plot_schedule(args.schedule, *sizes, picture)]
    runs = [run_of(word, args.workdir) for word in ",".join(args.runs).split(",")]
    first = runs[0].folder
    if name == "training":
        picture = path(first, "losses" if len(runs) > 1 else "training")
        return [plot_training(picture, [run.folder for run in runs], describe(runs[-1]))]
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
