"""Trains a model under any strategy, on processes that exchange tensors: VGG16 on images or, with
--model gpt2-mini, GPT-2 on text.

python project/train.py ddp --model gpt2-mini      two processes, text
python project/train.py -w 2 -n 5 ddp              two processes, images, five steps
python project/train.py ddp --help                 explains ddp and its options, with examples
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from project.command_line import begin, parse_options
from project.strategies import STRATEGIES
from runtime.axes import AXES, FACTORS, LAYER_AXES, named, ranks_of
from training.options import (
    UNSET,
    VGG,
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
)  # fmt: skip


@dataclass
class TrainOptions(Options):
    """The options of train.py."""

    GROUPS = (Training, Data, Architecture, Files, Processes, Axes, Stages, Tools)
    n_epochs: Count = 1
    batch_size: Count = 32
    """examples per step: the global batch, of all ranks together, not of each rank"""
    learning_rate: Positive = UNSET
    """peak rate; default: 1e-3 for gpt2-mini, 3e-4 for vgg16, otherwise 1e-4; 30 times that with
    --optimizer sgd"""
    dataset: str = "builtin"
    """builtin; for GPT-2 as in run_data_parallel.py, or a .txt file or a folder of them; for VGG16
    a folder (Parquet, or train/CLASS/ and test/CLASS/) or a dataset on the hub"""
    model: str = VGG
    """vgg16 learns images; gpt2-mini, gpt2, ... learn text; or pretrained: a folder or a hub id"""
    dropout: Fraction = 0.0
    cores_per_rank: Count | None = 1
    """CPU cores per process"""
    workdir: Path = UNSET
    """folder for results; default: workdir, then the strategy and its ranks: workdir/ddp2"""


if __name__ == "__main__":
    typed = begin(TrainOptions, __doc__)

# The imports below take seconds: --help and mistyped options are answered by now.

from project import rules, stage_rules, train_rules
from project.utils import finish, run_program
from runtime.mesh import make_mesh
from training.check import check, outputs_on_main
from training.files import SUMMARY, write_json
from training.launch.errors import RunError
from training.launch.launch import launch
from training.launch.world import World
from training.layouts.layout import LaidOutModel, Setup
from training.layouts.replicated import Replicated
from training.layouts.sharded import Sharded
from training.layouts.stages import Staged
from training.rank import run_rank, trained
from training.resume import Resume, as_it_was
from training.tasks.experts import LanguageWithExperts, TranslationWithExperts
from training.tasks.gpt2 import PRESETS
from training.tasks.language import LanguageTask
from training.tasks.pictures import load_pictures
from training.tasks.pretrained import Pretrained
from training.tasks.sequences import SequenceTask
from training.tasks.task import TrainingTask
from training.tasks.texts import load_texts
from training.tasks.tokens import TOKENIZER_FILES
from training.tasks.translation import TranslationTask
from training.tasks.vgg import PictureTask
from training.workdir import alone_in_workdir


def parse_train(argv: Sequence[str]) -> TrainOptions:
    """The options of a command line, each with its value."""
    return settled_train(parse_options(TrainOptions, None, argv))


def settled_train(given: TrainOptions) -> TrainOptions:
    """The options, each with its value. Raises UserError if they do not fit together."""
    args = as_it_was(settled_axes(given), given.strategy)  # the workdir is named by the axes
    args = rules.settled(args)
    rules.require(args, train_rules.of_strategy(args))
    return args


def settled_axes(args: TrainOptions) -> TrainOptions:
    """The options with the length of every axis, the number of ranks, the workdir (which these
    name), and the stages per rank. Under 3d, dp follows from the number of ranks, which torchrun
    may change when it restarts them."""
    lengths: dict[str, Any] = {axis: getattr(args, axis) or 1 for axis in AXES}
    own = STRATEGIES[args.strategy].axis
    product = math.prod(lengths[axis] for axis in FACTORS)
    ranks = rules.ranks_of_run(args) or (2 if own else product)
    if own is not None:
        lengths[own] = ranks
    elif args.dp is None:
        lengths["dp"] = max(1, ranks // product)
    workdir = args.workdir or Path(f"workdir/{args.strategy}{ranks if own else named(lengths)}")
    typed = args.num_microbatches if "num_microbatches" in args.typed else None
    chunks, pp = args.chunks or None, lengths["pp"]
    order = stage_rules.schedule_of_run(args.schedule, pp, typed, chunks)
    lengths["shards"] = args.shards  # None: all
    return replace(args, **lengths, world_size=ranks, workdir=workdir, **order)


def lay_out(task: TrainingTask, world: World, setup: Setup) -> LaidOutModel:
    """The model under the strategy of the options. All ranks call it together."""
    args = setup.args
    if STRATEGIES[args.strategy].whole and args.ep == 1:
        return Replicated(task, world, setup)
    more = [LAYER_AXES] if args.optimizer == "muon" else []  # over these, Muon makes matrices whole
    mesh = make_mesh(ranks_of(vars(args)), args.timeout, more)
    return (Sharded if args.zero in (2, 3) else Staged)(task, world, setup, mesh)


def task_of(args: TrainOptions, world: World, resume: Resume) -> TrainingTask:
    """Reads pictures or text, whichever the model learns, and makes the task. Raises UserError if
    there are none, or fewer pairs than ranks."""
    if args.model == VGG:
        pictures = load_pictures(args.dataset, args.n_train, args.n_validation, shown=world.is_main)
        return PictureTask(args, world, pictures)
    texts = load_texts(args, world)
    kinds: tuple[type[SequenceTask], ...] = (TranslationTask, LanguageTask)
    if args.experts:
        kinds = TranslationWithExperts, LanguageWithExperts
    files = resume.files(TOKENIZER_FILES) if world.is_main else None
    preset = args.model in PRESETS
    pretrained = None if preset else Pretrained(args.model, args.dropout, args.seed)
    return kinds[texts.plain](args, world, texts, files, pretrained)


def work(model: LaidOutModel, resume: Resume) -> None:
    """Trains, and checks. Raises RunError if a check finds a difference from one process."""
    args, results = model.setup.args, trained(model, resume)
    # Collective; rank 0 gets and keeps the outputs.
    outputs = outputs_on_main(model) if args.check_output else {}
    finish(results)

    def conclude() -> None:
        results.say("\nThe same training on one process, in plain PyTorch, and in float64 ...")
        verdicts = check(model, outputs)
        checks = {verdict.what: verdict.as_dict() for verdict in verdicts}
        write_json(args.workdir / SUMMARY, results.summary | {"checks": checks})
        for verdict in verdicts:
            results.say(verdict.say())
        wrong = [f"{v.what} are not those of one process" for v in verdicts if not v.agrees]
        if wrong:
            raise RunError(f"{args.strategy}: {'; '.join(wrong)}")

    if args.check_weights or args.check_output:
        model.world.on_main(conclude)  # rank 0 trains twice; the others wait


def train_rank(world: World, args: TrainOptions) -> None:
    """One rank of the program."""
    run_rank(world, args, task_of, lay_out, work)


def main(given: TrainOptions) -> None:
    """The program."""
    args = settled_train(given)
    with alone_in_workdir(args):
        launch(train_rank, args, args)  # returns when all ranks have


if __name__ == "__main__":
    run_program(partial(main, typed))
