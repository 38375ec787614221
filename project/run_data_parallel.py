"""Trains GPT-2 to translate, with data parallelism on several processes.

Every process holds the whole model and a part of each batch; gradients are averaged over the
processes while they are computed. The losses are those of one process with the whole batch.

    python project/run_data_parallel.py --world_size 2 --batch_size 128 --n_epochs 10
    torchrun --nproc-per-node 2 project/run_data_parallel.py
    python project/run_data_parallel.py --pytest True --n_epochs 1      then: pytest -k a4_1_2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from project.options import Data, Files, Model, Positive, Processes, Training, begin, parse


@dataclass
class DataParallel:
    """data parallelism"""

    gradient_sync: Literal["per_parameter", "flat", "overlap"] = "overlap"
    """one all-reduce per parameter after backward, one for all, or buckets while backward runs"""
    bucket_mb: Positive | None = None
    """size of a bucket of gradient_sync overlap in MiB; default: 4, and 25 over NCCL"""
    comm_dtype: Literal["fp32", "bf16"] = "fp32"
    """type in which buckets are sent"""
    pytest: bool = False
    """True: an epoch without evaluation; each rank writes tests/model{rank}_gradients.pth"""


@dataclass
class DataParallelOptions(Training, Data, Model, Files, Processes, DataParallel):
    """Of run_data_parallel.py."""


if __name__ == "__main__":
    begin(DataParallelOptions, __doc__)

# The imports below take seconds: --help and mistyped options are answered by now.
from itertools import islice

import torch

from data_parallel.gradients import average_gradients, default_bucket_bytes
from project.utils import (
    announce,
    finish,
    plan_of,
    read_texts,
    run_program,
    save_grad_weights,
    text_task,
)
from training.files import OPTIONS, show, write_json
from training.launch.errors import UserError, torchrun
from training.launch.launch import Settings, launch, setup
from training.launch.world import World, choose_backend
from training.layouts.replicated import Replicated
from training.loop import recipe_of, run, train
from training.optimization import Optimizers
from training.results import options_of
from training.resume import NO_RESUME, Resume, find_resume
from training.rules import (
    check_batch,
    check_microbatches,
    check_model,
    check_recompute,
    settle_ranks,
    settle_training,
)
from training.tasks.sequences import SequenceTask
from training.tasks.texts import Texts
from training.workdir import alone_in_workdir, claim_folders

__all__ = ["average_gradients", "main", "run_dp", "setup"]


def parse_data_parallel(description: str | None, argv: Sequence[str] | None = None) -> Any:
    """The options, each with its value. Raises UserError if they do not fit together."""
    args: Any = parse(DataParallelOptions, description, argv)
    args.strategy = "ddp"
    settle_ranks(args)  # first: the checks below need world_size
    if args.gradient_sync != "overlap":
        for name, given in (("bucket_mb", args.bucket_mb), ("comm_dtype", args.comm_dtype)):
            if given not in (None, "fp32"):
                raise UserError(
                    f"--{name} {given} --gradient_sync {args.gradient_sync}: only the buckets of "
                    "--gradient_sync overlap have it"
                )
    here = torchrun("LOCAL_WORLD_SIZE", args.world_size)  # ranks of this machine
    usual = default_bucket_bytes(choose_backend(args.device, here)) / 2**20
    args.bucket_mb = args.bucket_mb or usual
    check_batch(args, args.world_size)
    check_microbatches(args, args.world_size)
    check_recompute(args, one_at_a_time=True)
    settle_training(args)
    check_model(args)
    claim_folders(args)  # last, since it makes folders
    return args


def run_dp(world: World, args: Any, texts: Texts, resume: Resume = NO_RESUME) -> None:
    """One rank of the program: trains, evaluates after each epoch, writes its results."""
    resume = resume.of_main(world)  # collective
    task = text_task(args, world, texts, resume)
    plan = plan_of(args, world)
    model = Replicated(
        task, world, plan, args.gradient_sync,
        bucket_bytes=max(1, int(min(args.bucket_mb, 2**30) * 2**20)),
        comm_dtype=torch.bfloat16 if args.comm_dtype == "bf16" else None,
    )  # fmt: skip
    if args.pytest:
        write_gradients(world, args, task, model)
        return
    announce(world, args, model)
    results = run(world, args, task, model, plan, model.average_gradients, resume)
    finish(world, results, args)  # collective: rank 0 draws, the others wait
    model.close()


def write_gradients(world: World, args: Any, task: SequenceTask, model: Replicated) -> None:
    """An epoch without evaluation; then each rank writes the gradients of its last step, and the
    first one the options."""
    optimizer = Optimizers(model.optimizers, recipe_of(args, task), world, counted=model.counted)
    steps = task.steps(0, model.part, model.parts, model.num_microbatches)
    steps = islice(steps, args.num_batches or task.steps_per_epoch)  # at most an epoch
    train(model, optimizer, steps, "Epoch 1", world.rank, model.average_gradients)
    show(f"rank {world.rank} wrote {save_grad_weights(model.module, world.rank)}")
    if world.is_main:
        write_json(args.workdir / OPTIONS, options_of(args))


def main() -> None:
    """The program."""
    args = parse_data_parallel(__doc__)
    with alone_in_workdir(args):
        texts = read_texts(args)  # once, before ranks start; under torchrun by every rank
        resume = find_resume(args, texts.fingerprints()["train"])
        launch(run_dp, Settings.of(args), args, texts, resume)  # returns when all ranks have


if __name__ == "__main__":
    run_program(main)
