"""What is trained, in one form for every layout: GPT-2 on text, VGG16 on pictures.

A task is a model that no rank has to hold whole (a skeleton without memory, a function that fills
one parameter by its name, and the layers in order), the steps that train it, and a score of its
outputs. Layouts see layers, inputs and targets, never what they mean.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from runtime.meta import materialize, names_of
from training.options import Options

from .cache import Cache

if TYPE_CHECKING:
    from training.launch.world import World

T = TypeVar("T")


def stream(seed: int, purpose: str, *numbers: int | str) -> int:
    """The seed, 0 ... 2^63 - 1, of one of a run's independent random streams: a hash of its
    purpose. (Sums such as seed + epoch overlap: epoch 1 of seed 0 would be epoch 0 of seed 1.)

    Equal arguments give the same stream on every machine and in every process. torch's CPU
    generator uses the low 32 bits of its seed, so two of its streams coincide with probability
    2^-32. Python's uses all bits.

    Args:
        seed: of the run.
        purpose: in words: "data order", "dropout", "initial weights".
        numbers: which of that purpose's streams: an epoch, a rank, a parameter's name.
    """
    key = json.dumps([seed, purpose, *numbers]).encode()  # unambiguous: [1, 12] is not [11, 2]
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Step:
    """What one rank computes in one step: its part of a global batch, in micro-batches.

    The loss is the mean over `count` target tokens, or images: those of the *global* batch. Every
    rank knows which examples that has, and counts them itself: none asks the others.
    """

    inputs: list[Any]  # one per micro-batch; empty if the global batch has too few examples
    targets: list[Any]
    count: int
    positions: int  # of this part, padding included
    tokens: int  # of this part, padding not included

    @property
    def divisor(self) -> int:
        """What a summed loss is divided by; 1 for a batch without targets, whose loss is 0."""
        return max(1, self.count)

    def scale(self, averaging: int = 1) -> float:
        """What a rank multiplies the summed loss of its examples by. Its gradients, added up over
        the ranks, are then those of the mean loss over all targets of the global batch.

        Args:
            averaging: the number of ranks, if gradients are averaged over them, not added up
                (replicated.py): each is made that much larger before.
        """
        return averaging / self.divisor


@dataclass(frozen=True)
class Score:
    """How good a model is: BLEU from 0 to 100, accuracy in percent, or perplexity; NaN: unknown."""

    value: float = math.nan
    generated: list[str] = field(default_factory=list)  # outputs for the `scored_examples`


class Translator(Protocol):
    """A model in evaluation mode, or this rank's part of one, that continues sentences."""

    num_microbatches: int | None  # in training; None: as suits the device

    @property
    def sentences(self) -> tuple[int, int]:
        """Which sentences it continues: (r, n) are r, r + n, r + 2 n, ..."""

    def next_tokens(self, ids: Tensor, cache: Cache, num_tokens: int) -> Tensor:
        """The most probable next token of each sentence, B, on every rank, of the first
        `num_tokens` of the vocabulary. `ids`, B T, are the newest tokens; the `cache` has what the
        layers made of earlier ones."""

    def end(self) -> None:
        """This rank has no sentences left. Returns when no rank has."""


class TrainingTask(Protocol):
    """See the head of this file. `dp_rank` of `dp_size` is a place on the data-parallel axis; 0
    of 1 is the whole batch."""

    score_name: str  # "BLEU", "accuracy" or "perplexity"
    needs_an_epoch: bool  # the score means nothing, and takes long, after fewer steps
    units: Sequence[str]  # of speed: positions and real tokens per second, or pictures
    steps_per_epoch: int  # `steps` may go on: --max_batches ends an epoch early
    files: dict[str, bytes]  # small files that every checkpoint needs, by name

    def skeleton(self) -> nn.Module:
        """The whole model on the meta device: shapes and names, no memory."""

    def initialize(self, name: str, p: Tensor) -> None:
        """Writes the initial values of the parameter `name` into `p`."""

    def layers(self, model: Any) -> list[nn.Module]:
        """The model as layers that follow each other. They share its parameters."""

    @property
    def blocks(self) -> Sequence[int]:
        """What --balance counts: the number of layers of each block."""

    def loss(self, output: Tensor, target: Any) -> Tensor:
        """The summed loss of a micro-batch, from the last layer's output."""

    def steps(
        self, epoch: int, dp_rank: int, dp_size: int, num_microbatches: int | None, start: int = 0
    ) -> Iterator[Step]:
        """The steps of an epoch from `start` on; None: as many micro-batches as suit the device."""

    def validation_batches(
        self, dp_rank: int, dp_size: int, num_microbatches: int | None
    ) -> tuple[int, Iterator[tuple[Any, Any]]]:
        """How many batches of held-out data this rank has, and their inputs and targets, each made
        when it is asked for. No batch is larger than a micro-batch in training."""

    def to_measure(self, x: Any, target: Any) -> Any:  # noqa: ARG002
        """A validation input from which the last layer computes what `measure` takes."""
        return x

    def measure(self, output: Tensor, target: Any) -> Tensor:
        """[summed loss, right answers, number of answers] of a validation batch, in float64 on the
        CPU. `output` is of the last layer, for an input that is `to_measure`."""

    def input_to_compare(self, dp_rank: int, dp_size: int, num_microbatches: int | None) -> Any:
        """A validation input whose outputs --check_output compares, or None if there is none."""
        _, batches = self.validation_batches(dp_rank, dp_size, num_microbatches)
        return next(batches, (None, None))[0]

    def score(self, world: World, model: Translator, loss: float, accuracy: float) -> Score:
        """How good the model is; all ranks call it. `loss` and `accuracy`, from 0 to 1, are of the
        validation data."""

    @property
    def score_details(self) -> dict[str, str]:
        """What else the score depends on; for the result files."""
        return {}

    @property
    def score_title(self) -> str:
        """The head of the score's column."""
        return self.score_name

    def describe(self) -> str:
        """What is trained on what, for a person: a line or two."""

    def scored_examples(self) -> list[Any]:
        """The examples whose outputs are scored, as JSON values; none if nothing is generated."""
        return []

    def examples_to_show(self, generated: list[str]) -> str:  # noqa: ARG002
        """A few outputs of the trained model, for a person; empty if there are none."""
        return ""

    def model_content(self) -> bytes:
        """What of the model must be the same on all ranks, in addition to the options."""
        return b""

    def fingerprints(self) -> dict[str, str]:
        """A hash of each split's examples, in their order."""


def steps_of_epoch(args: Options, num_examples: int) -> int:
    """Global batches that cover the examples once, the last one smaller; or --max_batches, if that
    is less."""
    whole: int = -(-num_examples // args.batch_size)
    return min(whole, args.max_batches or whole)


def rectangles(lengths: Sequence[float], most: int) -> list[slice]:
    """Cuts examples, from the shortest to the longest, so that each part has one example, or at
    most `most` positions when it is padded to its longest."""
    edges = [0]
    for i, length in enumerate(lengths):
        if i > edges[-1] and (i + 1 - edges[-1]) * length > most:
            edges.append(i)
    return [slice(a, b) for a, b in pairwise([*edges, len(lengths)]) if a < b]


def to_device(values: T, device: torch.device | str) -> T:
    """CPU tensors, nested, moved to the device. The host does not wait for a GPU: they are pinned,
    so that the GPU fetches them when it gets there."""
    device = torch.device(device)
    if device.type == "cpu":
        return values
    return tree_map_only(Tensor, lambda t: _pinned(t).to(device, non_blocking=True), values)


def _pinned(tensor: Tensor) -> Tensor:
    """The tensor in memory that the GPU can read, or as it is if the system has none left: then the
    host waits for the copy."""
    try:
        return tensor.pin_memory()
    except RuntimeError:
        return tensor


def whole_model(
    task: TrainingTask, device: torch.device, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The whole model with its initial weights."""
    model = task.skeleton().to(dtype)
    materialize(model, names_of(model), device, task.initialize)
    return model
