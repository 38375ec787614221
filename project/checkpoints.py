"""Checkpoints of project/train.py: saved under any strategy, gone on from under any other.

What is saved is named after parameters (training/state.py), so a run that was sharded on four
workers goes on as a pipeline on two: with the same global batches, sums in another order. At the
same layout it computes the bits of a run that was never interrupted.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from project.log import Log
from project.options import plain
from project.progress import NO_RESUME, Resume, find_resume, versions
from project.recipes import learning_rate
from project.session import CHECKPOINTS, gather_over_ranks
from project.strategy import Strategy
from project.task import Data, Task
from training.checkpoint import Saver, clean, set_aside
from training.launch import UserError, World
from training.optimization import Optimizers
from training.pictures import PictureSets
from training.pieces import deal
from training.seeds import stream
from training.state import generator_pieces, load_generators, load_training, training_pieces


def find(args: argparse.Namespace, data: Data) -> Resume:
    """What --resume goes on from.

    Raises:
        UserError: there is nothing whole, or it is of a run with other options or data.
    """
    resume = find_resume(args, "log") if args.resume else NO_RESUME
    if resume.checkpoint is None:
        return resume
    name, state = resume.checkpoint.folder.name, resume.checkpoint.state
    if state["texts"] != data.fingerprint():
        raise UserError(
            f"--resume: {name} was trained on other data of the same name; another --workdir "
            "starts anew"
        )
    _check_length(args, data, name, state["steps"])
    was = state["options"]["num_batches"]
    if args.num_batches != was and args.lr_scheduler != "constant":
        then = "no --num_batches" if was is None else f"--num_batches {was}"
        raise UserError(
            f"--num_batches {args.num_batches} with --resume: {name} has a learning rate that "
            f"falls over its steps; {then} goes on from it"
        )
    return resume


def _check_length(args: argparse.Namespace, data: Data, name: str, done: int) -> None:
    """Raises UserError where the checkpoint has done more steps than the run is to have."""
    examples = len(data.train) if isinstance(data, PictureSets) else len(data.splits["train"])
    per_epoch = -(-examples // args.batch_size)
    option, given, least = "n_epochs", args.n_epochs, -(-done // per_epoch)
    if args.num_batches is not None:
        option, given, least = "num_batches", args.num_batches, done
    if given < least:
        raise UserError(
            f"--{option} {given} with --resume: {name} has done {done} steps; --{option} {least} "
            "or more works"
        )


class Checkpoints:
    """The checkpoints of a run; all ranks call its methods together."""

    def __init__(
        self,
        world: World,
        args: argparse.Namespace,
        task: Task,
        strategy: Strategy,
        optimizer: Optimizers,
        resume: Resume,
    ) -> None:
        self.world, self.args, self.task = world, args, task
        self.strategy, self.optimizer = strategy, optimizer
        self.fingerprint = task.data.fingerprint()
        self.saver = Saver(
            args.workdir / CHECKPOINTS, args.keep, world.rank,
            lambda value: gather_over_ranks(value, world.world_size), resume.refused,
        )  # fmt: skip
        self.saved = 0  # the step after which there was one last
        if world.is_main:
            clean(self.saver.folder)  # of what a killed run has left half written
            if resume.checkpoint is None and not args.resume:
                set_aside(self.saver.folder)

    def restore(self, resume: Resume, log: Log) -> None:
        """Puts weights, optimizer, random states and log back; the optimizer knows the step."""
        if resume.checkpoint is None:
            return
        state, tensors = resume.checkpoint.state, resume.checkpoint.tensors
        strategy, rank = self.strategy, self.world.rank
        load_training(strategy.held(), strategy.optimizers, strategy.pieces, tensors)
        strategy.loaded()
        self.optimizer.load_state_dict(state)
        log.before = state["log"]
        self.saved = state["steps"]
        was = state["options"]
        same = all(was[name] == getattr(self.args, name) for name in ("strategy", "num_workers"))
        if not (same and load_generators(rank, [self.world.device], tensors)):
            # Masks of its own, not those of the start again; nor those of a pipeline, whose ranks
            # draw alike, and would go on doing so where each has other examples.
            torch.manual_seed(stream(self.args.seed, "dropout", strategy.part, state["steps"]))

    def after_step(self, log: Log, total: int) -> None:
        """Saves at the end of an epoch, of the run, and every --save_every steps."""
        steps, args = self.optimizer.steps, self.args
        self._prune()  # that the step was finite speaks for the checkpoint before it
        every = (args.save_every, None if args.num_batches else self.task.steps_per_epoch, total)
        if args.keep and steps > self.saved and any(n and steps % n == 0 for n in every):
            self._save(log)
        if steps == total:
            self._prune()

    def _prune(self) -> None:
        if self.args.keep and not self.optimizer.in_a_row:
            self.saver.prune()

    def _save(self, log: Log) -> None:
        world, strategy = self.world, self.strategy
        held = training_pieces(strategy.held(), strategy.optimizers, strategy.pieces)
        if strategy.replicated:
            held = deal(held, world.rank, world.world_size)
        held += generator_pieces(world.rank, [world.device])
        epoch, step = 0, self.optimizer.steps
        if not self.args.num_batches:
            epoch = (step - 1) // self.task.steps_per_epoch
            step -= epoch * self.task.steps_per_epoch
        state = {
            "position": {"epoch": epoch, "step": step},
            **self.optimizer.state_dict(),
            "log": log.whole(world.device),
            "options": plain(vars(self.args)),
            "resolved": plain({**vars(self.args), "learning_rate": learning_rate(self.args)}),
            "texts": self.fingerprint,
            "cut": None,
            "versions": versions(),
        }
        files: dict[str, Any] = {}
        if world.is_main:
            files = {
                name: (self.args.workdir / name).read_bytes() for name in self.task.small_files
            }
        self.saver.save(f"step{self.optimizer.steps}", held, state, files)
        self.saved = self.optimizer.steps
