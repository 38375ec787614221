"""Pretrained GPT-2 weights, from a folder with weights and tokenizer or by name from the hub.

Parameters are read by name, one at a time, from safetensors files: no process need hold the whole
model. This project's special tokens get new rows of the embedding, which depend on the seed and the
name alone. Weights are converted to the run's type, at least float32.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from .gpt2 import check_computed, generator_for
from .text_files import try_hub

if TYPE_CHECKING:  # see training/tasks/gpt2.py
    from transformers import GPT2Config

PREFIX = "transformer."  # of parameter names; the published GPT-2 omits it


def check_pretrained(name: str) -> int:
    """Returns the number of positions of `name`, a local folder or a name on the hub, if it is a
    GPT-2 with its own tokenizer; else raises what its readers raise, or ValueError. (transformers
    itself loads any model, fills parameters that do not fit with random weights, and makes a
    tokenizer that knows no words.) Downloads the hub's files."""
    from transformers import AutoConfig, AutoTokenizer, GPT2LMHeadModel

    if not Path(name).is_dir():
        try_hub()
    config = AutoConfig.from_pretrained(name)
    if config.model_type != "gpt2":
        raise ValueError(f"its model_type is {config.model_type}")
    stored = _stored(name)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    check_computed(model)
    if (config.n_inner or 0) % config.n_head:
        raise ValueError(f"its n_inner is {config.n_inner}, not a multiple of its n_head")
    for parameter, p in model.named_parameters():  # a tied head is not among them
        *_, shape = stored.get(parameter.removeprefix(PREFIX), ("missing",))
        if shape != list(p.shape):
            raise ValueError(
                f"{parameter} is {shape} in its *.safetensors, and {list(p.shape)} in config.json"
            )
    # There may be fewer tokens than rows of the embedding, whose number may be rounded up. Our own
    # special tokens come on top, with new rows.
    tokens = len(AutoTokenizer.from_pretrained(name))
    if not 256 <= tokens <= config.vocab_size:  # every byte is a token
        raise ValueError(f"its tokenizer has {tokens} tokens, not 256 to {config.vocab_size}")
    return int(config.n_positions)


class Pretrained:
    """What a task that begins with pretrained weights takes from `name`, which has passed
    `check_pretrained`: configuration, initial values."""

    def __init__(self, name: str, dropout: float, seed: int) -> None:
        self.name, self.dropout, self.seed, self.stored = name, dropout, seed, _stored(name)

    def config(self, num_tokens: int) -> GPT2Config:
        """The model's own, with embedding rows for `num_tokens` and this run's dropout."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.name, use_cache=False)
        config.update({f"{place}_pdrop": self.dropout for place in ("resid", "embd", "attn")})
        config.vocab_size = max(config.vocab_size, num_tokens)
        if config.activation_function == "gelu_new":
            config.activation_function = "gelu_pytorch_tanh"  # the same function, see gpt2.py
        return config

    @torch.no_grad()
    def initialize(self, parameter: str, p: Tensor) -> None:
        """Fills a parameter by its name."""
        path, key, _ = self.stored[parameter.removeprefix(PREFIX)]
        with safe_open(path, framework="pt") as file:
            values = file.get_tensor(key)
        p[: len(values)] = values  # converted to p's type
        if rows := len(p) - len(values):  # of the embedding, for new tokens
            generator = generator_for(self.seed, parameter)
            p[-rows:] = torch.empty(rows, *p.shape[1:]).normal_(0, 0.02, generator=generator)

    def content(self) -> str:
        """A hash of the content of the weight files, of which each host has its own copy, wherever
        that is."""
        digest = hashlib.sha256()
        for path in sorted({path for path, *_ in self.stored.values()}):
            digest.update(np.memmap(path, mode="r").data)  # read through, never whole in memory
        return digest.hexdigest()


def _stored(name: str) -> dict[str, tuple[Path, str, list[int]]]:
    """Each parameter's file, name in it and shape, by its name without PREFIX."""
    from huggingface_hub import snapshot_download

    folder = Path(name)
    if not folder.is_dir():
        folder = Path(snapshot_download(name, allow_patterns="*.safetensors"))
    parameters = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no dictionary)
                parameters[key.removeprefix(PREFIX)] = (path, key, file.get_slice(key).get_shape())
    return parameters
