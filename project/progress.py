"""Where a run is: what it saves while it trains, and how a later run goes on from it.

A checkpoint (`training.checkpoint`) is written at the end of each epoch, before it is evaluated,
and every --save_every steps. Beside weights, optimizer and random states it holds the position in
the data, the totals of the epoch, and the options. The global batch and the learning rate of
a step are functions of the seed and of the step's number, so its position is all there is to know.

At the same layout a run that goes on computes the bits of one that was never interrupted. On
another number of ranks, devices or micro-batches, or with the other program, it goes on with the
same global batches; sums are taken in another order, and dropout draws other masks.

Cost: nothing per step; per checkpoint, three numbers per parameter to the disk, shared out among
the ranks (gpt2-mini: 46 MB). Its time is in none of the results. --keep 0 writes none.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any

import torch

from project.options import plain
from project.rules import model_name
from project.session import CHECKPOINTS, FILES, Session, gather_over_ranks
from project.utils import NOTHING_YET, EpochTotals
from training.checkpoint import Checkpoint, Saver, newest, set_aside
from training.launch import UserError, choose_device
from training.optimization import Optimizers
from training.pieces import deal
from training.seeds import stream
from training.state import (
    Shards,
    generator_pieces,
    load_generators,
    load_training,
    training_pieces,
    whole_parameters,
)
from training.text import Texts

# What a run that goes on may have otherwise than the checkpoint: how long it trains and what it
# leaves where, and which devices compute the same thing in which order. All other options say
# *what* is computed; a new one does so until it is listed here.
MAY_CHANGE = {
    "n_epochs", "on_nan", "save_every", "keep", "resume", "pytest",
    "workdir", "export", "timeout", "master_port",
    "device", "world_size", "cores_per_rank", "accumulation_steps", "gradient_sync", "bucket_mb",
    "model_parallel_mode", "num_devices", "n_chunk", "schedule", "balance", "pipeline", "timeline",
    "strategy", "num_workers", "cores_per_worker", "num_batches", "num_microbatches", "zero",
    "check_weights", "check_output",
}  # fmt: skip

# What programs keep of the steps that are done, and which.
MADE_BY = {"totals": "run_data_parallel.py or run_pipeline.py", "log": "train.py"}


@dataclass(frozen=True)
class Resume:
    """What --resume found: a checkpoint that is whole, or None; those it refused, by name; and what
    there is to say about it."""

    checkpoint: Checkpoint | None
    refused: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def epoch(self) -> int:
        """Where it goes on."""
        return self.checkpoint.state["position"]["epoch"] if self.checkpoint else 0

    @property
    def cut(self) -> list[int] | None:
        """The layers per stage, if it was a pipeline that was saved."""
        return self.checkpoint.state["cut"] if self.checkpoint else None


NO_RESUME = Resume(None, (), ())


def find_resume(args: argparse.Namespace, needed: str = "totals") -> Resume:
    """The newest good checkpoint that --resume can go on from.

    Args:
        needed: what the state of a checkpoint must have; a key of MADE_BY.

    Raises:
        UserError: there are checkpoints and none is whole, or it is of another program, or of a run
            with other options.
    """
    if not args.resume:
        return NO_RESUME
    folder = args.workdir / CHECKPOINTS
    checkpoint, refused = newest(folder)
    if checkpoint is None and refused:
        raise UserError(
            f"--resume: no checkpoint in {folder} is whole ({'; '.join(refused.values())}); a run "
            "without --resume starts from the beginning"
        )
    notes = [f"Not used, {line}" for line in refused.values()]
    if checkpoint is None:
        return Resume(None, (), (f"--resume: {folder} has no checkpoint; from the beginning.",))
    if needed not in checkpoint.state:
        raise UserError(
            f"--resume: {checkpoint.folder.name} was not made by {MADE_BY[needed]}, and no other "
            "is gone on from here; another --workdir starts anew"
        )
    _check_options(args, checkpoint)
    at = checkpoint.state["position"]
    notes.append(f"From {checkpoint.folder}: epoch {at['epoch']}, {at['step']} steps done.")
    return Resume(checkpoint, tuple(refused), tuple(notes))


def _check_options(args: argparse.Namespace, checkpoint: Checkpoint) -> None:
    name, state = checkpoint.folder.name, checkpoint.state
    was, meant = state["options"], state["resolved"]  # as given; and what was chosen where not
    model = model_name(args, choose_device(args.device, 0, args.world_size))
    for option, value in plain({**vars(args), "model": model}).items():
        if option in MAY_CHANGE or option not in was or value in (was[option], meant[option]):
            continue
        now, then = _spelt(option, value), _spelt(option, meant[option])
        raise UserError(
            f"{now} with --resume: {name} was made with {then}; {then} goes on from it, "
            "another --workdir starts anew"
        )
    least = state["position"]["epoch"] + 1
    if args.n_epochs < least:
        raise UserError(
            f"--n_epochs {args.n_epochs} with --resume: {name} is in epoch {least - 1}, the first "
            f"being 0; --n_epochs {least} or more works"
        )
    if args.n_epochs != was["n_epochs"] and args.lr_scheduler != "constant":
        raise UserError(
            f"--n_epochs {args.n_epochs} with --resume: {name} has a learning rate that falls over "
            f"{was['n_epochs']} epochs; --n_epochs {was['n_epochs']} goes on from it"
        )


def _spelt(option: str, value: Any) -> str:
    """An option as a person gives it."""
    if value is None and option not in ("n_train", "n_validation", "n_test"):
        return f"no --{option}"
    return f"--{option} {'all' if value is None else value}"


def check_texts(texts: Texts, resume: Resume) -> None:
    """Raises UserError where the texts are no longer those of the checkpoint."""
    checkpoint = resume.checkpoint
    if checkpoint is not None and checkpoint.state["texts"] != texts.fingerprint():
        raise UserError(
            f"--resume: {checkpoint.folder.name} was trained on other texts of the same name; "
            "another --workdir starts anew"
        )


class Progress:
    """The position of a run, saved and restored. All ranks make one, just before they train.

    Args:
        optimizer: of the session's model, with nothing done yet.
        steps_per_epoch: of every rank.
        devices: those that this process computes on.
        resume: where to go on, if anywhere.
        cut: the layers per stage, to be remembered.
        shards: which pieces of parameters this rank holds; by default all, as every rank does.
    """

    def __init__(
        self,
        session: Session,
        optimizer: Optimizers,
        steps_per_epoch: int,
        devices: Sequence[torch.device],
        resume: Resume = NO_RESUME,
        cut: Sequence[int] | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.session = session
        self.optimizer = optimizer
        self.steps_per_epoch = steps_per_epoch
        self.devices = devices
        self.cut = cut
        self.shards = shards
        self.epoch = 0
        self.before = NOTHING_YET  # of the epoch's steps that were done when this run began
        args, world = session.args, session.world
        self.saver = Saver(
            args.workdir / CHECKPOINTS, args.keep, world.rank,
            lambda value: gather_over_ranks(value, world.world_size), resume.refused,
        )  # fmt: skip
        if resume.checkpoint is not None:
            self._restore(resume.checkpoint)
        elif world.is_main and not args.resume:
            set_aside(self.saver.folder)

    @cached_property
    def texts(self) -> str:
        """Which texts are trained on."""
        return self.session.texts.fingerprint()

    def epochs(self) -> Iterator[int]:
        """The epochs that are left; the first may have begun: see `before`."""
        for epoch in range(self.epoch, self.session.args.n_epochs):
            self.epoch = epoch
            yield epoch
            self.before = NOTHING_YET
        self._prune()

    def after_step(self, totals: EpochTotals) -> None:
        """Saves, if it is time to. That the step was finite speaks for the checkpoint before it."""
        self._prune()
        every = self.session.args.save_every
        if every and self.optimizer.steps % every == 0 and totals.steps < self.steps_per_epoch:
            self._save(totals)

    def end_epoch(self, totals: EpochTotals) -> None:
        """Saves, unless that is where this run began."""
        if totals.steps > self.before.steps:
            self._save(totals)

    def _prune(self) -> None:
        if self.session.args.keep and not self.optimizer.in_a_row:
            self.saver.prune()

    def _save(self, totals: EpochTotals) -> None:
        session, world = self.session, self.session.world
        if not session.args.keep:
            return
        parameters, optimizers = session.model.parameters(), self.optimizer.optimizers
        if self.shards is None:
            held = training_pieces(parameters, optimizers, whole_parameters(session.model))
            held = deal(held, world.rank, world.world_size)
        else:
            held = training_pieces(parameters, optimizers, self.shards)
        held += generator_pieces(world.rank, self.devices)
        every_rank = gather_over_ranks(asdict(totals), world.world_size)
        workdir = session.args.workdir
        files = {name: (workdir / name).read_bytes() for name in FILES} if world.is_main else {}
        self.saver.save(
            f"epoch{self.epoch}-step{totals.steps}", held, self._state(totals, every_rank), files
        )

    def _state(self, totals: EpochTotals, every_rank: list[dict[str, Any]]) -> dict[str, Any]:
        session = self.session
        return {
            "position": {"epoch": self.epoch, "step": totals.steps},
            **self.optimizer.state_dict(),
            "totals": every_rank,
            "times": session.times,
            "options": plain(vars(session.args)),
            "resolved": session.options(),
            "texts": self.texts,
            "cut": self.cut,
            "versions": versions(),
        }

    def _restore(self, checkpoint: Checkpoint) -> None:
        session, state = self.session, checkpoint.state
        shards = self.shards or whole_parameters(session.model)
        load_training(
            session.model.parameters(), self.optimizer.optimizers, shards, checkpoint.tensors
        )
        self.optimizer.load_state_dict(state)
        self.epoch = state["position"]["epoch"]
        session.times = [(seconds, speed) for seconds, speed in state["times"]]
        world = session.world
        self.before = share_out(state["totals"], world.rank, world.world_size)
        if not load_generators(world.rank, self.devices, checkpoint.tensors):
            # A rank or device that was not there: masks of its own, not those of epoch 0 again.
            torch.manual_seed(stream(session.args.seed, "dropout", world.rank, state["steps"]))


def share_out(totals: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> EpochTotals:
    """A rank's totals: its own, or an equal part of all where there are more or fewer ranks now."""
    if len(totals) == world_size:
        return EpochTotals(**totals[rank])
    sums = {field.name: sum(t[field.name] for t in totals) for field in fields(EpochTotals)}
    parts = {
        name: value // world_size + (rank < value % world_size)
        if isinstance(value, int)
        else value / world_size
        for name, value in sums.items()
    }
    # What all ranks have in common is no sum.
    same = {name: totals[0][name] for name in ("seconds", "skipped", "steps")}
    return EpochTotals(**{**parts, **same})


@cache
def versions() -> dict[str, str]:
    """Of what wrote a checkpoint."""
    libraries = ("torch", "transformers", "tokenizers", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in libraries}}
