"""The command line that the programs share, and what must hold of it before anything starts."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from data_parallel.dataset import split_batch_size
from training.ending import ctrl_c_ends, refuse, speaks
from training.export import check_export
from training.launch import (
    DEVICES,
    RunError,
    Settings,
    UserError,
    World,
    choose_device,
    core_slice,
    quiet_libraries,
    torchrun_world_size,
)
from training.model import PRESETS, check_pretrained, gpt2_config
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
        refuse(f"{self.format_usage()}{self.prog}: error: {message}\n")

    def print_help(self, file: Any = None) -> None:
        if speaks():
            super().print_help(file)


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every program has."""
    parser = _Parser(description=description, formatter_class=Help, allow_abbrev=False)
    data = parser.add_argument_group("data")
    data.add_argument(
        "--dataset", default="builtin",
        help="builtin: German-English sentences from a grammar. Or a folder with train.de, "
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
        "layout is the same; where there is none, from the beginning",
    )  # fmt: skip
    run.add_argument(
        "--export", type=Path,
        help="folder for the trained model and its tokenizer, as transformers reads them",
    )  # fmt: skip
    run.add_argument(
        "--device", choices=DEVICES, default="auto", help="auto: a GPU if there is one"
    )
    run.add_argument(
        "--timeline", type=count, metavar="N",
        help="record who does what when in the first N + 1 steps: timeline_rank*.json, for "
        "plot.py timeline, and trace.json, for ui.perfetto.dev",
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


def check_batch(args: argparse.Namespace) -> None:
    """Raises UserError where the global batch does not fit the ranks or the data."""
    try:
        split_batch_size(args.batch_size, args.world_size)
    except ValueError as error:
        raise UserError(f"--batch_size {args.batch_size}: {error}") from None
    if args.n_train is not None and args.world_size > args.n_train:
        raise UserError(
            f"--world_size {args.world_size} --n_train {args.n_train}: each rank needs an example; "
            f"--world_size {args.n_train} or less works"
        )


def check_ranks(args: argparse.Namespace, ranks: str, cores_each: str) -> None:
    """Raises UserError where the ranks cannot be started as the options say; `ranks` and
    `cores_each` name those for their number and for the cores of each."""
    started, given = torchrun_world_size(), getattr(args, ranks)
    if started is not None and started != given:
        raise UserError(f"--{ranks} {given}: torchrun started {started} ranks; leave it out")
    if started is not None and args.master_port is not None:
        raise UserError(
            f"--master_port {args.master_port}: torchrun decides where its ranks meet; leave it "
            f"out, or start torchrun with --master-port {args.master_port}"
        )
    there, wanted = len(core_slice(0, 1)), getattr(args, cores_each)
    if there and (wanted or 0) > there:
        raise UserError(
            f"--{cores_each} {wanted}: {there} cores may be used here; "
            f"--{cores_each} {there} or less works"
        )


def check_warmup(args: argparse.Namespace, num_examples: int) -> None:
    """Raises UserError where the warm-up does not end before the run does."""
    steps = args.n_epochs * -(-num_examples // args.batch_size)
    if args.warmup_steps and args.warmup_steps >= steps:
        raise UserError(
            f"--warmup_steps {args.warmup_steps}: the run has {steps} steps, and the warm-up must "
            f"end before the last; --warmup_steps {steps // 10} works"
        )


def model_name(args: argparse.Namespace, device: torch.device) -> str:
    """The model that --model means here."""
    if args.model != "auto":
        return args.model
    return "gpt2" if device.type == "cuda" else "gpt2-mini"


def check_model(args: argparse.Namespace) -> None:
    """Raises UserError for model options that cannot work, before any process starts."""
    least = 256 + 3
    if args.vocab_size is not None and args.vocab_size < least:
        raise UserError(
            f"--vocab_size {args.vocab_size}: a byte-level vocabulary has at least {least} tokens; "
            "--vocab_size 2048 works"
        )
    if args.model in PRESETS or args.model == "auto":
        name = model_name(args, choose_device(args.device, 0, args.world_size))
        gpt2_config(
            name, 64, args.model_max_length,
            n_layer=args.n_layer, n_embd=args.n_embd, n_head=args.n_head,
        )  # fmt: skip
        return
    given = [n for n in ("n_layer", "n_embd", "n_head", "vocab_size") if getattr(args, n)]
    if given:
        raise UserError(
            f"--{given[0]} with --model {args.model}: weights come with their sizes; only the "
            f"presets can be changed ({', '.join(PRESETS)})"
        )
    folder = Path(args.model)
    if folder.is_dir() and not any(folder.glob("*.safetensors")) | any(folder.glob("*.bin")):
        raise UserError(
            f"--model {args.model}: the folder holds no weights (*.safetensors); "
            f"presets need none: {', '.join(PRESETS)}"
        )
    check_pretrained(args.model, args.model_max_length)


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON has them."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in options.items()}


def claim_folders(args: argparse.Namespace) -> None:
    """Makes the folders that the run will write into, or raises UserError where it cannot."""
    if args.save_every is not None and not args.keep:
        raise UserError(
            f"--save_every {args.save_every} --keep 0: no checkpoint would stay; --keep 1 works"
        )
    if args.export is not None:
        check_export(args.export)
        _claim(args.export.resolve().parent, f"--export {args.export}", "--export exported")
    _claim(args.workdir, f"--workdir {args.workdir}", "--workdir workdir")


def _claim(folder: Path, option: str, example: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # without a name, which a killed run would leave
    except OSError as error:
        raise UserError(
            f"{option}: nothing can be written there ({error.strerror}); "
            f"name a folder of your own, as {example}"
        ) from error


def run_program(main: Callable[[], None]) -> None:
    """Runs a program: a user's mistake is one line and status 2, a run that cannot go on one line
    and status 1, Ctrl-C no word and status 130."""
    quiet_libraries()
    with ctrl_c_ends():
        try:
            main()
        except (UserError, RunError) as error:
            status = 2 if isinstance(error, UserError) else 1
            refuse(f"{Path(sys.argv[0]).name}: error: {error}\n", status)
