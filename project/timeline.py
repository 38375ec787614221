"""Draws who does what when: the clock table of a schedule, or times of actions.

A row per stage, a box per action, grey where a stage idles (the bubble). Timelines of whole runs,
with the ideal beside them: measured.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from pipeline.schedule import bubble, clock_table, find, peak_alive
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
    page,
    readable,
    save,
)
from training.timeline import COMMUNICATION, KINDS

COLOURS = {  # of a kind: what arrives is sky blue, what leaves purple, what does both vermilion
    "F": BLUE, "B": ORANGE, "I": ORANGE, "W": GREEN, "R": YELLOW, "optimizer": GREY,
    "send": PURPLE, "receive": SKY, "all_reduce": VERMILION, "all_gather": SKY,
    "reduce_scatter": PURPLE, "barrier": INK,
}  # fmt: skip
_KINDS = {kind: (KINDS[kind][0], colour) for kind, colour in COLOURS.items()}
_TRANSFERS = [kind for kind in KINDS if KINDS[kind][1] == COMMUNICATION]  # strips at a row's foot
Action = tuple[Any, int, float, float]  # kind, micro-batch, start, end


def draw_schedule(name: str, num_stages: int, num_microbatches: int, path: Path) -> Path:
    """Draws the clock table of the schedule called `name`, every action taking one clock."""
    schedule = find(name)(num_stages, num_microbatches)
    table = clock_table(schedule)
    rows = [
        [(action.kind, action.microbatch, k, k + 1) for k, action in enumerate(column) if action]
        for column in zip(*table, strict=True)
    ]
    held = ", ".join(map(str, peak_alive(schedule)))
    return draw_clock_table(
        rows,
        path,
        title=f"{name}: {num_stages} stages, {num_microbatches} micro-batches, {len(table)} "
        f"clocks, {float(bubble(schedule)):.0%} idle",
        subtitle=f"a box is a micro-batch; the stages hold the activations of at most {held}",
    )


def draw_clock_table(
    rows: Sequence[Sequence[Action]],
    path: Path,
    *,
    title: str | None = None,
    subtitle: str = "",
    unit: str = "clock",
) -> Path:
    """Draws what each stage does when: a row per stage, a box per action. Returns the path.

    Args:
        rows: per stage, its actions (kind, micro-batch, start, end). Kinds are text, or an Enum of
            text: F, B, W, send, receive, or any other.
        path: the picture.
        title: by default the sizes, the duration, and the share of it that the stages are idle.
        subtitle: the line under it.
        unit: `clock` for a schedule, whose times count clocks; `s` for times measured in seconds.
    """
    begin = min((start for row in rows for _, _, start, _ in row), default=0.0)
    span = (max((end for row in rows for *_, end in row), default=0.0) - begin) or 1.0
    factor, name = (1.0, "clocks") if unit == "clock" else handy(span)
    table = [
        [
            (str(kind.value if isinstance(kind, Enum) else kind), i, a - begin, b - begin)
            for kind, i, a, b in row
        ]
        for row in rows
    ]
    if title is None:
        duration = f"{span:g}" if unit == "clock" else readable(span * factor)
        batches = len({i for row in rows for _, i, *_ in row})
        title = (
            f"{len(rows)} stages, {batches} micro-batches: {duration} {name}, "
            f"{idle_share(table, span):.0%} idle"
        )
    height = min(7.5, 2.4 + 0.7 * len(rows))
    fig, (ax,) = page(title, subtitle, width=13.33, height=height, gap=0.55)
    ax.grid(visible=False)
    ax.barh(range(len(rows)), span * factor, height=0.86, color=FAINT)
    _draw_boxes(ax, table, factor, points=72 * (13.33 - 1.3) / span)
    ax.set_yticks(range(len(rows)), [f"stage {s}" for s in range(len(rows))], color=INK)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(0, span * factor)
    if unit == "clock":  # a clock is a span, not a moment: its number stands in its middle
        clocks = range(0, round(span), -(-round(span) // 32))
        ax.set_xticks([k + 0.5 for k in clocks], [str(k) for k in clocks])
    ax.set_xlabel("clock" if unit == "clock" else f"time ({name})", fontsize=SMALL, color=GREY)
    return save(fig, path)


def handy(span: float) -> tuple[float, str]:
    """The unit in which a time is a handy number, and how many of it make a second."""
    return (1.0, "s") if span >= 1 else (1e3, "ms") if span >= 1e-3 else (1e6, "µs")


def idle_share(table: Sequence[Sequence[Action]], span: float) -> float:
    """The share of the stages' time in which they compute nothing, be it that they transfer."""
    busy = sum(b - a for row in table for kind, _, a, b in row if kind not in _TRANSFERS)
    return 1 - busy / (span * max(1, len(table)))


def _draw_boxes(ax: Axes, table: Sequence[Sequence[Action]], factor: float, points: float) -> None:
    """Boxes with the number of their micro-batch, where it is legible at `points` of the page per
    unit of time; and the legend."""
    found = {kind for row in table for kind, *_ in row}
    others = zip(sorted(found - set(_KINDS)), [VERMILION, GREY, INK] * len(found), strict=False)
    looks = _KINDS | {kind: (kind, colour) for kind, colour in others}
    for kind in (k for k in looks if k in found):
        strip, colour = kind in _TRANSFERS, looks[kind][1]
        for stage, row in enumerate(table):
            for i, a, b in ((i, a, b) for k, i, a, b in row if k == kind):
                middle = stage + (0.33 if strip else 0)
                ax.barh(
                    middle, (b - a) * factor, 0.2 if strip else 0.86, a * factor,
                    color=colour, edgecolor="white", linewidth=min(1.5, (b - a) * points / 8),
                )  # fmt: skip
                size = min(TEXT, 1.3 * (b - a) * points / max(2, len(str(i))))
                if size >= 6 and not strip:
                    dark = sum(to_rgb(colour)) < 1.5
                    ax.text(
                        (a + b) / 2 * factor, middle, str(i), ha="center", va="center_baseline",
                        fontsize=size, color="white" if dark else INK,
                    )  # fmt: skip
    legend = [Patch(color=looks[k][1], label=looks[k][0]) for k in looks if k in found]
    ax.legend(
        handles=[*legend, Patch(color=FAINT, label="idle")], loc="lower left", frameon=False,
        bbox_to_anchor=(0, 1), ncols=len(legend) + 1, fontsize=SMALL, labelcolor=INK,
        handlelength=1, handleheight=1, borderpad=0, borderaxespad=0.4, columnspacing=1.4,
    )  # fmt: skip
