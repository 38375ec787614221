"""VGG16 for 32 x 32 pictures: deliberately unlike GPT-2.

Its first layers have few parameters and large activations, its last layers the opposite; no two
stages or shards are alike.

    conv 64 64 | 128 128 | 256 256 256 | 512 512 512 | 512 512 512 | linear 512 512 classes
    pixels  32        16             8             4             2           1

Each `|` is a 2 x 2 max pooling; every layer but the last ends in a ReLU. 15.2 M parameters for ten
classes, 0.63 GFLOP for the forward of a picture.

No batch norm: it makes an example's output depend on its batch, so micro-batches, ranks and one
process would compute different functions. No dropout either. The initial weights alone make sixteen
layers trainable: every square layer but the last starts as the identity, which ReLUs preserve, plus
a little noise. So the network starts like one of five layers, and learns at once. (If all weights
are random, the loss first stays flat, then falls slowly: docs/log.md.) The last layer starts near
zero. Initial weights depend on the seed and the parameter's name alone.

Papers: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image
Recognition", 2015; for 32 x 32 pictures: Liu and Deng, 2015; He et al., "Delving Deep into
Rectifiers", 2015 (variance); Zagoruyko and Komodakis, "DiracNets", 2017 (identity).
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from data_parallel.dataset import even_slices, global_batches, partition_dataset
from training.launch.errors import parameters
from training.launch.world import World
from training.options import VGG, Options
from training.tasks.task import stream

from .gpt2 import generator_for, loss_of_targets
from .pictures import PictureSets, fingerprint, to_inputs
from .task import Score, Step, TrainingTask, Translator, steps_of_epoch, to_device

STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))  # (channels / width, convolutions), pooling
VGG_WIDTH = 64  # of the published model
NOISE = 0.2  # of layers that start as the identity, relative to the weights of random layers
EVALUATED = 64  # pictures at a time, or fewer where a micro-batch has fewer
LAST = 0.01  # standard deviation of the last layer's weights


def vgg16(num_classes: int = 10, width: int = VGG_WIDTH) -> nn.Sequential:
    """The network: pictures as floats [B, 3, 32, 32] to logits [B, num_classes]. `width`: channels
    of the first convolutions; conv3_2 is the second convolution after the second pooling."""
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    channels = 3
    for stage, (factor, convolutions) in enumerate(STAGES, 1):
        for i in range(1, convolutions + 1):
            modules[f"conv{stage}_{i}"] = nn.Conv2d(channels, factor * width, 3, padding=1)
            modules[f"relu{stage}_{i}"] = nn.ReLU()
            channels = factor * width
        modules[f"pool{stage}"] = nn.MaxPool2d(2)  # half the pixels each way
    modules["flatten"] = nn.Flatten()
    for i in (6, 7):
        modules[f"fc{i}"], modules[f"relu{i}"] = nn.Linear(channels, channels), nn.ReLU()
    modules["fc8"] = nn.Linear(channels, num_classes)
    return nn.Sequential(modules)


def vgg_layers(model: nn.Sequential) -> list[nn.Module]:
    """The 16 layers of `model`, sharing its parameters: each a convolution or linear layer with the
    modules up to the next one."""
    layers: list[list[nn.Module]] = []
    for module in model:
        if isinstance(module, nn.Conv2d | nn.Linear):
            layers.append([])
        layers[-1].append(module)
    return [nn.Sequential(*modules) for modules in layers]


@torch.no_grad()
def initialize_vgg_parameter(name: str, p: Tensor, seed: int) -> None:
    """Sets one parameter from the seed and its name in the whole model."""
    if name.endswith("bias"):
        p.zero_()
        return
    last = name.startswith("fc8")
    std = LAST if last else math.sqrt(2 / p[0].numel())  # He: 2 / inputs of a neuron
    identity = p.shape[0] == p.shape[1] and not last  # as many channels out as in
    p.copy_(torch.empty(p.shape).normal_(generator=generator_for(seed, name)))
    p.mul_(NOISE * std if identity else std)
    if identity:
        centre = p if p.dim() == 2 else p[:, :, 1, 1]  # of the 3 x 3 kernel
        centre.diagonal().add_(1)


class PictureTask(TrainingTask):
    """VGG16 that classifies pictures; see `training.tasks.task.TrainingTask`."""

    score_name = "accuracy"
    needs_an_epoch = False
    units: Sequence[str] = ("pictures/s",)
    files: dict[str, bytes]

    def __init__(self, args: Options, world: World, sets: PictureSets) -> None:
        self.args, self.sets, self.device = args, sets, world.device
        self.dtype = torch.float64 if args.precision == "fp64" else torch.float32
        self.steps_per_epoch = steps_of_epoch(args, len(sets.train))
        config = {"model": VGG, "width": args.vgg_width, "classes": list(sets.classes)}
        self.files = {"config.json": json.dumps(config).encode()}

    def skeleton(self) -> nn.Sequential:
        """The whole model on the meta device."""
        with torch.device("meta"):
            return vgg16(len(self.sets.classes), self.args.vgg_width)

    def layers(self, model: Any) -> list[nn.Module]:
        """Each a convolution or linear layer, with what follows it."""
        return vgg_layers(model)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The summed loss over the pictures."""
        return loss_of_targets(output, target)

    def initialize(self, name: str, p: Tensor) -> None:
        """From the seed and the parameter's name."""
        initialize_vgg_parameter(name, p, self.args.seed)

    @property
    def blocks(self) -> Sequence[int]:
        """Each layer is a block."""
        return [1] * 16

    def steps(
        self, epoch: int, dp_rank: int, dp_size: int, num_microbatches: int | None, start: int = 0
    ) -> Iterator[Step]:
        """The steps of an epoch."""
        n, size = len(self.sets.train), self.args.batch_size
        seed = stream(self.args.seed, "data order", epoch)
        counts = map(len, global_batches(n, size, seed, start))
        loader = partition_dataset(dp_rank, dp_size, range(n), size, list, seed=seed, start=start)
        nothing: Any = []  # for a rank that gets none of the last, smaller batch
        for count, numbers in zip_longest(counts, loader, fillvalue=nothing):
            cut = [
                self._to_device(self.sets.train, numbers[at])
                for at in even_slices(len(numbers), num_microbatches or 1)
            ]
            inputs, targets = [x for x, _ in cut], [y for _, y in cut]
            yield Step(inputs, targets, count, len(numbers), len(numbers))

    def _to_device(self, pictures: TensorDataset, index: Any) -> tuple[Tensor, Tensor]:
        images, labels = to_device(pictures[index], self.device)  # bytes [n, 3, 32, 32], [n]
        return to_inputs(images, self.dtype), labels

    def validation_batches(
        self, dp_rank: int, dp_size: int, num_microbatches: int | None
    ) -> tuple[int, Iterator[tuple[Any, Any]]]:
        """The test pictures."""
        numbers = range(dp_rank, len(self.sets.test), dp_size)  # dealt out one by one
        most = self.args.batch_size // (dp_size * (num_microbatches or 1))
        size = max(1, min(EVALUATED, most))
        parts = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        return len(parts), (self._to_device(self.sets.test, list(part)) for part in parts)

    def measure(self, output: Tensor, target: Any) -> Tensor:
        """See `TrainingTask`. `output`: [B, classes]."""
        right = (output.argmax(-1) == target).sum()
        numbers = torch.stack([self.loss(output, target), right]).tolist()  # one wait for a GPU
        return torch.tensor([*numbers, len(target)], dtype=torch.float64)

    def score(self, world: World, model: Translator, loss: float, accuracy: float) -> Score:  # noqa: ARG002
        """Accuracy in percent."""
        return Score(100 * accuracy)

    def describe(self) -> str:
        """Sizes of the model and of the data."""
        args, sets = self.args, self.sets
        size = parameters(sum(p.numel() for p in self.skeleton().parameters()))
        return (
            f"{VGG}: 16 layers, {size}\n"
            f"{args.dataset}: {len(sets.train):,} pictures of {len(sets.classes)} classes to train,"
            f" {len(sets.test):,} to test; batches of {args.batch_size}, {args.precision}, "
            f"{self.device.type}"
        )

    def fingerprints(self) -> dict[str, str]:
        """The hashes of the pictures."""
        sets = {"train": self.sets.train, "test": self.sets.test}
        return {name: fingerprint(pictures) for name, pictures in sets.items()}
