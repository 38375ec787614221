"""The folder of a run: no other run may write there, and nothing half-written stays."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from training.checkpoint import names
from training.files import CHECKPOINTS, TOKENS
from training.options import Options

from .launch.errors import Interrupted, UserError, say, torchrun, torchrun_world_size

# What a run that was interrupted leaves: checkpoints, results, tokens.
HALF_WRITTEN = (f"{CHECKPOINTS}/.*.part", "*.json.part", f"{TOKENS}/**/*.part")

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # what some file systems say


@contextmanager
def alone_in_workdir(args: Options) -> Iterator[None]:
    """Makes the workdir; within it no other run may write there. After it nothing half-written is
    left, however the ranks ended, and no empty folder that was made here. (Under torchrun the ranks
    of the next run clean up: no rank knows whether all have ended.)

    Raises:
        UserError: the folder cannot be made or written into, or another run writes there.
    """
    folder, own = args.workdir, torchrun_world_size() is None
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = _lock(folder)
    try:
        yield
    except Interrupted:
        if own:
            saved = names(folder / CHECKPOINTS)
            then = f"--resume continues from {saved[-1]}" if saved else "nothing is saved"
            say(
                f"\nInterrupted; {then}. (Ctrl-C saves nothing; SIGTERM saves the step first, and "
                "--save_every every so many.)\n"
            )
        raise
    finally:
        if own:
            for path in [path for pattern in HALF_WRITTEN for path in folder.glob(pattern)]:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            for path in made:
                with suppress(OSError):  # it is not empty
                    path.rmdir()
        os.close(lock)


def _lock(folder: Path) -> int:
    """Makes the folder, and returns a descriptor that locks it for as long as this process, or a
    rank of it, lives. Unlike a lock file it leaves nothing behind."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(0, "Permission denied")
        lock = os.open(folder, os.O_RDONLY)
        if torchrun("RANK", 0) == 0:  # of torchrun's ranks that one alone
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        another = shlex.quote(f"{folder}_2")
        raise UserError(
            f"--workdir {folder}: another run is writing there; --workdir {another} works"
        ) from None
    except OSError as error:
        if error.errno in WITHOUT_LOCKS:
            return lock
        raise UserError(
            f"--workdir {folder}: it is no folder to write into ({error.strerror}); name one of "
            "your own, as --workdir workdir"
        ) from error
    return lock
