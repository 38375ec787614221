"""A sharded step: zero 1, 2 and 3, data parallelism, and PyTorch's fully_shard (FSDP2).

Two ranks, one core each. All contestants live in the same two processes, with the same model,
batches and optimizer, and take turns. Then each has two processes to itself for a few steps, and
memory is counted: the bytes of parameters, gradients and optimizer state that a rank holds between
steps, and the most memory that was resident, beyond what the process had before the model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.harness import Row, agree, alternate, ratio_of, summarize, write_rows
from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.gradients import GradientBuckets
from pipeline.model import gpt2_layers, loss_of_targets
from training.launch import Settings, World, launch
from training.model import build_model, gpt2_config, initializer

TITLE = "Sharded step, GPT-2 with 6 blocks of width 512, 2 ranks with a core each"
ROUNDS, STEPS = 7, 1
SEQUENCES, LENGTH, VOCAB = 32, 32, 4096  # 1,024 positions per rank and step
MEMORY_STEPS = 3
MIB = 2**20

Batch = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def _config() -> GPT2Config:
    return gpt2_config("gpt2-mini", VOCAB, 128, dropout=0.0, n_layer=6, n_embd=512, n_head=8)


def _batches(rank: int) -> list[Batch]:
    """As in training: half of the positions are targets."""
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(4):
        ids = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=generator)
        weights = torch.zeros(SEQUENCES, LENGTH, dtype=torch.long)
        weights[:, LENGTH // 2 :] = 1
        batches.append(((ids[:, :-1], weights), (ids[:, 1:], weights)))
    return batches


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


class _Contestant:
    """A model of its own, trained in its own way."""

    def __init__(self, name: str, rank: int) -> None:
        self.batches = _batches(rank)
        self.taken = 0
        self.loss = torch.zeros(())
        self.targets = 2 * SEQUENCES * LENGTH / 2  # of both ranks

    def steps(self) -> None:
        """STEPS steps of training."""
        for _ in range(STEPS):
            x, target = self.batches[self.taken % len(self.batches)]
            self.taken += 1
            self.loss = self.step(x, target)

    def step(self, x: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
        """One of them; this rank's part of the loss."""
        raise NotImplementedError

    def state_bytes(self) -> int:
        """Of parameters, gradients and optimizer state on this rank."""
        raise NotImplementedError


class _Ours(_Contestant):
    def __init__(self, name: str, rank: int) -> None:
        super().__init__(name, rank)
        with torch.device("meta"):
            model = GPT2LMHeadModel(_config())
        self.fsdp = FullyShardedDataParallel(
            gpt2_layers(model),
            _optimizer,
            names={p: name for name, p in model.named_parameters()},
            init=initializer(_config(), seed=0),
            zero=int(name.split()[1]),
            share_memory="gloo" not in name,
        )

    def step(self, x: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
        loss = self.fsdp.train_step([x], [target], loss_of_targets, 1 / self.targets, 1)
        self.fsdp.optimizer_step()
        return loss

    def state_bytes(self) -> int:
        held = self.fsdp.held_bytes()
        return held.state + held.buffers


class _Torch(_Contestant):
    """Whole replicas with averaged gradients, or FSDP2: the same loop."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__(name, rank)
        model = build_model(_config(), seed=0)
        self.average: Callable[[], None] = lambda: None
        self.model: nn.Module = nn.Sequential(*gpt2_layers(model))
        if name == "FSDP2":
            for block in list(self.model)[1:-1]:
                fully_shard(block)
            fully_shard(self.model)
        else:
            self.average = GradientBuckets(self.model).finish
        self.parameters = list(self.model.parameters())
        self.optimizer = _optimizer(self.parameters)

    def step(self, x: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
        self.optimizer.zero_grad()
        loss = loss_of_targets(self.model(x), target) / (self.targets / 2)
        loss.backward()
        self.average()
        self.optimizer.step()
        return loss.detach() / 2

    def state_bytes(self) -> int:
        state = [t for s in self.optimizer.state.values() for t in s.values()]
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return sum(_local_bytes(t) for t in [*self.parameters, *gradients, *state])


def _local_bytes(tensor: Tensor) -> int:
    """FSDP2's tensors know how large the whole is, and hold a part."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.nbytes
