"""Trains VGG16 or GPT-2 under any strategy, on processes that exchange tensors.

    single     one worker
    ddp        the whole model on every worker, a part of each batch on each
    fsdp       a shard of every layer on each worker, a part of each batch on each
    pipeline   a few of the layers on each worker, micro-batches flowing through them
    model      the same with one micro-batch: one worker computes at a time

    python project/train.py ddp --num_workers 2 --num_batches 2 --learning_rate 1e-3 \\
        --batch_size 32 --check_weights --check_output
    torchrun --nproc-per-node 2 project/train.py ddp --model gpt2-mini

Dropout is off unless --dropout says otherwise: with it no two strategies draw the same, and there
is nothing to compare. A worker has one core unless --cores_per_worker says otherwise, however many
workers there are: so the throughput of one, two and four can be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    import project.startup  # noqa: F401 (Ctrl-C ends what takes seconds from here on)

from pipeline.partition import parse_balance
from pipeline.schedule import SCHEDULES
from project.checkpoints import find
from project.folders import alone_in_workdir, claim_folders
from project.options import (
    PRECISIONS,
    count,
    fraction,
    parser_for,
    port,
    positive,
    run_program,
    seconds,
)
from project.recipes import OPTIMIZERS
from project.rules import check_gpus, check_model, check_parts, check_ranks, number_of_blocks
from project.strategies import STRATEGIES
from project.task import DATA_PARALLEL, VGG
from project.tasks import read_data
from project.worker import run_worker
from training.launch import Settings, UserError, launch, torchrun_world_size
from training.model import PRESETS
from training.vgg import WIDTH

STAGED = ("pipeline", "model")  # every worker gets some of the layers
OF_SENTENCES = (  # options for which pictures have no use
    "n_layer", "n_embd", "n_head", "vocab_size", "dropout", "n_test", "padding", "src", "tgt",
    "model_max_length",
)  # fmt: skip
HANDING = ("fsdp", *STAGED)  # workers hand each other parts of the model, or of what it computes


def _parser() -> argparse.ArgumentParser:
    parser = parser_for(__doc__)
    parser.set_defaults(n_epochs=1, batch_size=32, dropout=0.0, timeline=20)
    parser.conflict_handler = "resolve"  # of these options there is more to say here
    more = parser.add_argument_group("of this program")
    more.add_argument("strategy", choices=STRATEGIES, help="how the model is trained; see above")
    more.add_argument(
        "--model", default=VGG,
        help=f"{VGG}, on pictures; or {', '.join(PRESETS)}, on sentences, trained from scratch; or "
        "a folder or hub id with weights of GPT-2 to start from",
    )  # fmt: skip
    more.add_argument(
        "--dataset", default="builtin",
        help="builtin: pictures that are drawn, or German-English sentences. For pictures also a "
        "folder with CIFAR-10, its Python or its binary version, or the name of a dataset on the "
        "hub; for sentences see run_data_parallel.py --help",
    )  # fmt: skip
    more.add_argument(
        "--num_workers", type=count,
        help="processes; by default 2, for single 1; torchrun decides where it starts them",
    )  # fmt: skip
    more.add_argument(
        "--num_batches", type=count, help="steps to train; by default --n_epochs passes"
    )
    more.add_argument(
        "--num_microbatches", type=count,
        help="parts into which a worker cuts its share of a batch; by default 4 in a pipeline, "
        "otherwise one, and of sentences on a CPU as few as keep like lengths together",
    )  # fmt: skip
    more.add_argument(
        "--schedule", choices=[name for name in SCHEDULES if name != "sequential"],
        help="of pipeline: the order of forwards and backwards; by default 1f1b",
    )  # fmt: skip
    more.add_argument(
        "--balance",
        help="of pipeline and model: auto, by default, measures the layers; uniform; or layers per "
        "worker, as 9,7",
    )  # fmt: skip
    more.add_argument(
        "--zero", type=int, choices=(1, 2, 3),
        help="of fsdp: 1 shards the optimizer state, 2 gradients too, 3, the default, all",
    )  # fmt: skip
    more.add_argument(
        "--cores_per_worker", type=count, default=1, help="CPU cores to which a worker is bound"
    )
    more.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw",
        help="adamw hides a wrong factor in all gradients from --check_weights, sgd does not",
    )  # fmt: skip
    more.add_argument("--momentum", type=fraction, default=0.9, help="of sgd")
    more.add_argument(
        "--learning_rate", type=positive,
        help="by default 1e-3 for gpt2-mini, 3e-4 for vgg16, 1e-4 for all others; 30 times that "
        "with sgd",
    )  # fmt: skip
    more.add_argument(
        "--precision", choices=(*PRECISIONS, "fp64"), default="fp32",
        help="bf16: matrix products, under fsdp all that layers compute, in bfloat16, weights and "
        "optimizer in fp32; fp64: all of it, to see small errors",
    )  # fmt: skip
    more.add_argument(
        "--vgg_width", type=count, default=WIDTH,
        help="channels of the first layers of vgg16; the others have up to 8 times as many",
    )  # fmt: skip
    more.add_argument(
        "--check_weights", action="store_true",
        help="compare the trained weights with those of the same training in plain PyTorch on one "
        "process; status 1 where they disagree. Trains once more, in float64 too",
    )  # fmt: skip
    more.add_argument(
        "--check_output", action="store_true", help="the same for outputs on a batch of test data"
    )
    more.add_argument(
        "--workdir", type=Path, help="where results go; by default workdir/STRATEGY and NUM_WORKERS"
    )
    more.add_argument(
        "--master_port", type=port,
        help="port on 127.0.0.1 where the workers meet; by default 11868, or a free one",
    )  # fmt: skip
    more.add_argument(
        "--timeout", type=seconds, default=300.0,
        help="seconds after which a worker that does not answer ends the run",
    )  # fmt: skip
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options, with what is wrong with them said before anything is started."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.model == "auto":
        raise UserError(f"--model auto: here it is one of {VGG}, {', '.join(PRESETS)}, or a folder")
    _check_uses(args, parser.get_default)
    _check_workers(args)
    if args.model != VGG:
        check_model(args)
    _check_options_of_strategies(args)
    if args.dropout and (args.check_weights or args.check_output):
        raise UserError(
            f"--dropout {args.dropout:g} with --check_weights or --check_output: what is dropped "
            "depends on the strategy, and nothing can be compared; --dropout 0 works"
        )
    if args.strategy in HANDING:
        check_gpus(args)
    args.workdir = args.workdir or Path("workdir") / f"{args.strategy}{args.num_workers}"
    claim_folders(args)
    return args


def _check_workers(args: argparse.Namespace) -> None:
    """Settles how many there are. Raises UserError where they cannot share the work."""
    started, given = torchrun_world_size(), args.num_workers
    args.num_workers = given or started or (1 if args.strategy == "single" else 2)
    args.world_size = args.num_workers  # what the other programs call it
    check_ranks(args, "num_workers", "cores_per_worker")
    if args.strategy == "single" and args.num_workers > 1:
        raise UserError(f"single --num_workers {args.num_workers}: it is one; ddp takes several")
    if args.strategy in DATA_PARALLEL:
        for name in ("batch_size", "n_train", "n_validation"):
            have = getattr(args, name)
            if have is not None and have < args.num_workers:
                raise UserError(
                    f"--{name} {have} --num_workers {args.num_workers}: each worker needs an "
                    f"example; --num_workers {have} or less works"
                )
    dealt = args.strategy in DATA_PARALLEL
    check_parts(args, "num_microbatches", "num_workers" if dealt else None)


def _check_options_of_strategies(args: argparse.Namespace) -> None:
    """Gives them their defaults. Raises UserError where they are of another strategy."""
    for name, default, strategies in (
        ("schedule", "1f1b", ("pipeline",)),
        ("balance", "auto", STAGED),
        ("zero", 3, ("fsdp",)),
    ):
        given = getattr(args, name)
        if given is not None and args.strategy not in strategies:
            raise UserError(
                f"{args.strategy} --{name} {given}: it is an option of {' and '.join(strategies)}"
            )
        setattr(args, name, given or default)
    if args.strategy in STAGED:
        layers = 16 if args.model == VGG else 2 * number_of_blocks(args) + 2
        if args.num_workers > layers:
            raise UserError(
                f"{args.strategy} --num_workers {args.num_workers}: {args.model} has {layers} "
                f"layers and every worker needs one; --num_workers {layers} or less works"
            )
        try:
            parse_balance(args.balance, layers, args.num_workers, lambda: [1.0] * layers)
        except ValueError as error:
            raise UserError(f"--num_workers {args.num_workers} --{error}") from None
    if args.strategy == "model" and (args.num_microbatches or 1) > 1:
        raise UserError(
            f"model --num_microbatches {args.num_microbatches}: with more than one it is pipeline"
        )


def _check_uses(args: argparse.Namespace, default: Callable[[str], Any]) -> None:
    """Raises UserError for an option that is not as it is by default, and that the model or the
    optimizer has no use for."""
    names: tuple[str, ...]
    if args.model == VGG:
        names, users = OF_SENTENCES, f"models of sentences have a use for it: {', '.join(PRESETS)}"
    else:
        names, users = ("vgg_width",), f"--model {VGG} has a use for it"
    unused = [(name, "model", users) for name in names]
    if args.optimizer != "sgd":
        unused.append(("momentum", "optimizer", "--optimizer sgd has a use for it"))
    for name, chosen, users in unused:
        given = getattr(args, name)
        if given != default(name):
            what = f"--{name} {'all' if given is None else given}"
            raise UserError(f"{what} --{chosen} {getattr(args, chosen)}: only {users}")


def main() -> None:
    """The program."""
    args = parse()
    settings = Settings(
        args.num_workers, args.device, args.master_port, args.timeout, args.cores_per_worker
    )
    with alone_in_workdir(args):
        data = read_data(args)
        resume = find(args, data)
        launch(run_worker, settings, args, data, resume)


if __name__ == "__main__":
    run_program(main)
