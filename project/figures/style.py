"""How every figure looks, and how numbers read.

A figure's title states the finding, the line at its foot what was measured. The colours are from
Okabe and Ito (2008): they can be told apart with any kind of colour vision. pyplot is not used: so
figures share no state, and need no display.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from training.files import writing

BLUE, GREEN, INK, GREY, FAINT = "#0072B2", "#009E73", "#1F2933", "#6B7785", "#E8EBEE"
ORANGE, SKY, PURPLE, VERMILION, YELLOW = "#E69F00", "#56B4E9", "#CC79A7", "#D55E00", "#F0E442"
LINES = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, GREY, INK)  # of curves
COLOURS = {  # by kind, in the order of the legend
    "parameters": BLUE, "gradients": ORANGE,
    "forward": SKY, "recompute": YELLOW, "backward": ORANGE, "backward (input)": "#F5CE85",
    "backward (weight)": GREEN, "optimizer": GREY, "communication": VERMILION,
    "send": PURPLE, "receive": BLUE, "all-reduce": VERMILION, "all-gather": "#8C510A",
    "reduce-scatter": "#5E3C99", "all-to-all": "#E78AC3", "wait for all ranks": INK, "idle": FAINT,
    "rest of the peak": FAINT, "baseline": GREY, "measured": SKY, "ideal": "white",
}  # fmt: skip
STYLE = {
    "font.size": 12, "text.color": INK, "axes.labelcolor": GREY, "axes.edgecolor": GREY,
    "xtick.major.size": 0, "ytick.major.size": 0,  # in SVG, tick marks would have ids
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": FAINT, "axes.axisbelow": True,
    "legend.frameon": False, "savefig.dpi": 150,
    "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"],  # text stays text
}  # fmt: skip


@contextmanager
def picture(
    path: Path, title: str, foot: str, size: tuple[float, float] = (10, 5.6), **grid: Any
) -> Iterator[tuple[Figure, Sequence[Axes]]]:
    """A figure of `size` inches; `grid` goes to `Figure.subplots`. It is written when the `with`
    ends. Raises RunError if it cannot be written."""
    with mpl.rc_context(STYLE):
        fig = Figure(size, layout="constrained")
        fig.suptitle(textwrap.fill(title, int(7 * size[0])), x=0.01, ha="left", weight="bold")
        fig.supxlabel(textwrap.fill(foot, int(11 * size[0])), x=0.01, ha="left", size="small")
        yield fig, fig.subplots(squeeze=False, **grid).flatten().tolist()
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            fig.savefig(path)


def legend(fig: Figure, kinds: set[str]) -> None:
    """Draws a legend of the colours of these kinds beside the axes."""
    patches = [
        Patch(facecolor=colour, label=kind, edgecolor=INK)
        for kind, colour in COLOURS.items()
        if kind in kinds
    ]
    fig.legend(handles=patches, loc="outside right upper")


def readable(value: float) -> str:
    """A number with about three digits: 0.0123, 4.56, 78.9, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def with_error(mean: float, std: float, plus_minus: str = " ± ") -> str:
    """A mean and its standard deviation, to the first digit of the deviation, or to whole numbers
    if that is above 1: 8.80 ± 0.04, 5,748 ± 133. Without a deviation as `readable`."""
    if not std:
        return readable(mean)
    digits = min(4, max(0, -math.floor(math.log10(std))))
    return f"{mean:,.{digits}f}{plus_minus}{std:,.{digits}f}"
