"""Trains VGG16 or GPT-2 under any strategy, on processes that exchange tensors.

single     one process
ddp        the whole model on every rank, a part of each batch on each
fsdp       a shard of every layer on each rank, a part of each batch on each
pipeline   some of the layers on each rank, micro-batches flowing through them
model      the same with one micro-batch: one rank computes at a time
tensor     a part of every matrix on each rank, all of the batch (GPT-2)
3d         replicas of stages of layers that are cut: --dp 2 --pp 2 --tp 2

python project/train.py ddp --num_workers 2 --num_batches 2 --check_weights --check_output
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from project.options import (
    Count,
    Data,
    Files,
    Fraction,
    Model,
    Processes,
    Stages,
    Tools,
    Training,
    begin,
    parse,
    settle_sizes,
)


@dataclass
class Strategy:
    """strategy"""

    dp: Count | None = None
    """of 3d: replicas, each with a part of the batch; default: 1"""
    pp: Count | None = None
    """of 3d: stages of layers; default: 1"""
    tp: Count | None = None
    """of 3d: parts of every matrix; default: 1"""
    sequence_parallel: bool = False
    """of tensor and 3d: between matrices, each rank has a part of the positions"""
    trace: bool = False
    """of pipeline and model: trace the model of transformers and cut that"""
    zero: Literal[1, 2, 3] | None = None
    """ZeRO: 1 optimizer state, 2 + gradients, 3 (of fsdp the default) + parameters; of 3d 1 or 3"""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """with check_weights prefer sgd: AdamW cannot reveal gradients scaled by a constant"""
    momentum: Fraction = 0.9
    """of sgd"""
    vgg_width: Count = 64
    """of vgg16: channels of the first layers; later ones have up to 8 times as many"""
    check_weights: bool = False
    """train again on one process and compare every weight by name; exit status 1 if they differ"""
    check_output: bool = False
    """the same for the outputs on a batch of test data"""


@dataclass
class TrainOptions(Training, Data, Model, Files, Processes, Strategy, Stages, Tools):
    """Of train.py."""

    strategy: Literal["single", "ddp", "fsdp", "pipeline", "model", "tensor", "3d"] = "ddp"
    """how the model is laid out on the processes; see above"""
    n_epochs: Count = 1
    batch_size: Count = 32
    model: str = "vgg16"
    """vgg16 on pictures, or gpt2-mini, gpt2, ... on text, as in run_data_parallel.py"""
    dropout: Fraction = 0.0
    cores_per_rank: Count | None = 1
    workdir: Path | None = None  # type: ignore[assignment]
    """folder for results; default: workdir/STRATEGY and WORLD_SIZE, or as workdir/3d2x2x2"""


if __name__ == "__main__":
    begin(TrainOptions, __doc__)

# The imports below take seconds: --help and mistyped options are answered by now.

import torch

from project.utils import announce, finish, plan_of, read_texts, run_program, text_task
from tensor_parallel.gpt2 import degrees
from training.check import check, outputs_on_main, weights_on_main
from training.files import SUMMARY, write_json
from training.launch.errors import RunError, UserError, torchrun, works
from training.launch.launch import Settings, launch
from training.launch.world import World, choose_backend, choose_device, on_main
from training.layouts.choose import lay_out
from training.layouts.replicated import Replicated
from training.layouts.traced import traced_layers
from training.loop import run
from training.profiling import Profile
from training.resume import NO_RESUME, Resume, find_resume
from training.rules import (
    check_batch,
    check_microbatches,
    check_model,
    check_recompute,
    check_warmup,
    settle_ranks,
    settle_training,
)
from training.stage_rules import check_stages, settle_chunks, size_of_model
from training.tasks.gpt2 import PRESETS
from training.tasks.pictures import PictureSets, load_pictures
from training.tasks.task import Task
from training.tasks.texts import Texts
from training.tasks.vgg import VGG, PictureTask
from training.trackers import close_trackers, trackers_of
from training.workdir import alone_in_workdir, claim_folders

SENTENCES_ONLY = (
    "n_layer", "n_embd", "n_head", "vocab_size", "dropout", "n_test", "padding", "src", "tgt",
    "model_max_length", "trace",
)  # fmt: skip


def parse_train(description: str | None, argv: Sequence[str] | None = None) -> Any:
    """The options, each with its value. Raises UserError if they do not fit together."""
    args: Any = parse(TrainOptions, description, argv)
    if args.model == "auto":
        raise UserError(f"--model auto: train.py needs one of {VGG}, {', '.join(PRESETS)}")
    _check_uses(args)
    _settle_mesh(args)  # dp, pp, tp and world_size, which all further checks need
    if args.strategy == "single" and args.world_size > 1:
        raise UserError(
            f"single --world_size {args.world_size}: single is one process; ddp takes several"
        )
    if args.dp > 1:
        check_batch(args, args.dp, "dp" if args.strategy == "3d" else "world_size")
    check_microbatches(args, args.dp)
    settle_training(args)
    trackers_of(args)  # refuses one that is not installed
    if args.model != VGG:
        check_model(args)
    _settle_strategy(args)  # schedule, chunks, balance and zero
    check_recompute(args, args.pp == 1 or args.strategy == "model")
    if args.trace:
        _check_trace(args)
    if args.tp > 1:
        _check_tensor(args)
    elif args.sequence_parallel:
        raise UserError(
            f"{args.strategy} --sequence_parallel: positions are shared by the ranks that share a "
            "matrix; tensor, or 3d --tp 2, works"
        )
    checked = args.check_weights or args.check_output
    drawn = args.precision == "bf16" or choose_device(args.device, 0, 1).type != "cpu"
    if args.model != VGG and args.dropout and checked and drawn:
        raise UserError(
            f"--dropout {args.dropout:g} with --check_weights or --check_output: on a GPU, and in "
            "bf16, the plain run drops other activations; --dropout 0, or --device cpu and "
            "--precision fp32, works"
        )
    if args.strategy not in ("single", "ddp"):
        _check_gpus(args)
        if args.compile:
            raise UserError(
                f"{args.strategy} --compile: stages and shards watch each layer's operators, which "
                "compiled code hides; single and ddp have it"
            )
    name = f"{args.dp}x{args.pp}x{args.tp}" if args.strategy == "3d" else str(args.world_size)
    args.workdir = args.workdir or Path("workdir") / f"{args.strategy}{name}"
    claim_folders(args)  # last, since it makes folders
    return args


def _check_uses(args: Any) -> None:
    """Raises UserError for an option that the model or the optimizer ignores."""
    defaults = settle_sizes(TrainOptions(dataset=args.dataset))
    if args.model == VGG:
        _refuse_text(args)
        users = f"models of sentences, as {next(iter(PRESETS))}"
        unused = [(name, "model", users) for name in SENTENCES_ONLY]
    else:
        unused = [("vgg_width", "model", f"--model {VGG}")]  # option, what decides, who has it
    if args.optimizer != "sgd":
        unused.append(("momentum", "optimizer", "--optimizer sgd"))
    for name, chosen, users in unused:
        given = getattr(args, name)
        if given != getattr(defaults, name):
            what = f"--{name}" + ("" if given is True else f" {'all' if given is None else given}")
            instead = "leave it out"
            if name == "n_test":
                instead = f"--n_validation {given} sets the number of test pictures"
            raise UserError(
                f"{what}: it is only for {users}, and --{chosen} is {getattr(args, chosen)} here; "
                + instead
            )


def _settle_mesh(args: Any) -> None:
    """Settles dp, pp, tp and world_size. Raises UserError if they do not fit each other."""
    axes = ("dp", "pp", "tp")
    given = {name: getattr(args, name) for name in axes if getattr(args, name) is not None}
    if args.strategy == "3d":
        sizes = {name: given.get(name, 1) for name in axes}
        product = math.prod(sizes.values())
        started = args.world_size or torchrun("WORLD_SIZE", product)  # given, or as torchrun did
        if started != product:
            raise UserError(
                f"--world_size {started} --dp {sizes['dp']} --pp {sizes['pp']} --tp {sizes['tp']}: "
                f"dp x pp x tp is {product}; leave --world_size out, or start {product} ranks"
            )
        args.world_size = product
        settle_ranks(args)
    else:
        if given:
            name, value = next(iter(given.items()))
            raise UserError(
                f"{args.strategy} --{name} {value}: it is an option of 3d; --world_size is the "
                f"number of ranks of {args.strategy}"
            )
        settle_ranks(args)
        # All ranks are on one axis, the others have length 1.
        axis = {"pipeline": "pp", "model": "pp", "tensor": "tp"}.get(args.strategy, "dp")
        sizes = dict.fromkeys(axes, 1) | {axis: args.world_size}
    args.dp, args.pp, args.tp = sizes.values()


def _refuse_text(args: Any) -> None:
    """Raises UserError if a model of pictures is given text."""
    path = Path(args.dataset)
    found = path.suffix == ".txt"
    with suppress(OSError):  # reading the data will report it
        found = found or path.is_file() or any(path.glob("*.txt")) or any(path.glob("train.??"))
    if found:
        raise UserError(
            f"--dataset {args.dataset} --model {VGG}: this is text, and {VGG} learns pictures; "
            "--model gpt2-mini works"
        )


def _check_tensor(args: Any) -> None:
    """Raises UserError for a model whose matrices cannot be cut."""
    option = "tp" if args.strategy == "3d" else "world_size"
    if args.model == VGG:
        raise UserError(
            f"{args.strategy} --model {VGG}: only GPT-2's matrices are cut; --model gpt2-mini works"
        )
    heads = size_of_model(args, "n_head")
    divisors = degrees(heads, args.vocab_size or 256)
    if args.tp not in divisors:
        numbers = " or ".join(map(str, divisors[1:])) or "1"
        raise UserError(
            f"--{option} {args.tp} --model {args.model}: its {heads} heads are "
            f"dealt out evenly; --{option} {numbers} works"
        )
    # more: the positions that a full sequence lacks for equal parts.
    length, more = args.model_max_length, -args.model_max_length % args.tp
    if args.sequence_parallel and more:
        raise UserError(
            f"--sequence_parallel --model_max_length {length}: {args.tp} ranks cannot have equal "
            f"parts; --model_max_length {length + more} works"
        )


def _settle_strategy(args: Any) -> None:
    """Settles the strategy's options. Raises UserError for another's, or a cut that fails."""
    for name in ("schedule", "chunks", "balance") if args.strategy == "3d" and args.pp == 1 else ():
        if (given := getattr(args, name)) is not None:
            raise UserError(f"3d --{name} {given} --pp 1: there are no stages; --pp 2 works")
    staged = ("pipeline", "model", "3d")
    for name, default, users in (
        ("schedule", "gpipe" if args.strategy == "model" else "1f1b", ("pipeline", "3d")),
        ("chunks", None, ("pipeline", "3d")),
        ("balance", "auto", staged),
        ("zero", 3 if args.strategy == "fsdp" else None, ("fsdp", "3d")),
    ):  # fmt: skip
        given = getattr(args, name)
        if given is not None and args.strategy not in users:
            others = f"{', '.join(users[:-1])} and {users[-1]}"
            others = "fsdp" if (name, given) == ("zero", 2) else others
            raise UserError(f"{args.strategy} --{name} {given}: it is an option of {others}")
        setattr(args, name, given or default)  # options.json has every value
    settle_chunks(args)
    if args.strategy == "3d" and args.zero is not None:
        mesh = f"--zero {args.zero} --dp {args.dp} --pp {args.pp}"
        if args.zero == 2:
            raise UserError(
                f"3d {mesh}: 3d has no stage 2; --zero 1 --dp 2 or, without stages, --zero 3 "
                "--dp 2 works"
            )
        if args.zero == 3 and args.pp > 1:
            raise UserError(f"3d {mesh}: stages keep their parameters; --zero 1, or --pp 1, works")
        if args.dp == 1:
            raise UserError(f"3d {mesh}: it shards over replicas; --dp 2 works")
    if args.strategy == "model" and (args.num_microbatches or 1) > 1:
        raise UserError(
            f"model --num_microbatches {args.num_microbatches}: with more than one it is pipeline"
        )
    if args.pp > 1 or args.strategy in ("pipeline", "model"):
        option = "pp" if args.strategy == "3d" else "world_size"
        check_stages(args, option, args.pp, 16 if args.model == VGG else None)


def _check_trace(args: Any) -> None:
    """Raises UserError for a strategy without --trace, and for dropout, which tracing changes."""
    if args.strategy not in ("pipeline", "model"):
        raise UserError(f"{args.strategy} --trace: it is an option of pipeline and model")
    if args.dropout:
        raise UserError(
            f"--trace --dropout {args.dropout:g}: transformers' dropout draws, so that its masks "
            "would depend on the cut, and a run without --trace has others; --dropout 0 works"
        )


def _check_gpus(args: Any) -> None:
    """Raises UserError if ranks that send each other tensors would share a GPU. NCCL needs a GPU
    per rank; gloo can sum tensors on a GPU, but neither send nor gather them."""
    here = torchrun("LOCAL_WORLD_SIZE", args.world_size)  # ranks of this machine
    device = choose_device(args.device, 0, here)
    if device.type != "cuda" or choose_backend(args.device, here) != "gloo":
        return
    gpus = torch.cuda.device_count()
    fewer = f"--world_size {gpus}" if here == args.world_size else f"--nproc-per-node {gpus}"
    raise UserError(
        f"{args.strategy} --world_size {args.world_size} --device {args.device}: "
        f"{gpus} GPU{'s are' if gpus > 1 else ' is'} visible, and every rank needs one; "
        f"{fewer}, or --device cpu, works"
    )


def run_rank(
    world: World, args: Any, data: Texts | PictureSets, resume: Resume = NO_RESUME
) -> None:
    """One rank of the program. Raises RunError if a check finds a difference from one process."""
    task: Task
    resume = resume.of_main(world)  # collective
    if isinstance(data, PictureSets):
        task = PictureTask(args, world, data)
    else:
        task = text_task(args, world, data, resume)
        if args.trace:
            task.layers_of = traced_layers  # before lay_out cuts them
    plan = plan_of(args, world)
    model = lay_out(args, task, world, plan, resume.cut)  # all ranks together
    plan.timeline.about |= {
        "schedule": model.schedule, "num_microbatches": model.num_microbatches,
        "ranks": model.ranks,
    }  # fmt: skip
    announce(world, args, model)
    average = model.average_gradients if isinstance(model, Replicated) else None
    profile = Profile(plan.timeline, args.profile, args.workdir)
    try:
        results = run(world, args, task, model, plan, average, resume, trackers_of(args))
        profile.close()
        close_trackers(args)
        # Both are collective, while the pipe is open; rank 0 keeps what it gets.
        outputs = outputs_on_main(world, task, model) if args.check_output else []
        weights = weights_on_main(world, model) if args.check_weights else {}
        finish(world, results, args)
        if any(args.workdir.glob("profile_rank*.json")):
            results.say(f"{args.workdir}/profile_rank*.json: open them in https://ui.perfetto.dev.")
    finally:
        model.close()

    def conclude() -> None:
        if args.check_weights or args.check_output:
            results.say("\nThe same training on one process, in plain PyTorch, and in float64 ...")
        verdicts = check(args, task, plan, model, weights, outputs)
        checks = {verdict.what: verdict.as_dict() for verdict in verdicts}
        write_json(args.workdir / SUMMARY, results.summary | {"checks": checks})
        for verdict in verdicts:
            results.say(verdict.say())
        wrong = [f"{v.what} are not those of one process" for v in verdicts if not v.agrees]
        if wrong:
            raise RunError(f"{args.strategy}: {'; '.join(wrong)}")

    on_main(world, conclude)  # to check, rank 0 trains twice; the others wait


def read_data(args: Any) -> Texts | PictureSets:
    """Pictures or texts, as the model needs. Raises UserError if there are none, or fewer than
    ranks."""
    if args.model != VGG:
        return read_texts(args)
    pictures = load_pictures(args.dataset, args.n_train, args.n_validation, seed=1234)
    fewest = min(len(pictures.train), len(pictures.test))
    if fewest < args.dp:
        option = "dp" if args.strategy == "3d" else "world_size"
        raise UserError(
            f"--{option} {args.dp} --dataset {args.dataset}: it has {fewest} pictures, and each "
            f"rank needs one; {works(f'--{option}', fewest)}"
        )
    check_warmup(args, len(pictures.train))
    return pictures


def main() -> None:
    """The program."""
    args = parse_train(__doc__)
    with alone_in_workdir(args):
        data = read_data(args)  # once, before ranks start; under torchrun by every rank
        resume = find_resume(args, data.fingerprints()["train"])
        launch(run_rank, Settings.of(args), args, data, resume)  # returns when all ranks have


if __name__ == "__main__":
    run_program(main)
