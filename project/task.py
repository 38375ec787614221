"""What is trained, in one form for all strategies: VGG16 on pictures, GPT-2 on translations.

A task is a model that nobody has to hold whole (a skeleton without memory, a function that fills
one parameter by its name, and the layers one after the other), the steps of training it, and how
good its outputs are. Strategies see layers, inputs and targets, and never what they are of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from training.generation import Decoder
from training.pictures import PictureSets
from training.text import Texts

VGG = "vgg16"
DATA_PARALLEL = ("ddp", "fsdp")  # strategies under which every worker gets a part of each batch
Data = PictureSets | Texts


@dataclass(frozen=True)
class Step:
    """What one rank computes in one step: its part of a global batch, in micro-batches."""

    inputs: list[Any]  # empty where the global batch has fewer examples than parts
    targets: list[Any]
    count: int  # what the loss is the mean over: pictures, or target tokens, of the global batch
    examples: int  # of this part
    positions: int  # of this part: tokens, padding included; a picture is one


class Task(Protocol):
    """See the head of this file. `part` of `parts` is what one of several data-parallel ranks
    computes; 0 of 1 is the whole batch."""

    unit: str  # what an example is called, in the plural
    answers: str  # what is right or wrong: the classes of pictures, or the tokens of sentences
    dtype: torch.dtype  # of weights and of inputs that are numbers
    steps_per_epoch: int

    @property
    def data(self) -> Data:
        """What it is trained on."""

    @property
    def small_files(self) -> tuple[str, ...]:
        """Names of files in the workdir without which a checkpoint is of no use."""

    def skeleton(self) -> nn.Module:
        """The whole model on the meta device: shapes and names, no memory."""

    def initialize(self, name: str, p: Tensor) -> None:
        """Fills the parameter of that name."""

    def layers(self, model: Any) -> list[nn.Module]:
        """The model as layers that follow each other; they hold its parameters."""

    def loss(self, output: Tensor, target: Any) -> Tensor:
        """The summed loss of a micro-batch, from the last layer's output."""

    def steps(
        self, epoch: int, part: int, parts: int, num_microbatches: int | None, start: int = 0
    ) -> Iterator[Step]:
        """The steps of an epoch from `start` on; None: as many micro-batches as suit the device."""

    def test_batches(self, part: int, parts: int) -> list[tuple[Any, Any]]:
        """Inputs and targets that are not trained on."""

    def score(self, output: Tensor, target: Any) -> Tensor:
        """[summed loss, right answers, number of answers] of a test batch, in float64."""

    def describe(self) -> str:
        """What is trained on what, for a person."""

    def show(self, decoder: Decoder, part: int, parts: int) -> str:
        """What a person wants to know of the trained model besides its loss; on rank 0, elsewhere
        nothing. All ranks together."""

    def export(self, folder: Path, weights: dict[str, Tensor]) -> str:
        """Writes the trained model; returns what was written, for a person. On rank 0 alone."""


def materialize(task: Task, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The whole model with its initial weights."""
    model: Any = task.skeleton().to(dtype).to_empty(device=device)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # to_empty has given each use of a tied parameter memory of its own
    for name, p in model.named_parameters():
        task.initialize(name, p)
    return model
