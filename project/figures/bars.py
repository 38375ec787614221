"""Bars side by side, with their parts, deviations and sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .style import COLOURS, INK, legend, picture, with_error


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


def draw_bars(path: Path, bars: Sequence[Bar], title: str, ylabel: str, foot: str = "") -> Path:
    """Draws the bars with the sum of each above it, and a legend if they have parts."""
    top = max((bar.total + bar.std for bar in bars), default=0.0) or 1.0
    with picture(path, title, foot, (max(10, 1.25 * len(bars)), 5.6)) as (fig, (ax,)):
        for x, bar in enumerate(bars):
            base = 0.0
            for kind, value in bar.parts.items():
                box = ax.bar(x, value, 0.64, base, color=COLOURS[kind], edgecolor=INK)
                inside = f"{value / bar.total:.0%}" if len(bar.parts) > 1 else bar.inside
                if value > 0.07 * top:  # there is room
                    ax.bar_label(box, [inside], label_type="center")
                base += value
            if bar.std:
                ax.errorbar(x, base, bar.std, color=INK, capsize=7)
            above = with_error(base, bar.std, "\n± ")
            ax.text(x, base + bar.std + 0.02 * top, above, ha="center", va="bottom")
        ax.set_xticks(range(len(bars)), [bar.label.replace(", ", "\n") for bar in bars])
        ax.set(xlim=(-0.6, max(1, len(bars)) - 0.4), ylim=(0, 1.2 * top))
        ax.set_title("" if title.startswith(ylabel) else ylabel)
        if any(len(bar.parts) > 1 for bar in bars):
            legend(fig, {kind for bar in bars for kind, value in bar.parts.items() if value})
    return path
