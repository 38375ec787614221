"""Trains VGG16 or GPT-2 under any strategy, on processes that exchange tensors.

The strategies:

single     one process
ddp        the whole model on every rank, a part of each batch on each
fsdp       a shard of every layer on each rank, a part of each batch on each
pipeline   some of the layers on each rank, micro-batches flowing through them
model      the same with one micro-batch: one rank computes at a time
tensor     a part of every matrix on each rank, all of the batch (GPT-2)
3d         replicas of stages of layers that are cut: --dp 2 --pp 2 --tp 2

python project/train.py ddp --help      explains ddp and its options, with examples
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from project.parser import begin, parse_options
from project.strategies import PAGES, STRATEGIES_WITH
from training.options import (
    UNSET,
    Architecture,
    Axes,
    Count,
    Data,
    Files,
    Fraction,
    Options,
    Positive,
    Processes,
    Stages,
    Tools,
    Training,
)


@dataclass
class TrainOptions(Options):
    """Of train.py."""

    GROUPS = (Training, Data, Architecture, Files, Processes, Axes, Stages, Tools)
    PAGES = PAGES
    n_epochs: Count = 1
    batch_size: Count = 32
    learning_rate: Positive = UNSET
    """peak rate; default: 1e-3 for gpt2-mini, 3e-4 for vgg16, else 1e-4; with sgd 30 times that"""
    dataset: str = "builtin"
    """of text as in run_data_parallel.py; of pictures builtin, a folder (Parquet, or train/CLASS/
    and test/CLASS/), or a hub name"""
    model: str = "vgg16"
    """vgg16 on pictures, or gpt2-mini, gpt2, ... on text, as in run_data_parallel.py"""
    dropout: Fraction = 0.0
    cores_per_rank: Count | None = 1
    """CPU cores per process"""
    workdir: Path = UNSET
    """folder for results; default: workdir/STRATEGY and WORLD_SIZE, or as workdir/3d2x2x2"""


if __name__ == "__main__":
    begin(TrainOptions, __doc__)

# The imports below take seconds: --help and mistyped options are answered by now.

from project import rules, stage_rules
from project.utils import announce, finish, read_texts, run_program, setup_of, text_task
from tensor_parallel.gpt2 import degrees
from training.check import check, outputs_on_main
from training.files import SUMMARY, write_json
from training.launch.errors import RunError, counted, torchrun_world_size, works
from training.launch.launch import Settings, launch
from training.launch.world import World, choose_device, on_main
from training.layouts.choose import lay_out
from training.layouts.replicated import Replicated
from training.loop import run
from training.profiling import Profile
from training.resume import NO_RESUME, Resume, find_resume
from training.tasks.pictures import PictureSets, load_pictures
from training.tasks.task import TrainingTask
from training.tasks.texts import Texts
from training.tasks.vgg import VGG, PictureTask
from training.trackers import close_trackers, trackers_of
from training.workdir import alone_in_workdir, claim_folders

OF_SENTENCES = "n_layer n_embd n_head vocab_size dropout padding src tgt model_max_length n_test"
VGG_LAYERS = 16
AXES = {"pipeline": "pp", "model": "pp", "tensor": "tp"}  # all ranks are on one; otherwise on dp


def parse_train(description: str | None, argv: Sequence[str] | None = None) -> TrainOptions:
    """The options, each with its value. Raises UserError if they do not fit together."""
    given, typed = parse_options(TrainOptions, description, argv)
    for names, who in STRATEGIES_WITH.items():
        has = given.strategy in who
        rules.require(given, rules.only(given, typed, names, has, " or ".join(who)))
    args = rules.resumed(settled_axes(given), typed)
    rules.require(args, only_for(args, typed))
    args = rules.settled(settled_strategy(args))
    rules.require(args, of_strategy(args))
    claim_folders(args)  # last, since it makes folders
    return args


def settled_axes(args: TrainOptions) -> TrainOptions:
    """With the length of every axis, the number of ranks, and the workdir that is named by them. Of
    3d dp follows the number of ranks, which torchrun may change when it restarts them."""
    sizes: dict[str, Any] = {name: getattr(args, name) or 1 for name in ("dp", "pp", "tp")}
    usual = {"single": 1, "3d": math.prod(sizes.values())}.get(args.strategy, 2)
    args = rules.settled_ranks(args, usual)
    name = str(args.world_size)
    if args.strategy == "3d":
        sizes["dp"] = args.dp or args.world_size // (sizes["pp"] * sizes["tp"]) or 1
        name = "x".join(map(str, sizes.values()))
    else:
        sizes[AXES.get(args.strategy, "dp")] = args.world_size
    return replace(args, **sizes, workdir=args.workdir or Path(f"workdir/{args.strategy}{name}"))


def option_of(args: TrainOptions, axis: str) -> str:
    """The option that sets the length of an axis on which there are several ranks."""
    return axis if args.strategy == "3d" else "world_size"


def settled_strategy(args: TrainOptions) -> TrainOptions:
    """With the schedule, the cut, and ZeRO's stage."""
    schedule = "gpipe" if args.strategy == "model" else "1f1b"
    zero = args.zero or (3 if args.strategy == "fsdp" else None)
    args = replace(
        args, schedule=args.schedule or schedule, balance=args.balance or "auto", zero=zero
    )
    return stage_rules.settled_chunks(args)


def only_for(args: TrainOptions, typed: set[str]) -> Iterator[rules.Row]:
    """The table of options that only some runs have, of any strategy that has them."""
    text, only = args.model != VGG, partial(rules.only, args, typed)
    stages = args.strategy != "3d" or args.pp > 1
    yield from only("schedule chunks balance", stages, "a run with stages", "--pp 2 works")
    yield from only(
        "sequence_parallel", args.tp > 1, "a run whose matrices are cut", "--tp 2 works"
    )
    yield from only(OF_SENTENCES, text, "a model of sentences, as gpt2-mini,")
    yield from only("vgg_width", not text, f"--model {VGG}")
    yield from only("momentum", args.optimizer == "sgd", "--optimizer sgd")


def of_strategy(args: TrainOptions) -> Iterator[rules.Row]:
    """What a strategy and its options ask of each other, and the rules of its parts."""
    strategy, vgg = args.strategy, args.model == VGG
    ranks, zero = args.dp * args.pp * args.tp, args.zero if strategy == "3d" else None
    elastic = torchrun_world_size() is not None  # another host may join later
    checked = args.check_weights or args.check_output
    drawn = args.precision == "bf16" or choose_device(args.device, 0, 1).type != "cpu"
    mesh = "strategy zero dp pp"
    yield from [
        ("strategy world_size", args.world_size == ranks,
         f"dp x pp x tp is {ranks}", f"start {ranks} ranks: --world_size {ranks} works"),
        ("strategy world_size", strategy != "single" or args.world_size == 1,
         "single is one process", "ddp takes several"),
        ("strategy num_microbatches", strategy != "model" or args.num_microbatches in (None, 1),
         "with more than one it is pipeline", "leave it out"),
        ("dataset model", not vgg or Path(args.dataset).suffix != ".txt",
         f"this is text, and {VGG} learns pictures", "--model gpt2-mini works"),
        ("strategy model", not vgg or args.tp == 1,
         "only GPT-2's matrices are cut", "--model gpt2-mini works"),
        (mesh, zero != 2,
         "3d has no stage 2", "--zero 1 --dp 2 or, without stages, --zero 3 --dp 2 works"),
        (mesh, zero != 3 or args.pp == 1,
         "stages keep their parameters", "--zero 1, or --pp 1, works"),
        (mesh, zero is None or args.dp > 1 or elastic,
         "it shards over replicas", "--dp 2 works"),
        ("keep check_weights", args.keep > 0 or not args.check_weights,
         "it compares the weights that are saved", "--keep 1 works"),
        ("dropout check_weights", not (args.dropout and checked and drawn),
         "on a GPU, and in bf16, the plain run drops other activations",
         "--dropout 0, or --device cpu and --precision fp32, works"),
    ]  # fmt: skip
    trackers_of(args)  # refuses one that is not installed
    yield from rules.rules(args, args.dp, option_of(args, "dp"))
    yield from rules.of_recompute(args, one_at_a_time=args.pp == 1 or strategy == "model")
    if not vgg:
        yield from rules.of_model(args)
    if args.pp > 1 or strategy in ("pipeline", "model"):
        layers = VGG_LAYERS if vgg else None
        yield from stage_rules.of_stages(args, option_of(args, "pp"), args.pp, layers)
    if args.tp > 1:
        yield from of_tensor(args)
    if strategy not in ("single", "ddp"):
        yield from rules.of_gpus(args)


def of_tensor(args: TrainOptions) -> Iterator[rules.Row]:
    """GPT-2's matrices are cut evenly."""
    option, heads = option_of(args, "tp"), rules.size_of_model(args, "n_head")
    divisors = degrees(heads, args.vocab_size or 256)
    numbers = " or ".join(map(str, divisors[1:])) or "1"
    # more: the positions that a full sequence lacks for equal parts.
    length, more = args.model_max_length, -args.model_max_length % args.tp
    yield from [
        (f"{option} model", args.tp in divisors,
         f"its {heads} heads are dealt out evenly", f"--{option} {numbers} works"),
        ("sequence_parallel model_max_length", not (args.sequence_parallel and more),
         f"{args.tp} ranks cannot have equal parts", f"--model_max_length {length + more} works"),
    ]  # fmt: skip


def run_rank(
    world: World, args: TrainOptions, data: Texts | PictureSets, resume: Resume = NO_RESUME
) -> None:
    """One rank of the program. Raises RunError if a check finds a difference from one process."""
    task: TrainingTask
    resume = resume.of_main(world)  # collective
    if isinstance(data, PictureSets):
        task = PictureTask(args, world, data)
    else:
        task = text_task(args, world, data, resume)
    setup = setup_of(args, world)
    model = lay_out(args, task, world, setup, resume.cut)  # all ranks together
    announce(world, args, model, setup.timeline)
    average = model.average_gradients if isinstance(model, Replicated) else None
    profile = Profile(setup.timeline, args.profile, args.workdir)
    try:
        results = run(world, args, task, model, setup, average, resume, trackers_of(args))
        profile.close()
        close_trackers(args)
        # Collective, while the pipe is open; rank 0 keeps what it gets.
        outputs = outputs_on_main(world, task, model) if args.check_output else []
        finish(world, results, args)
        if any(args.workdir.glob("profile_rank*.json")):
            results.say(f"{args.workdir}/profile_rank*.json: open them in https://ui.perfetto.dev.")
    finally:
        model.close()

    def conclude() -> None:
        if args.check_weights or args.check_output:
            results.say("\nThe same training on one process, in plain PyTorch, and in float64 ...")
        verdicts = check(args, task, setup, model.devices[0], outputs)
        checks = {verdict.what: verdict.as_dict() for verdict in verdicts}
        write_json(args.workdir / SUMMARY, results.summary | {"checks": checks})
        for verdict in verdicts:
            results.say(verdict.say())
        wrong = [f"{v.what} are not those of one process" for v in verdicts if not v.agrees]
        if wrong:
            raise RunError(f"{args.strategy}: {'; '.join(wrong)}")

    on_main(world, conclude)  # to check, rank 0 trains twice; the others wait


def read_data(args: TrainOptions) -> Texts | PictureSets:
    """Pictures or texts, as the model needs. Raises UserError if there are none, or fewer than
    ranks."""
    if args.model != VGG:
        return read_texts(args)
    pictures = load_pictures(args.dataset, args.n_train, args.n_validation, seed=1234)
    fewest, option = min(len(pictures.train), len(pictures.test)), option_of(args, "dp")
    rules.require(args, [
        (f"{option} dataset", fewest >= args.dp,
         f"it has {counted(fewest, 'picture')}, and each rank needs one",
         works(f"--{option}", fewest)),
        rules.warmup(args, len(pictures.train)),
    ])  # fmt: skip
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
