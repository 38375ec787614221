"""Trains GPT-2 to translate, with data parallelism on several processes.

Every process holds the whole model and a part of each batch; gradients are averaged over the
processes. The losses are those of one process with the whole batch.

    python project/run_data_parallel.py --world_size 2 --batch_size 128 --n_epochs 10
    torchrun --nproc-per-node 2 project/run_data_parallel.py
    python project/run_data_parallel.py --pytest True --n_epochs 1      then: pytest -k a4_1_2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from project.command_line import begin, parse_options
from runtime.axes import sizes
from training.options import (
    Architecture,
    Data,
    DataParallel,
    Files,
    Options,
    Processes,
    Training,
)  # fmt: skip


@dataclass
class DataParallelOptions(Options):
    """The options of run_data_parallel.py."""

    GROUPS = (Training, Data, Architecture, Files, Processes, DataParallel)
    strategy: str = "ddp"


if __name__ == "__main__":
    typed = begin(DataParallelOptions, __doc__)

# The imports below take seconds: --help and mistyped options are answered by now.
from itertools import chain, islice

from data_parallel.gradients import average_gradients
from project import rules
from project.utils import run_program, save_grad_weights, train_and_finish, translation
from training.files import OPTIONS, show, write_json
from training.launch.launch import launch
from training.launch.meeting import setup
from training.launch.world import World
from training.layouts.layout import LaidOutModel
from training.layouts.replicated import Replicated
from training.loop import train
from training.optimization import Recipe
from training.rank import run_rank
from training.results import holds_run, options_of
from training.resume import Resume, as_it_was
from training.workdir import alone_in_workdir

__all__ = ["average_gradients", "main", "run_dp", "setup"]


def parse_data_parallel(argv: Sequence[str]) -> DataParallelOptions:
    """The options of a command line, each with its value."""
    return settled_data_parallel(parse_options(DataParallelOptions, None, argv))


def settled_data_parallel(given: DataParallelOptions) -> DataParallelOptions:
    """The options, each with its value. Raises UserError if they do not fit together."""
    args = as_it_was(given, "ddp")
    ranks = rules.ranks_of_run(args) or 2
    args = rules.settled(replace(args, world_size=ranks, **{**sizes(dp=ranks), "shards": None}))
    rules.require(args, chain(rules.rules(args), rules.of_model(args)))
    return args


def run_dp(world: World, args: DataParallelOptions) -> None:
    """One rank of the program: trains, evaluates after each epoch, writes its results."""
    work = write_gradients if args.pytest else train_and_finish
    run_rank(world, args, translation, Replicated, work)


def write_gradients(model: LaidOutModel, _: Resume) -> None:
    """Trains for an epoch without evaluation. Then each rank writes the gradients of its last step,
    and rank 0 the options, unless the workdir already has a run."""
    task, args = model.task, model.setup.args
    assert model.module is not None  # of `Replicated`
    recipe = Recipe(args, task.steps_per_epoch)
    optimizer = model.global_optimizer(recipe)
    steps = task.steps(0, model.dp_rank, model.dp_size, model.num_microbatches)
    steps = islice(steps, args.num_batches or task.steps_per_epoch)  # at most an epoch
    number = model.world.rank
    train(model, optimizer, steps, "Epoch 1", number, model.average_gradients)
    show(f"rank {number} wrote {save_grad_weights(model.module, number)}")
    if model.world.is_main and not holds_run(args.workdir):
        write_json(args.workdir / OPTIONS, options_of(args))


def main(given: DataParallelOptions) -> None:
    """The program."""
    args = settled_data_parallel(given)
    with alone_in_workdir(args):
        launch(run_dp, args, args)  # returns when all ranks have


if __name__ == "__main__":
    run_program(partial(main, typed))
