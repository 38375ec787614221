"""Draws pictures from numbers: bars beside their ideal, and curves. (Clock tables: timeline.py.)

Nothing here reads a file or knows what a run is; project/plot.py does. A picture is a matplotlib
`Figure` of its own, without pyplot: no state is shared, and no display is needed.

One look for all: a 16:9 page that fits a slide, the finding as the title, what was measured under
it, values written at the marks. Colours are those of Okabe and Ito (2008), which people with any
kind of colour vision tell apart. Grey is the baseline, blue is what the picture is about, hatched
is what was not measured but computed: the ideal.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from training.ending import UserError

BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
SKY, PURPLE, VERMILION, YELLOW = "#56B4E9", "#CC79A7", "#D55E00", "#F0E442"
INK, GREY, FAINT = "#1F2933", "#6B7785", "#E8EBEE"
DPI = 150
TITLE, TEXT, SMALL = 19, 15, 13  # points
_LOOKS: dict[str, dict[str, Any]] = {
    "baseline": {"color": GREY, "edgecolor": GREY, "hatch": ""},
    "measured": {"color": BLUE, "edgecolor": BLUE, "hatch": ""},
    "ideal": {"color": "white", "edgecolor": BLUE, "hatch": "//"},
}


def _magnitude(value: float) -> tuple[float, str]:
    large = ((1e12, " T"), (1e9, " G"), (1e6, " M"))
    return next(((f, suffix) for f, suffix in large if abs(value) >= f), (1.0, ""))


def readable(value: float) -> str:
    """A number as a person says it, with about three digits: 0.0123, 4.56, 78.9, 12,345, 6.79 M."""
    factor, suffix = _magnitude(value)
    value /= factor
    if 0 < abs(value) < 1:
        return f"{value:.3g}{suffix}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}{suffix}"


def with_spread(mean: float, std: float) -> str:
    """A mean and, if it is not 0, its standard deviation: 22.1 ± 0.31, or 1.50 ± 0.03 M."""
    factor, suffix = _magnitude(mean)
    if not std:
        return readable(mean)
    spread = f"{std / factor:#.2g}" if std / factor < 9.95 else f"{std / factor:,.0f}"
    return f"{readable(mean / factor)} ± {spread}{suffix}"


def save(fig: Figure, path: Path) -> Path:
    """Writes the picture, making its folder, and returns the path.

    Raises:
        UserError: it cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, dpi=DPI, facecolor="white")
    except OSError as error:
        raise UserError(
            f"{path}: nothing can be written there ({error.strerror}); --output works with a file "
            "in a folder of your own"
        ) from error
    return path


def page(
    title: str,
    subtitle: str,
    columns: int = 1,
    width: float = 10.0,
    height: float = 5.625,
    gap: float = 0.2,
) -> tuple[Figure, list[Axes]]:
    """An empty page, in inches, with the title and a line under it; and, below a gap, its axes
    side by side."""
    fig = Figure(figsize=(width, height))
    below = 0.25  # inches from the top
    for text, size, per_inch, colour in ((title, TITLE, 6.4, INK), (subtitle, SMALL, 9.9, GREY)):
        lines = textwrap.wrap(text, int(per_inch * width))
        fig.text(
            0.35 / width, 1 - below / height, "\n".join(lines), va="top", fontsize=size,
            color=colour, fontweight="bold" if size == TITLE else "normal", linespacing=1.25,
        )  # fmt: skip
        below += len(lines) * size * 1.25 * 1.2 / 72 + 0.06
    fig.subplots_adjust(
        left=0.95 / width, right=1 - 0.35 / width, top=1 - (below + gap) / height,
        bottom=0.7 / height, wspace=0.25,
    )  # fmt: skip
    axes = [fig.add_subplot(1, columns, i + 1) for i in range(columns)]
    for ax in axes:
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.spines["bottom"].set_color(GREY)
        ax.tick_params(length=0, labelsize=SMALL, labelcolor=GREY)
        ax.grid(axis="y", color=FAINT, linewidth=1)
        ax.set_axisbelow(True)
        ax.yaxis.set_major_locator(MaxNLocator(5))
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}" if y < 1e6 else readable(y))
    return fig, axes


@dataclass(frozen=True)
class Bar:
    """A bar: its role gives its look, and `inside` is written into it, as a speed-up."""

    label: str
    mean: float
    std: float = 0.0
    role: str = "measured"  # or baseline, or ideal
    inside: str = ""


def draw_bars(
    bars: Sequence[Bar], *, title: str = "", subtitle: str = "", ylabel: str = "", unit: str = ""
) -> Figure:
    """A bar per entry, from 0, with its value above it; error bars where std is not 0."""
    fig, (ax,) = page(title, subtitle, gap=0.5)
    top = max((bar.mean + bar.std for bar in bars), default=0.0) or 1.0
    ax.set_ylim(0, 1.2 * top)
    ax.set_title(ylabel, loc="left", fontsize=SMALL, color=GREY)
    looks = [_LOOKS[bar.role] for bar in bars]
    styles: dict[str, Any] = {key: [look[key] for look in looks] for key in _LOOKS["ideal"]}
    ax.bar(
        range(len(bars)), [bar.mean for bar in bars], width=0.64, linewidth=2,
        **styles,
    )  # fmt: skip
    room = 8.5 * 72 / max(1, len(bars))  # points of the page per bar
    size = min(TEXT, room / 5.5)
    for x, bar in enumerate(bars):
        _label_bar(ax, x, bar, unit, bar.mean > 0.13 * top, size, room)
    labels = [wrap_label(bar.label, max(6, int(room / size / 0.58))) for bar in bars]
    ax.set_xticks(range(len(bars)), labels, fontsize=size, color=INK)
    lines = max((label.count("\n") + 1 for label in labels), default=1)
    fig.subplots_adjust(bottom=(0.3 + 0.25 * lines) / fig.get_figheight())
    ax.set_xlim(-0.6, max(1, len(bars)) - 0.4)
    return fig


def wrap_label(label: str, letters: int) -> str:
    """In lines of so many letters: broken at its commas first, and never within a word."""
    parts = label.replace(", ", ",\n") if len(label) > letters else label
    return "\n".join(
        textwrap.fill(part, letters, break_long_words=False) for part in parts.split("\n")
    )


def _label_bar(ax: Axes, x: int, bar: Bar, unit: str, fits: bool, size: float, room: float) -> None:
    """Writes a bar's numbers. What belongs inside goes above where the bar is too low for it."""
    if bar.std:
        ax.errorbar(x, bar.mean, bar.std, color=INK, capsize=7, elinewidth=1.8, capthick=1.8)
    if bar.inside and fits:
        ideal = bar.role == "ideal"
        ax.text(
            x, bar.mean / 2, bar.inside, ha="center", va="center", fontweight="bold",
            fontsize=size + 3, color=BLUE if ideal else "white",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 3} if ideal else None,
        )  # fmt: skip
    value = with_spread(bar.mean, bar.std) + unit
    if len(value) * size * 0.62 > room:
        value = value.replace(" ±", "\n±")
    ax.annotate(
        value if fits or not bar.inside else f"{bar.inside}\n{value}",
        (x, bar.mean + bar.std), (0, 6), textcoords="offset points", ha="center", fontsize=size,
        color=INK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
    )  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """A line of a panel: a value per epoch."""

    label: str
    values: Sequence[float]
    colour: str = BLUE


def draw_curves(
    panels: Sequence[tuple[str, Sequence[Curve]]], *, title: str, subtitle: str = ""
) -> Figure:
    """Panels (name, curves) side by side over the epochs, each curve labelled after its last
    point."""
    fig, axes = page(title, subtitle, columns=len(panels), gap=0.6)
    for ax, (name, curves) in zip(axes, panels, strict=True):
        ax.set_title(name, loc="left", fontsize=TEXT, color=INK, pad=10)
        last = max(len(curve.values) for curve in curves) - 1
        for curve in curves:
            ax.plot(curve.values, color=curve.colour, linewidth=2.5, marker="o", markersize=5,
                    clip_on=False)  # fmt: skip
        top = 1.1 * ax.get_ylim()[1]
        below = -top
        for curve in sorted(curves, key=lambda curve: curve.values[-1]):
            below = max(curve.values[-1], below + 0.13 * top)  # two lines of text apart
            label = f"{curve.label}\n{readable(curve.values[-1])}".strip()
            ax.text(
                last + 0.06 * (last + 1), below, label, va="center", fontsize=SMALL,
                fontweight="bold", color=curve.colour, linespacing=1.0,
            )  # fmt: skip
        ax.set_ylim(0, max(top, below + 0.1 * top))
        ax.set_xlim(-0.08 * (last + 1), last + 0.45 * (last + 1))
        ax.set_xticks(range(0, last + 1, -(-(last + 1) // 8)))
        ax.set_xlabel("epoch", fontsize=SMALL, color=GREY)
    return fig
