"""GPT-2 weights that others have trained: a folder with weights and tokenizer, or a hub's name.

Parameters are asked for one at a time, by name, and read one at a time from safetensors files: no
process need hold the whole model.

Tokens that are ours have new rows of the embedding, which depend on the seed and the name alone.
All weights come as float32, whatever they are stored in: an optimizer could not train bfloat16.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from training.launch import UserError
from training.model import PRESETS, generator_for

if TYPE_CHECKING:  # see training/model.py
    from transformers import GPT2Config

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
    if Path(name).is_dir():
        _check_embedding(name, config)
    _check_tokenizer(name, config)


def _check_embedding(name: str, config: GPT2Config) -> None:
    """Looks at the headers of a folder's files, unless they are pickled."""
    files, found = _files_by_parameter(name), None
    if "wte.weight" in files:
        path, key = files["wte.weight"]
        with safe_open(path, framework="pt") as file:
            found = file.get_slice(key).get_shape()
    wanted = [config.vocab_size, config.n_embd]
    if files and found != wanted:
        raise _no_weights(name, f"wte.weight is {found or 'missing'}, config.json says {wanted}")


def _check_tokenizer(name: str, config: GPT2Config) -> None:
    """A smaller tokenizer may fit, its embedding rounded up; a larger one is of another model. Our
    own special tokens come on top, with new rows."""
    from transformers import AutoTokenizer

    reason = f"there is no {' or '.join(TOKENIZERS)}"
    # Where there is no file, transformers makes a tokenizer that knows no words.
    if not Path(name).is_dir() or any((Path(name) / file).is_file() for file in TOKENIZERS):
        try:
            tokens = len(AutoTokenizer.from_pretrained(name))
        except Exception as error:
            reason = f"it cannot be read: {type(error).__name__} {error}"
        else:
            if tokens <= config.vocab_size:
                return
            reason = f"it has {tokens:,} tokens, and the embedding {config.vocab_size:,} rows"
    raise UserError(
        f"--model {name}: no tokenizer that fits comes with it ({' '.join(reason.split())[:160]}); "
        "save the one of these weights there, as --export does"
    )


def _no_weights(name: str, reason: object) -> UserError:
    if Path(name).is_dir():
        where = f"no GPT-2 weights come from this folder ({' '.join(str(reason).split())[:160]})"
    else:
        where = "neither a preset, nor a folder, nor could a GPT-2 of this name be had from the hub"
    near = "".join(f" (is it {preset}?)" for preset in get_close_matches(name, PRESETS, 1))
    return UserError(f"--model {name}: {where}{near}; presets need none: {', '.join(PRESETS)}")


def pretrained_config(name: str, num_tokens: int, dropout: float) -> GPT2Config:
    """The configuration that comes with weights, with rows of the embedding for `num_tokens` and
    what this project decides about GPT-2, see model.py."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        name, activation_function="gelu_pytorch_tanh", use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    config.vocab_size = max(config.vocab_size, num_tokens)
    return config


def pretrained_initializer(
    name: str, config: GPT2Config, seed: int
) -> Callable[[str, Tensor], None]:
    """Fills a parameter of that name with the weights of `name`.

    Args:
        config: of `pretrained_config`.

    Raises:
        UserError: a parameter is not among them.
    """
    from transformers import GPT2LMHeadModel

    files, loaded = _files_by_parameter(name), dict[str, Tensor]()
    if not files:  # pickled ones, which transformers reads, and only as a whole
        try:
            model, report = GPT2LMHeadModel.from_pretrained(name, output_loading_info=True)
        except Exception as error:
            raise _no_weights(name, error) from error
        missing = report["missing_keys"]  # they have random values
        loaded = {n: p for n, p in model.named_parameters() if n not in missing}
    with torch.device("meta"):
        wanted = [parameter for parameter, _ in GPT2LMHeadModel(config).named_parameters()]
    missing = [p for p in wanted if p.removeprefix(PREFIX) not in files and p not in loaded]
    if missing:
        raise _no_weights(name, f"{missing[0]} is missing")

    @torch.no_grad()
    def read(parameter: str, p: Tensor) -> None:
        if loaded:
            stored = loaded[parameter]
        else:
            path, key = files[parameter.removeprefix(PREFIX)]
            with safe_open(path, framework="pt") as file:
                stored = file.get_tensor(key)
        if parameter in EMBEDDINGS and len(stored) < len(p):
            rows = p[len(stored) :]
            rows.copy_(
                torch.empty(rows.shape).normal_(0, 0.02, generator=generator_for(seed, parameter))
            )
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
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (it is no dictionary)
                    found[key.removeprefix(PREFIX)] = (path, key)
        except (SafetensorError, OSError) as error:
            raise _no_weights(name, f"{path.name}: {error}") from error
    return found
