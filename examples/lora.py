"""Trains adapters (LoRA) of a GPT-2 whose own weights stay frozen, and saves only the adapters.

    python examples/lora.py pipe FILE                           two stages, a thread each
    torchrun --nproc-per-node 2 examples/lora.py ddp FILE       or fsdp

A chosen matrix W computes x W + x A B. Only A and B are trained: to every strategy they are
parameters like others. Here a small model with fresh weights learns the alphabet;
`GPT2LMHeadModel.from_pretrained` loads a trained model from a folder.

Paper: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import project  # noqa: F401  (first: it says what to type if the environment is not active)

# isort: split
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.gradients import DistributedDataParallel
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from runtime.meta import names_of
from training.tasks.gpt2 import Sequences, gpt2_layers

CHOSEN = ("transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_fc")  # matrices
LETTERS = (torch.arange(8)[:, None] + torch.arange(17)) % 26  # abc..., bcd..., cde..., ...
adamw = partial(torch.optim.AdamW, lr=0.01)


class Adapted(nn.Module):
    """A matrix with its adapter. B is 0 at first, so nothing changes."""

    def __init__(self, matrix: nn.Module, rank: int = 4) -> None:
        super().__init__()
        inputs, outputs = matrix.get_parameter("weight").shape
        self.matrix = matrix
        self.a = nn.Parameter(torch.randn(inputs, rank) / inputs**0.5)
        self.b = nn.Parameter(torch.zeros(rank, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix(x) + x @ self.a @ self.b


def adapt(model: nn.Module) -> dict[str, Tensor]:
    """Freezes the model, gives its chosen matrices adapters, and returns these, by name."""
    model.requires_grad_(False)
    for name in CHOSEN:
        model.set_submodule(name, Adapted(model.get_submodule(name)))
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def load(path: str, adapters: dict[str, Tensor]) -> None:
    """Loads adapters from a file. ValueError, before anything changes, unless names and shapes are
    the model's."""
    saved = load_file(path)
    differ = {(n, t.shape) for n, t in saved.items()} ^ {(n, p.shape) for n, p in adapters.items()}
    if differ:
        raise ValueError(f"{path} has adapters of another model, see {min(differ)[0]}")
    for name, p in adapters.items():
        p.data.copy_(saved[name])


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """What some sentences, logits B T V, labels B T, add to the mean over all 8 x 16 letters."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (8 * 16)


def in_stages(model: GPT2LMHeadModel, adapters: dict[str, Tensor], steps: int) -> None:
    """In one process, a thread per stage."""
    optimizer = adamw(adapters.values())
    layers = [WithDevice(layer, f"cpu:{k // 3}") for k, layer in enumerate(gpt2_layers(model))]
    with Pipe(nn.Sequential(*layers)) as pipe:
        for _ in range(steps):
            optimizer.zero_grad()
            pipe.train_step(Sequences(LETTERS[:, :-1]), LETTERS[:, 1:], loss_of, "1f1b", 4)
            optimizer.step()


def on_ranks(model: GPT2LMHeadModel, adapters: dict[str, Tensor], steps: int) -> None:
    """Each of W ranks has the whole model, and every W-th sentence."""
    rank, W, optimizer = dist.get_rank(), dist.get_world_size(), adamw(adapters.values())
    ddp = DistributedDataParallel(nn.Sequential(*gpt2_layers(model)))
    for _ in range(steps):
        optimizer.zero_grad()
        (W * loss_of(ddp(Sequences(LETTERS[rank::W, :-1])), LETTERS[rank::W, 1:])).backward()
        ddp.average_gradients()  # the mean over W ranks
        optimizer.step()


def in_shards(model: GPT2LMHeadModel, adapters: dict[str, Tensor], steps: int) -> None:
    """Each rank has a part of every layer. In the end all have the whole adapters."""
    rank, W, layers = dist.get_rank(), dist.get_world_size(), gpt2_layers(model)
    fsdp = FullyShardedDataParallel(layers, adamw, names=names_of(model))
    for _ in range(steps):
        fsdp.train_step([Sequences(LETTERS[rank::W, :-1])], [LETTERS[rank::W, 1:]], loss_of)
        fsdp.optimizer_step()
    for whole in map(fsdp.gather_param_data, range(len(layers))):
        adapters.update({name: p.clone() for name, p in whole.items() if name in adapters})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    strategies = {"pipe": in_stages, "ddp": on_ranks, "fsdp": in_shards}
    parser.add_argument("strategy", choices=strategies)
    parser.add_argument("file", help="for the adapters, e.g. adapters.safetensors")
    args = parser.parse_args()
    if args.strategy != "pipe":
        if "RANK" not in os.environ:
            parser.error(f"{args.strategy} needs ranks: torchrun --nproc-per-node 2 starts two")
        dist.init_process_group("gloo")
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=26))
    adapters = adapt(model)
    strategies[args.strategy](model, adapters, 100)
    save_file(adapters, args.file)  # on every rank the same bytes


if __name__ == "__main__":
    main()
