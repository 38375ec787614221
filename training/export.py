"""Trained weights as the rest of the world reads them: a folder for `transformers`.

    model = GPT2LMHeadModel.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

The parameters have the names that they have there, so nothing is converted. They come to rank 0
one at a time: it holds a file's worth of them, however large the model is. The folder is put in
place whole, as a checkpoint is; an earlier export in it is replaced.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from training.checkpoint import SaveError, sync, sync_all
from training.launch import UserError, World

FILE_BYTES = 1 << 30  # of weights in one file, unless a single one has more


def check_export(folder: Path, workdir: Path) -> None:
    """Raises UserError where an export would replace something else: the run's own `workdir`, or
    anything that is not an earlier export."""
    if workdir.resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"--export {folder}: it would replace --workdir {workdir}; --export "
            f"{workdir / 'exported'} works"
        )
    try:
        free = not folder.exists() or (folder.is_dir() and _may_be_replaced(folder))
    except OSError as error:
        raise UserError(
            f"--export {folder}: nothing can be written there ({error.strerror}); name a folder of "
            "your own, as --export exported"
        ) from error
    if not free:
        raise UserError(
            f"--export {folder}: something else is there; name a new folder, as --export "
            f"{folder}_gpt2"
        )


def _may_be_replaced(folder: Path) -> bool:
    """Whether the folder is empty, or an export; a workdir has a config.json, too."""
    paths = list(folder.iterdir())
    weights = any(path.suffix == ".safetensors" for path in paths)
    export = (folder / "config.json").is_file() and weights
    return not paths or (export and all(path.is_file() for path in paths))


def export(
    world: World,
    folder: Path,
    weights: Iterator[tuple[str, Tensor]],
    write_rest: Callable[[Path], None],
) -> None:
    """Writes a model. All ranks call it together.

    Args:
        weights: see `LaidOutModel.weights`.
        write_rest: writes into the folder that it is given what else there is, as config.json.

    Raises:
        SaveError: on rank 0: they cannot be written. What was there before still is.
    """

    def write(aside: Path) -> None:
        write_rest(aside)
        _write_weights(aside, weights)

    try:
        if world.is_main:
            put_in_place(folder, write)
    finally:
        deque(weights, maxlen=0)  # what other ranks still send, if this one could not write


def _write_weights(folder: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Into model.safetensors or, where that would be too large, several files with an index."""
    where: dict[str, str] = {}  # the file of each
    batch: dict[str, Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(where.values())) + 1:05d}.safetensors"
        save_file(batch, folder / file, {"format": "pt"})
        where.update(dict.fromkeys(batch, file))
        batch.clear()

    total = 0
    for name, p in weights:
        if batch and sum(t.nbytes for t in batch.values()) + p.nbytes > FILE_BYTES:
            flush()
        batch[name] = p.contiguous()
        total += p.nbytes
    flush()
    if len(set(where.values())) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def put_in_place(folder: Path, write: Callable[[Path], None]) -> None:
    """Makes `folder` what `write` writes into the folder that it is given, all or nothing.

    Raises:
        SaveError: it cannot be written. What was there before still is.
    """
    folder = folder.resolve()
    aside, old = _beside(folder)
    clean_export(folder)
    try:
        aside.mkdir()
        write(aside)
        for path in aside.iterdir():  # safetensors lets only the owner read
            path.chmod((aside / "config.json").stat().st_mode)
        sync_all(aside)
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise SaveError(f"--export {folder}: cannot be written ({error})") from error
    finally:
        clean_export(folder)


def clean_export(folder: Path) -> None:
    """Removes what an export that was killed has left beside its folder; an earlier one that it had
    moved out of the way is put back."""
    aside, old = _beside(folder.resolve())
    if old.exists() and not folder.exists():
        with suppress(OSError):
            old.rename(folder)
    for path in (aside, old) if folder.exists() else (aside,):
        shutil.rmtree(path, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    """Where an export is written, and where an earlier one is while it is being replaced."""
    return folder.with_name(f".{folder.name}.part"), folder.with_name(f".{folder.name}.old")
