"""The rules of stages of layers, which run_pipeline.py and train.py share; see project/rules.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipeline.schedules.catalogue import chunks_of
from training.launch.errors import UserError, counted, works
from training.layouts.measure import split_by
from training.options import O, Options

from .rules import Rule


def settled_chunks(args: O) -> O:
    """With the number of stages per rank or device, which the schedule limits."""
    try:
        return replace(args, chunks=chunks_of(args.schedule, args.chunks))
    except ValueError as error:
        raise UserError(f"--{error}") from None


def of_stages(
    args: Options, option: str, n: int, blocks: int | None, layers: int = 0
) -> Iterator[Rule]:
    """The model must have a layer for each stage of `n` ranks or devices, whose number `option`
    sets. It is a GPT-2 of so many blocks, or another model, of so many layers."""
    if blocks is None:
        units, unit, parts = layers, "layer", ""
    elif args.balance == "auto" and args.pipeline == "whole":
        units, unit, parts = 2 * blocks + 2, "layer", " (embedding, halves of blocks, head)"
    else:
        units, unit, parts = blocks, "block", ""
    stages, chunks = n * args.chunks, args.chunks
    if units >= 2 * chunks:  # one stage is no pipeline
        fewer = works(f"--{option}", units // chunks, 2)
    elif args.schedule == "interleaved" and units >= 2 * n:
        fewer = works("--chunks", units // n, 2)
    else:
        fewer = works(f"--schedule 1f1b --{option}", units, 2) + ", without --chunks"
    names = f"{option} chunks balance" if chunks > 1 else f"{option} balance"
    has = f"{counted(units, unit)}{parts}"
    yield names, stages <= units, f"the model has {has} and every stage needs one", fewer
    if args.balance != "auto":
        try:
            split_by(args.balance, units, stages, f"{unit}s")
        except ValueError as error:  # it begins with its own option
            raise UserError(f"--{option} {n} --{error}") from None


def visible(gpus: int) -> str:
    """How many GPUs there are, in words."""
    return f"{gpus} GPU{'s are' if gpus > 1 else ' is'} visible"
