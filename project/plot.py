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
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matplotlib.ticker import MaxNLocator

from pipeline.catalogue import SCHEDULES
from project.plot_timeline import (
    COLOURS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    draw_step,
    handy,
    in_step,
    legend,
    on,
    plot_schedule,
    shares,
    steps_of,
    stillness,
)
from training.command_line import Parser, count
from training.curves import (
    BLUE,
    GREEN,
    GREY,
    INK,
    Epochs,
    epochs_of,
    picture,
    plot_training,
    read_epochs,
    readable,
)
from training.errors import UserError
from training.perfetto import read_timelines, write_trace
from training.results import OPTIONS, SUMMARY
from training.timeline import Event

OUTPUT, WORKDIR = Path("submit_figures"), Path("workdir")
STRATEGIES = ("single", "ddp", "model", "fsdp", "pipeline", "tensor")
TIME, THROUGHPUT = "training_time", "tokens_per_sec"
YLABELS = {TIME: "training time of an epoch (s)", THROUGHPUT: "tokens per second, with padding"}
ALIKE = (  # options that must be the same in all runs of a figure
    "model", "precision", "vgg_width", "n_layer", "n_embd", "n_head", "vocab_size", "dataset",
    "n_train",
)  # fmt: skip
NAMED = ("strategy", "precision", "recompute", "learning_rate", "schedule", "world_size", "dropout")
FORMATS = (".png", ".pdf", ".svg")
LINES = (GREY, ORANGE, SKY, BLUE, GREEN, PURPLE, VERMILION, INK)  # wide ones first
TIMES = ("forward", "recompute", "backward", "optimizer", "other", "communication", "idle")


@dataclass(frozen=True)
class Bar:
    """A bar of stacked parts, from the bottom: their kinds (see COLOURS) and heights."""

    label: str
    parts: Mapping[str, float]
    std: float = 0.0
    inside: str = ""  # what is written into it, such as a speed-up

    @property
    def total(self) -> float:
        """The height of the bar."""
        return sum(self.parts.values())


def draw_bars(path: Path, bars: Sequence[Bar], *, title: str, foot: str, ylabel: str) -> Path:
    """Draws bars side by side, the sum of each above it, and a legend if they have parts."""
    top = max((bar.total + bar.std for bar in bars), default=0.0) or 1.0
    size, plus_minus = (15, " ± ") if len(bars) < 5 else (12, "\n± ")
    stacked = any(len(bar.parts) > 1 for bar in bars)
    with picture(path, title, foot, (max(10, 1.25 * len(bars)), 5.6)) as (fig, (ax,)):
        for x, bar in enumerate(bars):
            base = 0.0
            for kind, value in bar.parts.items():
                colour = COLOURS[kind]
                white = colour == "white"  # outlined: the ideal, and the peak
                edge: dict[str, Any] = {
                    "edgecolor": BLUE if white else "white",
                    "linewidth": 2 if white else 1,
                }
                hatch = "//" if kind == "ideal" else ""
                ax.bar(x, value, 0.64, base, color=colour, hatch=hatch, **edge)
                inside = f"{value / bar.total:.0%}" if len(bar.parts) > 1 else bar.inside
                if inside and value > 0.07 * top:
                    back = {"color": "white", "pad": 3} if white else None
                    ink = BLUE if white else on(colour)
                    at: dict[str, Any] = {"ha": "center", "va": "center", "size": size}
                    ax.text(x, base + value / 2, inside, color=ink, bbox=back, **at)
                base += value
            if bar.std:
                ax.errorbar(x, base, bar.std, color=INK, capsize=7, elinewidth=1.8)
            above = readable(base) + (plus_minus + readable(bar.std) if bar.std else "")
            ax.text(x, base + bar.std + 0.02 * top, above, ha="center", va="bottom", size=size)
        labels = [bar.label.replace(", ", "\n") for bar in bars]
        ax.set_xticks(range(len(bars)), labels, color=INK, size=size)
        ax.set(xlim=(-0.6, max(1, len(bars)) - 0.4), ylim=(0, 1.2 * top), title=ylabel)
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}")
        if stacked:
            legend(fig, {kind for bar in bars for kind, value in bar.parts.items() if value}, 4.5)
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


# A run of a course's program against its baseline


def plot_data_parallel(single: Path, multiple: Path, output: Path) -> list[Path]:
    """Draws training time and throughput of one process against several; returns the paths.
    Raises UserError if result files are missing or cannot be compared."""
    sizes = [read_options(folder).get("world_size", 1) for folder in (single, multiple)]
    if sizes[0] != 1 or sizes[1] == 1:
        raise UserError(
            f"--single {single} has {sizes[0]} rank(s), --multiple {multiple} has {sizes[1]}; "
            "needed are 1 and 2 or more"
        )
    runs = [
        [read_epochs(folder, f"rank{rank}_results") for rank in range(n)]
        for folder, n in zip((single, multiple), sizes, strict=True)
    ]
    labels = ("1 process", f"{sizes[1]} processes", "one")
    return compare("data_parallel", (single, multiple), runs, labels, sizes[1], output)


def plot_pipeline(
    model_parallel: Path,
    pipeline_parallel: Path,
    output: Path,
    num_microbatches: int | None = None,
    num_devices: int | None = None,
) -> list[Path]:
    """Draws training time and throughput of the pipeline against one stage at a time; returns the
    paths. Raises UserError if result files are missing or cannot be compared.

    With M micro-batches and K stages the ideal speed-up is K*M/(M+K-1): M+K-1 clocks instead of
    K*M. M and K default to the run's options, else to 4 and 2.
    """
    folders = (model_parallel, pipeline_parallel)
    for folder, mode in zip(folders, ("model_parallel", "pipeline_parallel"), strict=True):
        if (found := read_options(folder).get("model_parallel_mode", mode)) != mode:
            raise UserError(f"--{mode} {folder}: that run has --model_parallel_mode {found}")
    check_alike(folders, (*ALIKE, "batch_size"))
    runs = [[read_epochs(folder, "eval_results")] for folder in folders]
    options = read_options(pipeline_parallel)
    m = num_microbatches or options.get("num_microbatches") or 4
    k = num_devices or options.get("num_devices") or 2
    labels = ("model parallel", "pipeline", "model parallel")
    return compare("pipeline", folders, runs, labels, k * m / (m + k - 1), output)


def compare(
    name: str,
    folders: tuple[Path, Path],
    runs: Sequence[list[Epochs]],
    labels: tuple[str, str, str],
    ideal: float,
    output: Path,
) -> list[Path]:
    """Draws {name}_training_time.png and {name}_throughput.png of a baseline and a measured run.

    Args:
        runs: both runs' results per rank and epoch.
        labels: of the bars, and the baseline's name in the title.
        ideal: the ideal speed-up, if processes have equally many cores in both.
    """
    check_alike(folders)
    for folder, ranks in zip(folders, runs, strict=True):
        if len({tuple(epoch["epoch"] for epoch in rank) for rank in ranks}) > 1:
            raise UserError(
                f"{folder}: its ranks have results of different epochs, as it was resumed with "
                "another number of them; make the run again"
            )
    if min(len(rank) for run in runs for rank in run) < 2:
        raise UserError(
            f"{folders[0]} and {folders[1]}: both need 2 epochs or more, as the first is left out"
        )
    options = [read_options(folder) for folder in folders]
    here = ["".join(f", {fact}" for fact in _size(o)) for o in options]
    equal = len({o.get("cores") for o in options}) == 1
    paths = []
    for metric, file in ((TIME, "training_time"), (THROUGHPUT, "throughput")):
        (base, std), after = (over_epochs(run, metric) for run in runs)
        shown = {labels[1]: after}
        if metric == TIME and 1 < len(runs[1]) <= 4:
            shown = {f"rank {r}": over_epochs([rank], TIME) for r, rank in enumerate(runs[1])}
        sign = -1 if metric == TIME else 1  # of time, less is better
        bars = [Bar(labels[0] + here[0], {"baseline": base}, std)]
        bars += [
            Bar(label + here[1], {"measured": mean}, std, f"{(mean / base) ** sign:.2f}x")
            for label, (mean, std) in shown.items()
        ]
        if equal:
            bars.append(Bar("ideal", {"ideal": base * ideal**sign}, inside=f"{ideal:.3g}x"))
        verb = "as fast as" if metric == TIME else "the tokens/s of"
        gain = (after[0] / base) ** sign
        counts = {x: len(run[0]) - 1 for x, run in zip(labels[:2], runs, strict=True)}
        of = "mean and standard deviation of all epochs but the first"
        facts, before = _facts(folders[1]), _facts(folders[0])  # bars name batches and cores
        about = ["; ".join(x for x in facts if not before or x in before or " stages" in x)]
        about += [_of_several(of, "epoch", counts)]
        about += _why(runs, labels[1], options)
        if equal and gain > 1.01 * ideal:
            about.append(_above_ideal(folders[0], options))
        paths.append(output / f"{name}_{file}.png")
        draw_bars(
            paths[-1], bars, ylabel=YLABELS[metric], foot="; ".join(filter(None, about)),
            title=f"{labels[1]}: {gain:.2f}x {verb} {labels[2]}"
            + (f" (ideal {ideal:.3g}x)" if equal else ""),
        )  # fmt: skip
    return paths


def _of_several(meaning: str, what: str, counts: Mapping[str, int]) -> str:
    """What bars mean, given how many epochs or steps each is of: one value has no deviation."""
    single = [name for name, n in counts.items() if n == 1]
    found = "; ".join(f"{name}: of one {what}, without a deviation" for name in single)
    if len(single) == len(counts):
        return f"of one {what} each, so without a standard deviation"
    return f"{meaning}; {found}" if single else meaning


def _size(options: Mapping[str, Any]) -> list[str]:
    """What may differ between two compared runs: the batch, and the cores of a process."""
    found = [f"batch {options['batch_size']}"] if "batch_size" in options else []
    if cores := options.get("cores"):
        found.append(f"{cores} core{'s' * (cores > 1)} per process")
    return found


def _why(
    runs: Sequence[list[Epochs]], name: str, options: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Explanations for the foot of a figure: missing ideals, and time against tokens."""
    found = []
    cores = [o.get("cores") for o in options]
    if cores[0] != cores[1]:
        found.append(
            f"no ideal is drawn, since a process has {cores[0]} cores in one run and {cores[1]} in "
            "the other: --cores_per_rank 1 for both makes them equal"
        )
    (time, after), (rate, rate_after) = (
        [over_epochs(run, metric)[0] for run in runs] for metric in (TIME, THROUGHPUT)
    )
    by_time, by_tokens = time / after, rate_after / rate
    if abs(by_tokens / by_time - 1) > 0.01:
        positions = [
            sum(epoch[TIME] * epoch[THROUGHPUT] for rank in run for epoch in rank[1:])
            for run in runs
        ]
        more = positions[1] / positions[0] - 1
        own = fmean(over_epochs([rank], TIME)[0] for rank in runs[1])
        if abs(more) > 0.005:
            reason = (
                f"with {name} an epoch has {abs(more):.0%} {'more' if more > 0 else 'fewer'} "
                "tokens, padding included: batches are cut into other parts, each padded to its "
                "longest sentence"
            )
        elif after > 1.005 * own:
            reason = "the time is that of the slowest rank, tokens/s are added over the ranks"
        else:
            reason = "epochs differ in time, and in the mean of their speeds fast ones count more"
        found.append(f"{by_time:.2f}x by time, {by_tokens:.2f}x by tokens/s: {reason}")
    return found


def _above_ideal(baseline: Path, options: Sequence[Mapping[str, Any]]) -> str:
    """Why a run may gain more than its ideal, which assumes that the baseline wastes no time."""
    before, after = (o.get("num_microbatches") or 1 for o in options)
    if before < after:
        pieces = f"{before} pieces" if before > 1 else "one piece"
        return (
            f"more than ideal, since the baseline works on the whole batch in {pieces}, and "
            "smaller ones stay in the caches"
        )
    with suppress(UserError):
        workers, about = timeline_of(baseline)
        if about.get("schedule") in SCHEDULES:
            still = fmean(stillness(in_step(workers, step)) for step in steps_of(workers))
            return (
                "more than ideal, since the baseline also loses time between its actions: in "
                f"{still:.1%} of a step no stage works"
            )
    return "more than ideal, for a reason that was not measured"


def over_epochs(ranks: list[Epochs], metric: str) -> tuple[float, float]:
    """Mean and standard deviation over all epochs but the first: of the slowest rank's time, or of
    the throughput summed over the ranks."""
    combine = max if metric == TIME else sum
    epochs = list(zip(*ranks, strict=False))[1:]
    return mean_and_std([combine(rank[metric] for rank in epoch) for epoch in epochs])


def check_alike(folders: Sequence[Path], names: Sequence[str] = ALIKE) -> None:
    """Raises UserError if runs differ in one of these options: they trained different models, in
    different precision, or on different data."""
    every = {folder: read_options(folder) for folder in folders}
    for name in names:
        held = {str(o[name]): folder for folder, o in every.items() if o.get(name) is not None}
        if len(held) > 1:
            found = ", ".join(f"{folder} {value}" for value, folder in held.items())
            raise UserError(f"only runs of the same {name} compare, and these differ: {found}")


# Runs of train.py


@dataclass(frozen=True)
class Run:
    """A finished run of train.py."""

    strategy: str
    workers: int
    folder: Path
    summary: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Its name in a picture."""
        return f"{self.strategy}, {self.workers} worker{'s' * (self.workers > 1)}"


def run_names(text: str) -> list[tuple[str, int]]:
    """The type of an option: `ddp=1,ddp=2`."""
    found = [part.strip().partition("=") for part in text.split(",")]
    known = [name in STRATEGIES and n.isdecimal() and int(n) > 0 for name, _, n in found]
    if not all(known) or any(name == "single" and int(n) > 1 for name, _, n in found):
        raise argparse.ArgumentTypeError(
            f"{text}: they must be strategies ({', '.join(STRATEGIES)}) with their number of "
            "processes, 1 or more (of single 1), e.g. ddp=1,ddp=2"
        )
    return [(name, int(number)) for name, _, number in found]


def picture_or_folder(text: str) -> Path:
    """The type of an option: where pictures go. A folder that is not there yet has no suffix."""
    path = Path(text)
    if path.suffix.lower() not in ("", *FORMATS) and not path.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text}: it must be a folder, or a picture that ends in {', '.join(FORMATS[:-1])} or "
            f"{FORMATS[-1]}; {path.with_suffix('.png')} works"
        )
    return path


def run_or_folder(text: str) -> tuple[str, int] | Path:
    """The type of an option: a folder, or a run such as `pipeline=3`."""
    if "=" not in text:
        return Path(text)
    first, *others = run_names(text)
    if others:
        raise argparse.ArgumentTypeError(f"{text}: a timeline is of one run; take one of them")
    return first


def load_runs(names: Sequence[tuple[str, int]], root: Path) -> list[Run]:
    """The runs of these names, in their order. Raises UserError if one is missing, with the command
    that makes it, or if they cannot be compared."""
    runs = []
    for strategy, workers in names:
        folder = root / f"{strategy}{workers}"
        runs.append(Run(strategy, workers, folder, read_options(folder) if folder.is_dir() else {}))
        if not runs[-1].summary.get("step_seconds"):
            raise UserError(_make_it(strategy, workers, folder))
    check_alike([run.folder for run in runs])
    return runs


def _make_it(strategy: str, workers: int, folder: Path) -> str:
    """Says that a run is missing, with the command that makes it."""
    model = " --model gpt2-mini" if strategy == "tensor" else ""  # vgg16 cannot be cut
    return (
        f"no finished run in {folder}; make it with: python project/train.py {strategy} "
        f"--world_size {workers}{model} --num_batches 9 --timeline 8 --workdir {folder}"
    )


def read_options(workdir: Path) -> dict[str, Any]:
    """The options of a run: from its summary or, if it did not finish, from options.json. Raises
    UserError if there is no such folder, or they cannot be read."""
    if not workdir.is_dir():
        raise UserError(f"{workdir}: there is no such folder; name the --workdir of a run")
    for name in (SUMMARY, OPTIONS):
        try:
            return json.loads((workdir / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise UserError(f"{workdir / name} cannot be read ({error})") from None
    return {}


def describe(*workdirs: Path) -> str:
    """What was trained and how: the facts, from the options, that all runs have in common."""
    first, *others = map(_facts, workdirs)
    return "; ".join(fact for fact in first if all(fact in facts for facts in others))


def _facts(workdir: Path) -> list[str]:
    options = read_options(workdir)
    sizes = [f"{n} {options[n]}" for n in ("n_layer", "n_embd", "vocab_size") if options.get(n)]
    parts = [", ".join([options["model"], *sizes])] if "model" in options else []
    if "batch_size" in options:
        parts.append(f"batches of {options['batch_size']}")
    if options.get("strategy") == "3d":
        parts.append("data {dp} x pipeline {pp} x tensor {tp}".format(**options))
    stages = options.get("num_devices") or options.get("pp") or options.get("world_size", 1)
    schedule = options.get("schedule")
    if schedule and stages > 1:
        chunks = options.get("chunks") or 1
        each = f" with {chunks} chunks" if chunks > 1 else ""
        n = options["num_microbatches"]
        parts.append(f"{stages} stages{each}, {schedule}, {n} micro-batch{'es' * (n > 1)}")
    if cores := options.get("cores"):
        who = "" if "num_devices" in options else " per process"
        parts.append(f"{cores} core{'s' * (cores > 1)}{who}")
    return parts


def timeline_of(folder: Path) -> tuple[dict[str, list[Event]], dict[str, Any]]:
    """The events of a run's workers, and its options. Raises UserError if nothing was recorded."""
    options = read_options(folder)
    try:
        workers, about = read_timelines(folder)
    except (OSError, ValueError) as error:
        reason = f"{error.filename} is missing" if isinstance(error, OSError) else str(error)
        raise UserError(f"{reason}; make the run again, with --timeline 10") from None
    if not any(workers.values()):
        raise UserError(f"{folder}: no step was recorded; make the run again, with --timeline 10")
    return workers, options | about


def plot_split_time(runs: Sequence[Run], path: Path) -> Path:
    """Draws where the time of a step goes: a stacked bar per run."""
    times = {}
    for run in runs:
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
        foot=f"{describe(*(run.folder for run in runs))}; means over workers and steps, "
        "without the first step; communication: exchange and waiting that no computation hides",
    )  # fmt: skip


def plot_throughput(runs: Sequence[Run], path: Path) -> Path:
    """Draws the examples per second of each run. The ideal scales the run of the same strategy with
    the fewest workers by the number of workers."""
    rates, bars, title = {}, [], ""
    counted = {run.label: (s := run.summary["step_seconds"])[1:] or s for run in runs}
    for run in runs:
        seconds, size = counted[run.label], run.summary["batch_size"]
        _, std = mean_and_std([size / s for s in seconds])
        rates[run.label] = size * len(seconds) / sum(seconds), std
    measured = [f"{name}: {readable(mean)}" for name, (mean, _) in rates.items()]
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
    of = "all examples by all seconds of the steps but the first; ±: standard deviation of a step"
    of = _of_several(of, "step", {label: len(seconds) for label, seconds in counted.items()})
    for run in runs:
        load, cores = run.summary.get("load", 0), os.cpu_count() or 1  # of the whole machine
        if load > 1.2 * cores:
            of += f"; load {load:.1f} on {cores} cores in {run.label}: its times may be off"
    return draw_bars(
        path, bars, ylabel="examples per second, all workers together",
        title=title or f"{'; '.join(measured)} examples per second",
        foot=f"{describe(*(run.folder for run in runs))}; {of}",
    )  # fmt: skip


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
        foot=f"{describe(*(run.folder for run in runs))}; peak resident: of the whole process, "
        "with Python, libraries and activations",
    )  # fmt: skip


def plot_losses(workdirs: Sequence[Path], path: Path, names: Sequence[str] | None = None) -> Path:
    """Draws the losses of runs side by side, labelled by `names`, or by the options in which they
    differ."""
    runs = list(zip(names or _names(workdirs), map(epochs_of, workdirs), strict=True))
    ends_at = [run[-1]["epoch"] for _, run in runs]
    after = [f" after {n} epoch{'s' * (n > 1)}" for n in ends_at]
    every, each = (after[0], [""] * len(after)) if len({*after}) == 1 else ("", after)
    ends = (
        f"{run[-1]['validation_loss']:.3f}{own} ({name})"
        for (name, run), own in zip(runs, each, strict=True)
    )
    title = f"validation loss{every}: {', '.join(ends)}"
    with picture(path, title, describe(*workdirs), (12, 5.6), ncols=2) as (_, axes):
        for ax, kind in zip(axes, ("training", "validation"), strict=True):
            for k, (name, run) in enumerate(runs):
                values = [epoch[f"{kind}_loss"] for epoch in run]
                # A wide line shows under the narrow ones that lie on it.
                look: dict[str, Any] = {"lw": max(1.5, 9 - 2.3 * k), "color": LINES[k % len(LINES)]}
                look |= {"marker": "o", "markersize": look["lw"] + 4}  # a single epoch has no line
                ax.plot([epoch["epoch"] for epoch in run], values, label=name, **look)
            ax.set(title=f"{kind} loss (nats per target)", xlabel="epoch")
            ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
            ax.set_ylim(0, 1.1 * ax.get_ylim()[1])
        axes[0].legend()
    return path


def _names(workdirs: Sequence[Path]) -> list[str]:
    """Labels of runs: the options in which they differ, or their folders if these are ambiguous."""
    options = [read_options(workdir) for workdir in workdirs]
    differ = [key for key in NAMED if len({str(given.get(key)) for given in options}) > 1]
    found = [
        ", ".join(f"{key} {given[key]}" for key in differ if given.get(key) is not None)
        for given in options
    ]
    return found if len({*found}) == len(found) else [str(workdir) for workdir in workdirs]


# The command line

COMMANDS = {
    "data_parallel": "time and throughput of one process against several, beside the ideal",
    "pipeline": "time and throughput of a pipeline against one stage at a time, beside the ideal",
    "training": "loss and BLEU (or accuracy) of a run after each epoch; of runs, their losses",
    "schedule": "clock table of a pipeline schedule, printed and drawn",
    "split_time": "forward, backward, optimizer, exposed communication and idle time of a step",
    "throughput": "examples per second of runs, beside the ideal",
    "memory": "parameters, gradients, optimizer state and peak memory of each rank",
    "timeline": "what each worker did when in one step, beside the ideal of its schedule",
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__)
    adder = parser.add_subparsers(dest="figure", required=True, metavar="COMMAND")
    commands = {name: adder.add_parser(name, help=text) for name, text in COMMANDS.items()}

    def option(names: str, *flags: str, **settings: Any) -> None:
        for name in names.split():
            commands[name].add_argument(*flags, **settings)

    # fmt: off
    one: dict[str, Any] = {"type": Path, "metavar": "DIR", "help": "workdir of this run"}
    for name, runs in (("data_parallel", "single multiple"),
                       ("pipeline", "model_parallel pipeline_parallel")):
        for run in runs.split():
            option(name, f"--{run}", required=True, **one)
    m, k = ("--num_microbatches", "--n_chunk"), ("--num_devices", "--stages")
    option("pipeline", *m, type=count, metavar="M", help="micro-batches (the run's)")
    option("pipeline", *k, type=count, metavar="K", help="stages (the run's)")
    option("schedule", *m, type=count, metavar="M", default=8, help="micro-batches (8)")
    option("schedule", *k, type=count, metavar="K", default=4, help="stages (4)")
    option("schedule", "--schedule", choices=list(SCHEDULES), default="1f1b", help="which (1f1b)")
    option("schedule", "--chunks", type=count, metavar="V", help="chunks of layers per rank, of "
           "interleaved (2)")
    option("training", "workdir", nargs="+", **one)
    option("split_time throughput memory", "runs", type=run_names, help="e.g. ddp=1,ddp=2")
    option("timeline", "run", type=run_or_folder,
           help="the workdir of a run with --timeline, or e.g. pipeline=3")
    option("timeline", "--step", type=count, metavar="K", help="which step, from 1 (a typical one)")
    option("split_time throughput memory timeline", "--workdir", type=Path, default=WORKDIR,
           metavar="DIR", help="folder of the runs' folders (%(default)s)")
    option(" ".join(COMMANDS), "--output", type=picture_or_folder, metavar="PATH",
           help=f"the picture, or a folder for it ({OUTPUT}; of training: the run's)")
    # fmt: on
    return parser.parse_args(argv)


def draw_figure(args: argparse.Namespace) -> list[Path]:
    """Draws what the command line asks for; returns the paths."""
    name, folder = args.figure, args.output or OUTPUT

    def path(stem: str) -> Path:
        return folder if is_picture else folder / f"{stem}.png"

    is_picture = folder.suffix.lower() in FORMATS and not folder.is_dir()
    if is_picture and name in ("data_parallel", "pipeline"):
        raise UserError(
            f"--output {folder}: it must be a folder, as {name} draws two pictures; "
            f"{folder.with_suffix('')} works"
        )
    if name == "data_parallel":
        return plot_data_parallel(args.single, args.multiple, folder)
    if name == "pipeline":
        runs = args.model_parallel, args.pipeline_parallel
        return plot_pipeline(*runs, folder, args.num_microbatches, args.num_devices)
    if name == "training":
        if len(args.workdir) > 1:
            return [plot_losses(args.workdir, path("losses"))]
        (run,) = args.workdir
        steps = read_options(run).get("num_batches")
        return [plot_training(run, describe(run), steps, args.output and path("training"))]
    if name == "schedule":
        sizes = args.num_devices, args.num_microbatches
        stem = f"schedule_{args.schedule}"
        return [plot_schedule(args.schedule, *sizes, args.chunks, path(stem))]
    if name == "timeline":
        run = args.run
        if isinstance(run, tuple):
            strategy, workers = run
            run = args.workdir / f"{strategy}{workers}"
            if not run.is_dir():
                raise UserError(_make_it(strategy, workers, run))
        recorded = timeline_of(run)
        step = args.step and args.step - 1  # files count from 0
        drawn = draw_step(path(f"timeline_{run.name}"), *recorded, describe(run), step)
        print(f"wrote {write_trace(run)}: open it in https://ui.perfetto.dev")
        return [drawn]
    plots = {"split_time": plot_split_time, "throughput": plot_throughput, "memory": plot_memory}
    return [plots[name](load_runs(args.runs, args.workdir), path(name))]


def main() -> None:
    """The program."""
    for path in draw_figure(parse()):
        print(f"drew {path}")


if __name__ == "__main__":
    from project.utils import run_program

    run_program(main)
