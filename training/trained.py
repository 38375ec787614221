"""Loads a trained GPT-2 into one process, from any output of a run, and writes it for transformers.

a workdir       its newest intact checkpoint
a checkpoint    one of the folders in checkpoints/ of a workdir
an export       a folder that generate.py wrote, or any GPT-2 of `transformers`, also on the hub

Parameters have the names of `transformers`, so nothing is converted.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from training.checkpoint import METADATA, Checkpoint, newest, open_checkpoint, weights_of
from training.files import CHECKPOINTS, writing

from .launch.errors import UserError, first_sentence, say
from .tasks.pretrained import check_pretrained
from .tasks.tokens import TOKENIZER_FILES, load_tokenizer

if TYPE_CHECKING:  # see training/tasks/gpt2.py
    from transformers import PreTrainedTokenizerFast


def load_trained(
    name: str, device: torch.device | str = "cpu"
) -> tuple[Any, PreTrainedTokenizerFast]:
    """The model, a `GPT2LMHeadModel` in evaluation mode, and its tokenizer. `model.generate` takes
    the most probable tokens, and ends at the end token, and at the length of the sequences that the
    model was trained on, which is `tokenizer.model_max_length`.

    Raises:
        UserError: there is no such model, or it is damaged.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # else a bar for the weights precedes each answer
    folder = Path(name)
    one = (folder / METADATA).is_file()
    checkpoint, refused = (open_checkpoint(folder), []) if one else newest(folder / CHECKPOINTS)
    if checkpoint and refused:
        say(f"{'; '.join(refused)}; {checkpoint.folder.name}, which is older, is taken\n")
    model, tokenizer = _of_checkpoint(checkpoint) if checkpoint else _of_transformers(name)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.config.update({"use_cache": True, **special})
    # A pipeline of transformers samples, unless it is told not to.
    settings = {"max_length": tokenizer.model_max_length, "do_sample": False, **special}
    model.generation_config.update(**settings)
    return model.to(device).eval().requires_grad_(False), tokenizer


def _of_checkpoint(checkpoint: Checkpoint) -> tuple[Any, PreTrainedTokenizerFast]:
    from transformers import GPT2Config, GPT2LMHeadModel

    if not (checkpoint.folder / TOKENIZER_FILES[0]).is_file():
        raise UserError(f"{checkpoint.folder}: it is of a model of pictures, and not of text")
    if checkpoint.state["options"].get("experts"):
        raise UserError(
            f"{checkpoint.folder}: its model has experts, and transformers has no GPT-2 with "
            "experts; train.py writes what the model generates after every epoch"
        )
    config, weights = json.loads(checkpoint.read("config.json")), weights_of(checkpoint)
    model: Any = GPT2LMHeadModel.from_pretrained(
        None, config=GPT2Config.from_dict(config), state_dict=weights,
        dtype=weights["transformer.wte.weight"].dtype,
    )  # fmt: skip
    tokenizer = load_tokenizer({file: checkpoint.read(file) for file in TOKENIZER_FILES})
    tokenizer.model_max_length = checkpoint.state["options"]["model_max_length"]
    return model, tokenizer


def _of_transformers(name: str) -> tuple[Any, PreTrainedTokenizerFast]:
    """Raises UserError if it is not a GPT-2 with a tokenizer."""
    from transformers import AutoTokenizer, GPT2LMHeadModel

    try:
        check_pretrained(name)
    except Exception as error:  # its readers raise many kinds
        raise UserError(
            f"{name}: neither the workdir of a run with a checkpoint, nor a checkpoint, nor a "
            f"GPT-2 of transformers ({first_sentence(error)}); the --workdir of a run works, from "
            "its first epoch on"
        ) from error
    model, tokenizer = GPT2LMHeadModel.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    tokenizer.model_max_length = min(tokenizer.model_max_length, model.config.n_positions)
    return model, tokenizer


def source_end(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """The token after which a translation begins; None: the model continues texts."""
    ends = [token for token in tokenizer.all_special_tokens if re.fullmatch(r"<eos_.+>", token)]
    return next((token for token in ends if token != tokenizer.eos_token), None)


def export(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes what `load_trained` returns into a new folder, for `from_pretrained`. It gets its name
    when it is complete.

    Raises:
        UserError: something is in the folder.
        RunError: it cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--export {folder}: it already exists; name a new folder")
    with writing(f"--export {folder}"):
        whole = folder.resolve()  # it may be a link to an empty folder
        whole.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(".part", f".{whole.name}-", whole.parent) as part:
            new = Path(part) / "new"  # with the permissions of other folders
            model.float().save_pretrained(new)
            tokenizer.save_pretrained(new)
            new.rename(whole)
