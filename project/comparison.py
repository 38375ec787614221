"""Compares two runs by their result files: how much faster is one, and how fast could it be?

The first epoch of each run is left out: it pays for what happens once, as memory that is touched
for the first time. A time is that of the slowest rank, a throughput the sum over the ranks. Values
are means over the epochs, error bars the standard deviation of a sample (divided by n - 1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.figure import Figure

from project.figures import Bar, draw_bars, save
from training.launch import UserError
from training.record import OPTIONS, read_results

TIME, THROUGHPUT = "training_time", "tokens_per_sec"
YLABELS = {TIME: "training time of an epoch (s)", THROUGHPUT: "tokens per second, padding included"}
MODEL_SIZES = ("n_layer", "n_embd", "n_head", "vocab_size")
MAX_RANK_BARS = 4  # with more ranks the slowest stands for all

Epochs = list[dict[str, float]]  # the results of a rank, per epoch


def read_epochs(workdir: Path, prefix: str, remedy: str, keys: Sequence[str]) -> Epochs:
    """The results of one rank, from the first epoch on.

    Raises:
        UserError: there are none, one is missing, or one cannot be read or lacks one of `keys`.
            The text ends with `remedy`, which names the command that makes them.
    """
    try:
        found = {int(p.stem.rpartition("epoch")[2]) for p in workdir.glob(f"{prefix}_epoch*.json")}
        results = read_results(workdir, prefix)
    except (ValueError, OSError) as error:
        raise UserError(f"{workdir}: a result file cannot be read ({error}); {remedy}") from error
    gaps = set(range(max(found, default=0) + 1)) - found
    if gaps:
        raise UserError(f"{workdir}/{prefix}_epoch{min(gaps)}.json is not there; {remedy}")
    for epoch, result in enumerate(results):
        for key in keys:
            if key not in result:
                raise UserError(f"{workdir}/{prefix}_epoch{epoch}.json has no {key}; {remedy}")
    return results


def read_ranks(workdir: Path, remedy: str) -> list[Epochs]:
    """The results of all ranks of a data-parallel run, first rank first."""
    names = [path.name for path in workdir.glob("rank*_results_epoch*.json")]
    found = [int(m[1]) for m in (re.match(r"rank(\d+)_", name) for name in names) if m]
    ranks = [
        read_epochs(workdir, f"rank{rank}_results", remedy, (TIME, THROUGHPUT))
        for rank in range(max(found, default=0) + 1)
    ]
    if len({len(epochs) for epochs in ranks}) > 1:
        lengths = ", ".join(str(len(epochs)) for epochs in ranks)
        raise UserError(f"{workdir}: its ranks have {lengths} epochs, it ended early; {remedy}")
    return ranks


def describe(workdir: Path) -> str:
    """What was trained, as far as the files tell."""
    config, options = read_json(workdir / "config.json"), read_json(workdir / OPTIONS)
    parts = []
    if "n_layer" in config:
        parts.append(
            f"GPT-2 with {config['n_layer']} blocks of width {config['n_embd']}, "
            f"vocabulary {config['vocab_size']:,}"
        )
    if "batch_size" in options:
        parts.append(f"batches of {options['batch_size']} pairs")
    if options.get("cores") and options.get("device") == "cpu":
        cores = f"{options['cores']} core{'s' if options['cores'] > 1 else ''}"
        parts.append(cores if "num_devices" in options else f"{cores} per process")
    return "; ".join(parts)


def same_model(first: Path, second: Path, remedy: str) -> None:
    """Raises UserError where two runs are known to have trained models of different sizes."""
    sizes = [
        {k: v for k, v in read_json(run / "config.json").items() if k in MODEL_SIZES}
        for run in (first, second)
    ]
    if all(sizes) and sizes[0] != sizes[1]:
        raise UserError(
            f"{first} trained {sizes[0]}, {second} {sizes[1]}: only runs of the same model "
            f"compare; {remedy}"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The content of a file, empty where there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


@dataclass(frozen=True)
class Comparison:
    """A run against its baseline; each a list, per rank, of results per epoch."""

    baseline: list[Epochs]
    measured: list[Epochs]
    labels: tuple[str, str]  # of the bars
    subject: str  # "2 processes" ...
    reference: str  # ... as fast as "one"
    ideal: float  # the speed-up that would be perfect
    subtitle: str

    def check(self, remedy: str) -> None:
        """Raises UserError where the two did not do the same work, or there is too little."""
        for run, label in zip((self.baseline, self.measured), self.labels, strict=True):
            if len(run[0]) < 2:
                raise UserError(
                    f"{label}: only one epoch, and the first is left out; --n_epochs 2 or more: "
                    + remedy
                )
        work = [
            sum(r[0].get("real_tokens_per_sec", 0.0) * r[0][TIME] for r in run)
            for run in (self.baseline, self.measured)
        ]
        if min(work) > 0 and max(work) > 1.01 * min(work):
            raise UserError(
                f"{self.labels[0]} trained on {work[0]:,.0f} tokens per epoch, {self.labels[1]} on "
                f"{work[1]:,.0f}: only runs with the same data and options compare; {remedy}"
            )

    def draw(self, metric: str) -> Figure:
        """The picture of TIME, which lasts as long as the slowest rank's, or of THROUGHPUT, which
        is summed over the ranks."""
        timing, n = metric == TIME, len(self.measured)
        before, after = over_epochs(self.baseline, metric), over_epochs(self.measured, metric)
        shown = [(self.labels[1], after)]
        if timing and 1 < n <= MAX_RANK_BARS:
            shown = [(f"rank {r}", over_epochs([self.measured[r]], metric)) for r in range(n)]

        def speedup(mean: float) -> str:
            ratio = before[0] / mean if timing else mean / before[0]
            return f"{ratio:.{2 if ratio < 10 else 1}f}x"

        best, ideal = self.ideal ** (-1 if timing else 1), f"{self.ideal:.3g}x"
        verb = "as fast as" if timing else "the tokens/s of"
        return draw_bars(
            [
                Bar(self.labels[0], *before, role="baseline"),
                *(Bar(label, *value, inside=speedup(value[0])) for label, value in shown),
                Bar("ideal", before[0] * best, role="ideal", inside=ideal),
            ],
            title=f"{self.subject}: {speedup(after[0])} {verb} {self.reference} (ideal {ideal})",
            subtitle=self.subtitle,
            ylabel=YLABELS[metric] + (", all ranks together" if not timing and n > 1 else ""),
            unit=" s" if timing else "",
        )

    def spread(self) -> float:
        """The larger of the two standard deviations of TIME, relative to its mean."""
        times = [over_epochs(run, TIME) for run in (self.baseline, self.measured)]
        return max(std / mean for mean, std in times)

    def save(self, output: Path, name: str) -> list[Path]:
        """Draws both pictures."""
        return [
            save(self.draw(TIME), output / f"{name}_training_time.png"),
            save(self.draw(THROUGHPUT), output / f"{name}_throughput.png"),
        ]


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the standard deviation of a sample; 0 for a single value."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def over_epochs(ranks: list[Epochs], metric: str) -> tuple[float, float]:
    """Mean and standard deviation over all epochs but the first."""
    combine = max if metric == TIME else sum
    epochs = list(zip(*ranks, strict=True))[1:]
    return mean_and_std([combine(rank[metric] for rank in epoch) for epoch in epochs])
