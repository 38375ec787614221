"""The folder of a run: no other run may write there, and nothing half-written stays."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from training.checkpoint import names
from training.files import CHECKPOINTS, TOKENS
from training.options import Options

from .launch.errors import Interrupted, UserError, say, torchrun, torchrun_world_size

# What a run that was interrupted leaves: checkpoints, results, tokens.
HALF_WRITTEN = (f"{CHECKPOINTS}/.*.part", "*.json.part", f"{TOKENS}/**/*.part")


@contextmanager
def alone_in_workdir(args: Options) -> Iterator[None]:
    """Makes the workdir; within it no other run may write there. After it nothing half-written is
    left, however the ranks ended, and no empty folder that was made here. (Under torchrun the ranks
    of the next run clean up: no rank knows whether all have ended.)

    Raises:
        UserError: the folder cannot be made or written into, or another run writes there.
    """
    saved, own = args.workdir / CHECKPOINTS, torchrun_world_size() is None
    made = [
        folder for folder in (saved, args.workdir, *args.workdir.parents) if not folder.exists()
    ]
    lock = _lock(args)
    try:
        yield
    except Interrupted:
        if own:
            checkpoints = names(saved)
            then = (
                f"--resume continues from {checkpoints[-1]}" if checkpoints else "nothing is saved"
            )
            say(
                f"\nInterrupted; {then}. (Ctrl-C saves nothing; SIGTERM saves the step first, and "
                "--save_every every so many.)\n"
            )
        raise
    finally:
        if own:
            for path in [path for pattern in HALF_WRITTEN for path in args.workdir.glob(pattern)]:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            for folder in made:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()
        os.close(lock)


def _lock(args: Options) -> int:
    """A descriptor of the workdir that locks it for as long as this process, or a rank of it,
    lives. Unlike a lock file it leaves nothing behind."""
    try:
        for folder in (args.workdir, args.workdir / CHECKPOINTS)[: 2 if args.keep else 1]:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(0, "Permission denied")
        lock = os.open(args.workdir, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"--workdir {args.workdir}: it is no folder to write into ({error.strerror}); name one "
            "of your own, as --workdir workdir"
        ) from error
    try:
        if torchrun("RANK", 0) == 0:  # of torchrun's ranks that one alone
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(
            f"--workdir {args.workdir}: another run is writing there; --workdir "
            f"{shlex.quote(f'{args.workdir}_2')} works"
        ) from None
    except OSError:  # a file system without locks
        pass
    return lock
