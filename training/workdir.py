"""The folders of a run: no other run may write there, and half-written files are removed."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from training.checkpoint import clean, names
from training.files import CHECKPOINTS, TOKENS
from training.options import Options

from .launch.errors import Interrupted, UserError, say, torchrun, torchrun_world_size

ROOM = 1 << 20  # bytes
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def claim_folders(args: Options) -> None:
    """Makes the folders that the run will write into, and tests whether there is room for a
    tokenizer and results. Raises UserError if nothing can be written there."""
    folder = args.workdir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:  # a killed run leaves nothing of it
            file.write(bytes(ROOM))
            file.flush()
            os.fsync(file.fileno())  # some file systems only now notice that they are full
        if args.keep:
            folder /= CHECKPOINTS  # something else may be in its place
            folder.mkdir(exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        wrong = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        raise UserError(
            f"--workdir {args.workdir}: {wrong} is not a folder; --workdir workdir works"
        ) from error
    except OSError as error:
        raise UserError(
            f"--workdir {args.workdir}: nothing can be written to {folder} ({error.strerror}); "
            f"{'make room there, or ' * (error.errno in FULL)}name a folder of your own, as "
            "--workdir workdir"
        ) from error


@contextmanager
def alone_in_workdir(args: Options) -> Iterator[None]:
    """Within it no other run may write into the workdir. After it no half-written checkpoint, copy
    of a text, or result file is left, however the ranks ended. (Under torchrun the ranks of the
    next run clean up: no rank knows whether all have ended.)

    Raises:
        UserError: another run writes there.
    """
    lock = _lock(args.workdir) if torchrun("RANK", 0) == 0 else None  # under torchrun rank 0 alone
    try:
        yield
    except Interrupted:
        if torchrun_world_size() is None:
            saved = names(args.workdir / CHECKPOINTS)
            then = f"--resume continues from {saved[-1]}" if saved else "there is no checkpoint yet"
            say(f"\nInterrupted; {then}.\n")
        raise
    finally:
        if torchrun_world_size() is None:
            clean(args.workdir / CHECKPOINTS)
            with suppress(OSError):  # they are not empty
                (args.workdir / CHECKPOINTS).rmdir()
                args.workdir.rmdir()
            for path in args.workdir.glob("*.json.part"):
                path.unlink(missing_ok=True)
            for copy in [*args.workdir.glob(f"{TOKENS}/**/*.part")]:
                shutil.rmtree(copy, ignore_errors=True)
        if lock is not None:
            os.close(lock)  # unlocks the folder


def _lock(folder: Path) -> int | None:
    """A descriptor that locks the folder until it is closed, at the latest when this process ends;
    None if the file system has no locks. Unlike a lock file it leaves nothing behind."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"--workdir {folder}: another run is writing there; --workdir "
            f"{shlex.quote(f'{folder}_2')} works"
        ) from None
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
