"""The output of a run: result files, and the printed table.

Per epoch e a run writes into its workdir, for every rank r, or once for all ranks if they share
models, as in a pipeline:

    rank{r}_results_epoch{e}.json  or  eval_results_epoch{e}.json     see `Results.end_epoch`
    rank{r}_gen_epoch{e}.json      or  gen_epoch{e}.json              [{"example": ..., "gen": ...}]

It writes metrics.jsonl step by step (training/metrics.py) and summary.json at the end: speed,
memory and the loss of every step. options.json has the run's options; config.json and
tokenizer.json describe the model. Figures are drawn from these files. File names count epochs from
0, as in the course, and so do metrics.jsonl's; the table, figures and messages count from 1.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # figures are drawn without torch
    from training.layout import LaidOutModel
    from training.task import Score, Task
    from training.world import World

METRICS, OPTIONS, SUMMARY, PICTURE = "metrics.jsonl", "options.json", "summary.json", "training.png"
CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"  # their folders
# What a run leaves in its workdir: what shows that there was one, and the rest.
WORTH = (f"{CHECKPOINTS}/*", "*_results_epoch*.json", "timeline_rank*.json")
OF_A_RUN = (
    "*gen_epoch*.json", "profile_rank*.json", "trace.json", OPTIONS, SUMMARY, PICTURE, METRICS,
    TENSORBOARD, "timeline_rank*.json", "*_results_epoch*.json", CHECKPOINTS,
)  # fmt: skip


@dataclass(frozen=True)
class Totals:
    """What one rank has done in an epoch so far. Losses are in nats, seconds are wall-clock time;
    loss_sum and count exclude skipped steps. For steps before a resume, each rank has an equal
    share of all ranks' positions and tokens."""

    loss_sum: float = 0.0  # of the global batches
    count: int = 0  # target tokens, or images, of the global batches
    positions: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    steps: int = 0


NOTHING_YET = Totals()


class Results:
    """The table and the files of one run. All ranks call its methods together."""

    def __init__(self, world: World, args: Any, task: Task, model: LaidOutModel) -> None:
        self.world, self.args, self.task, self.model = world, args, task, model
        self.width = max(10, len(task.score_name) + 2)  # of the column
        self.history: list[tuple[float, float]] = []  # seconds and positions/s of each epoch
        self.resumed = 0  # epochs that an earlier run has done or begun
        self.losses: list[float] = []  # of every step; NaN: skipped
        self.seconds: list[float] = []  # of every step
        self.generated: list[str] = []  # the last translations
        self.validation_loss, self.score = math.nan, math.nan
        self.summary: dict[str, Any] = {}

    def say(self, text: str) -> None:
        """Prints, on rank 0 alone."""
        if self.world.is_main:
            show(text)

    def begin(self, notes: Sequence[str], resumed: bool = False) -> None:
        """Sets an earlier run aside, unless it is resumed; prints what will be trained."""
        args, task = self.args, self.task
        if self.world.is_main:
            if not resumed and (aside := set_aside(args.workdir)) is not None:
                notes = [*notes, f"Earlier results were moved to {aside}/."]
            command = shlex.join(["python", *sys.argv])
            write_json(args.workdir / OPTIONS, {**options_of(args), "command": command})
            for name, content in task.files.items():
                with writing(args.workdir / name):
                    (args.workdir / name).write_bytes(content)
        self.say("\n".join([task.describe(), *filter(None, [self.model.description]), *notes]))
        score = f"{task.score_name:>{self.width}}"
        self.say(f"epoch   train loss   valid. loss{score}    time   {'   '.join(task.units)}")

    def say_start(self, validation_loss: float, score: Score | None) -> None:
        """Prints the row of the untrained model."""
        value = score.value if score else math.nan
        self.say(f"{'start':>5}   {'':>10}   {validation_loss:>11.3f}{value:>{self.width}.1f}")

    def add_step(self, loss: float, seconds: float) -> None:
        """Records a step: its mean loss, or NaN if it was skipped, and its seconds."""
        self.losses.append(loss)
        self.seconds.append(seconds)

    def end_epoch(
        self, epoch: int, totals: Totals, validation_loss: float, score: Score | None
    ) -> dict[str, float]:
        """Writes the result files of this rank, prints a row, and returns the results.

        training_time is in seconds, without evaluation. tokens_per_sec counts every position of
        this rank's batches (all ranks', if they write one file), padding included, as the course
        does; real_tokens_per_sec counts only the tokens. Losses are nats per target, over all
        ranks; training_loss excludes skipped steps.
        """
        seconds = max(1e-9, totals.seconds)
        self.validation_loss, self.score = validation_loss, score.value if score else math.nan
        self.generated = score.generated if score else []
        training_loss = totals.loss_sum / totals.count if totals.count else math.nan
        speeds = [totals.positions / seconds, totals.tokens / seconds]  # of this rank
        positions, tokens = self.over_ranks(*speeds)  # collective: every rank comes here
        if self.model.schedule is not None:  # one file for all
            speeds = [positions, tokens]
        result = {
            "training_loss": training_loss,
            "validation_loss": validation_loss,
            "training_time": totals.seconds,
            "tokens_per_sec": speeds[0],
            "real_tokens_per_sec": speeds[1],
            "skipped_steps": totals.skipped,
            self.task.score_name.lower(): self.score,
        }
        self._write_epoch(epoch, result)
        self.history.append((totals.seconds, positions))
        shown = f"{self.score:>{self.width}.1f}" if score else f"{'-':>{self.width}}"
        units = zip(self.task.units, (positions, tokens), strict=False)
        shown_speeds = "   ".join(f"{speed:>{len(unit)},.0f}" for unit, speed in units)
        self.say(
            f"{epoch + 1:>5}   {training_loss:>10.3f}   {validation_loss:>11.3f}{shown}   "
            f"{totals.seconds:>4.0f}s   {shown_speeds}"
        )
        return result

    def over_ranks(self, *values: float) -> list[float]:
        """Sums over the data-parallel ranks; the stages of one pipeline count once."""
        from training.world import gather_over_ranks

        copies = self.world.world_size / self.model.parts  # ranks with the same part of a batch
        every = gather_over_ranks(values, self.world)
        return [sum(of_ranks) / copies for of_ranks in zip(*every, strict=True)]

    def _write_epoch(self, epoch: int, result: dict[str, float]) -> None:
        rank, workdir = self.world.rank, self.args.workdir
        if self.model.schedule is None:  # every rank has a part: a file each
            results, gen = f"rank{rank}_results", f"rank{rank}_gen"
        elif self.world.is_main:
            results, gen = "eval_results", "gen"
        else:
            return
        write_json(workdir / f"{results}_epoch{epoch}.json", result)
        if self.generated:
            pairs = zip(self.task.tested(), self.generated, strict=True)
            content = [{"example": example, "gen": sentence} for example, sentence in pairs]
            write_json(workdir / f"{gen}_epoch{epoch}.json", content)

    def summarize(self) -> None:
        """Writes summary.json, from which runs are compared; bytes are per rank."""
        from runtime.cores import core_slice
        from training.memory import peak_bytes
        from training.world import gather_over_ranks

        world, args, model = self.world, self.args, self.model
        mine = (peak_bytes(world.device), model.state_bytes())
        memory = gather_over_ranks(mine, world)  # by rank
        later = self.seconds[1:] or self.seconds  # the first step is slower
        mean = statistics.fmean(later) if later else math.nan
        positions = statistics.fmean(speed for _, speed in self.history) if self.history else 0.0
        summary = {
            **options_of(args),
            "layout": model.description,
            "load": os.getloadavg()[0],  # of the machine, over a minute, this run included
            "cores": len(core_slice(0, 1)) if world.device.type == "cpu" else None,  # a process'
            "schedule": model.schedule,
            "num_microbatches": args.num_microbatches or model.num_microbatches,
            "step_seconds": self.seconds,
            "examples_per_sec": args.batch_size / mean,
            "positions_per_sec": positions,
            "peak_rss_bytes": [peak for peak, _ in memory],
            "state_bytes": {kind: [state[kind] for _, state in memory] for kind in mine[1]},
            "loss": self.losses,
            "validation_loss": self.validation_loss,
            self.task.score_name.lower(): self.score,
        }
        if world.is_main:
            write_json(args.workdir / SUMMARY, summary)
        self.summary = summary

    def close(self) -> None:
        """Prints the mean time and speed of an epoch, and a few outputs. On rank 0 alone."""
        if history := self.history[self.resumed :]:
            seconds, speeds = zip(*(history[1:] or history), strict=True)
            which = "per epoch, without the first" if len(history) > 1 else "the epoch"
            self.say(f"{which}: {spread(seconds, 's')}, {spread(speeds, self.task.units[0])}\n")
        if self.generated:
            self.say(self.task.examples_to_show(self.generated))


def options_of(args: Any) -> dict[str, Any]:
    """The options of a run as JSON values."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}


def set_aside(workdir: Path) -> Path | None:
    """Moves the files of an earlier run, if it left results, a timeline or a checkpoint, into the
    folder earlier_1, or earlier_2, ..., of `workdir`, and returns that folder."""
    if not any(True for pattern in WORTH for _ in workdir.glob(pattern)):
        return None
    aside = next(p for n in itertools.count(1) if not (p := workdir / f"earlier_{n}").exists())
    with writing(aside):
        aside.mkdir()
        for pattern in OF_A_RUN:  # WORTH is last: after an interruption the next run moves the rest
            for path in workdir.glob(pattern):
                path.rename(aside / path.name)
    return aside


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turns an error in writing, as of a full disk, into a RunError."""
    try:
        yield
    except Exception as error:
        # Libraries in Rust raise plain exceptions: No space left on device (os error 28).
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        from training.errors import RunError  # here: figures are drawn without torch

        reason = getattr(error, "strerror", None) or error
        raise RunError(
            f"{path}: cannot be written ({reason}); make room there, or write elsewhere"
        ) from error


def show(text: str) -> None:
    """Prints. Raises RunError if its reader is gone, as when `| head` has ended."""
    with writing("standard output"):
        print(text, flush=True)


def write_text(path: Path, text: str) -> None:
    """Writes a temporary file and renames it: no reader sees half of it. Raises RunError."""
    aside = path.with_name(path.name + ".part")
    try:
        with writing(path):
            aside.write_text(text, encoding="utf-8")
            aside.replace(path)  # atomic
    finally:
        aside.unlink(missing_ok=True)  # left only by an error


def write_json(path: Path, content: Any) -> None:
    """Writes indented JSON with unescaped umlauts, see `json_text` and `write_text`."""
    write_text(path, json_text(content, indent=2))


def json_text(content: Any, indent: int | None) -> str:
    """As JSON, with null for NaN and infinities, which JSON does not have."""
    return json.dumps(_finite(content), indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content


def spread(values: Sequence[float], unit: str) -> str:
    """The mean and, with two values or more, the standard deviation, for a closing line."""
    digits = 1 if statistics.mean(values) < 100 else 0
    deviation = f" ± {statistics.stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):,.{digits}f}{deviation} {unit}"
