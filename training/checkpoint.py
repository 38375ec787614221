"""Checkpoints: what each rank holds goes to the disk, and from there into any layout.

Problem: ranks hold whole parameters, the layers of a stage, or parts of flat buffers that begin and
end anywhere. What one layout has saved, any other must load; and a run must never resume from
something half written or altered.

Idea: a tensor is known by the *name of the parameter* and its whole shape, and a rank says which
rectangles of it it holds (`Piece`). `torch.distributed.checkpoint` does the rest: one of the ranks
that hold the same writes it, and a piece is filled from all stored rectangles that overlap it.

    model.transformer.wte.weight                     a weight
    optimizer.exp_avg.transformer.wte.weight         optimizer state of its shape
    optimizer.step.transformer.wte.weight            optimizer state that is one number

Files are written into a folder aside (`.NAME.part`); rank 0 adds a manifest with the size and
SHA-256 of each, and renames the folder, which a file system does in one step: a name that is there
is whole.

    checkpoints/000007-epoch1-step40/
        __0_0.distcp, __1_0.distcp      what ranks 0 and 1 wrote
        .metadata                       which rectangle of which tensor is where
        state.json, tokenizer.json      position, random states, options; other small files
        manifest.json

Hosts need no common folder. Without one, rank 0 writes and reads for all: pieces travel one at a
time, and it must hold all of them to save, and one rank's to load.

Cost: each rank writes its part, and copies it where it holds views; rank 0 reads all files back for
the checksums. In the background the run waits only for a copy of what it holds.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from training.launch import RunError, UserError, World, gather_over_ranks
from training.results import json_text

# torch.distributed.checkpoint is imported where it is used: it takes a second.
if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from training.layout import LaidOutModel

FORMAT = "parallel-gpt2 checkpoint 2"
MANIFEST, STATE, METADATA = "manifest.json", "state.json", ".metadata"
_NAME = re.compile(r"(\d{6,})-[\w.-]+")
_ASIDE = re.compile(r"\..+\.part")

T = TypeVar("T")

# One process needs no advice to be several.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class CheckpointError(UserError):
    """A checkpoint that is not what was written, or not of this model."""


class SaveError(RunError):
    """A checkpoint could not be written. Nothing is left of it."""


# What a rank holds


@dataclass(frozen=True, eq=False)
class Piece:
    """A rectangle of the tensor `name`, whose whole shape is `shape`: `tensor` holds what begins
    at `offsets`. It is saved, or loaded into."""

    name: str
    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def whole(name: str, tensor: Tensor) -> Piece:
    """The piece that is all of the tensor."""
    return Piece(name, tensor, (0,) * tensor.dim(), tuple(tensor.shape))


def flat_pieces(name: str, shape: Sequence[int], start: int, values: Tensor) -> list[Piece]:
    """The pieces of a rank that holds elements start, start + 1, ... of the flattened tensor, as
    views of `values`. Where they begin and end inside a row, a matrix gives up to three."""
    pieces, done, sizes = [], 0, (1, *shape)  # the tensor is a row of its own
    rows = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]  # elements in a row of each level
    while done < values.numel():
        at, left = start + done, values.numel() - done
        d = next(d for d, row in enumerate(rows) if at % row == 0 and row <= left)  # the longest
        offsets = [at // row % size for row, size in zip(rows, sizes, strict=True)]
        n = min(left // rows[d], sizes[d] - offsets[d])
        box = [*(1 for _ in range(d)), n, *sizes[d + 1 :]]
        part = values[done : done + n * rows[d]].view(box[1:])
        pieces.append(Piece(name, part, tuple(offsets[1:]), tuple(shape)))
        done += n * rows[d]
    return pieces


def training_pieces(model: LaidOutModel) -> list[Piece]:
    """The weights and the optimizer state that this rank holds."""
    pieces = _weights(model)
    for optimizer in model.optimizers:
        for p, slots in optimizer.state.items():
            for slot, value in slots.items():
                if not isinstance(value, Tensor):  # SGD's momentum is None until there is one
                    continue
                like = value if value.dim() else p.detach()
                held = _named(f"optimizer.{slot}", model.pieces(p, like))
                if not value.dim():  # that of a flat buffer is that of each parameter in it
                    held = [whole(name, value.clone()) for name in sorted({x.name for x in held})]
                pieces += held
    return pieces


def load_training(saver: Saver, checkpoint: Checkpoint, model: LaidOutModel) -> None:
    """Puts weights and optimizer state back. All ranks call it together.

    Raises:
        CheckpointError: on all ranks: they are of another model.
    """
    stored, pieces = saver.stored(checkpoint), _weights(model)
    states = []
    for optimizer in model.optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        slots = [_slots(model, p, stored, pieces) for p in parameters]
        states.append({i: found for i, found in enumerate(slots) if found})
    saver.load(checkpoint, pieces)
    for optimizer, state in zip(model.optimizers, states, strict=True):
        # The optimizer puts each where it wants it: `step` of a fused one is on the GPU.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    model.loaded()


def _slots(
    model: LaidOutModel, p: Tensor, stored: Mapping[str, Any], pieces: list[Piece]
) -> dict[str, Tensor]:
    """The optimizer state of a parameter, to be loaded with the `pieces`, to which it is added;
    none if it had no gradient before. Of a flat buffer some parameters may have had none: theirs
    is zero."""
    slots: dict[str, Tensor] = {}
    for slot in sorted({key.split(".")[1] for key in stored if key.startswith("optimizer.")}):
        prefix = f"optimizer.{slot}"
        held = _named(prefix, model.pieces(p, p.detach()))
        saved = [piece.name for piece in held if piece.name in stored]
        if saved and stored[saved[0]].size:
            slots[slot] = torch.zeros_like(p)
            held = _named(prefix, model.pieces(p, slots[slot]))
            pieces += [piece for piece in held if piece.name in saved]
        elif saved:  # one number
            slots[slot] = torch.zeros((), dtype=stored[saved[0]].properties.dtype)
            pieces.append(whole(saved[0], slots[slot]))
    return slots


def _weights(model: LaidOutModel) -> list[Piece]:
    return _named("model", [x for p in model.held() for x in model.pieces(p, p.detach())])


def _named(prefix: str, pieces: Iterable[Piece]) -> list[Piece]:
    return [replace(piece, name=f"{prefix}.{piece.name}") for piece in pieces]


# By all ranks together


class Held(Tensor):
    """All that this rank holds of one tensor, for `torch.distributed.checkpoint`: it has the shape
    of the whole but no memory, and answers the questions that the library asks a DTensor."""

    pieces: Mapping[tuple[int, ...], Piece]  # by where they begin

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Which rectangles they are."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        pairs = self.pieces.items()
        return [ChunkStorageMetadata(torch.Size(at), p.tensor.shape) for at, p in pairs]

    def __create_write_items__(self, name: str, _: Tensor) -> list[WriteItem]:
        """What there is to write."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        items = []
        for chunk in self.__create_chunk_list__():
            data = TensorWriteData(chunk, TensorProperties(self.dtype), self.size())
            index = MetadataIndex(name, chunk.offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The memory from which to write, or into which to read."""
        assert index.offset is not None
        return self.pieces[tuple(index.offset)].tensor.detach()


def held_by_name(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The pieces as the library takes them. The largest come first: of what several ranks hold it
    lets the one write that has least to write so far, so all get about as much."""
    held: dict[str, Any] = {}
    for p in sorted((p for p in pieces if p.tensor.numel()), key=lambda p: -p.tensor.nbytes):
        if p.name not in held:
            held[p.name] = torch.empty((), dtype=p.tensor.dtype).expand(p.shape).as_subclass(Held)
            held[p.name].pieces = {}
        assert p.offsets not in held[p.name].pieces, f"{p.name}: two pieces begin at {p.offsets}"
        held[p.name].pieces[p.offsets] = p
    return held


class Saver:
    """Writes and loads the checkpoints of a run. All ranks call its methods together.

    Args:
        folder: where they are; rank 0's is the truth.
        keep: so many of the newest stay when it prunes, 1 or more.
        spare: names of checkpoints that are neither counted nor removed: damaged ones.
        timeout: seconds that a rank waits for another.
        background: whether `save` returns when it has copied what it is given.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        world: World = World(),  # noqa: B008 (it is immutable)
        spare: Iterable[str] = (),
        timeout: float = 300.0,
        background: bool = False,
    ) -> None:
        self.folder, self.keep, self.world = folder, keep, world
        self.spare, self.background = set(spare), background
        self._group: Any = None  # its own, since it may talk while the run does; and on the CPU
        if world.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None  # in the background
        self._pruned = False

    def save(
        self,
        label: str,
        pieces: Iterable[Piece],
        state: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
    ) -> str:
        """Writes a checkpoint and returns its name; see `prune`.

        Args:
            label: what its name says beside its number, as epoch1-step40.
            pieces: what this rank holds. All ranks' pieces together make whole tensors; several may
                hold the same one.
            state: what JSON can hold. Rank 0's is written; so are `files`.

        Raises:
            SaveError: on every rank, if one could not write this one, or the one before it in the
                background. Earlier checkpoints are as they were.
        """
        self.wait()
        name = self._together(partial(self._begin, label))[0]
        assert name is not None
        self._pruned, texts = False, {STATE: _json(state), **(files or {})}
        if not self.background:
            self._write(name, list(pieces), texts)
            return name
        # The library's async_save is the same, save in a thread, but it cannot copy a `Held`.
        copies = [replace(p, tensor=p.tensor.detach().to("cpu", copy=True)) for p in pieces]
        self._writing = self._thread.submit(self._write, name, copies, texts)
        return name

    def _begin(self, label: str) -> str | None:
        """Rank 0 names the checkpoint and makes the folder aside."""
        if not self.world.is_main:
            return None
        numbers = [int(name.split("-")[0]) for name in names(self.folder)]
        name = f"{max(numbers, default=0) + 1:06d}-{label}"
        aside = self.folder / f".{name}.part"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return name

    def _write(self, name: str, pieces: list[Piece], texts: Mapping[str, bytes]) -> None:
        """Each rank writes its files, then rank 0 the rest."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        aside = self.folder / f".{name}.part"

        def work() -> None:
            if self._who:
                save(held_by_name(pieces), storage_writer=FileSystemWriter(aside), **self._who)
            if self.world.is_main:
                put_in_place(aside, name, texts)

        try:
            if not self._one_folder:
                pieces = self._sent_to_main(pieces)
            self._together(work)
        except BaseException:
            if self.world.is_main:
                shutil.rmtree(aside, ignore_errors=True)
            raise

    def _sent_to_main(self, pieces: list[Piece]) -> list[Piece]:
        """On rank 0 the pieces of all ranks. Of what several hold, the first sends it."""
        every = gather_over_ranks([(p.name, p.offsets) for p in pieces], self.world, self._group)
        known, found = set(every[0]), pieces[:]
        for rank in range(1, self.world.world_size):
            for i, key in enumerate(every[rank]):
                if key not in known and self.world.rank == rank:
                    self._send(pieces[i], 0)
                elif key not in known and self.world.is_main:
                    found.append(self._received(rank))
                known.add(key)
        return found

    def _send(self, piece: Piece, rank: int) -> None:
        copy = piece.tensor.detach().cpu().clone()  # a view would be sent with all that it views
        dist.send_object_list([replace(piece, tensor=copy)], rank, self._group)

    def _received(self, rank: int) -> Piece:
        box: list[Any] = [None]
        dist.recv_object_list(box, rank, self._group)
        return box[0]

    def wait(self) -> None:
        """Returns when there is nothing left to write in the background. Raises SaveError."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def stored(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """The tensors in a checkpoint by name: their shapes, types and rectangles."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        def read() -> Any:
            # A pickle can run code. This one is in the user's own workdir, and the manifest's
            # checksum says that it is what a run wrote there.
            if not self.world.is_main:
                return None
            return FileSystemReader(checkpoint.folder).read_metadata().state_dict_metadata

        return self._together(read, reading=True)[0]

    def load(self, checkpoint: Checkpoint, pieces: Iterable[Piece]) -> None:
        """Fills the pieces' tensors.

        Raises:
            CheckpointError: on all ranks: a tensor is not in the checkpoint, or is of another shape
                or type, or a file cannot be read.
        """
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        pieces, stored = list(pieces), self.stored(checkpoint)
        unfit = gather_over_ranks(_unfit(stored, pieces), self.world, self._group)
        if any(unfit):
            raise CheckpointError(f"--resume: {checkpoint.folder} {next(filter(None, unfit))}")

        def read(pieces: list[Piece]) -> None:
            if self._who:
                reader = FileSystemReader(self.folder / checkpoint.folder.name)
                load(held_by_name(pieces), storage_reader=reader, **self._who)

        self._together(partial(read, pieces), reading=True)
        if not self._one_folder:
            self._send_from_main(pieces, read)

    def _send_from_main(self, pieces: list[Piece], read: Callable[[list[Piece]], None]) -> None:
        """Rank 0 reads what each other rank loads, and sends it, a piece at a time."""
        described = [replace(p, tensor=p.tensor.detach().to("meta")) for p in pieces]
        every = gather_over_ranks(described, self.world, self._group)
        for rank in range(1, self.world.world_size):
            filled = []
            if self.world.is_main:
                empty = partial(torch.zeros_like, device="cpu")
                filled = [replace(p, tensor=empty(p.tensor)) for p in every[rank]]
            self._together(partial(read, filled), reading=True)
            for piece in filled:
                self._send(piece, rank)
            for piece in pieces if self.world.rank == rank else ():
                piece.tensor.detach().copy_(self._received(0).tensor)

    @cached_property
    def _one_folder(self) -> bool:
        """Whether all ranks find what rank 0 puts into its folder: they are on one host, or the
        hosts have a common file system."""

        def put() -> str | None:
            if not self.world.is_main:
                return None
            self.folder.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(".part", ".", self.folder)).name

        if self._group is None:
            return True
        token = self.folder / str(self._together(put)[0])
        found = gather_over_ranks(token.exists(), self.world, self._group)
        if self.world.is_main:
            token.rmdir()
        return all(found)

    @property
    def _who(self) -> dict[str, Any]:
        """How the library is told which ranks use it; nothing on a rank that does not."""
        if self._one_folder and self._group is not None:
            return {"process_group": self._group}
        return {"no_dist": True} if self.world.is_main else {}

    def _together(self, work: Callable[[], T], reading: bool = False) -> list[T]:
        """What `work` returns on each rank, when all are done. Where one cannot write a file, or
        read it, all raise the same SaveError, or CheckpointError."""
        from torch.distributed.checkpoint.api import CheckpointException

        result, failed, why = None, None, ""
        try:
            result = work()
        except OSError as error:
            failed, why = self.world.rank, str(error)
        except CheckpointException as error:  # the library's, on all ranks that use it
            failed, (cause, _) = next(iter(error.failures.items()))
            why = str(cause)
            if not isinstance(cause, OSError):
                raise
        outcomes = gather_over_ranks((result, failed, why), self.world, self._group)
        for _, failed, why in outcomes:
            if failed is not None and reading:
                raise CheckpointError(f"--resume: rank {failed} cannot read a file ({why})")
            if failed is not None:
                left = [name for name in names(self.folder) if name not in self.spare]
                rest = f"--resume continues from {left[-1]}" if left else "there is no earlier one"
                raise SaveError(
                    f"--workdir {self.folder.parent}: rank {failed} cannot write a checkpoint "
                    f"({why}); {rest}, and --keep 0 saves none"
                )
        return [result for result, _, _ in outcomes]  # type: ignore[misc]

    def prune(self) -> None:
        """Removes all but the newest `keep`; to be called when a step from the newest one's weights
        was finite. Weights that are ruined look like others: until then the last good one stays."""
        writing = self._writing is not None and not self._writing.done()
        if self.world.rank or self._pruned or writing:
            return
        self._pruned = True
        for old in [n for n in names(self.folder) if n not in self.spare][: -self.keep]:
            out = self.folder / f".{old}.part"
            with suppress(OSError):  # the new one is whole: the run need not end for an old one
                (self.folder / old).rename(out)
                shutil.rmtree(out)


def _unfit(stored: Mapping[str, Any], pieces: list[Piece]) -> str | None:
    """Why the pieces are not among what is `stored`, if they are not."""
    for p in pieces:
        if (found := stored.get(p.name)) is None:
            return f"holds no {p.name}: it is of another model"
        if (shape := tuple(found.size)) != p.shape:
            return f"has {p.name} of shape {shape}, not {p.shape}: it is of another model"
        if (dtype := found.properties.dtype) != p.tensor.dtype:
            return f"has {p.name} in {dtype}, not in {p.tensor.dtype}"
        if sum(chunk.sizes.numel() for chunk in found.chunks) != found.size.numel():
            return f"lacks a part of {p.name}"
    return None


# In a folder


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found intact: every byte is what was written. `state` is what JSON
    could hold of the run."""

    folder: Path
    state: dict[str, Any]

    def read(self, file: str) -> bytes:
        """One of the small files that were saved with it."""
        return (self.folder / file).read_bytes()


def newest(folder: Path) -> tuple[Checkpoint | None, dict[str, str]]:
    """The newest intact checkpoint in `folder`, or None where there is none; and by name why each
    newer one is refused."""
    refused: dict[str, str] = {}
    for name in reversed(names(folder)):
        try:
            return open_checkpoint(folder / name), refused
        except CheckpointError as error:
            refused[name] = str(error)
    return None, refused


def names(folder: Path) -> list[str]:
    """The checkpoints in `folder` by name, intact or not, the oldest first."""
    if not folder.is_dir():
        return []
    found = [path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda name: int(name.split("-")[0]))


def set_aside(folder: Path) -> None:
    """Makes room for a run that does not resume what is in `folder`. A later one must not do so
    either, unless it is asked to: it is in FOLDER_old then, in place of what was there."""
    if names(folder):
        old = folder.with_name(f"{folder.name}_old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)


def clean(folder: Path) -> None:
    """Removes what a killed process left aside in `folder`."""
    if folder.is_dir():
        for path in folder.iterdir():
            if _ASIDE.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, if it is intact.

    Raises:
        CheckpointError: with what is wrong with it.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{folder}: its format is {manifest['format']!r}, not {FORMAT!r}")
        files: dict[str, Any] = manifest["files"]
        for file in sorted({STATE, METADATA, *files}):
            if file not in files or Path(file).name != file or not (folder / file).is_file():
                raise CheckpointError(f"{folder}: {file} is missing")
            entry, found = files[file], file_entry(folder / file)
            if found["bytes"] != entry["bytes"]:
                wrong = f"{found['bytes']} bytes of {entry['bytes']}"
                raise CheckpointError(f"{folder}: {file} has {wrong}")
            if found != entry:
                raise CheckpointError(f"{folder}: {file} was altered, its checksum differs")
        return Checkpoint(folder, json.loads((folder / STATE).read_bytes()))
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: it has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{folder}: its {MANIFEST} cannot be read") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: it cannot be read ({error.strerror})") from None


def file_entry(path: Path) -> dict[str, Any]:
    """What the manifest says of a file: its size and checksum."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def put_in_place(aside: Path, name: str, texts: Mapping[str, bytes]) -> None:
    """Completes the folder `aside` with small files and the manifest, and gives it its name."""
    for file, content in texts.items():
        (aside / file).write_bytes(content)
    files = {path.name: file_entry(path) for path in sorted(aside.iterdir())}
    (aside / MANIFEST).write_bytes(_json({"format": FORMAT, "files": files}))
    sync_all(aside)
    aside.rename(aside.with_name(name))
    sync(aside.parent)


def _json(content: Any) -> bytes:
    return json_text(content, indent=1).encode()


def sync_all(folder: Path) -> None:
    """Returns when the files in the folder are on the disk, and their names."""
    for path in sorted(folder.iterdir()):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Returns when the file, or the names in the folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
