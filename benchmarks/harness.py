"""Times contestants in turns, in one run, on the same cores; reports medians and spread.

Timings on shared machines drift by more than the differences of interest. So contestants take
turns, in an order that is reversed every round, and the reported ratio is the median of the rounds'
ratios. Their losses are compared too: no contestant may win by computing something else.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
# The pairs, de to en, of benchmarks that translate: as --dataset of the programs.
DATASET = os.environ.get("BENCHMARK_DATASET", "builtin")


@dataclass(frozen=True)
class Row:
    """A line of a benchmark's table. `goal`, if any, is what `ratio` must reach."""

    name: str
    value: float  # median
    spread: tuple[float, float]  # quartiles
    unit: str
    ratio: float | None = None
    against: str = ""
    goal: float | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None without a goal."""
        return None if self.goal is None or self.ratio is None else self.ratio >= self.goal


def use_cores(cores: Sequence[int]) -> None:
    """Binds this process to these cores, with a thread each."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def summarize(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (low, high)


def alternate(
    contestants: dict[str, Callable[[], None]], rounds: int, warm: bool = False
) -> dict[str, list[float]]:
    """Seconds of every contestant in every round, after a warm-up round, unless they are `warm`."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(1 if warm else 0, rounds + 1):
        names = list(contestants) if round_ % 2 else list(contestants)[::-1]
        for name in names:
            start = time.perf_counter()
            contestants[name]()
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio_of(baseline: Sequence[float], contestant: Sequence[float]) -> float:
    """How many times faster the contestant is: the median of the rounds' ratios, since a slow round
    slows both."""
    return statistics.median(b / c for b, c in zip(baseline, contestant, strict=True))


def agree(losses: dict[str, float], tolerance: float = 1e-4) -> None:
    """Raises AssertionError if the contestants' losses differ by more than rounding."""
    reference = next(iter(losses.values()))
    off = {n: x for n, x in losses.items() if abs(x - reference) > tolerance * abs(reference)}
    if off:
        raise AssertionError(f"the contestants compute different losses: {losses}")


def format_table(title: str, rows: Sequence[Row]) -> str:
    """The rows, aligned, under their title."""
    width = max(len(row.name) for row in rows)
    lines = [title, "-" * len(title)]
    for row in rows:
        line = (
            f"{row.name:<{width}}  {row.value:>10,.4g} {row.unit:<10} "
            f"[{row.spread[0]:,.4g} .. {row.spread[1]:,.4g}]"
        )
        if row.ratio is not None:
            line += f"   {row.ratio:.2f}x {row.against}"
        if row.reached is not None:
            line += f"   goal {row.goal:.2f}: {'reached' if row.reached else 'MISSED'}"
        lines.append(line)
    return "\n".join(lines)


def write_rows(name: str, title: str, rows: Sequence[Row]) -> None:
    """Prints the table, and writes it as JSON under benchmarks/results/."""
    print(format_table(title, rows), end="\n\n", flush=True)
    RESULTS.mkdir(exist_ok=True)
    content = {
        "title": title,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "rows": [asdict(row) for row in rows],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
