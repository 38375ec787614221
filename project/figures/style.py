"""How every figure looks, and the curves of a run.

A figure's title states the finding, the line at its foot what was measured. Grey is the baseline,
blue the subject. The colours are from Okabe and Ito (2008): they can be told apart with any kind of
colour vision. Without pyplot there is no shared state, and no display is needed.
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
from matplotlib.ticker import MaxNLocator

from training.files import PICTURE, writing

from .epochs import read_epochs

BLUE, GREEN, INK, GREY, FAINT = "#0072B2", "#009E73", "#1F2933", "#6B7785", "#E8EBEE"
STYLE = {
    "font.size": 13, "text.color": INK, "axes.labelcolor": GREY, "axes.edgecolor": GREY,
    "xtick.color": GREY, "ytick.color": GREY, "xtick.major.size": 0, "ytick.major.size": 0,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": FAINT, "axes.axisbelow": True,
    "axes.titlelocation": "left", "axes.titlesize": 14, "lines.linewidth": 2.5,
    "legend.frameon": False, "savefig.dpi": 150,
    "figure.constrained_layout.h_pad": 0.16, "figure.constrained_layout.w_pad": 0.16,
}  # fmt: skip


@contextmanager
def picture(
    path: Path, title: str, foot: str, size: tuple[float, float] = (10, 5.6), **grid: Any
) -> Iterator[tuple[Figure, Sequence[Axes]]]:
    """A figure of `size` inches; `grid` goes to `Figure.subplots`. It is written when the `with`
    ends. Raises RunError if it cannot be written."""
    with mpl.rc_context(STYLE):
        fig = Figure(size, layout="constrained")
        left = {"x": 0.2 / size[0], "ha": "left"}
        fig.suptitle(textwrap.fill(title, int(6.3 * size[0])), **left, size=19, weight="bold")
        fig.supxlabel(textwrap.fill(foot, int(11 * size[0])), **left, size=11.5, color=GREY)
        yield fig, fig.subplots(squeeze=False, **grid).flatten().tolist()
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            fig.savefig(path)


def readable(value: float) -> str:
    """A number with about three digits: 0.0123, 4.56, 78.9, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def with_error(mean: float, std: float, plus_minus: str = " ± ") -> str:
    """A mean with as many digits as its standard deviation, which has one, or whole ones: 8.80 ±
    0.04, 5,748 ± 133. Without a deviation `readable`."""
    if not std:
        return readable(mean)
    digits = min(4, max(0, -math.floor(math.log10(std))))
    return f"{mean:,.{digits}f}{plus_minus}{std:,.{digits}f}"


def plot_training(
    workdir: Path, foot: str, steps: int | None = None, output: Path | None = None
) -> Path:
    """Draws loss and score of a run after each epoch, by default in workdir/training.png; returns
    the path. Raises UserError if results are missing.

    Args:
        foot: what was trained and how.
        steps: of a run whose length was given in steps; None: in epochs.
    """
    epochs = read_epochs(workdir)
    done, last = [epoch["epoch"] for epoch in epochs], epochs[-1]
    colours = {"training_loss": GREY, "validation_loss": BLUE}
    # --benchmark_only validates nothing.
    losses = {key: x for key, x in colours.items() if not math.isnan(last[key])} or colours
    panels = {"loss (nats per target)": losses}
    shown = [*losses][-1]
    found = f"{shown.replace('_', ' ')} {last[shown]:.2f}"
    for name, split in (("BLEU", "test"), ("accuracy", "test"), ("perplexity", "validation")):
        score = last.get(name.lower(), math.nan)
        if math.isfinite(score):
            panels[f"{name} on the {split} split"] = {name.lower(): GREEN}
            found = f"{name} {score:.1f}, {found}"
    n, unit = (steps, "step") if steps else (done[-1], "epoch")
    title = f"{found} after {n} {unit}{'s' * (n > 1)}"
    path = output or workdir / PICTURE
    with picture(path, title, foot, ncols=len(panels)) as (_, axes):
        for ax, (heading, keys) in zip(axes, panels.items(), strict=True):
            for key, colour in keys.items():
                name = key.removesuffix("_loss").replace("bleu", "BLEU")
                label = f"{name} {readable(last[key])}"
                values = [epoch[key] for epoch in epochs]
                ax.plot(done, values, color=colour, marker="o", label=label, clip_on=False)
            finish_panel(ax, heading)
            ax.legend(labelcolor="linecolor", prop={"weight": "bold"})
    return path


def finish_panel(ax: Axes, heading: str) -> None:
    """Finishes a panel of curves over epochs: axes from 0, whole epochs."""
    ax.set(title=heading, xlabel="epoch", ylim=(0, 1.1 * ax.get_ylim()[1]))
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
