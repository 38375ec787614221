"""What a run leaves behind: result files, and the table that a person reads.

A run writes under its workdir, per rank r (data parallel) or without rank (pipeline), and per
epoch e:

    rank{r}_results_epoch{e}.json  or  eval_results_epoch{e}.json     an EpochResult
    rank{r}_gen_epoch{e}.json      or  gen_epoch{e}.json              [{"example": ..., "gen": ...}]

and once: options.json, the options, with what the program chose where it was left to it; and
training.png, drawn from the results. With --timeline, timeline_rank{r}.json and trace.json
(timeline.py). Figures are drawn from these files, never from numbers typed in.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_RESULT_FILE = re.compile(
    r"(rank\d+_results|rank\d+_gen|eval_results|gen)_epoch(?P<epoch>\d+)\.json"
)
_TIMELINE_FILE = re.compile(r"timeline_rank\d+\.json|trace\.json")
OPTIONS, PICTURE = "options.json", "training.png"


@dataclass(frozen=True)
class EpochResult:
    """One epoch as one rank saw it.

    training_time is in seconds, without evaluation. tokens_per_sec counts every position of this
    rank's batches, padding included, as the course does; real_tokens_per_sec only the tokens.
    Losses are nats per target token, over all ranks; bleu is of the whole test split. The skipped
    steps changed nothing, and training_loss leaves them out: NaN where there are no others.
    """

    training_loss: float
    validation_loss: float
    bleu: float
    training_time: float
    tokens_per_sec: float
    real_tokens_per_sec: float
    skipped_steps: int = 0


def clear_results(workdir: Path, first: int = 0) -> None:
    """Removes the result files of an earlier run, so that no figure mixes two runs; those of its
    epochs before `first` stay, for a run that goes on from there. And what a killed run left half
    written."""
    for path in workdir.iterdir():
        found = _RESULT_FILE.fullmatch(path.name)
        stale = int(found["epoch"]) >= first if found else path.name.endswith(".json.part")
        stale = stale or (first == 0 and _TIMELINE_FILE.fullmatch(path.name) is not None)
        if stale or path.name in (OPTIONS, PICTURE):
            with writing(path):
                path.unlink()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What is done within it writes, or removes, a file or a folder's files.

    Raises:
        RunError: it cannot, as on a full disk.
    """
    try:
        yield
    except Exception as error:
        # Libraries in Rust raise plain exceptions: No space left on device (os error 28).
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        from training.ending import RunError  # here: figures are drawn without torch

        reason = getattr(error, "strerror", None) or error
        raise RunError(
            f"{path}: cannot be written ({reason}); make room there, or name another folder"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Writes a file, aside and renamed: a reader never sees half of it.

    Raises:
        RunError: it cannot be written; what was there before still is.
    """
    aside = path.with_name(path.name + ".part")
    try:
        with writing(path):
            aside.write_text(text, encoding="utf-8")
            aside.replace(path)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Writes readable JSON, umlauts as they are, see `json_text` and `write_text`."""
    write_text(path, json_text(content, indent=2))


def json_text(content: Any, indent: int) -> str:
    """As JSON, which has neither NaN nor infinities: null stands for them."""
    return json.dumps(_finite(content), indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content


def write_epoch(
    workdir: Path,
    epoch: int,
    result: EpochResult,
    examples: Sequence[dict[str, str]],
    generated: Sequence[str],
    rank: int | None = None,
) -> None:
    """Writes the two files of an epoch. Without a rank, under the names of a pipeline run."""
    results, gen = ("eval_results", "gen") if rank is None else (
        f"rank{rank}_results", f"rank{rank}_gen"
    )  # fmt: skip
    write_json(workdir / f"{results}_epoch{epoch}.json", asdict(result))
    write_json(
        workdir / f"{gen}_epoch{epoch}.json",
        [{"example": e, "gen": g} for e, g in zip(examples, generated, strict=True)],
    )


def read_results(workdir: Path, prefix: str) -> list[dict[str, float]]:
    """The results of all epochs, in order, of `prefix`: `rank0_results` or `eval_results`."""
    found = {
        int(path.stem.rpartition("epoch")[2]): json.loads(path.read_text(encoding="utf-8"))
        for path in workdir.glob(f"{prefix}_epoch*.json")
    }
    return [
        {key: math.nan if value is None else value for key, value in found[epoch].items()}
        for epoch in sorted(found)
    ]


HEADER = "epoch   train loss   valid. loss    BLEU    time   positions/s   real tokens/s"


def epoch_line(
    epoch: str,
    bleu: float,
    validation_loss: float,
    result: EpochResult | None = None,
    speeds: Sequence[float] = (),
) -> str:
    """A row under HEADER. `speeds` are positions and real tokens per second, of all ranks; the row
    of a model that is not trained yet has neither these nor a result."""
    if result is None:
        return f"{epoch:>5}   {'':>10}   {validation_loss:>11.3f}   {bleu:>5.1f}"
    return (
        f"{epoch:>5}   {result.training_loss:>10.3f}   {validation_loss:>11.3f}   {bleu:>5.1f}   "
        f"{result.training_time:>4.0f}s   {speeds[0]:>11,.0f}   {speeds[1]:>13,.0f}"
    )


def spread(values: Sequence[float], unit: str) -> str:
    """Mean and deviation of the sample, if it has one, as a closing line says them."""
    digits = 1 if statistics.mean(values) < 100 else 0
    deviation = f" ± {statistics.stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):,.{digits}f}{deviation} {unit}"
