"""metrics.jsonl: the numbers of a run, step by step, for tools; TensorBoard and Weights & Biases.

A line of JSON per step and per evaluation, written at once, so that `tail -f` follows a run:

    {"epoch": 0, "step": 12, "loss": 3.1, "learning_rate": 0.001, "gradient_norm": 0.8, ...}
    {"epoch": 0, "step": 79, "training_loss": 1.9, "validation_loss": 1.4, "bleu": 22.9}

`step` is the number of steps done in the whole run. Speeds are summed over all ranks;
`tokens_per_sec` counts all positions, `real_tokens_per_sec` excludes padding. A position of GPT-2
with P parameters, L blocks of width C and sequences of T takes about 6 P + 12 L C T operations.

Cost: 0.1 ms per step.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from training.files import METRICS, TENSORBOARD, json_text, show, write_text, writing
from training.optimization import Optimizers
from training.options import Options
from training.results import options_of, peak_bytes

from .launch.errors import RunError, UserError
from .launch.world import World
from .layouts.layout import LaidOutModel

Sink = Callable[[int, Mapping[str, Any]], None]
"""Takes the number of steps done, and the numbers to write."""


class Metrics:
    """The lines of one run. All ranks make one; rank 0 writes.

    Args:
        steps_done: by the run that is resumed. Lines of later steps are removed.
    """

    def __init__(self, world: World, args: Options, model: LaidOutModel, steps_done: int) -> None:
        self.copies = world.world_size / model.dp_size  # ranks that have the same part of a batch
        self.args, self.device = args, world.device
        self.sinks: list[Sink] = []
        if world.is_main:
            self.sinks.append(_json_lines(args.workdir / METRICS, steps_done))
            if args.print_steps:
                self.sinks.append(_printed)
            if args.tensorboard:
                self.sinks.append(_tensorboard(args.workdir / TENSORBOARD, steps_done))
            if args.wandb:
                self.sinks.append(_wandb(args))

    def add_step(self, epoch: int, optimizer: Optimizers, seconds: float) -> None:
        """Writes a step, done or skipped."""
        if not self.sinks:
            return
        positions = optimizer.counts.positions / self.copies  # each part once
        tokens = optimizer.counts.tokens / self.copies
        self._write(
            optimizer.steps, epoch=epoch, loss=optimizer.loss, learning_rate=optimizer.rate,
            gradient_norm=optimizer.norm, seconds=seconds, tokens_per_sec=positions / seconds,
            real_tokens_per_sec=tokens / seconds, peak_rss_bytes=peak_bytes(self.device),
            skipped=math.isnan(optimizer.loss),
        )  # fmt: skip

    def add_evaluation(self, steps: int, epoch: int, result: Mapping[str, float]) -> None:
        """Writes an evaluation, without the speeds in `result`, which are this rank's alone."""
        numbers = {key: x for key, x in result.items() if not key.endswith("tokens_per_sec")}
        self._write(steps, epoch=epoch, **numbers)

    def _write(self, steps: int, epoch: int, **numbers: Any) -> None:
        for sink in self.sinks:
            sink(steps, {"epoch": epoch, "step": steps, **numbers})

    def close(self) -> None:
        """Ends the run of W&B. (Forked ranks run no exit handlers.)"""
        if self.args.wandb and self.sinks:
            import wandb

            wandb.finish()


def _json_lines(path: Path, steps_done: int) -> Sink:
    """Goes on after the lines of the steps that are done. They are the only record of their losses:
    the file is replaced by a whole one, and never cut."""
    lines = path.read_text(encoding="utf-8").splitlines(True) if path.exists() else []
    whole = [line for line in lines if line.endswith("}\n")]  # the last may be cut off
    kept = [line for line in whole if _is_before(json.loads(line), steps_done)]
    write_text(path, "".join(kept))
    with writing(path):
        file = path.open("a", encoding="utf-8", buffering=1)

    def write(_: int, numbers: Mapping[str, Any]) -> None:
        with writing(path):
            file.write(json_text(numbers, indent=None))

    return write


def _printed(step: int, numbers: Mapping[str, Any]) -> None:
    if "loss" in numbers:  # else an evaluation
        show(f"step {step}: loss {numbers['loss']:.4f}, {numbers['seconds']:.3f} s")


def _is_before(numbers: Mapping[str, Any], steps_done: int) -> bool:
    """The evaluation after the last step that is done will be repeated."""
    step: int = numbers["step"]
    return step < steps_done or (step == steps_done and "loss" in numbers)


def check_trackers(args: Options) -> None:
    """Raises UserError if one that the options ask for is not installed."""
    for name in ("tensorboard", "wandb"):
        if getattr(args, name) and importlib.util.find_spec(name) is None:
            raise UserError(f"--{name}: {name} is not installed; pip install {name} works")


def _tensorboard(folder: Path, steps_done: int) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    if not steps_done:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed early
    writer = SummaryWriter(folder, purge_step=steps_done + 1 if steps_done else None)

    def write(steps: int, numbers: Mapping[str, Any]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, steps)
        writer.flush()

    return write


def _wandb(args: Options) -> Sink:
    """A run that is resumed after it was killed goes on there as the same run ("auto")."""
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    about: dict[str, Any] = {"dir": args.workdir, "config": options_of(args)}
    try:
        run = wandb.init(project="parallel-gpt2", resume="auto", **about)
    except wandb.Error as error:  # no account, or no network
        raise RunError(
            f"--wandb: {str(error).rstrip('.')}; WANDB_MODE=offline in the environment works "
            "without an account"
        ) from error
    return lambda steps, numbers: run.log(dict(numbers), step=steps)
