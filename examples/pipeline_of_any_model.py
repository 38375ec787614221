"""Trains any model as a pipeline of two stages, in a plain training loop.

    python examples/pipeline_of_any_model.py

`split` traces a model and cuts it at the first call of a submodule. The model needs no changes.
Here a GPT-2 and a Llama of transformers, with fresh weights, learn the alphabet. For another model,
name the submodule at which its second stage begins.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import project  # noqa: F401  (first: it says what to type if the environment is not active)

# isort: split
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.tracing.trace import split

V, B, T = 26, 8, 16  # letters of the alphabet, sentences per batch, letters per sentence
STEPS, MICROBATCHES, LEARNING_RATE = 30, 4, 0.003


def models() -> list[tuple[nn.Module, str]]:
    """Models, and the submodule of each at which its second stage begins."""
    torch.manual_seed(0)
    letters = {"vocab_size": V, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    gpt2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, **letters)
    llama = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, **letters
    )
    return [(GPT2LMHeadModel(gpt2), "transformer.h.1"), (LlamaForCausalLM(llama), "model.layers.1")]


def batch() -> tuple[dict[str, Any], Tensor]:
    """The arguments of a model, and the letters that follow, B T."""
    letters = (torch.arange(B)[:, None] + torch.arange(T + 1)) % V  # abc..., bcd..., cde..., ...
    return {"input_ids": letters[:, :-1], "use_cache": False}, letters[:, 1:]


def loss_of(output: Any, labels: Tensor) -> Tensor:
    """The sum over the letters of a micro-batch."""
    return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="sum")


def train(model: nn.Module, second_stage: str) -> list[float]:
    """The loss per letter, of every step."""
    x, labels = batch()
    stages = split(model, x, at=[second_stage])
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)  # the stages hold these, too
    losses = []
    with Pipe(nn.Sequential(*map(WithDevice, stages, ["cpu:0", "cpu:1"]))) as pipe:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = pipe.train_step(x, labels, loss_of, "1f1b", MICROBATCHES, scale=1 / (B * T))
            optimizer.step()
            losses.append(loss.item())
    return losses


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=form).parse_args()
    for model, second_stage in models():
        first, *_, last = train(model, second_stage)
        print(f"{type(model).__name__}: the loss per letter fell from {first:.2f} to {last:.2f}")


if __name__ == "__main__":
    main()
