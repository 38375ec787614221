"""The numbers of metrics.jsonl for TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from typing import Any

from training.files import TENSORBOARD
from training.metrics import Sink, Tracker
from training.options import Options
from training.results import options_of

from .launch.errors import RunError, UserError


def trackers_of(args: Options) -> list[Tracker]:
    """Those that the options ask for. Raises UserError if one is not installed."""
    wanted = {name: tracker for name, tracker in TRACKERS.items() if getattr(args, name)}
    for name in wanted:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--{name}: {name} is not installed; pip install {name} works")
    return list(wanted.values())


def _tensorboard(args: Options, steps_done: int) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    folder = args.workdir / TENSORBOARD
    if not steps_done:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed early
    writer = SummaryWriter(folder, purge_step=steps_done + 1 if steps_done else None)

    def write(steps: int, numbers: Mapping[str, Any]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, steps)
        writer.flush()

    return write


def _wandb(args: Options, steps_done: int) -> Sink:
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    name = args.workdir / "wandb" / "run-id"  # a resumed run continues the same run there
    known = name.read_text() if steps_done and name.exists() else None
    about: dict[str, Any] = {"dir": args.workdir, "config": options_of(args)}
    try:
        run = wandb.init(project="parallel-gpt2", id=known, resume="allow", **about)
    except wandb.Error as error:  # no account, or no network
        raise RunError(
            f"--wandb: {str(error).rstrip('.')}; WANDB_MODE=offline in the environment works "
            "without an account"
        ) from error
    name.parent.mkdir(exist_ok=True)  # wandb does not make it if it is disabled
    name.write_text(run.id)
    return lambda steps, numbers: run.log(dict(numbers), step=steps)


def close_trackers(args: Options) -> None:
    """Ends the run of wandb. (Forked ranks run no exit handlers.)"""
    if args.wandb:
        import wandb

        wandb.finish()


TRACKERS: dict[str, Tracker] = {"tensorboard": _tensorboard, "wandb": _wandb}  # by their options
