"""What verify.py trains: a small GPT-2 on random sentences, a small VGG16 on random pictures.

A problem says which examples form which batch and how they become micro-batches; it knows no
strategy. The plain loop over each is in verify.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from data_parallel.dataset import even_slices
from pipeline.model import gpt2_layers, loss_of_targets
from training.data import Batch, Encoded, GlobalBatches, RankLoader, Step
from training.launch import World
from training.model import gpt2_config
from training.vgg import picture_loss, vgg16, vgg_layers


class Loader(Protocol):
    """The steps of one rank."""

    def steps(self, epoch: int) -> Iterator[Step]:
        """Those of an epoch."""


class Problem(Protocol):
    """See the head of this file. Problems are frozen dataclasses: equal ones have one reference."""

    def __hash__(self) -> int: ...

    @property
    def max_grad_norm(self) -> float | None:
        """What gradients are clipped to."""

    @property
    def without_dropout(self) -> Problem:
        """What the plain process trains."""

    def model(self) -> nn.Module:
        """The plain model."""

    def layers(self, model: Any) -> list[nn.Module]:
        """The same as layers that follow each other; they hold its parameters."""

    def batches(self) -> GlobalBatches:
        """Which examples form which step's batch."""

    def loader(self, world: World, **cut: Any) -> Loader:
        """A rank's part of every batch; `cut`: into which micro-batches, see RankLoader."""

    def pair(self, batch: Batch, dtype: torch.dtype) -> tuple[Any, Any]:
        """The first layer's input, and the target, of a micro-batch for weights of that type."""

    def loss(self, output: Tensor, target: Any) -> Tensor:
        """The summed loss of a micro-batch, from the last layer's output."""


@dataclass(frozen=True)
class Sentences:
    """A GPT-2 of width 16, vocabulary 64, on sentences of 3 to 21 tokens."""

    num_examples: int = 16
    batch_size: int = 8
    n_layer: int = 2
    tied: bool = True  # the head is the embedding
    same_length: bool = False  # micro-batches have equal shapes, and can be mistaken for each other
    some_without_target: bool = False  # every second is a source sentence alone
    dropout: float = 0.0
    max_grad_norm: float | None = None

    @property
    def without_dropout(self) -> Sentences:
        """See `Problem`."""
        return replace(self, dropout=0.0)

    def config(self) -> GPT2Config:
        """The model's sizes."""
        config = gpt2_config(
            "gpt2-mini", 64, 32, dropout=self.dropout, n_layer=self.n_layer, n_embd=16, n_head=2
        )
        config.tie_word_embeddings = self.tied
        return config

    def model(self) -> GPT2LMHeadModel:
        """See `Problem`."""
        return GPT2LMHeadModel(self.config())

    def layers(self, model: Any) -> list[nn.Module]:
        """See `Problem`: embedding, halves of blocks, head."""
        return gpt2_layers(model, halves=True)

    def examples(self) -> list[Encoded]:
        """Sentences of tokens 1 to 63; 0 pads."""
        rng, examples = random.Random(3), []
        for i in range(self.num_examples):
            source, target = rng.randint(2, 9), rng.randint(1, 12)
            if self.same_length:
                target = 14 - source
            if self.some_without_target and i % 2:
                source, target = source + target, 0
            ids = [rng.randrange(1, 64) for _ in range(source + target)]
            examples.append(Encoded(ids, source))
        return examples

    def batches(self) -> GlobalBatches:
        """See `Problem`."""
        return GlobalBatches(self.num_examples, self.batch_size, seed=0)

    def loader(self, world: World, **cut: Any) -> RankLoader:
        """See `Problem`."""
        return RankLoader(
            self.examples(), self.batches(), rank=world.rank, world_size=world.world_size,
            pad_id=0, device=world.device, **cut,
        )  # fmt: skip

    def pair(self, batch: Batch, _: torch.dtype) -> tuple[Any, Any]:
        """See `Problem`: the weights go with the ids, so that the head computes few logits."""
        weights = batch["label_token_weights"]
        return (batch["input_ids"], weights), (batch["labels"], weights)

    def loss(self, output: Tensor, target: Any) -> Tensor:
        """See `Problem`."""
        return loss_of_targets(output, target)


@dataclass(frozen=True)
class Pictures:
    """A VGG16 of a sixteenth of its width, on noise."""

    num_examples: int = 16
    batch_size: int = 8
    max_grad_norm: float | None = None

    @property
    def without_dropout(self) -> Pictures:
        """See `Problem`."""
        return self

    def model(self) -> nn.Module:
        """See `Problem`."""
        return vgg16(width=4)

    def layers(self, model: Any) -> list[nn.Module]:
        """See `Problem`."""
        return [*vgg_layers(model)]

    def examples(self) -> tuple[Tensor, Tensor]:
        """Pictures N 3 32 32 and their classes N."""
        generator = torch.Generator().manual_seed(3)
        pictures = torch.randn(self.num_examples, 3, 32, 32, generator=generator)
        classes = torch.randint(10, (self.num_examples,), generator=generator)
        return pictures, classes

    def batches(self) -> GlobalBatches:
        """See `Problem`."""
        return GlobalBatches(self.num_examples, self.batch_size, seed=0)

    def loader(self, world: World, **cut: Any) -> Loader:
        """See `Problem`."""
        return _PictureLoader(self, world, **cut)

    def pair(self, batch: Batch, dtype: torch.dtype) -> tuple[Any, Any]:
        """See `Problem`."""
        return batch["pictures"].to(dtype), batch["labels"]

    def loss(self, output: Tensor, target: Any) -> Tensor:
        """See `Problem`."""
        return picture_loss(output, target)


class _PictureLoader:
    """What RankLoader is to sentences: rank r has every W-th picture of a batch."""

    def __init__(self, problem: Pictures, world: World, accumulation: int = 1) -> None:
        self.problem, self.world, self.accumulation = problem, world, accumulation

    def steps(self, epoch: int) -> Iterator[Step]:
        """Each picture counts as one position and one target."""
        pictures, classes = self.problem.examples()
        for indices in self.problem.batches().epoch(epoch):
            mine = indices[self.world.rank :: self.world.world_size]
            parts = [mine[at] for at in even_slices(len(mine), self.accumulation)]
            batches = [
                {
                    "pictures": pictures[part].to(self.world.device),
                    "labels": classes[part].to(self.world.device),
                    "target_index": torch.arange(len(part)),
                }
                for part in parts
            ]
            yield Step(batches, len(indices), len(mine), len(mine))
