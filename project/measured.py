"""Draws a timeline that was measured, and beside it the ideal of its schedule.

A row per worker: above what it computes, a box per action with the number of its micro-batch; below
it, thinner, what it sends and receives; grey where it computes nothing. The ideal has the same
schedule and the same mean times, but every stage needs as long for every micro-batch, and transfers
take no time: what it idles is the schedule's own, and what is measured beyond that comes from the
cut, the batches and the machine. (Processes send gradients of inputs before they compute those of
weights, and so may idle less than a schedule of whole backwards says.)

The bubble is idle / total, see training/breakdown.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from pipeline.schedule import SCHEDULES, Action
from planning.simulate import simulate
from project.figures import FAINT, GREY, INK, SMALL, TEXT, VERMILION, page, readable, save
from project.timeline import COLOURS, handy
from training.breakdown import (
    ACTIONS,
    Workers,
    actions_only,
    bubble,
    bubbles,
    duration,
    in_step,
    length,
    shares,
    span,
    spent,
    steps_of,
    typical_step,
)
from training.launch import UserError
from training.timeline import COMMUNICATION, COMPUTE, KINDS, Event, without_crossings

WIDTH = 13.33  # inches
RIGHT = 1.1  # inches right of the boxes, for the shares of idle time
STRIP = 0.3  # height of a row of transfers, a row of work being 1
GAP = 0.22  # between two workers
HEADING = 0.42  # inches above a panel


@dataclass(frozen=True)
class Panel:
    """A heading and, under it, the rows of all workers."""

    heading: str
    workers: Workers
    idle: Mapping[str, float]  # per worker, what is written right of its row, if anything


def ideal_of(workers: Workers, schedule: str | None) -> dict[str, list[Event]] | None:
    """The same step under the ideal of its schedule; None where it has none that is known."""
    actions = actions_only(workers)
    stages = sorted({e.stage for events in actions.values() for e in events})
    count = {e.microbatch for events in actions.values() for e in events}
    if schedule not in SCHEDULES or stages != list(range(len(workers))) or len(stages) < 2:
        return None
    table = SCHEDULES[schedule](len(stages), len(count))
    needed = {action.kind.value for row in table for action in row}
    seconds = _mean_seconds(actions, whole="B" in needed)
    if not needed <= set(seconds):
        return None

    def takes(action: Action) -> float:
        return seconds[action.kind.value]

    return {
        name: [Event(t.action.kind.value, *t.action[1:], t.start, t.end) for t in row]
        for name, row in zip(workers, simulate(table, takes), strict=True)
    }


def _mean_seconds(workers: Workers, whole: bool) -> dict[str, float]:
    """Per kind of action its mean over all stages, recomputation being part of the backward; and so
    are both halves of a backward where the schedule has it `whole`."""
    sums: dict[str, float] = dict.fromkeys(ACTIONS, 0.0)
    counts: dict[str, int] = dict.fromkeys(ACTIONS, 0)
    for row in workers.values():
        for event in row:
            kind = "B" if whole and event.kind in ("I", "W") else event.kind
            sums[kind] += event.end - event.start
            counts[kind] += event.kind != "W" or not whole  # I and W are one backward
        own = [e for e in row if e.kind != "R"]  # what is recomputed before it, not within it
        sums["B" if whole else "I"] += length(spent(row)) - length(spent(own))
    return {kind: sums[kind] / counts[kind] for kind in ACTIONS if counts[kind] and kind != "R"}


def plot_timeline(
    workers: Workers,
    path: Path,
    about: Mapping[str, Any],
    step: int | None = None,
    seconds_per_event: float = 0.0,
) -> Path:
    """Draws one step, by default a typical one, and returns the path.

    Args:
        workers: per worker its events, as training.timeline.by_worker gives them.
        about: strategy, schedule, whatever else is known of the run.
        seconds_per_event: what recording one costs.

    Raises:
        UserError: there is no such step.
    """
    steps = steps_of(workers)
    if not steps:
        raise UserError(f"--output {path}: nothing was recorded in this run; --timeline 3 records")
    step = typical_step(workers) if step is None else step
    if step not in steps:
        raise UserError(f"--step {step}: recorded are {steps[0]} to {steps[-1]}; e.g. {steps[-1]}")
    measured = in_step(workers, step)
    ideal = ideal_of(measured, about.get("schedule"))
    panels = [Panel("", measured, {})]
    if ideal:
        panels = [
            _panel("measured", measured),
            _panel("ideal: equal stages and micro-batches, free transfers", ideal),
        ]
    cost = max(len(events) for events in measured.values()) * seconds_per_event
    meaning = (
        "idle: the share of the time between the first start and the last end in which a worker "
        "computes nothing"
        if ideal
        else "communication: in which nothing is computed; idle: in which neither goes on"
    )
    subtitle = f"step {step}, {_time(duration(measured))}; {meaning}; {_numbers(measured)}"
    if cost:
        subtitle += f"; recording it took {100 * cost / duration(measured):.2g}% of the time"
    return save(draw_panels(panels, title=_title(measured, ideal, about), subtitle=subtitle), path)


def _panel(name: str, workers: Workers) -> Panel:
    heading = f"{name}: {_time(duration(actions_only(workers)))}, {bubble(workers):.0%} idle"
    return Panel(heading, workers, bubbles(workers))


def _title(measured: Workers, ideal: Workers | None, about: Mapping[str, Any]) -> str:
    strategy = str(about.get("strategy", "run")).replace("_", " ")
    if ideal is None:
        parts = shares(measured)
        return (
            f"{strategy}, {len(measured)} worker{'s' if len(measured) > 1 else ''}: communication "
            f"{parts['communication'] / duration(measured):.0%} of a step, "
            f"idle {parts['idle'] / duration(measured):.0%}"
        )
    m = len({e.microbatch for row in ideal.values() for e in row})
    return (
        f"{strategy}, {about['schedule']}, {len(measured)} stages, {m} micro-batches: "
        f"{bubble(measured):.1%} idle, ideal {bubble(ideal):.1%}"
    )


def _numbers(workers: Workers) -> str:
    if not _by_microbatch(workers):
        return "numbers: layers or buckets"
    buckets = any(event.kind == "all_reduce" for row in workers.values() for event in row)
    return f"numbers: micro-batches{', of an all-reduce buckets' if buckets else ''}"


def _by_microbatch(workers: Workers) -> bool:
    """Whether the boxes of work are told apart by micro-batch, or only by layer."""
    work = [e for row in workers.values() for e in row if e.kind in ACTIONS]
    layers = max(len({e.stage for e in row if e.kind in ACTIONS}) for row in workers.values())
    return len({e.microbatch for e in work}) > 1 or layers < 2


def _time(seconds: float) -> str:
    factor, unit = handy(seconds or 1.0)
    return f"{readable(seconds * factor)} {unit}"


def draw_panels(panels: Sequence[Panel], *, title: str, subtitle: str) -> Figure:
    """The panels one under the other, with one scale of time."""
    total = max(duration(panel.workers) for panel in panels) or 1.0
    factor, unit = handy(total)
    heights = [sum(_height(events) + GAP for events in p.workers.values()) for p in panels]
    scale = min(0.62, 6.0 / sum(heights))  # inches per row of work
    height = 10.0  # until it is known how much the title takes
    fig, (first,) = page(title, subtitle, width=WIDTH, height=height, gap=0.0)
    head = height * (1 - fig.subplotpars.top)
    legend = 0.75 if panels[0].heading else 0.5
    height = head + legend + scale * sum(heights) + HEADING * (len(panels) - 1) + 0.7
    fig, (first,) = page(title, subtitle, width=WIDTH, height=height, gap=0.0)
    first.remove()
    _legend(fig, panels, y=1 - (head + 0.08) / height)
    top = height - head - legend
    for panel, rows in zip(panels, heights, strict=True):
        below = top - scale * rows
        box = (1.05 / WIDTH, below / height, 1 - (1.05 + RIGHT) / WIDTH, (top - below) / height)
        ax = fig.add_axes(box)
        _draw_rows(ax, panel, factor, points=72 * (WIDTH - 1.05 - RIGHT) / total, total=total)
        ax.set_title(panel.heading, loc="left", fontsize=SMALL, color=INK, fontweight="bold", pad=4)
        last = panel is panels[-1]
        ax.tick_params(labelbottom=last)
        if last:
            ax.set_xlabel(f"time ({unit})", fontsize=SMALL, color=GREY)
        top = below - HEADING
    return fig


def _height(events: Sequence[Event]) -> float:
    return 1 + STRIP * len(_strips(events))


def _strips(events: Sequence[Event]) -> list[list[Event]]:
    sent = [event for event in events if event.lane == COMMUNICATION]
    return without_crossings(sent, nested=False)


def _draw_rows(ax: Axes, panel: Panel, factor: float, points: float, total: float) -> None:
    """The rows of a panel, from the top. `points` of the page make a second."""
    begin, _ = span(panel.workers)
    ax.grid(visible=False)
    ax.spines["bottom"].set_visible(False)
    ax.tick_params(length=0, labelsize=SMALL, labelcolor=GREY)
    ax.spines[["top", "right", "left"]].set_visible(False)
    by_microbatch = _by_microbatch(panel.workers)
    top, ticks = 0.0, []
    for name, events in panel.workers.items():
        ticks.append(top + 0.5)
        ax.add_patch(Rectangle((0, top), duration(panel.workers) * factor, 1, color=FAINT, lw=0))
        work = [event for event in events if event.lane == COMPUTE]
        for event in sorted(work, key=lambda e: e.kind == "R"):  # within a backward: on top
            number = event.microbatch if by_microbatch and event.microbatch >= 0 else event.stage
            inside = 0.22 if event.kind == "R" else 0.0
            label = str(number) if event.kind in ACTIONS and number >= 0 else ""
            _box(ax, event, begin, factor, points, (top + inside, 1 - 2 * inside), label)
        if name in panel.idle:
            ax.text(
                total * factor * 1.01, top + 0.5, f"{panel.idle[name]:.0%} idle", va="center",
                fontsize=SMALL, color=GREY,
            )  # fmt: skip
        top += 1
        for strip in _strips(events):
            for event in strip:
                label = str(event.stage) if event.kind not in ("send", "receive") else ""
                _box(ax, event, begin, factor, points, (top + 0.05, STRIP - 0.07), label)
            top += STRIP
        top += GAP
    ax.set_yticks(ticks, list(panel.workers), color=INK)
    ax.set_ylim(top - GAP / 2, -GAP / 2)
    ax.set_xlim(0, total * factor)


def _box(
    ax: Axes,
    event: Event,
    begin: float,
    factor: float,
    points: float,
    row: tuple[float, float],
    label: str,
) -> None:
    """A box at (top, height), and in it a number where it is legible."""
    width = event.end - event.start
    colour = COLOURS.get(event.kind, VERMILION)
    ax.add_patch(
        Rectangle(
            ((event.start - begin) * factor, row[0]), width * factor, row[1], facecolor=colour,
            edgecolor="white", linewidth=min(1.2, width * points / 8),
        )
    )  # fmt: skip
    size = min(TEXT, 1.2 * width * points / max(2, len(label)), 36 * row[1])
    if label not in ("", "-1") and size >= 6:
        ax.text(
            ((event.start + event.end) / 2 - begin) * factor, row[0] + row[1] / 2, label,
            ha="center", va="center_baseline", fontsize=size,
            color="white" if sum(to_rgb(colour)) < 1.5 else INK,
        )  # fmt: skip


def _legend(fig: Figure, panels: Sequence[Panel], y: float) -> None:
    found = {event.kind for p in panels for row in p.workers.values() for event in row}
    order = [kind for kind in KINDS if kind in found] + sorted(found - set(KINDS))
    names = {kind: KINDS.get(kind, (kind,))[0] for kind in order}
    if "B" in order and "I" in order:  # of one colour: the half that the stage below waits for
        order.remove("I")
        names["B"] = "backward, or of inputs"
    grey = "idle" if any(panel.idle for panel in panels) else "waiting"
    patches = [Patch(color=COLOURS.get(k, VERMILION), label=names[k]) for k in order]
    fig.legend(
        handles=[*patches, Patch(color=FAINT, label=grey)], loc="upper left", frameon=False,
        bbox_to_anchor=(0.35 / WIDTH, y), ncols=len(patches) + 1, fontsize=SMALL, labelcolor=INK,
        handlelength=1, handleheight=1, borderpad=0, borderaxespad=0, columnspacing=1.4,
    )  # fmt: skip
