"""Draws the curves of a run from its result files; and how all pictures of this project look.

The title of a picture is what was found, the line under it is what was measured. Grey is the
baseline, blue the subject, hatched the ideal, which is computed and not measured. The colours are
those of Okabe and Ito (2008), which people with any kind of colour vision tell apart. Figures are
made without pyplot: no state is shared, and no display is needed.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from training.errors import UserError
from training.results import OPTIONS, PICTURE, SUMMARY, read_results

BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
SKY, PURPLE, VERMILION, YELLOW = "#56B4E9", "#CC79A7", "#D55E00", "#F0E442"
INK, GREY, FAINT = "#1F2933", "#6B7785", "#E8EBEE"
COLOURS = {  # of what a picture tells apart, in the order of its legend
    "parameters": BLUE, "gradients": ORANGE,
    "forward": BLUE, "recompute": YELLOW, "backward": ORANGE, "backward of inputs": ORANGE,
    "backward of weights": GREEN, "optimizer": GREY, "other": SKY, "communication": VERMILION,
    "send": PURPLE, "receive": SKY, "all-reduce": VERMILION, "all-gather": SKY,
    "reduce-scatter": PURPLE, "wait for all ranks": INK, "idle": FAINT, "peak resident": "white",
    "baseline": GREY, "measured": BLUE, "ideal": "white",
}  # fmt: skip
STYLE = {
    "font.size": 13, "text.color": INK, "axes.labelcolor": GREY, "axes.edgecolor": GREY,
    "xtick.color": GREY, "ytick.color": GREY, "xtick.major.size": 0, "ytick.major.size": 0,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": FAINT, "axes.axisbelow": True,
    "axes.titlelocation": "left", "axes.titlesize": 14, "lines.linewidth": 2.5,
    "legend.frameon": False, "legend.handlelength": 1, "legend.handleheight": 1,
    "hatch.linewidth": 1.2, "savefig.dpi": 150,
}  # fmt: skip
SCORES = {"bleu": "BLEU", "accuracy": "accuracy"}  # key of a result file: name

Epochs = list[dict[str, float]]  # the results of one rank, per epoch


@contextmanager
def picture(
    path: Path, title: str, subtitle: str, size: tuple[float, float] = (10, 5.6), **grid: Any
) -> Iterator[tuple[Figure, Sequence[Axes]]]:
    """A page of `size` inches with a title, a line under it, and axes in a `grid`, as
    `Figure.subplots` takes it. It is written when the `with` ends.

    Raises:
        UserError: it cannot be written there.
    """
    (width, height), below = size, 0.25  # inches from the top
    with mpl.rc_context(STYLE):
        fig = Figure(size, layout="constrained")
        for text, points, weight, colour in ((title, 19, "bold", INK), (subtitle, 13, None, GREY)):
            lines = textwrap.wrap(text, int(width * (6.3 if weight else 9.7)))
            fig.text(
                0.35 / width, 1 - below / height, "\n".join(lines), va="top", size=points,
                weight=weight, color=colour, linespacing=1.25,
            )  # fmt: skip
            below += len(lines) * points * 1.5 / 72 + 0.06
        engine: Any = fig.get_layout_engine()
        engine.set(rect=(0.02, 0.01, 0.96, 0.97 - below / height), w_pad=0.1, wspace=0.05)
        yield fig, fig.subplots(squeeze=False, **grid).flatten().tolist()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fig.savefig(path)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written ({error.strerror}); choose a folder of your own"
            ) from error


def on(colour: str) -> str:
    """The colour of text on a colour."""
    return "white" if sum(to_rgb(colour)) < 1.5 else INK


def legend(fig: Figure, kinds: set[str]) -> None:
    """Says under the picture which colour is which kind; a backward and its first half are one."""
    patches = [
        Patch(facecolor=colour, label=kind, edgecolor=BLUE if colour == "white" else colour)
        for kind, colour in COLOURS.items()
        if kind in kinds and not (kind == "backward of inputs" and "backward" in kinds)
    ]
    fig.legend(handles=patches, loc="outside lower left", ncols=8)


def readable(value: float) -> str:
    """A number with about three digits: 0.0123, 4.56, 78.9, 12,345, 6.79 M."""
    for factor, suffix in ((1e9, " G"), (1e6, " M")):
        if abs(value) >= factor:
            return readable(value / factor) + suffix
    if 0 < abs(value) < 1:
        return f"{value:.3g}"
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def read_json(path: Path) -> dict[str, Any]:
    """The content of a file; empty if there is no such file. Raises UserError for other texts."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}); make the run again") from None


def read_options(workdir: Path) -> dict[str, Any]:
    """The options of a run: from its summary or, if it did not reach its end, from the options."""
    return read_json(workdir / SUMMARY) or read_json(workdir / OPTIONS)


def read_epochs(workdir: Path, prefix: str, keys: Sequence[str], remedy: str) -> Epochs:
    """The results of one rank from the first epoch on; see `read_results` for `prefix`.

    Raises:
        UserError: a file is missing, cannot be read, or lacks one of `keys`. The text ends with
            `remedy`, which names the command that makes them.
    """
    try:
        found = {int(p.stem.rpartition("epoch")[2]) for p in workdir.glob(f"{prefix}_epoch*.json")}
        results = read_results(workdir, prefix)
    except (ValueError, OSError, AttributeError) as error:
        raise UserError(f"{workdir}: a result file cannot be read ({error}); {remedy}") from error
    if gaps := set(range(max(found, default=0) + 1)) - found:
        raise UserError(f"{workdir}/{prefix}_epoch{min(gaps)}.json is missing; {remedy}")
    for epoch, result in enumerate(results):
        if lacking := [key for key in keys if key not in result]:
            raise UserError(f"{workdir}/{prefix}_epoch{epoch}.json has no {lacking[0]}; {remedy}")
    return results


def describe(*workdirs: Path) -> str:
    """What was trained and how, as far as the files tell and the runs have it in common."""
    first, *others = map(_facts, workdirs)
    return "; ".join(fact for fact in first if all(fact in facts for facts in others))


def _facts(workdir: Path) -> list[str]:
    config, options = read_json(workdir / "config.json"), read_options(workdir)
    parts = [str(options.get("model", "")).upper()]
    if "n_layer" in config:
        parts = [f"GPT-2 with {config['n_layer']} blocks of width {config['n_embd']}, vocabulary "
                 f"{config['vocab_size']:,}"]  # fmt: skip
    if "batch_size" in options:
        parts.append(f"batches of {options['batch_size']}")
    if schedule := options.get("schedule"):
        stages = options.get("num_devices") or options.get("world_size")
        parts.append(f"{stages} stages, {schedule}, {options['num_microbatches']} micro-batches")
    if cores := options.get("cores"):
        who = "" if "num_devices" in options else " per process"
        parts.append(f"{cores} core{'s' * (cores > 1)}{who}")
    return [part for part in parts if part]


def plot_training(workdir: Path, output: Path | None = None) -> Path:
    """Draws loss and score of a run after each epoch, by default in workdir/training.png; returns
    the path.

    Raises:
        UserError: a result file is missing, or the picture cannot be written.
    """
    remedy = f"make it with: python project/run_data_parallel.py --workdir {workdir}"
    prefix = "eval_results" if any(workdir.glob("eval_results_epoch*.json")) else "rank0_results"
    epochs = read_epochs(workdir, prefix, ("training_loss", "validation_loss"), remedy)
    panels = [("loss (nats per target)", {"training": GREY, "validation": BLUE}, "_loss")]
    found = f"validation loss {epochs[-1]['validation_loss']:.2f}"
    for key, name in SCORES.items():
        if any(math.isfinite(epoch.get(key, math.nan)) for epoch in epochs):
            panels.append((f"{name} on the test split", {key: GREEN}, ""))
            found = f"{name} {epochs[-1][key]:.1f}, {found}"
    title = f"{found} after {len(epochs)} epoch{'s' * (len(epochs) > 1)}"
    path = output or workdir / PICTURE
    with picture(path, title, describe(workdir), ncols=len(panels)) as (_, axes):
        for ax, (heading, names, suffix) in zip(axes, panels, strict=True):
            for name, colour in names.items():
                values = [epoch[name + suffix] for epoch in epochs]
                label = f"{SCORES.get(name, name)} {readable(values[-1])}"
                ax.plot(values, color=colour, marker="o", label=label, clip_on=False)
            ax.set_ylim(0, 1.1 * ax.get_ylim()[1])
            ax.set(title=heading, xlabel="epoch")
            ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
            ax.legend(labelcolor="linecolor", prop={"weight": "bold"})
    return path
