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
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.schedules.catalogue import SCHEDULES, in_words
from training.command_line import Parser, count

OUTPUT = Path("submit_figures")
MOST_STAGES, MOST_CELLS = 64, 2048  # drawn in seconds, and legible
OF_TRAIN = {  # figures of runs of train.py
    "split_time": "computation, exposed communication and idle time of a step",
    "throughput": "examples per second of runs, beside the ideal",
    "memory": "parameters, gradients, optimizer state and peak of each rank",
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
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
    parse()  # before torch and matplotlib are imported, which takes seconds

from project.plot_timeline import (
    COLOURS,
    LINES,
    draw_step,
    handy,
    in_step,
    legend,
    on,
    plot_schedule,
    shares,
    steps_of,
)
from training.curves import (
    BLUE,
    INK,
    Epochs,
    finish_panel,
    picture,
    plot_training,
    read_epochs,
    readable,
    with_error,
)
from training.files import OPTIONS, SUMMARY
from training.launch.errors import UserError
from training.perfetto import read_timelines, write_trace
from training.timeline import Event

STRATEGIES = ("single", "ddp", "model", "fsdp", "pipeline", "tensor")
TIME, THROUGHPUT = "training_time", "tokens_per_sec"
YLABELS = {TIME: "training time of an epoch (s)", THROUGHPUT: "tokens per second, with padding"}
ALIKE = (  # options that must be the same in all runs of a figure
    "model", "precision", "vgg_width", "n_layer", "n_embd", "n_head", "vocab_size", "dataset",
    "n_train",
)  # fmt: skip
FORMATS = (".png", ".pdf", ".svg")
TIMES = ("forward", "recompute", "backward", "optimizer", "communication", "idle")


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
    with picture(path, title, foot, (max(10, 1.25 * len(bars)), 5.6)) as (fig, (ax,)):
        for x, bar in enumerate(bars):
            base = 0.0
            for kind, value in bar.parts.items():
                white = COLOURS[kind] == "white"  # outlined: the ideal, and the peak
                look: dict[str, Any] = {"edgecolor": BLUE if white else "white"}
                look |= {"color": COLOURS[kind], "lw": 2 if white else 1}
                look |= {"hatch": "//" if kind == "ideal" else ""}
                box = ax.bar(x, value, 0.64, base, **look)
                inside = f"{value / bar.total:.0%}" if len(bar.parts) > 1 else bar.inside
                if inside and value > 0.07 * top:
                    back = {"color": "white", "pad": 3} if white else None
                    ink = BLUE if white else on(COLOURS[kind])
                    ax.bar_label(
                        box, [inside], label_type="center", color=ink, size=size, bbox=back
                    )
                base += value
            if bar.std:
                ax.errorbar(x, base, bar.std, color=INK, capsize=7, elinewidth=1.8)
            above = with_error(base, bar.std, plus_minus)
            ax.text(x, base + bar.std + 0.02 * top, above, ha="center", va="bottom", size=size)
        labels = [bar.label.replace(", ", "\n") for bar in bars]
        ax.set_xticks(range(len(bars)), labels, color=INK, size=size)
        ax.set(xlim=(-0.6, max(1, len(bars)) - 0.4), ylim=(0, 1.2 * top), title=ylabel)
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}")
        if any(len(bar.parts) > 1 for bar in bars):
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


# What a run left


@dataclass(frozen=True)
class Run:
    """What a run left in its folder. Its files are read when they are first asked for, and once."""

    folder: Path

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Its summary.json or, if it did not finish, options.json: the options are in both. Raises
        UserError if there is no such folder, or they cannot be read."""
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: there is no such folder; name the --workdir of a run")
        for path in (self.folder / SUMMARY, self.folder / OPTIONS):
            if path.exists():
                try:
                    return json.loads(path.read_text(encoding="utf-8"))
                except (OSError, ValueError) as error:
                    raise UserError(f"{path} cannot be read ({error})") from None
        return {}

    @cached_property
    def ranks(self) -> list[Epochs]:
        """The results of every rank, or of the pipeline. Raises UserError if some are missing."""
        if any(self.folder.glob("eval_results_*")):
            return [read_epochs(self.folder, "eval_results")]
        numbers = range(self.summary.get("world_size", 1))
        ranks = [read_epochs(self.folder, f"rank{rank}_results") for rank in numbers]
        if len({len(rank) for rank in ranks}) > 1:  # interrupted, or resumed on another number
            raise UserError(
                f"{self.folder}: its ranks have results of different epochs; make it again"
            )
        return ranks

    @cached_property
    def timeline(self) -> tuple[dict[str, list[Event]], dict[str, Any]]:
        """The events of its workers, and its options. Raises UserError if it recorded none."""
        options, again = self.summary, "make the run again, with --timeline 10"
        try:
            workers, about = read_timelines(self.folder)
        except FileNotFoundError as error:
            raise UserError(
                f"{self.folder}: its run has recorded no steps, as there is no "
                f"{Path(error.filename).name}; {again}"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{error}; {again}") from None
        if not any(workers.values()):
            raise UserError(f"{self.folder}: no step was recorded; {again}")
        return workers, options | about

    @property
    def facts(self) -> list[str]:
        """What was trained and how, from the options."""
        options = self.summary
        sizes = [f"{n} {options[n]}" for n in ("n_layer", "n_embd", "vocab_size") if options.get(n)]
        facts = [", ".join([options["model"], *sizes])] if "model" in options else []
        if "batch_size" in options:
            facts.append(f"batches of {options['batch_size']}")
        if options.get("strategy") == "3d":
            facts.append("data {dp} x pipeline {pp} x tensor {tp}".format(**options))
        stages = options.get("num_devices") or options.get("pp") or options.get("world_size", 1)
        if options.get("schedule") and stages > 1:
            n, words = options["num_microbatches"], in_words(stages, options.get("chunks") or 1)
            facts.append(f"{words}, {options['schedule']}, {n} micro-batches")
        if cores := options.get("cores"):
            n, total = options.get("world_size", 1), options.get("cores_of_all")
            who = "" if "num_devices" in options else " per process"
            if total is not None and n * cores > total:
                cores, who = total, f", shared by {n} processes"
            facts.append(f"{cores} core{'s' * (cores > 1)}{who}")
        return facts

    @property
    def label(self) -> str:
        """The name of a run of train.py in a picture."""
        n = self.summary["world_size"]
        return f"{self.summary['strategy']}, {n} worker{'s' * (n > 1)}"

    def epochs(self) -> list[tuple[dict[str, float], ...]]:
        """Per epoch, the results of the ranks."""
        return list(zip(*self.ranks, strict=True))

    def over_epochs(self, metric: str) -> tuple[float, float]:
        """Mean and standard deviation over all epochs but the first: of the slowest rank's time, or
        of the throughput summed over the ranks."""
        combine = max if metric == TIME else sum
        return mean_and_std([combine(rank[metric] for rank in e) for e in self.epochs()[1:]])

    def speed(self) -> tuple[float, float]:
        """Of a run of train.py: examples per second over all steps but the first, and the deviation
        of a step."""
        size, seconds = self.summary["batch_size"], self.summary["step_seconds"]
        seconds = seconds[1:] or seconds
        return size * len(seconds) / sum(seconds), mean_and_std([size / s for s in seconds])[1]


def in_common(*runs: Run) -> list[str]:
    """The facts that all runs share."""
    first, *others = (run.facts for run in runs)
    return [fact for fact in first if all(fact in facts for facts in others)]


def facts_of(runs: Sequence[Run], labels: Sequence[str]) -> list[str]:
    """The facts that all runs share, then what is each one's own."""
    common = in_common(*runs)
    about = [*common]
    for label, run in zip(labels, runs, strict=True):
        own = [fact for fact in run.facts if fact not in common]
        about += [f"{label}: {', '.join(own)}"] if own else []
    return about


def describe(*runs: Run) -> str:
    """What was trained and how, as far as all runs have it in common."""
    return "; ".join(in_common(*runs))


def check_alike(runs: Sequence[Run], names: Sequence[str] = ALIKE) -> None:
    """Raises UserError if runs differ in one of these options: they trained different models, in
    different precision, or on different data."""
    for name in names:
        given = [(run.summary.get(name), run.folder) for run in runs]
        held = {str(value): folder for value, folder in given if value is not None}
        if len(held) > 1:
            found = ", ".join(f"{folder} {value}" for value, folder in held.items())
            raise UserError(f"only runs of the same {name} compare, and these differ: {found}")


def speed_up(run: Run, baseline: Run, metric: str) -> float:
    """How much faster than the baseline a run is: of time, less is better; of throughput, more."""
    (before, _), (after, _) = baseline.over_epochs(metric), run.over_epochs(metric)
    return before / after if metric == TIME else after / before


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
    labels = ("1 process", f"{n} processes", "one")
    return compare("data_parallel", (single, multiple), labels, n, output)


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
    labels = ("model parallel", "pipeline", "model parallel")
    return compare("pipeline", runs, labels, n * m / (m + n - 1), output)


def compare(
    name: str,
    runs: tuple[Run, Run],
    labels: tuple[str, str, str],
    ideal: float,
    output: Path,
) -> list[Path]:
    """Draws {name}_training_time.png and {name}_throughput.png of a baseline and a measured run.

    Args:
        labels: of the bars, and the baseline's name in the title.
        ideal: the ideal speed-up, if processes have equally many cores in both.
    """
    check_alike(runs)
    baseline, measured = runs
    if min(len(run.epochs()) for run in runs) < 2:
        raise UserError(
            f"{baseline.folder} and {measured.folder}: both need 2 epochs or more, as the first is "
            "left out"
        )
    about = facts_of(runs, labels[:2])
    about.append("mean of all epochs but the first, ± standard deviation if there are several")
    apart = [
        f"{words} {' and '.join(map(str, values))}"
        for name, words in (("cores", "cores per process:"), ("batch_size", "batches of"))
        if len({*(values := [run.summary.get(name) for run in runs])}) > 1
    ]
    equal = not apart
    if apart:
        about.append(
            "no ratio and no ideal, since the runs differ in more than their layout "
            f"({'; '.join(apart)}): the same --batch_size, and --cores_per_rank 1, make them alike"
        )
    gains = {metric: speed_up(measured, baseline, metric) for metric in YLABELS}
    if equal and abs(gains[THROUGHPUT] / gains[TIME] - 1) > 0.01:
        about.append(
            f"{gains[TIME]:.2f}x by time, {gains[THROUGHPUT]:.2f}x by tokens/s: the time is that "
            "of the slowest rank; tokens/s are the ranks' sum and count padding, which depends on "
            "how batches are cut"
        )
    if equal and max(gains.values()) > 1.01 * ideal:
        before, after = (run.summary.get("num_microbatches") or 1 for run in runs)
        reason = "the ideal assumes that the baseline loses no time between its actions"
        if before < after:
            reason = "smaller pieces of a batch stay in the caches, the baseline's larger ones less"
        about.append(f"more than ideal: {reason}")
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
            Bar(label, {"measured": mean}, std, f"{(mean / base) ** sign:.2f}x" if equal else "")
            for label, (mean, std) in shown.items()
        ]
        verb, unit = ("as fast as", "s") if metric == TIME else ("the tokens/s of", "tokens/s")
        title = f"{labels[1]}: {gains[metric]:.2f}x {verb} {labels[2]} (ideal {ideal:.3g}x)"
        if equal:
            bars.append(Bar("ideal", {"ideal": base * ideal**sign}, inside=f"{ideal:.3g}x"))
        else:
            of_each = zip(labels, ((base, std), after), strict=False)
            title = "; ".join(f"{label}: {with_error(*value)} {unit}" for label, value in of_each)
        paths.append(output / f"{name}_{file}.png")
        draw_bars(paths[-1], bars, title=title, foot="; ".join(about), ylabel=YLABELS[metric])
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
    title = f"validation loss: {ends}"
    foot = "; ".join(facts_of(runs, names))
    with picture(path, title, foot, (12, 5.6), ncols=2) as (_, axes):
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
        foot=f"{describe(*runs)}; means over workers and steps, "
        "without the first step; communication: exchange and waiting that no computation hides",
    )  # fmt: skip


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
        path, bars, title=title, ylabel="examples per second, all workers together",
        foot=f"{describe(*runs)}; all examples by all seconds of the steps "
        "but the first; ± standard deviation of a step, if there are several",
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
        foot=f"{describe(*runs)}; peak resident: of the whole process, "
        "with Python, libraries and activations",
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
    for path in draw_figure(parse()):
        print(f"drew {path}")


if __name__ == "__main__":
    from project.utils import run_program

    run_program(main)
