"""The rules of stages of layers, which run_pipeline.py and train.py share; see project/rules.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.schedules.catalogue import SCHEDULES, chunks_of, load, refuse_other_sizes
from pipeline.schedules.written import count_microbatches, label_of, write_schedule
from training.launch.errors import UserError, counted, works
from training.layouts.measure import split_by
from training.options import Options

from .rules import Rule


def schedule_of_run(schedule: str, n: int, m: int | None, chunks: int | None) -> dict[str, Any]:
    """The schedule and the stages per rank. A schedule that has no name, such as a file's, is kept
    as its text, and fixes the number of micro-batches. Raises UserError if its sizes are not those
    given."""
    if schedule in SCHEDULES:
        return {"schedule": schedule, "chunks": chunks or chunks_of(schedule)}
    try:
        lists = load(schedule, n, m or 4)
        refuse_other_sizes(lists, label_of(schedule), n, m, chunks)
    except (ValueError, OSError) as error:
        raise UserError(f"--{error}") from None
    text = write_schedule(lists, label_of(schedule))
    own = {"chunks": chunks_of(text), "num_microbatches": count_microbatches(lists)}
    return {"schedule": text, **own}


def of_stages(
    args: Options, option: str, n: int, blocks: int | None, layers: int = 0
) -> Iterator[Rule]:
    """The model must have a layer for each stage. `n` is the number of ranks or devices, and
    `option` the option that sets it. The model is a GPT-2 with `blocks` blocks or, if `blocks` is
    None, a different one with `layers` layers."""
    units, unit, parts = (blocks, "block", "") if blocks else (layers, "layer", "")
    if blocks and args.balance == "auto" and args.pipeline == "whole":
        units, unit, parts = 2 * blocks + 2, "layer", " (embedding, halves of blocks, head)"
    stages = chunks_of(args.schedule)  # of a rank
    yield (
        "schedule chunks", args.schedule == "interleaved" or args.chunks == stages,
        "this schedule fixes the number of stages per rank", "leave --chunks out",
    )  # fmt: skip
    yield (
        f"{option} chunks balance", n * args.chunks <= units,
        f"the model has {counted(units, unit)}{parts} and every stage needs one",
        works(f"--{option}", max(1, units // args.chunks)),
    )  # fmt: skip
    if args.balance != "auto":
        split_by(args.balance, units, n * args.chunks, f"{unit}s")
