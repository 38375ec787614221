"""Checkpoints: each rank writes what it holds, and any layout can load the result.

Problem: ranks hold whole parameters, the layers of a stage, or parts of flat buffers. Any layout
must load what another has saved, and never a half-written checkpoint.

Idea: a tensor is identified by its *parameter name* and its whole shape; each rank lists the
rectangles that it holds of it (`Held`). `torch.distributed.checkpoint` does the rest: of several
ranks that hold a rectangle, one writes it; a tensor is filled from all its stored rectangles.

    model.transformer.wte.weight                     a weight
    optimizer.exp_avg.transformer.wte.weight         optimizer state of its shape
    optimizer.step.transformer.wte.weight            optimizer state that is one number

    checkpoints/000007-epoch1-step40/
        __0_0.distcp, __1_0.distcp      what ranks 0 and 1 wrote
        .metadata                       which rectangle of which tensor is where
        state.json, tokenizer.json      position, options; other small files

The folder is `.NAME.part` until all is on disk; then rank 0 renames it, which is atomic. Hosts need
not share it: ranks that do not see rank 0's folder send it the files that they wrote. To load, each
rank reads the tensors of which it holds a part, or gets them from rank 0, and keeps its rectangles.

A truncated file is refused; a bit that the disk has flipped is not noticed. A rank that cannot
write or read says so and ends, and with it the run.

A damaged checkpoint is renamed, and the one before it is used. One that may be whole, but cannot be
read now, ends the run: its disk does not answer, or a different version wrote it. Only `prune`
removes checkpoints, each file by its name; `clean` removes those that were not completed.

Cost: each rank writes its part. When saving in the background the run waits only until its tensors
are copied. Loading takes the memory of the largest tensor.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from enum import EnumMeta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.files import json_text, unused, writing

from .launch.errors import UserError
from .launch.last_actions import LastAction
from .launch.world import World
from .layouts.layout import Held, LaidOutModel

FORMAT = "parallel-gpt2 checkpoint 5"
NAME = re.compile(r"\d{6}-(epoch\d+-)?step\d+$")  # not a user's 000002-best, 000002-step4-copy
STATE, METADATA = "state.json", ".metadata"
MOVE = "move it away to go on from the one before it"

# A single process needs no reminder that torch.distributed is not initialized.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class CheckpointError(UserError):
    """A checkpoint of a different model, or one that cannot be read here and now."""


class DamagedError(CheckpointError):
    """A checkpoint that nobody can read any more."""


# What a rank holds


def training_state(model: LaidOutModel) -> list[Held]:
    """The weights and the optimizer state that this rank holds."""
    state = _weights(model)
    for optimizer in model.optimizers:
        for p, slots in optimizer.state.items():  # p: a parameter, or a slice of one
            state += _state(model, p, slots)
    return state


def _weights(model: LaidOutModel) -> list[Held]:
    return [replace(x, name=f"model.{x.name}") for x in model.held]


def _state(model: LaidOutModel, p: Tensor, slots: Mapping[str, Tensor]) -> list[Held]:
    """The optimizer state of one of this rank's parameters or slices."""
    rectangles = [x for x in model.held if x.parameter is p and x.tensor.numel()]
    state = []
    for slot, value in slots.items():
        if value.dim():
            state += [
                replace(x, name=f"optimizer.{slot}.{x.name}", tensor=x.of(value))
                for x in rectangles
            ]
        else:
            state += [Held.whole(f"optimizer.{slot}.{x.name}", value) for x in rectangles[:1]]
    return state


def load_training(saver: Saver, checkpoint: Checkpoint, model: LaidOutModel) -> None:
    """Restores weights and optimizer state. All ranks call it together.

    Raises:
        CheckpointError: on all ranks, if they are of a different model.
    """
    stored = checkpoint.tensors
    slots: dict[str, dict[str, Any]] = defaultdict(dict)  # by parameter
    for name, t in stored.items():
        kind, _, of_parameter = name.partition(".")
        if kind == "optimizer":
            slot, _, parameter = of_parameter.partition(".")
            slots[parameter][slot] = t
    names = {x.parameter: x.name for x in model.held if x.parameter is not None}
    wanted = _weights(model)
    for optimizer in model.optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                # A parameter that never had a gradient has no saved state, and gets none.
                if p in names and (saved := slots.get(names[p])):
                    optimizer.state[p] = _blank(p, saved, group.get("fused"))
                    wanted += _state(model, p, optimizer.state[p])
    saver.load(checkpoint, wanted)
    model.loaded()


def _blank(p: Tensor, slots: Mapping[str, Any], fused: bool | None) -> dict[str, Tensor]:
    """An optimizer's state of p before its first step: zeros of p's shape, and numbers, which a
    fused optimizer keeps on the device."""
    device = p.device if fused else torch.device("cpu")
    state = {}
    for slot, t in slots.items():
        number = torch.zeros((), dtype=t.properties.dtype, device=device)
        state[slot] = torch.zeros_like(p) if t.size else number
    return state


# Saving and loading, by all ranks together


class Saver:
    """Writes and loads the checkpoints of a run. All ranks call its methods together.

    Args:
        folder: of the checkpoints; rank 0's folder counts.
        timeout: seconds that a rank waits for another.
        background: whether `save` returns once tensors are copied, and a thread writes them.
    """

    def __init__(
        self,
        folder: Path,
        world: World | None = None,
        timeout: float = 300.0,
        background: bool = False,
    ) -> None:
        self.folder, self.background = folder, background
        self.world = (world or World()).apart(timeout)  # it may communicate while the run does
        last = LastAction() if background else self.world.last
        self.writer = replace(self.world, last=last)  # the writing thread's
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._writing: Future[None] | None = None  # in the background

    def save(
        self, label: str, held: Iterable[Held], state: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> str:
        """Writes a checkpoint and returns its name.

        Args:
            label: follows the number in its name, e.g. epoch1-step40.
            held: by this rank. Together, ranks hold whole tensors; several may hold the same.
            state: JSON values. Rank 0's are written, as are its `files`.

        Raises:
            RunError: this checkpoint, or the one before it in the background, cannot be written. It
                is raised on the rank that failed, or on all if the library failed. No part of the
                checkpoint is left. Earlier checkpoints stay intact.
        """
        self.wait()  # at most one is being written
        last = ["0", *names(self.folder)][-1]
        name, *_ = self.world.gather(f"{int(last.split('-')[0]) + 1:06d}-{label}")  # rank 0's
        sizes = {file: len(content) for file, content in files.items()}
        full_state = {"format": FORMAT, "bytes": sizes, **state}
        texts = {STATE: json_text(full_state, indent=1).encode(errors="backslashreplace"), **files}
        if not self.background:
            self._write(name, held, texts)
            return name
        # The library's async_save also saves in a thread, but copies only a dictionary's tensors.
        copies = [replace(x, tensor=x.tensor.detach().to("cpu", copy=True)) for x in held]
        # Its collectives use a group of their own: this thread goes on with the run's.
        self._writing = self._thread.submit(self._write, name, copies, texts)
        return name

    def _write(self, name: str, held: Iterable[Held], texts: Mapping[str, bytes]) -> None:
        """Each rank writes its tensors, rank 0 the rest."""
        from training import tensor_files

        world, aside = self.writer, self.folder / f".{name}.part"
        world.last.note("checkpoint")
        if world.device.type == "cuda":  # a new thread is on the first GPU, and would take memory
            torch.accelerator.set_device_index(world.device)
        what = f"--workdir {self.folder.parent}: checkpoint {name}"
        try:
            with writing(what):
                if world.is_main:
                    aside.mkdir(parents=True)
                world.gather(None)
                # A host that does not see the folder of rank 0 has a disk of its own.
                with nullcontext(aside) if aside.exists() else TemporaryDirectory() as own:
                    tensor_files.write(Path(own), held, world)
                    self._send([] if own == aside else [*Path(own).iterdir()], aside)
            world.on_main(lambda: self._complete(what, aside, name, texts))  # however long it takes
        except BaseException:
            if world.is_main:  # torchrun's next attempt needs the room on the disk
                shutil.rmtree(aside, ignore_errors=True)
            raise

    def _send(self, paths: list[Path], aside: Path) -> None:
        """Sends these files to rank 0, which writes them into its folder: one after the other, so
        that no rank holds more than one of them."""
        world = self.writer
        for rank, sizes in enumerate(world.gather({path: path.stat().st_size for path in paths})):
            for path, size in sizes.items() if world.rank in (0, rank) else ():
                content = torch.empty(size, dtype=torch.uint8)
                if world.is_main:
                    dist.recv(content, rank, world.group)
                    (aside / path.name).write_bytes(content.numpy().data)
                else:
                    with path.open("rb") as file:
                        file.readinto(content.numpy().data)
                    dist.send(content, 0, world.group)

    def _complete(self, what: str, aside: Path, name: str, texts: Mapping[str, bytes]) -> None:
        """Writes the other files of a checkpoint, and gives its folder the name. On rank 0."""
        with writing(what):
            for file, content in texts.items():
                (aside / file).write_bytes(content)
            for path in (*sorted(aside.iterdir()), aside):  # contents first, then the name
                _sync(path)
            aside.rename(self.folder / name)  # atomic
            _sync(self.folder)  # the name, too

    def wait(self) -> None:
        """Waits for the checkpoint that is written in the background. Raises RunError."""
        if self._writing is None:
            return
        while not self._writing.done():  # this rank does, or waits for, what its thread does
            self.world.last.note(self.writer.last.name.decode())
            wait([self._writing], 0.1)
        self._writing.result()

    def load(self, checkpoint: Checkpoint, held: Iterable[Held]) -> None:
        """Fills the records' tensors. If all ranks see rank 0's files, each reads what it needs;
        else rank 0 reads one tensor after the other, and sends it.

        Raises:
            CheckpointError: a tensor is missing or has a different shape.
        """
        from training import tensor_files

        stored, wanted = checkpoint.tensors, defaultdict(list)
        for x in held:
            if x.name not in stored or stored[x.name].size != x.shape:
                lacks = f"has no {x.name} of shape {x.shape}: it is of another model"
                raise CheckpointError(f"--resume: {checkpoint.folder} {lacks}")
            wanted[x.name].append(x)
        folder = self.folder / checkpoint.folder.name
        by_rank = self.world.gather((_identity(folder), [*wanted]))
        is_common = len({identity for identity, _ in by_rank}) == 1
        needed = {*wanted} if is_common else {name for _, names in by_rank for name in names}
        for name in sorted(needed):
            whole = torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
            if self.world.is_main or is_common:
                tensor_files.read(folder, checkpoint.metadata, name, whole)
            if not is_common:
                with self.world.last.waiting():
                    dist.broadcast(whole, 0, self.world.group)
            for x in wanted[name]:
                sides = zip(x.offsets, x.tensor.shape, strict=True)
                x.tensor.detach().copy_(whole[tuple(slice(at, at + n) for at, n in sides)])

    def prune(self, keep: int, best: str | None = None) -> None:
        """Removes all checkpoints but the newest `keep`, 1 or more, and that with the label `best`,
        as rank 0 gives it. Call it after a finite step from the newest weights: the files do not
        show whether weights are NaN."""
        old = [name for name in names(self.folder)[:-keep] if name.partition("-")[2] != best]
        self._each(old, _remove)

    def set_aside_after(self, loaded: Checkpoint) -> None:
        """Renames the checkpoints newer than the loaded one: they are damaged, and must not count
        towards `keep`."""
        damaged = [name for name in names(self.folder) if name > loaded.folder.name]
        self._each(
            damaged, lambda path: path.rename(unused(path.with_name(f"damaged-{path.name}")))
        )

    def _each(self, some: Sequence[str], work: Callable[[Path], object]) -> None:
        """Calls `work` with the folder of each of these checkpoints, on rank 0."""

        def work_on_all() -> None:
            with writing(self.folder):
                for name in some:
                    work(self.folder / name)

        self.world.on_main(work_on_all)


def _remove(folder: Path) -> None:
    """Removes the files of a checkpoint, then its folder. A file that a user has put there stays,
    as does a folder that is no checkpoint, whatever its name. state.json, which shows that it is
    one, goes last: if the process ends before, the next call continues."""
    with suppress(OSError, ValueError):
        texts = json.loads((folder / STATE).read_bytes()).get("bytes", {})
        for file in (METADATA, "manifest.json", *texts):
            (folder / file).unlink(missing_ok=True)
        for path in (*folder.glob("__*.distcp"), folder / STATE):
            path.unlink()
        folder.rmdir()


def _identity(folder: Path) -> tuple[int, ...]:
    """Identifies a checkpoint's files as this host sees them. A copy has a different identity."""
    with suppress(OSError):
        status = (folder / METADATA).stat()
        return status.st_ino, status.st_ctime_ns
    return ()


# In a folder


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are all there, whole.

    Attributes:
        state: the run's state as JSON values.
        metadata: the library's: which rectangle of which tensor is where.
    """

    folder: Path
    state: dict[str, Any]
    metadata: Any

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The library's description of each tensor, with `size` and `properties.dtype`, by name."""
        by_name: Mapping[str, Any] = self.metadata.state_dict_metadata
        return by_name

    def read(self, file: str) -> bytes:
        """One of the small files that were saved with it."""
        return (self.folder / file).read_bytes()


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest intact checkpoint in `folder`, or None if there is none; and why each newer one,
    which is damaged, was refused. Raises CheckpointError if all are damaged, or if one may be whole
    and cannot be read."""
    refused: list[str] = []
    for name in reversed(names(folder)):
        try:
            return open_checkpoint(folder / name), refused
        except DamagedError as error:
            refused.append(str(error))
    if refused:
        anew = "a run without --resume starts from scratch"
        raise DamagedError(f"every checkpoint is damaged ({'; '.join(refused)}); {anew}")
    return None, refused


def names(folder: Path) -> list[str]:
    """The checkpoints in `folder` by name, intact or not, the oldest first. Raises CheckpointError
    if the folder exists but cannot be read: it may have some."""
    try:
        return sorted(path.name for path in folder.iterdir() if NAME.match(path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read now ({error.strerror})") from error


def clean(folder: Path) -> None:
    """Removes the temporary folders that a killed process left in `folder`."""
    for path in folder.glob(f".{'[0-9]' * 6}-*.part"):
        shutil.rmtree(path, ignore_errors=True)


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, if it is intact.

    Raises:
        DamagedError: with what is wrong with it.
        CheckpointError: it may be intact, but cannot be read.
    """
    file = STATE
    try:
        state = json.loads((folder / file).read_bytes())
        found = FORMAT if (folder / "manifest.json").exists() else state["format"]  # of version 4
        if found != FORMAT:
            raise CheckpointError(f"its format is {found!r}, not {FORMAT!r}")
        file = METADATA
        with (folder / file).open("rb") as stream:
            metadata = _Metadata(stream).load()
        sizes: dict[str, int] = dict(state.get("bytes", {}))
        for entry in metadata.storage_data.values():  # a file ends with its last entry
            end = entry.offset + entry.length
            sizes[entry.relative_path] = max(end, sizes.get(entry.relative_path, 0))
        for file, size in sizes.items():
            if (there := (folder / file).stat().st_size) != size:
                raise ValueError(f"it has {there:,} of {size:,} bytes")
        return Checkpoint(folder, state, metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}; {MOVE}") from None
    except (OSError, MemoryError) as error:
        if isinstance(error, FileNotFoundError):
            raise DamagedError(f"{folder}: {file} is missing") from None
        raise CheckpointError(f"{folder}: {file} cannot be read now ({error}); {MOVE}") from error
    except Exception as error:  # a damaged pickle raises many kinds
        raise DamagedError(f"{folder}: {file} is damaged ({error})") from None


def weights_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every weight by name, whole, in this process."""
    weights = {
        name.removeprefix("model."): torch.empty(t.size, dtype=t.properties.dtype)
        for name, t in checkpoint.tensors.items()
        if name.startswith("model.")
    }
    held = [Held.whole(f"model.{name}", t) for name, t in weights.items()]
    Saver(checkpoint.folder.parent).load(checkpoint, held)
    return weights


# `.metadata` is a pickle, which can run code: it is read with these classes alone. The entries of a
# checkpoint are tensors; torch reads their values without unpickling anything else.
_CLASSES = {
    "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "StorageMeta",
    "MetadataIndex", "_StorageInfo", "_MEM_FORMAT_ENCODING", "_get_layout", "Size", "PosixPath",
    "WindowsPath",
}  # fmt: skip


def enum_member(members: Any, name: str) -> Any:
    """A member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as `getattr(members, name)`.
    Raises TypeError if it is no enumeration: an attribute of anything else may be code."""
    if not isinstance(members, EnumMeta):
        raise TypeError(f"{name} is asked of {members!r}, which is no enumeration")
    return members[name]


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_class = module.split(".")[0] in ("torch", "pathlib") and name in _CLASSES
        if not (is_class or is_dtype):
            raise CheckpointError(
                f"its .metadata asks for {module}.{name}, which no checkpoint of this project "
                "needs: do not load files of people whom you do not trust"
            )
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            raise CheckpointError(f"it needs {module}.{name} of a different torch") from None


def _sync(path: Path) -> None:
    """Flushes a file, or a folder's entries, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
