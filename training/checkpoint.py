"""Checkpoints that a crash at any instant, a full disk or a flipped bit cannot spoil.

Problem: a run must go on from where it was when it was killed, and must never go on from something
half written or altered.

Idea: every file is written into a folder aside (`.NAME.part`) and fsynced; a manifest with the size
and SHA-256 of each comes last; then the folder is renamed, which a file system does in one step. A
name that is there is whole. Older checkpoints are removed after that, and renamed first as well.
What a killed process left aside is removed at the next start.

    checkpoints/000007-epoch1-step40/
        shard-00001-model-00001-of-00001.safetensors    what rank 0 wrote (`training.pieces`)
        shard-00002-model-00001-of-00001.safetensors    what rank 1 wrote
        state.json, tokenizer.json, ...                 position, options, versions; small files
        manifest.json

Nothing in it is a pickle: no file can run code. The writer of `torch.distributed.checkpoint` is not
used, for it has neither checksums nor the one step; its reader can read the folder.

Cost: each rank writes its pieces, waits for the disk, and reads them back for the checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from training.pieces import (
    SUFFIX,
    CheckpointError,
    Piece,
    SaveError,
    StoredTensors,
    check_whole,
    save_pieces,
)
from training.record import json_text, writing

FORMAT = "parallel-gpt2 checkpoint 2"  # 2: another order of the data
MANIFEST, STATE = "manifest.json", "state.json"
_NAME = re.compile(r"(\d{6,})-[\w.-]+")
_ASIDE = re.compile(r"\..+\.part")

T = TypeVar("T")


class Checkpoint:
    """A checkpoint that was found whole: every byte is what was written.

    Attributes:
        state: what JSON could hold of the run.
        tensors: the rest.

    Raises:
        CheckpointError: `folder` is not whole, or not a checkpoint of this program.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = _verify(folder)
        self.state: dict[str, Any] = json.loads(self.read(STATE))
        self.tensors = StoredTensors(folder, [file for file in files if file.endswith(SUFFIX)])

    def read(self, file: str) -> bytes:
        """One of the small files that were saved with it."""
        return (self.folder / file).read_bytes()


def newest(folder: Path) -> tuple[Checkpoint | None, dict[str, str]]:
    """The newest checkpoint in `folder` that is whole, or None where there is none; and by name why
    each newer one is refused."""
    refused: dict[str, str] = {}
    for name in reversed(names(folder)):
        try:
            return Checkpoint(folder / name), refused
        except CheckpointError as error:
            refused[name] = str(error)
    return None, refused


def names(folder: Path) -> list[str]:
    """The checkpoints in `folder` by name, whole or not, the oldest first."""
    if not folder.is_dir():
        return []
    found = [path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda name: int(name.split("-")[0]))


def set_aside(folder: Path) -> None:
    """Makes room for a run that does not go on from what is in `folder`. A later one must not do so
    either, unless it is asked to: it is in FOLDER_old then, in place of what was there."""
    if names(folder):
        old = folder.with_name(f"{folder.name}_old")
        shutil.rmtree(old, ignore_errors=True)
        with writing(old):
            folder.rename(old)


def clean(folder: Path) -> None:
    """Removes what a killed process left aside in `folder`."""
    if folder.is_dir():
        for path in folder.iterdir():
            if _ASIDE.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


class Saver:
    """Writes the checkpoints of a run: all ranks call `save` together.

    Args:
        folder: where they go; one that all ranks see.
        keep: so many of the newest stay when it prunes, 1 or more.
        gather: returns its argument of every rank, by rank, on every rank, when all have called
            it; by default there is one rank.
        spare: names of checkpoints that are neither counted nor removed: damaged ones.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        rank: int = 0,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        spare: Iterable[str] = (),
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.rank = rank
        self.gather = gather
        self.spare = set(spare)
        self._pruned = False

    def save(
        self,
        label: str,
        pieces: Iterable[Piece],
        state: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Writes a checkpoint and returns its folder; see `prune`.

        Args:
            label: what its name says beside its number, as epoch1-step40.
            pieces: what this rank writes. All ranks' pieces together make whole tensors.
            state: what JSON can hold. Rank 0's is written; so are `files`.

        Raises:
            SaveError: on every rank, if one could not write. Earlier checkpoints are as they were.
        """
        aside, self._pruned = Path(), False
        try:
            name = self._together(lambda: self._begin(label))[0]
            aside = self.folder / f".{name}.part"
            texts = {STATE: _json(state), **(files or {})}
            reports = self._together(lambda: self._write(aside, pieces, texts))
            return Path(self._together(lambda: self._finish(aside, name, reports))[0])
        except BaseException:
            if self.rank == 0 and aside.name:
                shutil.rmtree(aside, ignore_errors=True)
            raise

    def prune(self) -> None:
        """Removes all but the newest `keep`; to be called when a step from the newest one's weights
        was finite. Weights that are ruined look like others: until then the last good one stays."""
        if self.rank or self._pruned:
            return
        self._pruned = True
        for old in [n for n in names(self.folder) if n not in self.spare][: -self.keep]:
            out = self.folder / f".{old}.part"
            with suppress(OSError):  # the new one is whole: the run need not end for an old one
                (self.folder / old).rename(out)
                shutil.rmtree(out)

    def _together(self, work: Callable[[], T | None]) -> list[T]:
        """What `work` returns on each rank, when all are done. A failure on one is one on all."""
        result, failure = None, None
        try:
            result = work()
        except (OSError, SafetensorError) as error:
            failure = str(error)
        outcomes = self.gather((result, failure))
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                raise SaveError(self._cannot_write(rank, failure))
        return [result for result, _ in outcomes]

    def _cannot_write(self, rank: int, why: str) -> str:
        left = [name for name in names(self.folder) if name not in self.spare]
        rest = f"--resume goes on from {left[-1]}" if left else "there is no earlier one"
        return (
            f"--workdir {self.folder.parent}: rank {rank} cannot write a checkpoint ({why}); "
            f"{rest}, and --keep 0 saves none"
        )

    def _begin(self, label: str) -> str | None:
        """Rank 0 makes the folder aside, and names the checkpoint."""
        if self.rank:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(name.split("-")[0]) for name in names(self.folder)]
        name = f"{max(numbers, default=0) + 1:06d}-{label}"
        aside = self.folder / f".{name}.part"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        return name

    def _write(
        self, aside: Path, pieces: Iterable[Piece], texts: Mapping[str, bytes]
    ) -> dict[str, Any]:
        """This rank's files: their sizes and checksums, and the rectangles in them."""
        saved = save_pieces(aside, f"shard-{self.rank + 1:05d}", pieces)
        boxes = [box for volume in saved.values() for box in volume]
        files = {file: _entry(aside / file) for file in saved}
        for file, content in texts.items() if self.rank == 0 else ():
            write_synced(aside / file, content)
            files[file] = _entry(aside / file)
        return {"files": files, "boxes": boxes}

    def _finish(self, aside: Path, name: str, reports: Sequence[dict[str, Any]]) -> str | None:
        """Rank 0 writes the manifest, and puts the folder in place."""
        check_whole([box for report in reports for box in report["boxes"]])
        if self.rank:
            return None
        files = {file: entry for report in reports for file, entry in report["files"].items()}
        write_synced(aside / MANIFEST, _json({"format": FORMAT, "files": files}))
        sync_folder(aside)
        aside.rename(self.folder / name)
        sync_folder(self.folder)
        return str(self.folder / name)


def _json(content: Any) -> bytes:
    return json_text(content, indent=1).encode()


def write_synced(path: Path, content: bytes) -> None:
    """Writes a file, and returns when it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Returns when the names in the folder are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _entry(path: Path) -> dict[str, Any]:
    """The size and checksum of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _verify(folder: Path) -> list[str]:
    """The files of the checkpoint in `folder`, or CheckpointError with what is wrong with it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{folder}: its format is {manifest['format']!r}, not {FORMAT!r}")
        files: dict[str, Any] = manifest["files"]
        for file, entry in files.items():
            if Path(file).name != file or not (folder / file).is_file():
                raise CheckpointError(f"{folder}: {file} is missing")
            if (found := (folder / file).stat().st_size) != entry["bytes"]:
                raise CheckpointError(f"{folder}: {file} has {found} bytes of {entry['bytes']}")
            if _entry(folder / file) != entry:
                raise CheckpointError(f"{folder}: {file} was altered, its checksum differs")
        if STATE not in files:
            raise CheckpointError(f"{folder}: {STATE} is missing")
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: it has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{folder}: its {MANIFEST} cannot be read") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: it cannot be read ({error.strerror})") from None
    return list(files)
