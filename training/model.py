"""GPT-2: sizes, initial weights, and the loss over target tokens.

The model itself is the one of `transformers`, with its parameter names, so that weights come
from and go to where everybody else's do. Here is what this project decides about it:

- initial weights depend on the seed and on the parameter's *name*, never on the order in which
  parameters are created or on which rank holds them: every layout starts from the same model;
- logits are computed at target positions only. The head is a [C, V] matrix product per position,
  and in translation half of all positions, source and padding, have no target;
- the activation is PyTorch's fused tanh-GELU. It is the same function as the `gelu_new` of the
  published weights, in one pass over memory instead of eight.

Source of the sizes and the initialisation: Radford et al., "Language Models are Unsupervised
Multitask Learners", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.data import Batch
from training.launch import UserError
from training.seeds import stream

if TYPE_CHECKING:  # it takes seconds to import: functions do it where they need it
    from transformers import GPT2Config, GPT2LMHeadModel

PRESETS = {
    "gpt2-mini": {"n_layer": 4, "n_embd": 256, "n_head": 4},
    "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt2-medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
    "gpt2-large": {"n_layer": 36, "n_embd": 1280, "n_head": 20},
    "gpt2-xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25},
}
VOCAB_MULTIPLE = 64  # matrix units prefer it


def import_transformers() -> None:
    """Ranks call this side by side, before one waits for another: it takes seconds."""
    from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast  # noqa: F401


def round_vocab(size: int) -> int:
    """The next multiple of 64."""
    return -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def gpt2_size(
    name: str, n_layer: int | None = None, n_embd: int | None = None, n_head: int | None = None
) -> dict[str, int]:
    """The sizes of a preset, with what is given changed.

    Raises:
        UserError: no such preset, or sizes that do not make a model.
    """
    if name not in PRESETS:
        raise UserError(
            f"--model {name}: neither a preset ({', '.join(PRESETS)}) nor a folder with weights"
        )
    given = {"n_layer": n_layer, "n_embd": n_embd, "n_head": n_head}
    size = {**PRESETS[name], **{k: v for k, v in given.items() if v is not None}}
    if min(size.values()) < 1 or size["n_embd"] % size["n_head"]:
        raise UserError(
            f"--n_layer {size['n_layer']} --n_embd {size['n_embd']} --n_head {size['n_head']}: all "
            "must be positive and n_head must divide n_embd, as --n_layer 4 --n_embd 256 --n_head 4"
        )
    return size


def gpt2_config(
    name: str,
    vocab_size: int,
    max_length: int,
    *,
    dropout: float = 0.1,
    n_layer: int | None = None,
    n_embd: int | None = None,
    n_head: int | None = None,
) -> GPT2Config:
    """The configuration of a preset, with what is given changed. Raises as `gpt2_size`."""
    from transformers import GPT2Config

    return GPT2Config(
        **gpt2_size(name, n_layer, n_embd, n_head),
        vocab_size=vocab_size,
        n_positions=max(max_length, 1024 if name != "gpt2-mini" else 0),
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )


def build_model(config: GPT2Config, seed: int) -> GPT2LMHeadModel:
    """A new model with the weights that `seed` gives."""
    from transformers import GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    initialize(model, seed)
    return model


def initialize(model: Any, seed: int) -> None:
    """Sets every parameter from the seed and its name, see `initializer`."""
    fill = initializer(model.config, seed)
    for name, p in model.named_parameters():
        fill(name, p)


def initializer(config: GPT2Config, seed: int) -> Callable[[str, Tensor], None]:
    """Fills a parameter of that name, as GPT-2 does: biases 0, norms 1, matrices normal with
    deviation 0.02, those that add to the residual stream less by sqrt(2 * n_layer)."""
    layers = config.n_layer

    @torch.no_grad()
    def fill(name: str, p: Tensor) -> None:
        if name.endswith("bias"):
            p.zero_()
        elif ".ln_" in name:
            p.fill_(1)
        else:
            generator = generator_for(seed, name)
            std = 0.02 / math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 0.02
            p.copy_(torch.empty(p.shape).normal_(0, std, generator=generator))

    return fill


def generator_for(seed: int, name: str) -> torch.Generator:
    """The source of a parameter's initial weights."""
    return torch.Generator().manual_seed(stream(seed, "initial weights", name))


def target_loss(model: Any, batch: Batch) -> Tensor:
    """The summed negative log likelihood, in nats, of the target tokens of a batch.

    Args:
        model: a GPT2LMHeadModel.
        batch: see `training.data.to_batch`; at least one position.
    """
    hidden = model.transformer(input_ids=batch["input_ids"], use_cache=False)[0]
    at = batch["target_index"]
    logits = model.lm_head(hidden.flatten(0, 1)[at])
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()  # the sum over the vocabulary needs more than 8 bits
    return F.cross_entropy(logits, batch["labels"].flatten()[at], reduction="sum")
