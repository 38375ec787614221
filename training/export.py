"""Trained weights as the rest of the world reads them: a folder for `transformers`.

    model = GPT2LMHeadModel.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

The parameters have the names that they have there, so nothing is converted. The folder is put in
place whole, as a checkpoint is; an earlier export in it is replaced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from torch import Tensor

from training.checkpoint import sync_folder
from training.launch import UserError
from training.pieces import SaveError

if TYPE_CHECKING:  # see training/model.py
    from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast


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
    folder: Path,
    model: GPT2LMHeadModel,
    tokenizer: PreTrainedTokenizerFast,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Writes the model and its tokenizer.

    Args:
        weights: of a model that is on the meta device, by name.

    Raises:
        SaveError: they cannot be written. What was there before still is.
    """

    def write(aside: Path) -> None:
        model.save_pretrained(aside, state_dict=weights)
        tokenizer.save_pretrained(aside)

    put_in_place(folder, write)


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
        for path in aside.iterdir():
            path.chmod(
                (aside / "config.json").stat().st_mode
            )  # safetensors lets only the owner read
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        sync_folder(aside)
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        sync_folder(folder.parent)
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
