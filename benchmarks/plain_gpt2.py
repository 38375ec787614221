"""GPT-2 whole, in one process, with the initial weights of every layout."""

from __future__ import annotations

from transformers import GPT2Config, GPT2LMHeadModel

from training.tasks.gpt2 import initializer


def build_model(config: GPT2Config, seed: int) -> GPT2LMHeadModel:
    """A new model in one process, initialized from `seed`."""
    model = GPT2LMHeadModel(config)
    fill = initializer(config, seed)
    for name, p in model.named_parameters():
        fill(name, p)
    return model
