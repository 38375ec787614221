"""The output of a run: the numbers of every step, result files, and the printed table.

Per epoch e a run writes into its workdir, for every rank r, or once for all ranks if they share a
model, as in a pipeline:

    rank{r}_results_epoch{e}.json  or  eval_results_epoch{e}.json     see `Results.end_epoch`
    rank{r}_gen_epoch{e}.json      or  gen_epoch{e}.json              [{"example": ..., "gen": ...}]

metrics.jsonl is the record of a run, and a resumed run continues it. It gets a line of JSON per
step and per evaluation, at once, so that `tail -f` follows a run. TensorBoard and Weights & Biases
get the same numbers:

    {"epoch": 0, "step": 12, "loss": 3.1, "learning_rate": 0.001, "gradient_norm": 0.8, ...}
    {"epoch": 0, "step": 50, "validation_loss": 1.7}                             of --eval_every
    {"epoch": 0, "step": 79, "training_loss": 1.9, "validation_loss": 1.4, "bleu": 22.9}

`step` is the number of steps done in the whole run. Speeds are summed over all ranks;
`tokens_per_sec` counts all positions, `real_tokens_per_sec` excludes padding.

At the end summary.json is written: speed, memory and the loss of every step. options.json has the
run's options; config.json and tokenizer.json describe the model. Figures are drawn from these
files. File names count epochs from 0, as in the course, and so do metrics.jsonl's; the table,
figures and messages count from 1.

Cost: 0.1 ms per step.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import resource
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import add
from pathlib import Path
from typing import Any

import torch

from runtime.cores import core_slice
from training.checkpoint import names
from training.optimization import GlobalOptimizer
from training.options import Options

from .files import (
    CHECKPOINTS,
    METRICS,
    OPTIONS,
    PICTURE,
    SUMMARY,
    TENSORBOARD,
    json_text,
    show,
    unused,
    write_json,
    write_text,
    writing,
)
from .launch.errors import RunError, UserError
from .layouts.layout import LaidOutModel
from .tasks.task import Score

Sink = Callable[[Mapping[str, Any]], None]
"""Takes the numbers of a step, or of an evaluation."""

# What a run leaves in its workdir. The last file shows that there was a run; so does a checkpoint.
OF_A_RUN = (
    CHECKPOINTS, "*_results_epoch*.json", "*gen_epoch*.json", "timeline_rank*.json",
    "timeline_*.png", "profile_rank*.json", "report.html", OPTIONS, SUMMARY, PICTURE,
    TENSORBOARD, "config.json", "tokenizer.json", "tokenizer_config.json", METRICS,
)  # fmt: skip


LOG_IN = "`wandb login`, or WANDB_MODE=offline in the environment, works"


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

    def plus(self, other: Totals) -> Totals:
        """The sum of both."""
        return Totals(*map(add, astuple(self), astuple(other)))


NOTHING_YET = Totals()


class Results:
    """The table and the files of one run. All ranks call its methods together."""

    def __init__(self, args: Options, model: LaidOutModel) -> None:
        self.world, self.args, self.task, self.model = model.world, args, model.task, model
        title = f"{self.task.score_title:>7}"
        self.columns = "epoch", "train loss", "valid. loss", title, " time", *self.task.units
        self.history: list[tuple[float, float]] = []  # seconds and positions/s of each epoch
        self.generated: list[str] = []  # the last translations
        self.summary: dict[str, Any] = {}  # on rank 0, as are the next two
        self.metrics: MetricsFile | None = None
        self.sinks: list[Sink] = []

    def say(self, text: str) -> None:
        """Prints, on rank 0 alone."""
        if self.world.is_main:
            show(text)

    def _say_row(self, *cells: str) -> None:
        """Prints the cells that there are, each under its column's name."""
        widths = map(len, self.columns)
        self.say("   ".join(f"{cell:>{n}}" for cell, n in zip(cells, widths, strict=False)))

    def begin(self, notes: Sequence[str], steps_done: int = 0) -> None:
        """Sets aside the files of an earlier run, unless steps of it are resumed; prints what will
        be trained."""
        args, task = self.args, self.task

        def write() -> Path | None:
            aside = None if steps_done else set_aside(args.workdir)
            write_options(args)
            for name, content in task.files.items():
                with writing(args.workdir / name):
                    (args.workdir / name).write_bytes(content)
            self.metrics = MetricsFile(args.workdir / METRICS, steps_done)
            self.sinks = _sinks(args, steps_done)  # which may wait for a network
            return aside

        if (aside := self.world.on_main(write)) is not None:
            notes = [*notes, f"Earlier results were moved to {aside}/."]
        self.say("\n".join([task.describe(), *filter(None, [self.model.description]), *notes]))
        self._say_row(*self.columns)

    def say_start(self, validation_loss: float, score: Score) -> None:
        """Prints the row of the untrained model."""
        self._say_row("start", "", _number(validation_loss, 3), _number(score.value, 1))

    def add_step(self, epoch: int, optimizer: GlobalOptimizer, seconds: float) -> None:
        """Writes the numbers of a step, done or skipped."""
        copies = self.world.world_size / self.model.dp_size  # ranks with the same part of a batch
        positions, tokens = optimizer.counts.positions / copies, optimizer.counts.tokens / copies
        self._write_numbers(
            optimizer.steps, epoch=epoch, loss=optimizer.loss, learning_rate=optimizer.rate,
            gradient_norm=optimizer.norm, seconds=seconds, tokens_per_sec=positions / seconds,
            real_tokens_per_sec=tokens / seconds, peak_rss_bytes=peak_bytes(self.world.device),
            skipped=math.isnan(optimizer.loss),
        )  # fmt: skip

    def add_validation(self, epoch: int, steps: int, loss: float) -> None:
        """Writes the validation loss after this number of steps, and prints a row."""
        self._write_numbers(steps, epoch=epoch, validation_loss=loss)
        self._say_row(f"{steps / self.task.steps_per_epoch:.3g}", "", _number(loss, 3))

    def _write_numbers(self, steps: int, epoch: int, **numbers: Any) -> None:
        numbers = {"epoch": epoch, "step": steps, **numbers}
        if self.metrics is not None:
            self.metrics.write(numbers)
        for sink in self.sinks:  # those that were asked for
            sink(numbers)

    def end_epoch(
        self, epoch: int, steps: int, totals: Totals, validation_loss: float, score: Score
    ) -> None:
        """Writes the result files of this rank and the evaluation after this number of steps,
        and prints a row.

        training_time is in seconds, without evaluation. tokens_per_sec counts every position of
        this rank's batches (all ranks', if they write one file), padding included, as the course
        does; real_tokens_per_sec counts only the tokens. Losses are nats per target, over all
        ranks; training_loss excludes skipped steps.
        """
        seconds = max(1e-9, totals.seconds)
        training_loss = totals.loss_sum / totals.count if totals.count else math.nan
        speeds: Sequence[float] = (totals.positions / seconds, totals.tokens / seconds)
        of_parts = self.world.of_parts(self.model.dp_rank, speeds)  # collective
        summed = [sum(values) for values in zip(*of_parts, strict=True)]
        if not self.model.results_per_rank:
            speeds = summed
        numbers = {
            "training_loss": training_loss,
            "validation_loss": validation_loss,
            "training_time": totals.seconds,
            "skipped_steps": totals.skipped,
            self.task.score_name.lower(): score.value,
        }
        measured = {"tokens_per_sec": speeds[0], "real_tokens_per_sec": speeds[1]}
        self.generated = score.generated
        self._write_epoch(epoch, numbers | measured | self.task.score_details)
        self._write_numbers(steps, epoch, **numbers)
        self.history.append((totals.seconds, summed[0]))
        self._say_row(
            str(epoch + 1), _number(training_loss, 3), _number(validation_loss, 3),
            _number(score.value, 1), f"{totals.seconds:.{0 if totals.seconds > 9 else 2}f}s",
            *(_number(x, 0) for x in summed),
        )  # fmt: skip
        self._say_speeds(epoch, totals.seconds, speeds[0])

    def _say_speeds(self, epoch: int, seconds: float, tokens_per_sec: float) -> None:
        """Prints the lines that the course's benchmark script reads, and that a log keeps: one per
        rank or, in a pipeline, one for all. Rank 0 prints all lines, so that none is cut in two."""
        ranks = self.world.gather((seconds, tokens_per_sec))  # collective
        if not self.args.benchmark_only and sys.stdout.isatty():
            return
        for rank, (time, speed) in enumerate(ranks if self.model.results_per_rank else ranks[:1]):
            who = f" on Rank {rank}" if self.model.results_per_rank else ""
            self.say(
                f"Epoch {epoch}{who}: Training Time = {time:.2f}, Tokens_per_sec = {speed:.1f}"
            )

    def _write_epoch(self, epoch: int, result: Mapping[str, Any]) -> None:
        who = f"rank{self.world.rank}_" if self.model.results_per_rank else ""
        if not (who or self.world.is_main):
            return
        write_json(self.args.workdir / f"{who or 'eval_'}results_epoch{epoch}.json", result)
        if self.generated:
            pairs = zip(self.task.scored_examples(), self.generated, strict=True)
            content = [{"example": example, "gen": sentence} for example, sentence in pairs]
            write_json(self.args.workdir / f"{who}gen_epoch{epoch}.json", content)

    def summarize(self) -> None:
        """Writes summary.json, by which runs are compared. Losses and seconds are read back from
        metrics.jsonl, whose last line is the last evaluation; bytes are per rank."""
        world, args, model = self.world, self.args, self.model
        memory = (peak_bytes(world.device), model.state_bytes())
        peaks, states = zip(*world.gather(memory), strict=True)  # by rank
        if not world.is_main:
            return
        *lines, last = read_metrics(args.workdir)
        steps = [numbers for numbers in lines if "loss" in numbers]
        score = self.task.score_name.lower()
        self.summary = {
            **options_of(args),
            "layout": model.description,
            "stage_sizes": list(model.stage_sizes),
            "load": os.getloadavg()[0],  # of the machine, over a minute, this run included
            "cores": len(core_slice(0, 1)) if world.device.type == "cpu" else None,  # of a process
            "schedule": model.schedule,
            "num_microbatches": args.num_microbatches or model.num_microbatches,
            "step_seconds": [numbers["seconds"] for numbers in steps],
            "peak_rss_bytes": peaks,
            "state_bytes": {kind: [state[kind] for state in states] for kind in states[0]},
            "loss": [numbers["loss"] for numbers in steps],  # null: skipped
            "validation_loss": last["validation_loss"],
            score: last[score],
            **self.task.score_details,
        }
        write_json(args.workdir / SUMMARY, self.summary)

    def close(self) -> None:
        """Prints the mean time and speed of an epoch, and a few outputs; ends the run at W&B.
        On rank 0 alone, inside `on_main`."""
        if later := self.history[1:]:  # the first warms up; an earlier run may have begun it
            seconds, speeds = zip(*later, strict=True)
            means = f"{spread(seconds, 's')}, {spread(speeds, self.task.units[0])}"
            self.say(f"per epoch, without the first: {means}")
        self.say("")
        if self.generated:
            self.say(self.task.examples_to_show(self.generated))
        if self.args.wandb:  # forked ranks run no exit handlers
            import wandb

            wandb.finish()


def _number(value: float, digits: int) -> str:
    """A number as the table shows it."""
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def options_of(args: Options) -> dict[str, Any]:
    """The options of a run as JSON values."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "typed"}


def write_options(args: Options) -> None:
    """Writes options.json."""
    command = shlex.join(["python", *sys.argv])
    write_json(args.workdir / OPTIONS, {**options_of(args), "command": command})


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; those of steps have a `loss`, those of evaluations have none."""
    text = (workdir / METRICS).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def evaluations(workdir: Path) -> list[dict[str, Any]]:
    """The lines of evaluations in metrics.jsonl; those after an epoch have a `training_loss`. Lines
    of steps, a thousand times as many, are not parsed."""
    path = workdir / METRICS
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if '"validation_loss"' in line]


def holds_run(workdir: Path) -> bool:
    """Whether a run has come so far that its folder has results or a checkpoint."""
    return (workdir / METRICS).exists() or bool(names(workdir / CHECKPOINTS))


def set_aside(workdir: Path) -> Path | None:
    """Moves files with the names of a run's, even if they are a user's own, into the folder
    earlier_1, or earlier_2, ..., of `workdir`. Returns that folder, or None if there were no such
    files. Where there was no run, options.json is already the new run's, and stays."""
    new = () if holds_run(workdir) else (OPTIONS,)
    there = [path for name in OF_A_RUN if name not in new for path in workdir.glob(name)]
    if not there:
        return None
    aside = unused(workdir / "earlier")
    with writing(aside):
        aside.mkdir()
        for path in there:  # after an interruption the next run moves the rest
            path.rename(aside / path.name)
    return aside


def spread(values: Sequence[float], unit: str) -> str:
    """The mean and, with two values or more, the standard deviation, for a closing line."""
    digits = 1 if statistics.mean(values) < 100 else 0
    deviation = f" ± {statistics.stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):,.{digits}f}{deviation} {unit}"


def peak_bytes(device: torch.device) -> int:
    """The peak memory of this process: resident, or allocated on a GPU."""
    if device.type == "cuda":  # torch has no peak for Apple's GPUs
        return torch.accelerator.max_memory_allocated(device)
    if sys.platform == "linux":  # in a child, getrusage's peak starts at its parent's memory
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])  # kB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# The numbers of every step


def _sinks(args: Options, steps_done: int) -> list[Sink]:
    """Who else gets the numbers of a run. What TensorBoard has after `steps_done` is hidden."""
    sinks: list[Sink] = []
    if args.print_steps:
        sinks.append(_printed)
    if args.tensorboard:
        sinks.append(_tensorboard(args.workdir / TENSORBOARD, steps_done))
    if args.wandb:
        sinks.append(_wandb(args))
    return sinks


class MetricsFile:
    """metrics.jsonl. It keeps the lines of the steps that are done, and new ones follow. They are
    the only record of those losses, so a whole new file replaces the old one, which is never
    truncated. The file exists from the first step on."""

    def __init__(self, path: Path, steps_done: int) -> None:
        def is_done(line: str) -> bool:
            """The last line may be cut off. The evaluation after the last step that is done does
            not count, since a resumed run repeats it."""
            numbers = json.loads(line) if line.endswith("}\n") else {"step": math.inf}
            return numbers["step"] + ("loss" not in numbers) <= steps_done

        self.path = path
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(True)
            write_text(path, "".join(filter(is_done, lines)))

    def write(self, numbers: Mapping[str, Any]) -> None:
        """Appends a line."""
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json_text(numbers, indent=None))


def _printed(numbers: Mapping[str, Any]) -> None:
    if "loss" in numbers:  # else an evaluation
        show("step {step}: loss {loss:.4f}, {seconds:.3f} s".format(**numbers))


def check_trackers(args: Options) -> None:
    """Raises UserError if a tracker that the options ask for is not installed, or has no login."""
    for name in ("tensorboard", "wandb"):
        if getattr(args, name) and importlib.util.find_spec(name) is None:
            raise UserError(f"--{name}: {name} is not installed; pip install {name} works")
    files = ("~/.netrc", "~/_netrc", "~/.config/wandb/settings", "wandb/settings")
    known = any(Path(file).expanduser().exists() for file in files)
    if args.wandb and not known and not any(name.startswith("WANDB_") for name in os.environ):
        raise UserError(f"--wandb: nobody is logged in; {LOG_IN}")


def _tensorboard(folder: Path, steps_done: int) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    # Hides what is there of later steps, e.g. of a run that was killed.
    writer = SummaryWriter(folder, purge_step=steps_done + 1)

    def write(numbers: Mapping[str, Any]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, numbers["step"])
        writer.flush()

    return write


def _wandb(args: Options) -> Sink:
    """A run that is resumed after it was killed continues the same run at W&B ("auto").
    WANDB_MODE=offline in the environment works without an account or a network."""
    import wandb

    about: dict[str, Any] = {"dir": args.workdir, "config": options_of(args)}
    try:
        run = wandb.init(project="parallel-gpt2", resume="auto", **about)
    except wandb.errors.Error as error:  # no login, no network
        raise RunError(f"--wandb: {error}; {LOG_IN}") from error
    return lambda numbers: run.log(dict(numbers), step=numbers["step"])
