"""Draws every figure from the result files of runs, never from numbers typed in.

    python project/plot.py figures            makes the missing runs, then draws everything
    python project/plot.py data_parallel --single workdir_1 --multiple workdir_2
    python project/plot.py pipeline --model_parallel workdir_mp --pipeline_parallel workdir_pp
    python project/plot.py training workdir
    python project/plot.py schedule --schedule 1f1b --num_devices 4 --num_microbatches 8
    python project/plot.py timeline workdir_pp
    python project/plot.py split_time ddp=1,ddp=2     also throughput, memory, timeline pipeline=3

ddp=2 is the run that `python project/train.py ddp --world_size 2` leaves in workdir/ddp2. Bars are
means, error bars standard deviations; the first epoch or step is slower and left out.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.schedule import SCHEDULES
from project.plot_timeline import draw_step, handy, in_step, plot_schedule, shares, steps_of
from training.curves import (
    BLUE,
    COLOURS,
    INK,
    Epochs,
    describe,
    legend,
    on,
    picture,
    plot_training,
    read_epochs,
    read_json,
    read_options,
    readable,
)  # fmt: skip
from training.errors import UserError
from training.results import SUMMARY
from training.timeline import Event, read_timelines

ROOT = Path(__file__).resolve().parents[1]
OUTPUT, WORKDIR, WORKDIRS = Path("submit_figures"), Path("workdir"), Path("workdir_figures")
STRATEGIES = ("single", "ddp", "model", "fsdp", "pipeline")
TIME, THROUGHPUT = "training_time", "tokens_per_sec"
YLABELS = {TIME: "training time of an epoch (s)", THROUGHPUT: "tokens per second, with padding"}
ALIKE = {  # options that are the same in all runs of a figure, and their defaults in train.py
    "model": "vgg16", "precision": "fp32", "vgg_width": 64, "n_layer": None, "n_embd": None,
    "n_head": None, "vocab_size": None,
}  # fmt: skip
TIMES = ("forward", "recompute", "backward", "optimizer", "other", "communication", "idle")


# Bars


@dataclass(frozen=True)
class Bar:
    """A bar of stacked parts, from the bottom: their kinds (see COLOURS) and heights."""

    label: str
    parts: Mapping[str, float]
    std: float = 0.0
    inside: str = ""  # what is written into it, such as a speed-up

    @property
    def total(self) -> float:
        """How high it is."""
        return sum(self.parts.values())


def draw_bars(path: Path, bars: Sequence[Bar], *, title: str, subtitle: str, ylabel: str) -> Path:
    """The bars side by side, the sum of each above it, and a legend where they have parts."""
    top = max((bar.total + bar.std for bar in bars), default=0.0) or 1.0
    size, plus_minus = (15, " ± ") if len(bars) < 5 else (12, "\n± ")
    stacked = any(len(bar.parts) > 1 for bar in bars)
    with picture(path, title, subtitle, (max(10, 1.25 * len(bars)), 5.6)) as (fig, (ax,)):
        for x, bar in enumerate(bars):
            base = 0.0
            for kind, value in bar.parts.items():
                colour = COLOURS[kind]
                white = colour == "white"  # outlined: the ideal, and the peak
                ax.bar(
                    x, value, 0.64, base, color=colour, hatch="//" * (kind == "ideal"),
                    edgecolor=BLUE if white else "white", linewidth=2 if white else 1.5 * stacked,
                )  # fmt: skip
                share = f"{value / bar.total:.0%}" if len(bar.parts) > 1 else bar.inside
                if share and value > 0.07 * top:
                    ax.text(
                        x, base + value / 2, share, ha="center", va="center", size=size,
                        color=BLUE if white else on(colour),
                        weight=None if stacked else "bold",
                        bbox={"color": "white", "pad": 3} if white else None,
                    )  # fmt: skip
                base += value
            if bar.std:
                ax.errorbar(x, base, bar.std, color=INK, capsize=7, elinewidth=1.8)
            above = readable(base) + (plus_minus + readable(bar.std) if bar.std else "")
            ax.annotate(
                above, (x, base + bar.std), (0, 5), textcoords="offset points", ha="center",
                size=size, bbox={"color": "white", "pad": 0.5},
            )  # fmt: skip
        labels = [bar.label.replace(", ", "\n") for bar in bars]
        ax.set_xticks(range(len(bars)), labels, color=INK, size=size)
        ax.set(xlim=(-0.6, max(1, len(bars)) - 0.4), ylim=(0, 1.2 * top), title=ylabel)
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}" if y < 1e6 else readable(y))
        if stacked:
            legend(fig, {kind for bar in bars for kind, value in bar.parts.items() if value})
    return path


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the standard deviation of a sample; 0 for a single value."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def plot(
    means: Sequence[float],
    stds: Sequence[float],
    labels: Sequence[str],
    fig_name: str | Path,
    ylabel: str = YLABELS[TIME],
) -> Path:
    """The course's function: a bar with its error bar per label, saved as `fig_name`. Raises
    ValueError where the three differ in length."""
    values = zip(labels, means, stds, strict=True)
    bars = [Bar(label, {"measured": mean}, std) for label, mean, std in values]
    return draw_bars(Path(fig_name), bars, title="", subtitle="", ylabel=ylabel)


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


# A run against its baseline


def plot_data_parallel(single: Path, multiple: Path, output: Path = OUTPUT) -> list[Path]:
    """Draws training time and throughput of one process against several; returns the paths.
    Raises UserError where result files are missing or do not compare."""
    program = "make it with: python project/run_data_parallel.py --n_epochs 5 --world_size"
    runs = []
    for folder, n in ((single, 1), (multiple, 2)):
        found = [re.match(r"rank(\d+)_", path.name) for path in folder.glob("rank*_results_*.json")]
        last = max((int(match[1]) for match in found if match), default=0)
        remedy = f"{program} {n} --workdir {folder}"
        names = [f"rank{rank}_results" for rank in range(last + 1)]
        runs.append([read_epochs(folder, name, (TIME, THROUGHPUT), remedy) for name in names])
    one, n = map(len, runs)
    if one != 1 or n == 1:
        raise UserError(
            f"--single {single} has {one} rank(s), --multiple {multiple} has {n}; needed are 1 and "
            f"2 or more; {program} N --workdir DIR"
        )
    labels = ("1 process", f"{n} processes", "one")
    return compare("data_parallel", (single, multiple), runs, labels, n, output, remedy)


def plot_pipeline(
    model_parallel: Path,
    pipeline_parallel: Path,
    output: Path = OUTPUT,
    num_microbatches: int | None = None,
    num_devices: int | None = None,
) -> list[Path]:
    """Draws training time and throughput of the pipeline against one stage at a time; returns the
    paths. Raises UserError where result files are missing or do not compare.

    With M micro-batches and K stages the ideal speed-up is K*M/(M+K-1): M+K-1 clocks instead of
    K*M. Both are the run's options unless they are given, else 4 and 2.
    """
    runs, folders = [], (model_parallel, pipeline_parallel)
    for mode, folder in zip(("model_parallel", "pipeline_parallel"), folders, strict=True):
        remedy = (
            "make it with: python project/run_pipeline.py --n_epochs 5 --model_parallel_mode "
            f"{mode} --workdir {folder}"
        )
        runs.append([read_epochs(folder, "eval_results", (TIME, THROUGHPUT), remedy)])
    options = read_options(pipeline_parallel)
    m = num_microbatches or options.get("num_microbatches") or 4
    k = num_devices or options.get("num_devices") or 2
    labels = ("model parallel", "pipeline", "model parallel")
    return compare("pipeline", folders, runs, labels, k * m / (m + k - 1), output, remedy)


def compare(
    name: str,
    folders: tuple[Path, Path],
    runs: Sequence[list[Epochs]],
    labels: tuple[str, str, str],
    ideal: float,
    output: Path,
    remedy: str,
) -> list[Path]:
    """Draws {name}_training_time.png and {name}_throughput.png of a baseline and a measured run.

    Args:
        runs: of both, per rank, the results per epoch.
        labels: of the bars, and how the title names the baseline.
        ideal: the speed-up that would be perfect.
    """
    check_alike(folders)
    epochs = [[len(rank) for rank in run] for run in runs]
    if any(len(set(counts)) > 1 or counts[0] < 2 for counts in epochs):
        raise UserError(
            f"{folders[0]} has {epochs[0]} epochs per rank, {folders[1]} {epochs[1]}; at least 2 "
            f"are needed, as the first is left out, and as many on every rank; {remedy}"
        )
    tokens = [
        sum(rank[0].get("real_tokens_per_sec", 0) * rank[0][TIME] for rank in run) for run in runs
    ]
    if min(tokens) > 0 and max(tokens) > 1.01 * min(tokens):
        raise UserError(
            f"{folders[0]} trained on {tokens[0]:,.0f} tokens per epoch, {folders[1]} on "
            f"{tokens[1]:,.0f}: only runs on the same data compare; {remedy}"
        )
    paths = []
    for metric, file in ((TIME, "training_time"), (THROUGHPUT, "throughput")):
        (base, std), after = (over_epochs(run, metric) for run in runs)
        shown = {labels[1]: after}
        if metric == TIME and 1 < len(runs[1]) <= 4:
            shown = {f"rank {r}": over_epochs([rank], TIME) for r, rank in enumerate(runs[1])}
        sign = -1 if metric == TIME else 1  # of time, less is better
        speedup = f"{(after[0] / base) ** sign:.2f}x"
        bars = [
            Bar(labels[0], {"baseline": base}, std),
            *(
                Bar(label, {"measured": mean}, std, f"{(mean / base) ** sign:.2f}x")
                for label, (mean, std) in shown.items()
            ),
            Bar("ideal", {"ideal": base * ideal**sign}, inside=f"{ideal:.3g}x"),
        ]
        verb = "as fast as" if metric == TIME else "the tokens/s of"
        last = epochs[1][0] - 1
        about = [describe(folders[1]), f"mean and standard deviation of epochs 1 to {last}"]
        paths.append(output / f"{name}_{file}.png")
        draw_bars(
            paths[-1], bars, ylabel=YLABELS[metric], subtitle="; ".join(filter(None, about)),
            title=f"{labels[1]}: {speedup} {verb} {labels[2]} (ideal {ideal:.3g}x)",
        )  # fmt: skip
    return paths


def over_epochs(ranks: list[Epochs], metric: str) -> tuple[float, float]:
    """Mean and standard deviation over all epochs but the first: of the slowest rank's time, or of
    the throughput summed over the ranks."""
    combine = max if metric == TIME else sum
    epochs = list(zip(*ranks, strict=True))[1:]
    return mean_and_std([combine(rank[metric] for rank in epoch) for epoch in epochs])


def check_alike(folders: Sequence[Path]) -> None:
    """Raises UserError where runs trained different models, or in different precision."""
    for name in ALIKE:
        values = {folder: read_options(folder).get(name) for folder in folders}
        held = {str(value): folder for folder, value in values.items() if value is not None}
        if len(held) > 1:
            found = ", ".join(f"{folder} {value}" for value, folder in held.items())
            raise UserError(f"only runs of the same {name} compare, and these differ: {found}")


# Runs of train.py


@dataclass(frozen=True)
class Run:
    """A run of train.py; `summary` is empty where it is missing."""

    strategy: str
    workers: int
    folder: Path
    summary: Mapping[str, Any]

    @property
    def label(self) -> str:
        """As a picture calls it."""
        return f"{self.strategy}, {self.workers} worker{'s' * (self.workers > 1)}"


def run_names(text: str) -> list[tuple[str, int]]:
    """The type of an option: `ddp=1,ddp=2`."""
    known = re.compile(rf"({'|'.join(STRATEGIES)})=([1-9]\d*)")
    found = [known.fullmatch(part.strip()) for part in text.split(",")]
    if None in found:
        raise argparse.ArgumentTypeError(
            f"{text!r}: take strategies ({', '.join(STRATEGIES)}) and their number of processes, "
            "e.g. ddp=1,ddp=2"
        )
    return [(match[1], int(match[2])) for match in found if match]


def run_or_folder(text: str) -> tuple[str, int] | Path:
    """The type of an option: `pipeline=3`, or a folder."""
    if "=" not in text:
        return Path(text)
    if len(found := run_names(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: one run is drawn, e.g. pipeline=3")
    return found[0]


def load_runs(names: Sequence[tuple[str, int]], root: Path, *keys: str) -> list[Run]:
    """The runs of these names, in their order. Raises UserError, with the commands that make them,
    where runs are missing or their summaries lack one of `keys`, and where they do not compare."""
    folders = [root / f"{strategy}{workers}" for strategy, workers in names]
    runs = [Run(*name, f, read_json(f / SUMMARY)) for name, f in zip(names, folders, strict=True)]
    check_alike(folders)
    missing = {run.folder: run for run in runs if not all(run.summary.get(key) for key in keys)}
    like = next((run.summary for run in runs if run.summary), {})
    commands = [
        command_of(folder, {**like, "strategy": run.strategy, "world_size": run.workers})
        for folder, run in missing.items()
    ]
    if missing:
        where = ", ".join(map(str, missing))
        raise UserError(f"no finished run in {where}; make it with: {' && '.join(commands)}")
    return runs


def command_of(folder: Path, options: Mapping[str, Any]) -> str:
    """The command that makes a run with a timeline, as far as its options are known."""
    if "model_parallel_mode" in options:
        program = f"run_pipeline.py --model_parallel_mode {options['model_parallel_mode']}"
    elif "strategy" in options and "gradient_sync" not in options:
        program = f"train.py {options['strategy']} --world_size {options['world_size']}"
    else:
        program = "run_data_parallel.py"
    given = {key: options.get(key, default) for key, default in ALIKE.items()}
    words = [f"--{k} {v} " for k, v in given.items() if v not in (None, ALIKE[k])]
    return f"python project/{program} {''.join(words)}--timeline 10 --workdir {folder}"


def timeline_of(folder: Path) -> tuple[dict[str, list[Event]], dict[str, Any]]:
    """What the workers of a run recorded, and its options. Raises UserError, with the command that
    makes the run again, where nothing was recorded."""
    options = read_options(folder)
    try:
        workers, about = read_timelines(folder)
        if not any(workers.values()):
            raise ValueError(f"{folder}: no step was recorded")
    except (OSError, ValueError) as error:
        reason = f"{error.filename} is missing" if isinstance(error, OSError) else str(error)
        raise UserError(f"{reason}; make it with: {command_of(folder, options)}") from None
    return workers, options | about


def plot_split_time(names: Sequence[tuple[str, int]], root: Path, path: Path) -> Path:
    """Where the time of a step goes: a stacked bar per run."""
    times = {}
    for run in (runs := load_runs(names, root, "step_seconds")):
        workers, _ = timeline_of(run.folder)
        steps = [shares(in_step(workers, step)) for step in steps_of(workers)]
        times[run.label] = {kind: fmean(step[kind] for step in steps) for kind in TIMES}
    factor, unit = handy(max(sum(parts.values()) for parts in times.values()))
    bars = [
        Bar(label, {kind: factor * value for kind, value in parts.items() if value})
        for label, parts in times.items()
    ]
    last = bars[-1]
    sent, idle = (last.parts.get(kind, 0) / last.total for kind in ("communication", "idle"))
    return draw_bars(
        path, bars, ylabel=f"a step ({unit})",
        title=f"{last.label}: communication {sent:.0%} of a step, idle {idle:.0%}",
        subtitle=f"{describe(*(run.folder for run in runs))}; means over workers and steps, "
        "without the first step; communication: the part that no computation hides",
    )  # fmt: skip


def plot_throughput(names: Sequence[tuple[str, int]], root: Path, path: Path) -> Path:
    """Examples per second of each run. The ideal of N workers is N times the run with the fewest
    workers of the same strategy."""
    runs = load_runs(names, root, "step_seconds", "batch_size")
    rates, bars, title = {}, [], ""
    for run in runs:
        seconds, size = run.summary["step_seconds"], run.summary["batch_size"]
        rates[run.label] = mean_and_std([size / s for s in seconds[1:] or seconds])
    for run in runs:
        mean, std = rates[run.label]
        alike = [other for other in runs if other.strategy == run.strategy]
        base = min(alike, key=lambda other: other.workers)
        if run is base:
            role = "baseline" if len(alike) > 1 else "measured"
            bars.append(Bar(run.label, {role: mean}, std))
            continue
        ideal, times = run.workers / base.workers, mean / rates[base.label][0]
        bars.append(Bar(run.label, {"measured": mean}, std, f"{times:.2f}x"))
        bars.append(Bar("ideal", {"ideal": mean / times * ideal}, inside=f"{ideal:.3g}x"))
        one = "one" if base.workers == 1 else base.workers
        title = f"{run.label}: {times:.2f}x the examples/s of {one} (ideal {ideal:.3g}x)"
    return draw_bars(
        path, bars, ylabel="examples per second, all workers together",
        title=title or f"{runs[0].label}: {readable(bars[0].total)} examples per second",
        subtitle=f"{describe(*(run.folder for run in runs))}; mean and standard deviation of the "
        "steps, without the first",
    )  # fmt: skip


def plot_memory(names: Sequence[tuple[str, int]], root: Path, path: Path) -> Path:
    """Per rank of each run: bytes of parameters, gradients and optimizer state, and the peak."""
    bars, most = [], {}
    for run in (runs := load_runs(names, root, "state_bytes", "peak_rss_bytes")):
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
        subtitle=f"{describe(*(run.folder for run in runs))}; peak resident: of the whole process, "
        "with Python, libraries and activations",
    )  # fmt: skip


# Every figure

_SHORT = "--n_epochs 5 --n_validation 100 --n_test 10 --timeline 3"
_DP = f"run_data_parallel.py --cores_per_rank 1 --batch_size 128 --n_train 3000 {_SHORT}"
_PP = (
    "run_pipeline.py --num_devices 2 --n_layer 8 --n_embd 256 --n_head 4 --batch_size 64 "
    f"--n_train 1500 {_SHORT} --model_parallel_mode"
)
RUNS = {  # folder: the program and its options, less --device and --workdir
    "dp1": f"{_DP} --world_size 1",
    "dp2": f"{_DP} --world_size 2",
    "mp": f"{_PP} model_parallel --num_microbatches 8",
    "pp": f"{_PP} pipeline_parallel --num_microbatches 8",
    **{
        f"{strategy}{n}": f"train.py {strategy} --world_size {n} --num_batches 9 --timeline 8 "
        f"--keep 0{' --num_microbatches 4' * (strategy == 'pipeline')}"
        for strategy, n in (("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2), ("model", 2),
                            ("pipeline", 2))
    },
}  # fmt: skip
_ALL = f"ddp=1,ddp=2,fsdp=1,fsdp=2,model=2,pipeline=2 --workdir {WORKDIRS}"
FIGURES = (  # command lines of this program, less --output
    f"data_parallel --single {WORKDIRS}/dp1 --multiple {WORKDIRS}/dp2",
    f"pipeline --model_parallel {WORKDIRS}/mp --pipeline_parallel {WORKDIRS}/pp",
    "schedule --schedule gpipe",
    "schedule --schedule 1f1b",
    f"split_time {_ALL}",
    f"throughput {_ALL}",
    f"memory ddp=2,fsdp=2 --workdir {WORKDIRS}",
    *(f"timeline {WORKDIRS}/{run}" for run in ("dp2", "pp", "pipeline2", "fsdp2")),
)


def make_figures(output: Path = OUTPUT, device: str = "cpu", again: bool = False) -> list[Path]:
    """Makes the runs that are missing or have other options, or all of them `again`, then draws
    every figure. Raises UserError where a run failed."""
    for number, (name, options) in enumerate(RUNS.items(), 1):
        folder = WORKDIRS / name
        words = [*options.split(), "--device", device, "--workdir", str(folder)]
        done, command = folder / "command.txt", f"python project/{' '.join(words)}"
        if not again and done.is_file() and done.read_text(encoding="utf-8") == command:
            continue
        done.unlink(missing_ok=True)
        print(f"[{number}/{len(RUNS)}] {command}", flush=True)
        program = [sys.executable, str(ROOT / "project" / words[0]), *words[1:]]
        if status := subprocess.run(program, check=False).returncode:
            raise UserError(f"status {status} from: {command}")
        done.write_text(command, encoding="utf-8")  # last: a run that failed is made again
    return [path for figure in FIGURES for path in draw_figure(parse(figure.split()), output)]


# The command line

COMMANDS = {
    "data_parallel": "time and throughput of one process against several, beside the ideal",
    "pipeline": "time and throughput of a pipeline against one stage at a time, beside the ideal",
    "training": "loss and BLEU (or accuracy) of a run after each epoch",
    "schedule": "clock table of a pipeline schedule, printed and drawn",
    "split_time": "forward, backward, optimizer, exposed communication and idle time of a step",
    "throughput": "examples per second of runs, beside the ideal",
    "memory": "parameters, gradients, optimizer state and peak memory of each rank",
    "timeline": "what each worker did when in one step, beside the ideal of its schedule",
    "figures": "make the missing runs (about seven minutes on two cores) and draw everything",
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    adder = parser.add_subparsers(dest="figure", required=True, metavar="COMMAND")
    commands = {name: adder.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
                for name, text in COMMANDS.items()}  # fmt: skip

    def option(names: str, *flags: str, **settings: Any) -> None:
        for name in names.split():
            commands[name].add_argument(*flags, **settings)

    # fmt: off
    one = {"type": Path, "required": True, "metavar": "DIR"}
    option("data_parallel", "--single", **one, help="workdir of the run of one process")
    option("data_parallel", "--multiple", **one, help="workdir of the run of several")
    option("pipeline", "--model_parallel", **one, help="workdir of this mode's run")
    option("pipeline", "--pipeline_parallel", **one, help="workdir of this mode's run")
    m, k = ("--num_microbatches", "--n_chunk"), ("--num_devices", "--stages")
    option("pipeline", *m, type=count, metavar="M", help="micro-batches (the run's)")
    option("pipeline", *k, type=count, metavar="K", help="stages (the run's)")
    option("schedule", *m, type=count, metavar="M", default=8, help="micro-batches (8)")
    option("schedule", *k, type=count, metavar="K", default=4, help="stages (4)")
    option("schedule", "--schedule", choices=list(SCHEDULES), default="1f1b", help="which (1f1b)")
    option("training", "workdir", type=Path, metavar="DIR", help="workdir of the run")
    option("split_time throughput memory", "runs", type=run_names, help="e.g. ddp=1,ddp=2")
    option("timeline", "run", type=run_or_folder,
           help="e.g. pipeline=3, or the workdir of any run with --timeline")
    option("timeline", "--step", type=int, metavar="K", help="which step (a typical one)")
    option("split_time throughput memory timeline", "--workdir", type=Path, default=WORKDIR,
           metavar="DIR", help="folder of the runs' folders (%(default)s)")
    option("figures", "--device", choices=("auto", "cpu", "cuda", "mps"), default="cpu",
           help="where the runs train (cpu)")
    option("figures", "--again", action="store_true", help="make all runs again")
    option("data_parallel pipeline figures", "--output", type=Path, metavar="DIR",
           help=f"folder of the pictures ({OUTPUT})")
    option("training", "--output", type=Path, metavar="FILE", help="picture (DIR/training.png)")
    option("schedule split_time throughput memory timeline", "--output", type=Path,
           metavar="FILE", help=f"picture ({OUTPUT}/COMMAND.png)")
    # fmt: on
    return parser.parse_args(argv)


def count(text: str) -> int:
    """The type of an option: a whole number, 1 or more."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number, 1 or more, is needed, as 4")
    return int(text)


def draw_figure(args: argparse.Namespace, output: Path = OUTPUT) -> list[Path]:
    """Draws what the command line asks for; returns the paths, in `output` by default."""
    name = args.figure
    folder, path = args.output or output, args.output or output / f"{name}.png"
    if name == "data_parallel":
        return plot_data_parallel(args.single, args.multiple, folder)
    if name == "pipeline":
        runs = args.model_parallel, args.pipeline_parallel
        return plot_pipeline(*runs, folder, args.num_microbatches, args.num_devices)
    if name == "figures":
        return make_figures(folder, args.device, args.again)
    if name == "training":
        return [plot_training(args.workdir, args.output)]
    if name == "schedule":
        path = args.output or output / f"schedule_{args.schedule}.png"
        return [plot_schedule(args.schedule, args.num_devices, args.num_microbatches, path)]
    if name == "timeline":
        folder = args.run
        if isinstance(folder, tuple):
            folder = load_runs([folder], args.workdir)[0].folder
        path = args.output or output / f"timeline_{folder.name}.png"
        workers, about = timeline_of(folder)
        return [draw_step(path, workers, about, describe(folder), args.step)]
    plots = {"split_time": plot_split_time, "throughput": plot_throughput, "memory": plot_memory}
    return [plots[name](args.runs, args.workdir, path)]


def main() -> None:
    """The program."""
    for path in draw_figure(parse()):
        print(f"drew {path}")


if __name__ == "__main__":
    from project.utils import run_program

    run_program(main)
