"""What a run of project/train.py remembers of its steps, and the summary it leaves of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from project.task import Step
from project.utils import sum_over_ranks


@dataclass
class Log:
    """One rank's steps, one by one; and, of steps that an earlier run has made, what is known."""

    losses: list[float] = field(default_factory=list)  # summed, of this rank's part; NaN: left out
    counts: list[int] = field(default_factory=list)  # what each step's loss is the mean over
    seconds: list[float] = field(default_factory=list)
    examples: list[int] = field(default_factory=list)  # of this rank's part
    positions: list[int] = field(default_factory=list)
    before: Mapping[str, Sequence[float | None]] = field(
        default_factory=lambda: {"loss": [], "time": []}
    )

    def add(self, step: Step, loss: float, seconds: float, left_out: bool = False) -> None:
        """A step has been made, or left out."""
        self.losses.append(math.nan if left_out else loss)
        self.counts.append(step.count)
        self.examples.append(step.examples)
        self.positions.append(step.positions)
        self.seconds.append(seconds)

    def mean_losses(self, device: torch.device, since: int = 0) -> list[float]:
        """The global batches' mean losses, of this run, NaN of those left out; all ranks call it
        together."""
        sums = sum_over_ranks(self.losses[since:], device)
        return [s / max(1, n) for s, n in zip(sums, self.counts[since:], strict=True)]

    def whole(self, device: torch.device) -> dict[str, list[float | None]]:
        """Loss and time of all steps from the first; all ranks call it together."""
        return {
            "loss": [*self.before["loss"], *self.mean_losses(device)],
            "time": [*self.before["time"], *self.seconds],
        }

    def speeds(self, device: torch.device, copies: float) -> dict[str, float]:
        """Examples and positions per second over all ranks, after the first step, which is slower;
        `copies` ranks compute the same examples. All ranks call it together."""
        later = slice(1, None) if len(self.seconds) > 1 else slice(None)
        seconds = max(1e-9, sum(self.seconds[later]))
        mine: list[Any] = [sum(self.examples[later]), sum(self.positions[later])]
        examples, positions = sum_over_ranks(mine, device)
        return {
            "examples_per_sec": examples / copies / seconds,
            "positions_per_sec": positions / copies / seconds,
        }
