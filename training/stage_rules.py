"""The rules between options for stages of layers, which run_pipeline.py and train.py share. As in
training/rules.py, each raises UserError with the values, the rule, and a setting that works."""

from __future__ import annotations

from typing import Any

from pipeline.schedules.catalogue import chunks_of

from .launch.errors import UserError, works
from .tasks.gpt2 import PRESETS, split_by


def settle_chunks(args: Any) -> None:
    """Settles the number of stages per rank or device, which the schedule limits."""
    try:
        args.chunks = chunks_of(args.schedule, args.chunks)
    except ValueError as error:
        raise UserError(f"--{error}") from None


def check_stages(args: Any, option: str, n: int, num_layers: int | None = None) -> None:
    """Raises UserError if the model cannot be cut into the stages of `n` ranks or devices, whose
    number `option` sets. A model that is not a GPT-2 has `num_layers`."""
    if num_layers is not None:
        units, unit, parts = num_layers, "layers", ""
    elif args.balance == "auto" and getattr(args, "pipeline", "whole") == "whole":
        units, unit = 2 * size_of_model(args, "n_layer") + 2, "layers"
        parts = " (embedding, halves of blocks, head)"
    else:
        units, unit, parts = size_of_model(args, "n_layer"), "blocks", ""
    stages, chunks = n * args.chunks, args.chunks
    given = f"--{option} {n}" + (f" --chunks {chunks}" if chunks > 1 else "")
    if stages > units:
        least = 2 if option == "pp" else 1  # 3d has no schedule without stages
        if chunks > 2 and units // n > 1:  # of interleaved, which takes two or more
            fewer = works("--chunks", units // n, least=2)
        elif units >= least * chunks:
            fewer = works(f"--{option}", units // chunks, least)
        else:
            fewer = works(f"--schedule 1f1b --{option}", units, least) + ", without --chunks"
        has = f"{units} {unit if units > 1 else unit.removesuffix('s')}{parts}"
        raise UserError(
            f"{given} --balance {args.balance}: the model has {has} and every stage needs one; "
            + fewer
        )
    if args.balance != "auto":
        try:
            split_by(args.balance, units, stages, unit)
        except ValueError as error:
            raise UserError(f"{given} --{error}") from None


def size_of_model(args: Any, name: str) -> int:
    """n_layer or n_head of the GPT-2 that the options name, which has passed `check_model`."""
    if args.model in PRESETS:
        return getattr(args, name) or PRESETS[args.model][name]
    from transformers import AutoConfig  # here: it takes seconds to import

    return getattr(AutoConfig.from_pretrained(args.model), name)
