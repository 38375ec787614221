"""GPT-2 weights that others have trained: a folder with weights and tokenizer, or a hub's name.

Two roads to the same numbers. A process that holds the whole model lets transformers load it
(`load_pretrained`). Where no process may, parameters are asked for one at a time, by name
(`pretrained_initializer`), and read one at a time, from safetensors files.

Tokens that are ours have new rows of the embedding, which depend on the seed and the name alone.
All weights come as float32, whatever they are stored in: an optimizer could not train bfloat16.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from training.launch import UserError
from training.model import PRESETS, generator_for

if TYPE_CHECKING:  # see training/model.py
    from transformers import GPT2Config, GPT2LMHeadModel

TOKENIZERS = ("tokenizer.json", "vocab.json")  # files, one of which a tokenizer has
PREFIX = "transformer."  # of names; the published GPT-2 has them without it
EMBEDDINGS = ("transformer.wte.weight", "lm_head.weight")  # grow with the vocabulary


def check_pretrained(name: str, max_length: int) -> None:
    """Raises UserError unless `name`, a local folder or one on the hub, is of a GPT-2 with at
    least max_length positions and a tokenizer of its own. (transformers itself loads whatever it is
    given, and fills what does not fit with random weights.)"""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:
        raise _no_weights(name, error) from error
    if config.model_type != "gpt2":
        raise _no_weights(name, f"its model_type is {config.model_type}")
    if config.n_positions < max_length:
        raise UserError(
            f"--model_max_length {max_length} --model {name}: the model has {config.n_positions} "
            f"positions; --model_max_length {config.n_positions} works"
        )
    _check_weights(name, config)
    _check_tokenizer(name, config)


def _check_weights(name: str, config: GPT2Config) -> None:
    """Looks at the headers of a folder's files: whether the token embedding is there, whole."""
    found = None
    for path in sorted(Path(name).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (it is no dictionary)
                    if key.removeprefix("transformer.") == "wte.weight":
                        found = file.get_slice(key).get_shape()
        except (SafetensorError, OSError) as error:
            raise _no_weights(name, f"{path.name}: {error}") from error
    wanted = [config.vocab_size, config.n_embd]
    if any(Path(name).glob("*.safetensors")) and found != wanted:
        raise _no_weights(name, f"wte.weight is {found or 'missing'}, config.json says {wanted}")


def _check_tokenizer(name: str, config: GPT2Config) -> None:
    """A smaller tokenizer may fit, its embedding rounded up; a larger one is of another model. Our
    own special tokens come on top, with new rows."""
    from transformers import AutoTokenizer

    tokens = 0
    # Where there is no file, transformers makes a tokenizer that knows no words.
    if not Path(name).is_dir() or any((Path(name) / file).is_file() for file in TOKENIZERS):
        try:
            tokens = len(AutoTokenizer.from_pretrained(name))
        except Exception as error:
            raise _no_tokenizer(
                name, f"it cannot be read: {type(error).__name__} {error}"
            ) from error
    if not tokens:
        raise _no_tokenizer(name, f"there is no {' or '.join(TOKENIZERS)}")
    if tokens > config.vocab_size:
        raise _no_tokenizer(
            name, f"it has {tokens:,} tokens, and the embedding {config.vocab_size:,} rows"
        )


def _no_tokenizer(name: str, reason: str) -> UserError:
    return UserError(
        f"--model {name}: no tokenizer that fits comes with it ({' '.join(reason.split())[:160]}); "
        "save the one of these weights there, as --export does"
    )


def _no_weights(name: str, reason: object) -> UserError:
    kind = "folder" if Path(name).is_dir() else "name, and neither a preset nor a folder"
    return UserError(
        f"--model {name}: no GPT-2 weights come from this {kind} "
        f"({' '.join(str(reason).split())[:160]}); presets need none: {', '.join(PRESETS)}"
    )


def pretrained_config(name: str, num_tokens: int, dropout: float) -> GPT2Config:
    """The configuration that comes with weights, with rows of the embedding for `num_tokens`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name, **_changes(dropout))
    config.vocab_size = max(config.vocab_size, num_tokens)
    return config


def _changes(dropout: float) -> dict[str, str | float | bool]:
    """What this project decides about GPT-2, see model.py."""
    return {
        "activation_function": "gelu_pytorch_tanh",
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "use_cache": False,
    }


def load_pretrained(name: str, vocab_size: int, dropout: float, seed: int) -> GPT2LMHeadModel:
    """The weights of a local folder or of the hub, with embeddings for `vocab_size` tokens.

    Raises:
        UserError: there are none.
    """
    from transformers import GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, report = GPT2LMHeadModel.from_pretrained(
            name, output_loading_info=True, **_changes(dropout)
        )
    except Exception as error:
        raise _no_weights(name, error) from error
    if report["missing_keys"]:
        raise _no_weights(name, f"{sorted(report['missing_keys'])[0]} is missing")
    model.float()
    known = model.config.vocab_size
    if known < vocab_size:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
        for parameter, p in model.named_parameters():
            if parameter in EMBEDDINGS:
                _new_rows(parameter, p.data[known:], seed)
    return model


def _new_rows(parameter: str, rows: Tensor, seed: int) -> None:
    rows.copy_(torch.empty(rows.shape).normal_(0, 0.02, generator=generator_for(seed, parameter)))


def pretrained_initializer(
    name: str, config: GPT2Config, seed: int
) -> Callable[[str, Tensor], None]:
    """Fills a parameter of that name with the weights of `name`: the same as `load_pretrained`.

    Args:
        config: of `pretrained_config`.

    Raises:
        UserError: a parameter is not among them.
    """
    from transformers import GPT2LMHeadModel

    files = _files_by_parameter(name)
    if not files:  # pickled ones, which transformers reads, and only as a whole
        loaded = dict(load_pretrained(name, config.vocab_size, 0.0, seed).named_parameters())

        @torch.no_grad()
        def copy(parameter: str, p: Tensor) -> None:
            p.copy_(loaded[parameter])

        return copy
    with torch.device("meta"):
        wanted = [parameter for parameter, _ in GPT2LMHeadModel(config).named_parameters()]
    if missing := [p for p in wanted if p.removeprefix(PREFIX) not in files]:
        raise _no_weights(name, f"{missing[0]} is missing")

    @torch.no_grad()
    def read(parameter: str, p: Tensor) -> None:
        path, key = files[parameter.removeprefix(PREFIX)]
        with safe_open(path, framework="pt") as file:
            stored = file.get_tensor(key)
        if parameter in EMBEDDINGS and len(stored) < len(p):
            _new_rows(parameter, p[len(stored) :], seed)
            p = p[: len(stored)]
        if stored.shape != p.shape:
            found, expected = list(stored.shape), list(p.shape)
            raise _no_weights(name, f"{parameter} is {found}, config.json says {expected}")
        p.copy_(stored)

    return read


def model_content(name: str, config: GPT2Config) -> bytes:
    """A hash of the model `name`: its configuration, and all weights that are not pickled. One
    pass over its files."""
    settings = {k: v for k, v in config.to_dict().items() if k != "_name_or_path"}
    content = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode())
    files = {} if name in PRESETS else _files_by_parameter(name)
    for path in sorted({path for path, _ in files.values()}):
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                content.update(chunk)
    return content.digest()


def _files_by_parameter(name: str) -> dict[str, tuple[Path, str]]:
    """The file of each parameter, and what it is called there, by its name without PREFIX; nothing
    where there are no safetensors files."""
    from huggingface_hub import snapshot_download

    folder = Path(name)
    if not folder.is_dir():
        folder = Path(snapshot_download(name, allow_patterns="*.safetensors"))
    found = {}
    with ExitStack() as opened:
        for path in sorted(folder.glob("*.safetensors")):
            file = opened.enter_context(safe_open(path, framework="pt"))
            found.update({key.removeprefix(PREFIX): (path, key) for key in file.keys()})  # noqa: SIM118
    return found
