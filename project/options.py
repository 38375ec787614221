"""The command line that the programs share. What must hold of it is in rules.py and folders.py."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from training.ending import leave_when_done, refuse, signals_end, speaks
from training.launch import DEVICES, RunError, Settings, UserError, World, quiet_libraries
from training.optimization import LR_SCHEDULERS, ON_NAN
from training.timeline import Timeline

PRECISIONS = ("fp32", "bf16")
PADDINGS = ("longest", "max_length")
MAX_SECONDS = 30 * 24 * 3600


def count(text: str) -> int:
    """A positive whole number."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, 1 or more")
    return value


def count_or_all(text: str) -> int | None:
    """A positive whole number, or None for `all`."""
    return None if text == "all" else count(text)


def positive(text: str) -> float:
    """A positive, finite number."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a positive, finite number, as 0.5")
    return value


def fraction(text: str) -> float:
    """A number from 0 up to, but not, 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and less than 1, as 0.1")
    return value


def _number(text: str) -> float:
    """The number that is meant, or NaN, which fails every comparison."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def whole_number(text: str) -> int:
    """A seed, or a number of steps: what torch and Python take as it is."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number from 0 to {2**32 - 1}")
    return int(text)


def port(text: str) -> int:
    """A TCP port, 0 being any that is free."""
    if not text.isdecimal() or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(
            f"{text} must be a port from 0 (any free one) to {2**16 - 1}"
        )
    return int(text)


def seconds(text: str) -> float:
    """A positive time that the libraries can still count in milliseconds."""
    value = positive(text)
    if value > MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} must be at most {MAX_SECONDS} seconds, a month")
    return value


def boolean(text: str) -> bool:
    """True or False, as the course writes it: --pytest True."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text} is neither True nor False")
    return text.lower() in ("true", "1")


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults, and keeps the line breaks of the description."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong, or helps, once for all ranks that torchrun starts with one line."""

    def error(self, message: str) -> NoReturn:
        """Says it in one line: the usage has forty options, and hides what is wrong with one."""
        refuse(f"{self.prog}: error: {message}; --help explains every option\n")

    def print_help(self, file: Any = None) -> None:
        if speaks():
            super().print_help(file)


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every program has."""
    parser = _Parser(description=description, formatter_class=Help, allow_abbrev=False)
    data = parser.add_argument_group("data")
    data.add_argument(
        "--dataset", default="builtin",
        help="builtin: German-English sentences that come with it. Or a folder with train.de, "
        "train.en, validation.*, test.*; or a JSONL, CSV or Parquet file or folder; or the name "
        "of a dataset on the hub, as bbaaaa/iwslt14-de-en-preprocess",
    )  # fmt: skip
    data.add_argument("--src", default="de", help="language to translate from")
    data.add_argument("--tgt", default="en", help="language to translate to")
    for split, n in (("train", 5000), ("validation", 1000), ("test", 100)):
        data.add_argument(
            f"--n_{split}", type=count_or_all, default=n, help=f"{split} pairs at most, or 'all'"
        )
    data.add_argument(
        "--padding", choices=PADDINGS, default="longest",
        help="longest: micro-batches of like lengths, padded to their longest; max_length: all "
        "padded to --model_max_length. Batches hold the same pairs either way",
    )  # fmt: skip
    data.add_argument(
        "--model_max_length", type=count, default=128, help="longest sequence; pairs are cut to it"
    )

    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", default="auto",
        help="gpt2-mini, gpt2, gpt2-medium, gpt2-large or gpt2-xl, trained from scratch; or a "
        "folder or hub id with weights to start from; auto: gpt2 on a GPU, gpt2-mini without",
    )  # fmt: skip
    for name, what in (("n_layer", "blocks"), ("n_embd", "width"), ("n_head", "attention heads")):
        model.add_argument(f"--{name}", type=count, help=f"{what}, instead of the preset's")
    model.add_argument(
        "--vocab_size", type=count,
        help="rows of the embedding; by default the size of the trained tokenizer (at most 4096 "
        "tokens), rounded up to a multiple of 64",
    )  # fmt: skip
    model.add_argument("--dropout", type=fraction, default=0.1, help="as in GPT-2")

    run = parser.add_argument_group("training")
    run.add_argument("--n_epochs", type=count, default=8, help="passes over the training pairs")
    run.add_argument(
        "--batch_size", type=count, default=64,
        help="pairs in a step, over all ranks and micro-batches together",
    )  # fmt: skip
    run.add_argument(
        "--learning_rate", type=positive,
        help="of AdamW; by default 1e-3 for gpt2-mini, 1e-4 for the larger ones",
    )  # fmt: skip
    run.add_argument(
        "--lr_scheduler", choices=LR_SCHEDULERS, default="constant",
        help="the learning rate after the warm-up: it stays, or falls to 0 over the rest of the "
        "run, along a line or half a cosine",
    )  # fmt: skip
    run.add_argument(
        "--warmup_steps", type=whole_number, default=0,
        help="steps in which the learning rate rises from 0: larger ones become possible",
    )  # fmt: skip
    run.add_argument(
        "--max_grad_norm", type=positive,
        help="a gradient that is longer, over the whole model, is shortened to this; 1 is usual; "
        "by default none is",
    )  # fmt: skip
    run.add_argument(
        "--on_nan", choices=ON_NAN, default="stop",
        help="where a loss or a gradient is infinite or not a number: stop: the run ends before "
        "the weights change; skip: the step is left out, on all ranks, and counted",
    )  # fmt: skip
    run.add_argument(
        "--precision", choices=PRECISIONS, default="fp32",
        help="bf16: matrix products in bfloat16, weights and optimizer in fp32",
    )  # fmt: skip
    run.add_argument(
        "--seed", type=whole_number, default=0, help="of weights, data order and dropout"
    )
    run.add_argument(
        "--workdir", type=Path, default=Path("workdir"),
        help="where tokenizer, results and figures go; results of an earlier run are replaced",
    )  # fmt: skip
    run.add_argument(
        "--save_every", type=count,
        help="steps between checkpoints within an epoch; at its end there always is one",
    )  # fmt: skip
    run.add_argument(
        "--keep", type=whole_number, default=2,
        help="checkpoints that stay in the workdir, the newest; with 0 none is written",
    )  # fmt: skip
    run.add_argument(
        "--resume", action="store_true",
        help="go on from the newest checkpoint in the workdir that is whole, bit for bit where the "
        "layout is the same; where there is none, from the beginning. Without it, those of an "
        "earlier run are moved to checkpoints_old",
    )  # fmt: skip
    run.add_argument(
        "--export", type=Path,
        help="folder for the trained model and its tokenizer, as transformers reads them",
    )  # fmt: skip
    run.add_argument(
        "--device", choices=DEVICES, default="auto", help="auto: a GPU if there is one"
    )
    run.add_argument(
        "--timeline", type=whole_number, metavar="N",
        help="record who does what when in the first N + 1 steps: timeline_rank*.json, for "
        "plot.py timeline, and trace.json, for ui.perfetto.dev; with 0 nothing is recorded",
    )  # fmt: skip
    return parser


def launch_settings(args: argparse.Namespace) -> Settings:
    """How the ranks of these options are started."""
    return Settings(
        world_size=args.world_size,
        device=args.device,
        master_port=args.master_port,
        timeout=args.timeout,
        cores_per_rank=args.cores_per_rank,
    )


def open_timeline(
    args: argparse.Namespace, world: World, workers: str = "rank", **about: str | int
) -> Timeline:
    """The recorder that --timeline asks for; without it, one that records nothing."""
    return Timeline(
        world.rank,
        world.world_size,
        num_steps=args.timeline + 1 if args.timeline else 0,  # pictures leave the first one out
        workers=workers,
        device=world.device,
        about=about,
    )


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON has them."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in options.items()}


def run_program(main: Callable[[], None]) -> None:
    """Runs a program: a user's mistake is one line and status 2, a run that cannot go on one line
    and status 1, Ctrl-C and its like status 128 + signal, and no traceback."""
    quiet_libraries()
    with signals_end():
        try:
            main()
        except (UserError, RunError) as error:
            status = 2 if isinstance(error, UserError) else 1
            refuse(f"{Path(sys.argv[0]).name}: error: {error}\n", status)
    leave_when_done()
