"""The results of a run's epochs, read back and drawn as curves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from training.launch.errors import UserError
from training.results import evaluations

from .style import LINES, picture, readable

LOSS = "training loss"
PANELS = {  # results of an epoch
    "training_loss": LOSS, "validation_loss": "validation loss",
    "bleu": "BLEU", "accuracy": "accuracy", "perplexity": "perplexity",
}  # fmt: skip
Curves = Mapping[str, Mapping[Any, float]]  # by run, its values by epoch or step


def read_json(path: Path) -> dict[str, Any]:
    """The content of a file that a run wrote; empty if there is none. Raises UserError if it cannot
    be read."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); make the run again") from None


def read_epochs(workdir: Path, *prefixes: str) -> list[dict[str, float]]:
    """The results of all epochs, in order, from the files whose names have these prefixes. `epoch`
    is the number of each, from 1. Raises UserError if there are none, or one cannot be read."""
    paths = [path for prefix in prefixes for path in workdir.glob(f"{prefix}_epoch*.json")]
    numbers = {int(path.stem.rpartition("epoch")[2]) + 1: path for path in paths}
    if not numbers:
        raise UserError(
            f"{workdir} has no {prefixes[0]}_epoch0.json; name the --workdir of a finished run"
        )
    results = []
    for number, path in sorted(numbers.items()):
        values = {key: math.nan if x is None else x for key, x in read_json(path).items()}
        results.append({**values, "epoch": number})
    return results


def within_epochs(workdir: Path) -> dict[float, float]:
    """The validation losses that --eval_every has measured, by the number of epochs done, such as
    0.5. An epoch has as many steps as the first, since the last may not have ended."""
    lines = evaluations(workdir)
    length = next((x["step"] for x in lines if "training_loss" in x), None)
    within = {x["step"]: x["validation_loss"] for x in lines if "training_loss" not in x}
    return {step / length: x for step, x in within.items() if x is not None} if length else {}


def draw_curves(
    path: Path, panels: Mapping[str, Curves], title: str, foot: str, xlabel: str
) -> Path:
    """Draws a panel per heading, with a curve per run. Returns the path."""
    with picture(path, title, foot, (5 * max(2, len(panels)), 5.6), ncols=len(panels)) as (_, axes):
        for ax, (heading, curves) in zip(axes, panels.items(), strict=True):
            for k, (name, values) in enumerate(curves.items()):
                line = "o-" if len(values) < 30 else "-"
                (x, y), colour = zip(*sorted(values.items()), strict=True), LINES[k % len(LINES)]
                ax.plot(x, y, line, label=name, c=colour, lw=1 + len(curves) - k)  # all are seen
            ax.set(title=heading, xlabel=xlabel, ylim=(0, 1.1 * ax.get_ylim()[1]))
            ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
            if ax is axes[0] and len(curves) > 1:
                ax.legend()
    return path


def plot_training(path: Path, workdirs: Sequence[Path], foot: str) -> Path:
    """Draws losses and score of runs after each epoch. Returns the path. Raises UserError if
    results are missing."""
    names = ("rank0_results", "eval_results")
    runs = {str(folder): read_epochs(folder, *names) for folder in workdirs}
    panels = dict[str, Curves]()
    for key, heading in PANELS.items():
        curves = {
            run: {epoch["epoch"]: epoch.get(key, math.nan) for epoch in epochs}
            for run, epochs in runs.items()
        }
        if key == "validation_loss":
            curves = {run: within_epochs(Path(run)) | curve for run, curve in curves.items()}
        values = [value for curve in curves.values() for value in curve.values()]
        # --benchmark_only validates nothing; a run has only one of the scores.
        if heading == LOSS or any(map(math.isfinite, values)):
            panels[heading] = curves
    name = [*runs][-1]
    last = {heading: [*curves[name].values()][-1] for heading, curves in panels.items()}
    said = [f"{h} {readable(x)}" for h, x in last.items() if h == LOSS or math.isfinite(x)]
    foot = f"{foot}; losses in nats per target"
    return draw_curves(path, panels, f"{name}: {', '.join(said)}", foot, "epoch")
