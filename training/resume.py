"""Saves the state of a run while it trains, and resumes it in a later run.

A checkpoint (training/checkpoint.py) is written at the end of every epoch, before it is evaluated,
and every --save_every steps. With weights and optimizer state it holds the number of steps done,
the totals of the epoch, and the options. The losses so far are in metrics.jsonl. The global batch,
the learning rate and the dropout of a step are functions of the seed and the step's number; hashed
dropout masks are functions of seed, epoch and example.

A run that was saved in the middle of an epoch is resumed as follows:

    Saving.save         writes the steps done in the run, and the epoch's `Totals` with its steps
    Saving.restore      reads weights and optimizer, `optimizer.steps`, and those totals: `before`
    loop.run            begins in the epoch of the last step done; `train` goes on from `before`
    task.steps          deals out the epoch, in an order that seed and epoch decide, from batch
                        `before.steps` on
    seed_step           seeds dropout by the number of the step in the run

Any program can resume a checkpoint that another has saved of the same model. With the same layout
the result is bit-identical to an uninterrupted run. With a different layout the global batches are
the same; sums are taken in a different order, and dropout that draws (on a GPU) differs.

Cost: three numbers per parameter on disk, each rank writing its share (gpt2-mini: 46 MB in all).
No result includes the time of saving.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from runtime.axes import AXES
from training.checkpoint import (
    Checkpoint,
    Saver,
    clean,
    load_training,
    names,
    newest,
    training_state,
)
from training.files import CHECKPOINTS, ENDED, OPTIONS, show, unused, writing
from training.optimization import GlobalOptimizer, Recipe
from training.options import Architecture, Data, O, Options, option_names, spelt
from training.results import NOTHING_YET, Totals, evaluations, holds_run, options_of, write_options

from .launch.errors import RunError, UserError, counted, torchrun_world_size
from .launch.signals import Ended
from .launch.world import World
from .layouts.layout import LaidOutModel

# Options that decide *what* is computed: a resumed run must have the same.
DECIDE = {
    *option_names(Data, Architecture), "batch_size", "optimizer", "momentum", "weight_decay",
    "betas", "eps", "max_grad_norm", "precision", "comm_dtype", "seed", "max_batches", "vgg_width",
    "experts", "top_k", "shared_experts", "balance_by", "balance_coefficient", "balance_rate",
    "router_z", "adamw_lr",
}  # fmt: skip
# And these, unless the rates of all steps that were done would have been the same.
OF_RATES = {"learning_rate", "lr_scheduler", "warmup_steps", "decay_steps", "min_lr"}
# How long the run is, and how the ranks compute it. If one option of such a set was typed, a resume
# takes no other option of it from the saved run either.
LENGTH = {"n_epochs", "num_batches"}
OF_LAYOUT = {
    "world_size", *AXES, "zero", "sequence_parallel", "attention", "schedule", "chunks", "balance",
    "num_microbatches", "recompute", "gradient_sync", "bucket_mb", "num_devices", "pipeline",
    "compile",
}  # fmt: skip


@dataclass(frozen=True)
class Resume:
    """What --resume found: an intact checkpoint or None, and notes for the user."""

    checkpoint: Checkpoint | None
    notes: tuple[str, ...] = ()

    @property
    def cut(self) -> list[int] | None:
        """The measured layers per stage, if a pipeline was saved."""
        return self.checkpoint.state["cut"] if self.checkpoint else None

    def files(self, names: Sequence[str]) -> dict[str, bytes] | None:
        """Small files of the checkpoint. Only rank 0 sees its folder."""
        return {n: self.checkpoint.read(n) for n in names} if self.checkpoint else None

    def check_data_and_model(self, fingerprints: Mapping[str, str], config: bytes) -> None:
        """Raises UserError if the run that was saved had different data in one of these splits, or
        a model whose config.json differs in what no shape of a weight tells: a pretrained one may
        have changed. A checkpoint of an older version, which has fewer fingerprints, is compared
        by those. Call it on rank 0."""
        if self.checkpoint is None:
            return
        now, was = json.loads(config), json.loads(self.checkpoint.read("config.json"))
        for name in ("n_head", "activation_function", "layer_norm_epsilon"):
            if name in was and now.get(name) != was[name]:  # VGG16 has none of them
                raise UserError(
                    f"--resume: {self.checkpoint.folder.name} had a model with {name} {was[name]}, "
                    f"and now it is {now.get(name)}; use the same model, or a different --workdir "
                    "to start a new run"
                )
        saved = self.checkpoint.state.get("examples", {})
        saved = saved if isinstance(saved, dict) else {"train": saved}
        if differ := [split for split, was in saved.items() if fingerprints.get(split) != was]:
            raise UserError(
                f"--resume: {self.checkpoint.folder.name} had different {differ[0]} data of the "
                "same name; use a different --workdir to start a new run"
            )


NO_RESUME = Resume(None)


def as_it_was(args: O, *strategies: str) -> O:
    """With --resume, the options with the values that they had in the run in the workdir. Those
    that were typed keep their values. So do --check_weights and --check_output, since a flag that
    is set cannot be unset by typing. The options of the layout are taken from that run if it had
    one of `strategies`, no option of the layout was typed, and torchrun does not decide how many
    ranks there are."""
    saved = options_in(args.workdir, newest(args.workdir / CHECKPOINTS)[0]) if args.resume else {}
    left = {"workdir", "check_weights", "check_output", *args.typed}
    if LENGTH & args.typed:
        left |= LENGTH
    other = saved.get("strategy") not in strategies or torchrun_world_size() is not None
    if other or OF_LAYOUT & args.typed:
        left |= OF_LAYOUT
    names = saved.keys() & {*option_names(*args.GROUPS)} - left
    sizes = {"n_train", "n_validation", "n_test"}
    taken: dict[str, Any] = {name: saved[name] or "all" for name in names & sizes}  # as typed
    # Others may be unset, if the program that saved them lacks them.
    taken |= {name: saved[name] for name in names - sizes if saved[name] is not None}
    return replace(args, **taken)


def options_in(workdir: Path, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """The options of the run that is resumed. Before its first checkpoint options.json has them."""
    if checkpoint is not None:
        return dict(checkpoint.state["options"])
    file = workdir / OPTIONS
    try:
        return dict(json.loads(file.read_text("utf-8"))) if file.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file}: {error}; without --resume a new run begins") from error


def find_resume(args: Options) -> Resume:
    """The newest intact checkpoint, for --resume. Rank 0 looks for it, and sends it to the others,
    whose hosts may have different folders.

    Raises:
        UserError: all checkpoints are damaged, or the newest cannot be read now; options differ
            from those of the run; or the run has done more steps than the options ask for.
    """
    if not args.resume:
        return NO_RESUME
    folder = args.workdir / CHECKPOINTS
    checkpoint, refused = newest(folder)
    name = checkpoint.folder.name if checkpoint else OPTIONS
    now, was = options_of(args), options_in(args.workdir, checkpoint)
    fixed = DECIDE | OF_RATES
    before = replace(args, **{name: was[name] for name in OF_RATES | LENGTH if name in was})
    if checkpoint and _rates(args, checkpoint) == _rates(before, checkpoint):
        fixed = DECIDE  # as in the stable phase of wsd
    elif checkpoint and args.lr_scheduler != "constant":  # a decay depends on the run's length
        fixed |= LENGTH
    # What an older version has not saved is no difference.
    differ = [x for x in now if x in fixed and not _alike(x, now[x], was.get(x, now[x]))]
    if differ:
        here = " ".join(spelt(key, now[key]) for key in differ if key in args.typed) or "this run"
        there = ", ".join(spelt(key, was[key]) for key in differ)
        raise UserError(
            f"{here} with --resume: {name} was saved with {there}; keep that, in a program that "
            "has it, or use another --workdir to start a new run"
        )
    if checkpoint is None:
        options = f"with the options in {OPTIONS}" if was else "as typed"
        return Resume(None, (f"--resume: {folder} has no checkpoint; starting afresh, {options}.",))
    done, per_epoch = checkpoint.state["steps"], checkpoint.state["steps_per_epoch"]
    total = args.num_batches or args.n_epochs * per_epoch
    if total < done:
        length = "num_batches" if args.num_batches else "n_epochs"
        raise UserError(
            f"{spelt(length, now[length])} with --resume: {name} has done {counted(done, 'step')} "
            f"({done / per_epoch:g} epochs); as many or more work"
        )
    notes = [f"Set aside a damaged checkpoint, as damaged-...: {reason}" for reason in refused]
    notes.append(f"Resumed from {checkpoint.folder}: {counted(done, 'step')} done.")
    if total == done:
        notes.append("Nothing is left to train.")
    return Resume(checkpoint, tuple(notes))


def _alike(option: str, now: Any, was: Any) -> bool:
    """Whether two values of an option have the same effect. A folder or file may have moved, so its
    name alone counts: `check_data_and_model` compares its content; tokenizer and weights are the
    checkpoint's."""
    if option in ("dataset", "tokenizer", "model") and now and was:
        return Path(now).absolute().name == Path(was).absolute().name
    return bool(now == was)


def _rates(args: Options, checkpoint: Checkpoint) -> list[float]:
    """The learning rates of the steps that were done, by these options."""
    recipe = Recipe(args, checkpoint.state["steps_per_epoch"])
    return [recipe.learning_rate_at(step) for step in range(checkpoint.state["steps"])]


def _is_of_a_run(workdir: Path) -> bool:
    """Whether options.json is a run's, and intact, and not a user's own file or folder."""
    with suppress(UserError):
        return "strategy" in options_in(workdir, None)
    return False


@contextmanager
def started(world: World, args: Options) -> Iterator[None]:
    """Writes options.json, so that --resume knows the options before anything is saved. (If an
    earlier run is in the workdir, that is the one to resume, and nothing is written.) An error in
    the `with` removes the file, or puts back the one that was there: it is all that is left of a
    run without a checkpoint."""
    begins = world.is_main and not holds_run(args.workdir)
    path = args.workdir / OPTIONS
    if begins and path.exists() and not _is_of_a_run(args.workdir):
        with writing(path):
            show(f"{path} is not of a run; it is now {path.rename(unused(path))}.")
    earlier = path.read_bytes() if begins and path.exists() else None
    if begins:
        write_options(args)
    try:
        yield
    except (UserError, RunError) as error:
        if begins and not isinstance(error, Ended):
            if earlier is None:
                path.unlink()
            else:
                path.write_bytes(earlier)
        raise


@dataclass(eq=False)
class Saving:
    """The checkpoints of a run. All ranks call its methods together."""

    args: Options
    model: LaidOutModel
    optimizer: GlobalOptimizer

    def __post_init__(self) -> None:
        self.world, self.task = self.model.world, self.model.task
        self.fingerprints = self.task.fingerprints()
        folder = self.args.workdir / CHECKPOINTS
        if self.world.is_main:
            (self.args.workdir / ENDED).unlink(missing_ok=True)
        clean(folder)  # on every host, before the ranks meet to make the Saver
        self.saver = Saver(folder, self.world, self.args.timeout, self.args.async_save)
        self.saved = 0  # the steps done at the last checkpoint

    def restore(self, resume: Resume) -> Totals:
        """Restores weights and optimizer from the checkpoint, if there is one; returns the totals
        of the epoch that it was saved in."""
        if resume.checkpoint is None:
            return NOTHING_YET
        state = resume.checkpoint.state
        load_training(self.saver, resume.checkpoint, self.model)
        self.saver.set_aside_after(resume.checkpoint)
        self.optimizer.steps, self.optimizer.in_a_row = state["steps"], state["in_a_row"]
        self.saved = state["steps"]  # `save` need not save it again
        done, n, part = Totals(**state["totals"]), self.model.dp_size, self.model.dp_rank
        # Each part of the batch has an equal share; together they have all.
        return replace(
            done, positions=(done.positions + part) // n, tokens=(done.tokens + part) // n
        )

    def after_step(self, epoch: int, totals: Totals, now: bool = False) -> None:
        """Saves every --save_every steps, or now."""
        interval = self.args.save_every
        if now or (interval and self.optimizer.steps % interval == 0):
            self.save(epoch, totals)

    @contextmanager
    def before_the_end(self) -> Iterator[None]:
        """If the run ends early, waits for the checkpoint that is being written. If it ends on
        notice, says how to go on; each rank of rank 0's host also marks the workdir (`ENDED`),
        since the first that ends may end the others."""
        try:
            yield
        except RunError as error:  # the weights of the step before may be the last good ones
            self.saver.wait()
            if not isinstance(error, Ended):
                raise
            said = "no step is saved"
            if self.saved:
                said = f"step {self.saved} is saved, and --resume goes on from there"
                if self.world.rank == self.world.local_rank:
                    (self.args.workdir / ENDED).touch()
            raise Ended(f"The run was asked to end: {said}.") from None

    def prune(self) -> None:
        """Waits for the last checkpoint, and removes older ones if the last step was finite, which
        shows finite weights."""
        self.saver.wait()
        if self.args.keep and not self.optimizer.in_a_row:
            best = self._best() if self.args.keep_best and self.world.is_main else None
            self.saver.prune(self.args.keep, best)

    def _best(self) -> str | None:
        """The label of the checkpoint with the lowest validation loss, if one has any."""
        saved = {name.partition("-")[2] for name in names(self.saver.folder)}
        losses = {
            checkpoint_label(x["epoch"], x["step"] - x["epoch"] * self.task.steps_per_epoch): loss
            for x in evaluations(self.args.workdir)
            if (loss := x["validation_loss"]) is not None  # else NaN
        }
        return min((x for x in losses if x in saved), key=losses.__getitem__, default=None)

    def save(self, epoch: int, totals: Totals) -> None:
        """Saves, unless this step was saved already. Removes older checkpoints first."""
        world, model, steps = self.world, self.model, self.optimizer.steps
        if not self.args.keep or steps <= self.saved:
            return
        world.last.note("checkpoint")
        self.prune()  # first: no step has shown yet that what is saved now is finite
        shares = world.of_parts(model.dp_rank, (totals.positions, totals.tokens))
        positions, tokens = map(sum, zip(*shares, strict=True))
        state = {
            "steps": steps,
            "in_a_row": self.optimizer.in_a_row,
            "totals": asdict(replace(totals, positions=positions, tokens=tokens)),
            "options": options_of(self.args),
            "examples": self.fingerprints,
            "steps_per_epoch": self.task.steps_per_epoch,
            "cut": model.cut,
        }
        label = checkpoint_label(epoch, totals.steps)
        self.saver.save(label, training_state(model), state, self.task.files)
        self.saved = steps


def checkpoint_label(epoch: int, steps: int) -> str:
    """What follows a checkpoint's number in its name: the epoch, from 0, and its steps so far."""
    return f"epoch{epoch}-step{steps}"
