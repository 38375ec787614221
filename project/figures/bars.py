"""Bars, their colours and their legend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .style import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    picture,
    readable,
)

COLOURS = {  # by kind, in the order of the legend
    "parameters": BLUE, "gradients": ORANGE,
    "forward": BLUE, "recompute": YELLOW, "backward": ORANGE, "backward (input)": "#F5CE85",
    "backward (weight)": GREEN, "optimizer": GREY, "communication": VERMILION,
    "send": PURPLE, "receive": SKY, "all-reduce": VERMILION, "all-gather": "#8C510A",
    "reduce-scatter": "#5E3C99", "wait for all ranks": INK, "idle": FAINT,
    "over 25 % shorter than predicted": "#4F9BD0", "over 10 % shorter": "#A9D0EE",
    "within 10 % of predicted": "#D3D8DE", "over 10 % longer": "#F4B3BC",
    "over 25 % longer than predicted": "#DB4A68",
    "rest of the peak": FAINT, "predicted by the planner": VERMILION, "limit": INK,
    "baseline": GREY, "measured": BLUE, "ideal": "white",
}  # fmt: skip


def text_colour(colour: str) -> str:
    """A legible colour of text on this colour."""
    return "white" if sum(to_rgb(colour)) < 1.5 else INK


def legend(fig: Figure, kinds: set[str], below: float = 3.6) -> None:
    """Draws a legend of the colours of `kinds`, `below` the axes by this many lines."""
    patches = [
        Patch(facecolor=colour, label=kind, edgecolor=BLUE if colour == "white" else colour)
        for kind, colour in COLOURS.items()
        if kind in kinds
    ]
    for rows in range(1, len(patches) + 1):  # as many as it takes to fit, or the axes would shrink
        box = fig.axes[-1].legend(
            handles=patches, loc="upper left", bbox_to_anchor=(0, 0), borderaxespad=below,
            ncols=-(-len(patches) // rows), handlelength=1, handleheight=1,
        )  # fmt: skip
        if box.get_window_extent().width < 0.8 * fig.bbox.width:
            break


@dataclass(frozen=True)
class Bar:
    """A bar of stacked parts, from the bottom: their kinds (see COLOURS) and heights."""

    label: str
    parts: Mapping[str, float]
    std: float = 0.0
    inside: str = ""  # what is written into it, such as a speed-up
    predicted: float = 0.0  # the height of a line across it

    @property
    def total(self) -> float:
        """The height of the bar."""
        return sum(self.parts.values())


def draw_bars(
    path: Path, bars: Sequence[Bar], *, title: str, foot: str, ylabel: str, limit: float = 0.0
) -> Path:
    """Draws bars side by side, the sum of each above it, and a legend if they have parts. There is
    a line at the `limit`, unless that is far above the bars."""
    top = max((max(bar.total + bar.std, bar.predicted) for bar in bars), default=0.0) or 1.0
    near = 0 < limit < 2 * top
    top = max(top, limit) if near else top
    size, plus_minus = (15, " ± ") if len(bars) < 5 else (12, "\n± ")
    with picture(path, title, foot, (max(10, 1.25 * len(bars)), 5.6)) as (fig, (ax,)):
        for x, bar in enumerate(bars):
            base = 0.0
            for kind, value in bar.parts.items():
                colour = COLOURS[kind]
                edge = BLUE if colour == "white" else "white"  # the ideal
                box = ax.bar(x, value, 0.64, base, color=colour, edgecolor=edge, linewidth=1.5)
                inside = f"{value / bar.total:.0%}" if len(bar.parts) > 1 else bar.inside
                if inside and value > 0.07 * top:
                    ink = text_colour(colour)
                    ax.bar_label(box, [inside], label_type="center", color=ink, size=size)
                base += value
            if bar.predicted:
                colour = COLOURS["predicted by the planner"]
                ax.hlines(bar.predicted, x - 0.42, x + 0.42, colour, lw=3)
            if bar.std:
                ax.errorbar(x, base, bar.std, color=INK, capsize=7, elinewidth=1.8)
            above = with_error(base, bar.std, plus_minus)
            ax.text(x, base + bar.std + 0.02 * top, above, ha="center", va="bottom", size=size)
        if near:
            ax.axhline(limit, color=COLOURS["limit"])
        labels = [bar.label.replace(", ", "\n") for bar in bars]
        ax.set_xticks(range(len(bars)), labels, color=INK, size=size)
        ax.set(xlim=(-0.6, max(1, len(bars)) - 0.4), ylim=(0, 1.2 * top), title=ylabel)
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}")
        if any(len(bar.parts) > 1 for bar in bars):
            kinds = {kind for bar in bars for kind, value in bar.parts.items() if value}
            lines = {"predicted by the planner": any(bar.predicted for bar in bars), "limit": near}
            legend(fig, kinds | {line for line, drawn in lines.items() if drawn}, 4.5)
    return path


def with_error(mean: float, std: float, plus_minus: str = " ± ") -> str:
    """A mean with as many digits as its standard deviation, which has one, or whole ones: 8.80 ±
    0.04, 5,748 ± 133. Without a deviation `readable`."""
    if not std:
        return readable(mean)
    digits = min(4, max(0, -math.floor(math.log10(std))))
    return f"{mean:,.{digits}f}{plus_minus}{std:,.{digits}f}"
