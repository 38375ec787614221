"""The folders that a run writes into: that it can, that no other run does, and that nothing half
written stays."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from training.checkpoint import clean, names
from training.errors import Interrupted, say, torchrun, torchrun_world_size
from training.export import check_export, clean_export
from training.launch import UserError
from training.saving import CHECKPOINTS

ROOM = 1 << 20  # bytes


def claim_folders(args: argparse.Namespace) -> None:
    """Makes the folders that the run will write into, or raises UserError where it cannot."""
    if args.save_every is not None and not args.keep:
        raise UserError(
            f"--save_every {args.save_every} --keep 0: no checkpoint would stay; --keep 1 works"
        )
    there = os.access(args.dataset, os.R_OK) and Path(args.dataset).is_dir()
    if there and args.workdir.resolve() == Path(args.dataset).resolve():
        raise UserError(
            f"--workdir {args.workdir}: it is the --dataset, and results would be mixed into it; "
            "--workdir workdir works"
        )
    if args.export is not None:
        check_export(args.export, args.workdir)
        claim_folder(args.export.resolve().parent, f"--export {args.export}", "--export exported")
    claim_folder(args.workdir, f"--workdir {args.workdir}", "--workdir workdir")
    _check_checkpoints(args.workdir, args.keep)


def claim_folder(folder: Path, option: str, example: str) -> None:
    """Makes the folder, and writes into it. Raises UserError where that cannot be done: `option` is
    how it was named, and `example` what would work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _try_to_write(folder)
    except OSError as error:
        way_out = "name a folder of your own"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            way_out = "make room, or name a folder elsewhere"
        raise UserError(
            f"{option}: nothing can be written there ({error.strerror}); {way_out}, as {example}"
        ) from error


def _try_to_write(folder: Path) -> None:
    """Raises OSError unless there is room for a tokenizer and for results. (The file has no name,
    which a run that is killed would leave.)"""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(ROOM))
        file.flush()
        os.fsync(file.fileno())  # some file systems notice only now that they are full


def _check_checkpoints(workdir: Path, keep: int) -> None:
    """Raises UserError where something is in the place of the checkpoints' folder that this run
    cannot read, or write if it is to keep some."""
    folder = workdir / CHECKPOINTS
    try:
        if folder.is_symlink() or folder.exists():
            list(folder.iterdir())
            if keep:
                _try_to_write(folder)
    except OSError as error:
        raise UserError(
            f"--workdir {workdir}: {folder} is no folder whose checkpoints this run can read and "
            f"write ({error.strerror}); move it away, or take another --workdir, as {workdir}_2"
        ) from error


@contextmanager
def alone_in_workdir(args: argparse.Namespace) -> Iterator[None]:
    """Within it no other run may write into the workdir; after it there is nothing half written,
    whatever has ended the ranks. (Those of torchrun leave that to the ranks that come next: none of
    them knows whether all have ended.)

    Raises:
        UserError: another run writes there.
    """
    lock = _lock(args.workdir) if torchrun("RANK", 0) == 0 else None
    try:
        yield
    except Interrupted:
        if torchrun_world_size() is None:
            saved = names(args.workdir / CHECKPOINTS)
            then = f"--resume continues from {saved[-1]}" if saved else "there is no checkpoint yet"
            say(f"\nThe run was asked to end; {then}.\n")
        raise
    finally:
        if torchrun_world_size() is None:
            clean(args.workdir / CHECKPOINTS)
            for path in args.workdir.glob("*.json.part"):
                with suppress(OSError):
                    path.unlink()
            if args.export is not None:
                clean_export(args.export)
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder until it is closed, which the system does when this
    process ends; None where there are no such locks. No file is left, as of a lock file."""
    if sys.platform == "win32":
        return None
    import fcntl  # here: not on every system

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"--workdir {folder}: another run is writing there; --workdir {folder}_2 works"
        ) from None
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor
