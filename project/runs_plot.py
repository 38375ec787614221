"""Draws runs beside each other: where a step's time goes, throughput, memory.

Bars are means over the steps but the first, error bars the standard deviation; hatched is the
ideal. What the kinds of time mean: training/breakdown.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from project.comparison import mean_and_std
from project.figures import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    SMALL,
    TEXT,
    VERMILION,
    YELLOW,
    Bar,
    draw_bars,
    page,
    readable,
    save,
    wrap_label,
)
from project.runs import Run, describe_runs
from project.timeline import handy
from training.breakdown import mean_shares

Stack = Sequence[tuple[str, float]]  # from the bottom: a part's name, and how high it is
TIMES = {  # categories of training.breakdown.shares, from the bottom, and their looks
    "forward": BLUE, "recompute": YELLOW, "backward": ORANGE, "optimizer": GREY, "other": SKY,
    "communication": VERMILION, "idle": FAINT,
}  # fmt: skip
STATES = {"parameters": BLUE, "gradients": ORANGE, "optimizer": GREY, "state": BLUE}
REST = (GREEN, PURPLE, SKY, YELLOW)  # for kinds of state that are not known
PEAK = "peak resident"


def plot_split_time(runs: Sequence[Run], path: Path) -> Path:
    """Where the time of a step goes: a stacked bar per run."""
    stacks = [[(kind, mean_shares(run.workers())[kind]) for kind in TIMES] for run in runs]
    factor, unit = handy(max(sum(value for _, value in stack) for stack in stacks))
    scaled = [[(kind, value * factor) for kind, value in stack if value > 0] for stack in stacks]
    last = dict(stacks[-1])
    total = sum(last.values())
    fig = draw_stacks(
        scaled,
        [_label(run) for run in runs],
        TIMES,
        title=f"{_label(runs[-1])}: communication {last['communication'] / total:.0%} of a step, "
        f"idle {last['idle'] / total:.0%}",
        subtitle=f"{describe_runs(runs)}; means over workers and steps, the first step left out; "
        "communication: the part in which nothing is computed",
        ylabel=f"a step ({unit})",
    )
    return save(fig, path)


def plot_throughput(runs: Sequence[Run], path: Path) -> Path:
    """Examples per second of each run, and beside it the ideal: so many times as fast as the
    smallest run of its strategy as it has workers more."""
    rates = {run.spec: mean_and_std(run.rates()) for run in runs}
    bars: list[Bar] = []
    title = ""
    for run in runs:
        mean, std = rates[run.spec]
        alike = [other.spec for other in runs if other.spec.strategy == run.spec.strategy]
        base = min(alike, key=lambda spec: spec.workers)
        times, ideal = mean / rates[base][0], run.spec.workers / base.workers
        if run.spec == base:
            role = "baseline" if len(alike) > 1 else "measured"
            bars.append(Bar(_label(run), mean, std, role=role))
            continue
        bars.append(Bar(_label(run), mean, std, inside=f"{times:.2f}x"))
        bars.append(Bar("ideal", rates[base][0] * ideal, role="ideal", inside=f"{ideal:.3g}x"))
        one = "one" if base.workers == 1 else str(base.workers)
        title = f"{_label(run)}: {times:.2f}x the examples/s of {one} (ideal {ideal:.3g}x)"
    if not title:
        best = max(bars, key=lambda bar: bar.mean)
        title = f"{best.label}: {readable(best.mean)} examples per second"
    fig = draw_bars(
        bars, title=title, ylabel="examples per second, all workers together",
        subtitle=f"{describe_runs(runs)}; mean and standard deviation over the steps, the first "
        "left out",
    )  # fmt: skip
    return save(fig, path)


def plot_memory(runs: Sequence[Run], path: Path) -> Path:
    """Per rank of each run: bytes of parameters, gradients and optimizer state, stacked, and
    beside them the most that was resident."""
    labels, stacks, peaks = [], [], []
    for run in runs:
        states, tops = run.states(), run.peaks()
        for rank, top in enumerate(tops):
            labels.append(f"{_label(run)}\nrank {rank}" if len(tops) > 1 else _label(run))
            stacks.append([(kind, values[rank]) for kind, values in states.items()])
            peaks.append(float(top))
    unit, factor = ("GB", 1e-9) if max(peaks) >= 1e9 else ("MB", 1e-6)
    kinds = dict.fromkeys(kind for stack in stacks for kind, _ in stack)
    rest = iter(REST * len(kinds))
    colours = {kind: STATES.get(kind) or next(rest) for kind in kinds}
    sums = [sum(value for _, value in stack) for stack in stacks]
    fig = draw_stacks(
        [[(kind, value * factor) for kind, value in stack] for stack in stacks],
        labels,
        colours,
        title=_memory_title(runs, sums),
        subtitle=f"{describe_runs(runs)}; {PEAK}: of the whole process, with Python, libraries "
        "and activations",
        ylabel=unit,
        beside=[peak * factor for peak in peaks],
    )
    return save(fig, path)


def _memory_title(runs: Sequence[Run], sums: Sequence[float]) -> str:
    first = sums[0]
    most = max(sums[-len(runs[-1].peaks()) :])
    if len(runs) == 1:
        return f"{_label(runs[0])}: {readable(most / 1e6)} MB of state per rank at most"
    return f"{_label(runs[-1])} holds {most / first:.2f} of the state of {_label(runs[0])}"


def _label(run: Run) -> str:
    n = run.spec.workers
    return f"{run.spec.strategy}, {n} worker{'s' if n > 1 else ''}"


def draw_stacks(
    stacks: Sequence[Stack],
    labels: Sequence[str],
    colours: Mapping[str, str],
    *,
    title: str,
    subtitle: str,
    ylabel: str,
    beside: Sequence[float] = (),
) -> Figure:
    """A stacked bar per entry with its parts' names in a legend and their sum above; right of it,
    where given, an outlined bar of what is `beside`."""
    fig, (ax,) = page(title, subtitle, gap=0.85)
    top = max([*(sum(v for _, v in stack) for stack in stacks), *beside]) or 1.0
    ax.set_ylim(0, 1.12 * top)
    ax.set_title(ylabel, loc="left", fontsize=SMALL, color=GREY)
    width = 0.4 if beside else 0.64
    room = 8.5 * 72 / len(stacks)
    size = min(TEXT - 1, room / 6.5)
    for x, stack in enumerate(stacks):
        centre = x - 0.21 if beside else x
        total = _draw_stack(ax, centre, stack, colours, width, 1.12 * top, size)
        _write_above(ax, centre, total, size)
    for x, value in enumerate(beside):
        ax.bar(x + 0.21, value, 0.4, color="white", edgecolor=GREY, linewidth=2)
        _write_above(ax, x + 0.21, value, size)
    letters = max(6, int(room / size / 0.58))
    labels = [wrap_label(label, letters) for label in labels]
    ax.set_xticks(range(len(labels)), labels, fontsize=size, color=INK)
    ax.set_xlim(-0.6, len(stacks) - 0.4)
    lines = max(label.count("\n") + 1 for label in labels)
    fig.subplots_adjust(bottom=(0.3 + 0.25 * lines) / fig.get_figheight())
    found = [kind for kind in colours if any(kind == k for stack in stacks for k, _ in stack)]
    handles: list[Any] = [Patch(color=colours[kind], label=kind) for kind in found]
    if beside:
        handles.append(Patch(facecolor="white", edgecolor=GREY, linewidth=2, label=PEAK))
    fig.legend(
        handles=handles, loc="upper left", frameon=False, ncols=len(handles), fontsize=SMALL,
        bbox_to_anchor=(0.35 / 10, fig.subplotpars.top + 0.62 / fig.get_figheight()),
        labelcolor=INK, handlelength=1, handleheight=1, borderpad=0, borderaxespad=0,
        columnspacing=1.3,
    )  # fmt: skip
    return fig


def _draw_stack(
    ax: Axes,
    x: float,
    stack: Stack,
    colours: Mapping[str, str],
    width: float,
    top: float,
    size: float,
) -> float:
    """Draws the parts, with the share of those that have room for it; returns the sum."""
    total = sum(value for _, value in stack) or 1.0
    base = 0.0
    for kind, value in stack:
        ax.bar(x, value, width, base, color=colours[kind], edgecolor="white", linewidth=1.5)
        if value > 0.075 * top:
            dark = sum(to_rgb(colours[kind])) < 1.5
            ax.text(
                x, base + value / 2, f"{value / total:.0%}", ha="center", va="center",
                fontsize=size, color="white" if dark else INK,
            )  # fmt: skip
        base += value
    return base


def _write_above(ax: Axes, x: float, value: float, size: float) -> None:
    ax.annotate(
        readable(value), (x, value), (0, 5), textcoords="offset points", ha="center",
        fontsize=size, color=INK,
    )  # fmt: skip
