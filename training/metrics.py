"""metrics.jsonl: the numbers of a run, step by step, for tools.

A line of JSON per step and per evaluation, written at once, so that `tail -f` follows a run:

    {"epoch": 0, "step": 12, "loss": 3.1, "learning_rate": 0.001, "gradient_norm": 0.8, ...}
    {"epoch": 0, "step": 79, "training_loss": 1.9, "validation_loss": 1.4, "bleu": 22.9}

`step` is the number of steps done in the whole run. Speeds are summed over all ranks;
`tokens_per_sec` counts all positions, `real_tokens_per_sec` excludes padding. A position of GPT-2
with P parameters, L blocks of width C and sequences of T takes about 6 P + 12 L C T operations.
training/trackers.py writes the same numbers for other tools.

Cost: 0.1 ms per step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.files import METRICS, json_text, writing
from training.optimization import Optimizers
from training.options import Options

from .launch.memory import peak_bytes
from .launch.world import World
from .layouts.layout import LaidOutModel

Sink = Callable[[int, Mapping[str, Any]], None]
"""Takes the number of steps done, and the numbers to write."""
Tracker = Callable[[Any, int], Sink]
"""Opens a sink, given the options and the number of steps that a resumed run has done."""


class Metrics:
    """The lines of one run. All ranks make one; rank 0 writes.

    Args:
        steps_done: by the run that is resumed. Lines of later steps are removed.
        trackers: what else rank 0 writes the numbers to.
    """

    def __init__(
        self,
        world: World,
        args: Options,
        model: LaidOutModel,
        steps_done: int,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self.copies = world.world_size / model.dp_size  # ranks that have the same part of a batch
        self.device = world.device
        self.sinks: list[Sink] = []
        if world.is_main:
            self.sinks.append(_json_lines(args.workdir / METRICS, steps_done))
            self.sinks += [tracker(args, steps_done) for tracker in trackers]

    def add_step(self, epoch: int, optimizer: Optimizers, seconds: float) -> None:
        """Writes a step, done or skipped."""
        if not self.sinks:
            return
        positions, tokens, _ = (count / self.copies for count in optimizer.counts)  # each part once
        self._write(
            optimizer.steps, epoch=epoch, loss=optimizer.loss, learning_rate=optimizer.rate,
            gradient_norm=optimizer.norm, seconds=seconds, tokens_per_sec=positions / seconds,
            real_tokens_per_sec=tokens / seconds, peak_rss_bytes=peak_bytes(self.device),
            skipped=math.isnan(optimizer.loss),
        )  # fmt: skip

    def add_evaluation(self, steps: int, epoch: int, result: Mapping[str, float]) -> None:
        """Writes an evaluation, without the speeds in `result`, which are this rank's alone."""
        found = {key: x for key, x in result.items() if not key.endswith("tokens_per_sec")}
        self._write(steps, epoch=epoch, **found)

    def _write(self, steps: int, epoch: int, **numbers: Any) -> None:
        for sink in self.sinks:
            sink(steps, {"epoch": epoch, "step": steps, **numbers})


def _json_lines(path: Path, steps_done: int) -> Sink:
    with writing(path):
        lines = path.read_text(encoding="utf-8").splitlines(True) if path.exists() else []
        whole = [line for line in lines if line.endswith("}\n")]  # the last may be cut off
        kept = [line for line in whole if _is_before(json.loads(line), steps_done)]
        path.write_text("".join(kept), encoding="utf-8")
        file = path.open("a", encoding="utf-8", buffering=1)

    def write(_: int, numbers: Mapping[str, Any]) -> None:
        with writing(path):
            file.write(json_text(numbers, indent=None))

    return write


def _is_before(numbers: Mapping[str, Any], steps_done: int) -> bool:
    """The evaluation after the last step that is done will be repeated."""
    step: int = numbers["step"]
    return step < steps_done or (step == steps_done and "loss" in numbers)
