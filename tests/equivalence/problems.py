"""What is trained: a tiny GPT-2 on random sentences, a narrow VGG16 on noise.

A problem is a frozen dataclass, so that equal ones share a reference. Its `task` is the project's
own `TranslationTask` or `PictureTask`: order of the data, micro-batches, layers and loss are what
the programs run. Only the examples and the initial weights are given.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from transformers import GPT2Config

from data_parallel.dataset import shuffled_indices
from project.train import TrainOptions
from training.launch.world import World
from training.options import Options
from training.tasks.experts import ExpertTask
from training.tasks.gpt2 import generator_for, gpt2_config, initializer
from training.tasks.language import LanguageTask
from training.tasks.pictures import PictureSets
from training.tasks.sequences import CPU_POSITIONS
from training.tasks.task import stream
from training.tasks.tokens import PAD, Encoded
from training.tasks.translation import TranslationTask
from training.tasks.vgg import PictureTask, initialize_vgg_parameter

LEARNING_RATE, WARMUP, DECAY = 1e-3, 3, 20  # the rate rises for 3 steps, then falls until step 20
# AdamW divides by |gradient| + eps. With the usual 1e-8 a gradient that is zero but for rounding
# (of the keys' biases, on which attention does not depend) moves its weight by a learning rate in
# a direction of chance; with 1e-4 rounding moves weights by as little as gradients.
EPS = 1e-4
SEED = 0
BALANCE = 0.3  # --balance_coefficient: large, so that its gradient counts beside the loss'
POSITIONS = 32  # of the model
LONG = 25  # the first position of `odd` problems whose embedding is infinite


@dataclass(frozen=True)
class Problem:
    """Examples in global batches, and how the weights are updated."""

    num_examples: int = 16
    batch_size: int = 8
    max_grad_norm: float | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_examples // self.batch_size)

    @property
    def options(self) -> TrainOptions:
        """How the weights are updated, as a person types it."""
        return TrainOptions(
            batch_size=self.batch_size, learning_rate=LEARNING_RATE, lr_scheduler="cosine",
            warmup_steps=WARMUP, num_batches=DECAY, max_grad_norm=self.max_grad_norm,
            on_nan="skip", optimizer=self.optimizer, seed=SEED, eps=EPS, betas="0.8,0.95",
            weight_decay=0.3, min_lr=LEARNING_RATE / 10, momentum=0.9,
            adamw_lr=2 * LEARNING_RATE if self.optimizer == "muon" else None,
        )  # fmt: skip

    def batches(self, epoch: int) -> list[list[int]]:
        """Which examples form each global batch of an epoch."""
        order = shuffled_indices(self.num_examples, stream(SEED, "data order", epoch))
        return [list(order[i : i + self.batch_size]) for i in range(0, len(order), self.batch_size)]

    def task(self, world: World, dtype: torch.dtype) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Sentences(Problem):
    """A small GPT-2 on sentences of 3 to 21 tokens.

    Attributes:
        tied: the head is the embedding.
        same_length: micro-batches have equal shapes, and can be mistaken for each other.
        some_without_target: every second example is a source sentence alone.
        odd: of the first epoch, batch 1 has no target at all, and an example of batch 2 is so long
            that it meets a position whose embedding is infinite.
        positions: of a micro-batch at most, where their number is not given.
        n_positions: of the model.
        experts, top_k, shared_experts: of each block; 0: none.
        balance_by, router_z: as the options.
        documents: a sequence is a row of documents, each of which token 0 precedes, and none sees
            another. All but the first token is learnt.
    """

    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 16
    vocabulary: int = 64
    tied: bool = True
    same_length: bool = False
    some_without_target: bool = False
    odd: bool = False
    dropout: float = 0.0
    positions: int = CPU_POSITIONS
    n_positions: int = POSITIONS
    experts: int = 0
    top_k: int = 2
    shared_experts: int = 0
    balance_by: Literal["loss", "bias"] = "loss"
    router_z: float = 0.0
    documents: bool = False

    def config(self) -> GPT2Config:
        """The model's sizes."""
        config = gpt2_config(
            "gpt2-mini", self.vocabulary, self.n_positions, dropout=self.dropout,
            n_layer=self.n_layer, n_embd=self.n_embd, n_head=self.n_head,
        )  # fmt: skip
        config.tie_word_embeddings = self.tied
        return config

    def examples(self) -> list[Encoded]:
        """Sentences of tokens 1 to 63; 0 pads."""
        rng, examples = random.Random(3), []
        no_target, too_long = self.batches(0)[1:3] if self.odd else ([], [-1])
        for i in range(self.num_examples):
            source, target = rng.randint(2, 9), rng.randint(1, 12)
            if self.same_length:
                target = 14 - source
            if i in no_target or (self.some_without_target and i % 2):
                source, target = source + target, 0
            if i == too_long[0]:
                source, target = LONG, 5
            ids = [rng.randrange(1, 64) for _ in range(source + target)]
            if self.documents:  # of one token or more; the last token may be such an end
                source, ids = 1, [token * (rng.random() < 0.75) for token in ids]
            examples.append(Encoded(ids, source, i))
        return examples

    def task(self, world: World, dtype: torch.dtype) -> SentenceTask:  # noqa: ARG002
        """The project's task on these sentences."""
        kinds = (SentenceTask, RowTask), (RoutedSentenceTask, RoutedRowTask)
        return kinds[self.experts > 0][self.documents](self, world)


class Held(list[Encoded]):
    """Examples in memory; see `training.tasks.tokens.Tokens`."""

    def sizes(self, numbers: Sequence[int]) -> Any:
        """Their tokens, and their targets."""
        return np.array([[len(self[i].ids), self[i].num_targets] for i in numbers]).T


class SentenceTask(TranslationTask):
    """Steps, micro-batches, layers and loss are `TranslationTask`'s own; no text is read."""

    def __init__(self, problem: Sentences, world: World) -> None:
        self.args = Options(
            batch_size=problem.batch_size, seed=SEED, src="", tgt="", model_max_length=POSITIONS,
            experts=problem.experts, top_k=problem.top_k, balance_coefficient=BALANCE,
            shared_experts=problem.shared_experts, balance_by=problem.balance_by,
            router_z=problem.router_z,
        )  # fmt: skip
        self.problem, self.device, self.files, self.length = problem, world.device, {}, None
        tokenizer: Any = SimpleNamespace(pad_token=PAD, convert_tokens_to_ids=lambda _: 0)
        self.tokenizer = tokenizer
        examples: Any = Held(problem.examples())
        self.examples = {"train": examples}
        self.steps_per_epoch = problem.steps_per_epoch
        self.cpu_positions = problem.positions
        self.config = problem.config()
        self._initialize = initializer(self.config, SEED)

    def initialize(self, name: str, p: Tensor) -> None:
        """Nothing is 0, and norms are not 1, so that every gradient matters."""
        super().initialize(name, p)
        add_noise(name, p)
        if self.problem.odd and name == "transformer.wpe.weight":
            with torch.no_grad():
                p[LONG:] = math.inf

    def fingerprints(self) -> dict[str, str]:
        """Two of one problem have the same sentences."""
        return {"train": repr(self.problem)}


class RowTask(SentenceTask):
    """The same of rows of documents, which start where `LanguageTask` says."""

    starts = LanguageTask.starts


class RoutedSentenceTask(ExpertTask, SentenceTask):
    """The same of a model with experts."""


class RoutedRowTask(ExpertTask, RowTask):
    """The same of both."""


@dataclass(frozen=True)
class Noise(Problem):
    """A VGG16 of a sixteenth of its width, on pictures of noise."""

    def examples(self) -> TensorDataset:
        """Their bytes and classes."""
        generator = torch.Generator().manual_seed(3)
        n = self.num_examples
        images = torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)
        return TensorDataset(images, torch.randint(10, (n,), generator=generator))

    def task(self, world: World, dtype: torch.dtype) -> NoiseTask:
        """The project's task on these pictures."""
        precision: Any = "fp64" if dtype == torch.float64 else "fp32"
        args = Options(batch_size=self.batch_size, seed=SEED, vgg_width=4, precision=precision)
        classes = tuple("0123456789")
        return NoiseTask(args, world, PictureSets(self.examples(), self.examples(), classes))


class NoiseTask(PictureTask):
    """`PictureTask`, its initial weights apart."""

    def initialize(self, name: str, p: Tensor) -> None:
        """No bias is 0."""
        initialize_vgg_parameter(name, p, SEED)
        if name.endswith("bias"):
            add_noise(name, p)


@torch.no_grad()
def add_noise(name: str, p: Tensor) -> None:
    """Adds to a parameter a tenth of what its name gives."""
    noise = torch.empty(p.shape).normal_(0, 0.1, generator=generator_for(1, name))
    p.add_(noise.to(p))
