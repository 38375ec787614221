"""The folder of a run: no other run may write there while it runs."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.checkpoint import names
from training.files import CHECKPOINTS, TOKENS
from training.options import Options

from .launch.errors import UserError, torchrun
from .launch.signals import ENDING_SIGNALS, end_process, handlers


@contextmanager
def alone_in_workdir(args: Options) -> Iterator[None]:
    """Makes the workdir; within it no other run may write there, and a signal that ends the program
    says what is saved. Under torchrun rank 0 locks the folder for all ranks, which wait to meet it.

    Raises:
        UserError: the folder cannot be made, or another run writes there.
    """

    def say_what_is_saved(number: int, _: object) -> None:
        saved = names(checkpoints)
        if saved and earlier is not None and os.path.samestat(earlier, checkpoints.stat()):
            saved = []
        then = f"--resume continues from {saved[-1]}" if saved else "nothing is saved"
        end_process(
            number, message=f"\nInterrupted; {then}. (Ctrl-C saves nothing; SIGTERM saves the "
            "current step, and --save_every N every N steps.)\n",
        )  # fmt: skip

    folder, checkpoints = _opened(args.workdir), args.workdir / CHECKPOINTS
    # An earlier run's are set aside, with their folder, when this one begins to train.
    earlier = None if args.resume or not checkpoints.is_dir() else checkpoints.stat()
    try:
        if torchrun("RANK", 0) == 0:
            _lock(folder, args.workdir)
            for part in args.workdir.glob(f"{TOKENS}/**/*.part"):  # of a run that was killed
                shutil.rmtree(part, ignore_errors=True)
        with handlers(ENDING_SIGNALS, say_what_is_saved):
            yield
    finally:
        os.close(folder)


def _opened(path: Path) -> int:
    """Makes the folder, and returns its descriptor."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"--workdir {path}: it is no folder to write into ({error.strerror}); name one of "
            "your own, e.g. --workdir workdir"
        ) from error


def _lock(folder: int, path: Path) -> None:
    """Locks the folder for as long as this process, or a rank of it, lives. Unlike a lock file it
    leaves nothing behind."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        another = shlex.quote(f"{path}_2")
        raise UserError(
            f"--workdir {path}: another run is writing there; --workdir {another} works"
        ) from None
    except OSError:  # a file system without locks
        pass
