"""What is trained, in one form for all strategies: VGG16 on pictures, GPT-2 on translations.

A task is a model that nobody has to hold whole (a skeleton without memory, a function that fills
one parameter by its name, and the layers one after the other), the steps of training it, and how
good its outputs are. Strategies see layers, inputs and targets, and never what they are of.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from data_parallel.dataset import Partition
from pipeline.model import gpt2_layers, loss_of_targets
from project.session import CPU_POSITIONS, EVAL_BATCH, shared_tokenizer
from project.utils import evaluate_bleu, generate
from training.data import Encoded, GlobalBatches, RankLoader, encode, to_batch
from training.launch import World
from training.model import gpt2_config, initializer, round_vocab
from training.pictures import Pictures, PictureSets, to_inputs
from training.text import SPLITS, Texts
from training.vgg import initialize_vgg_parameter, picture_loss, vgg16, vgg_layers

VGG = "vgg16"
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

    def skeleton(self) -> nn.Module:
        """The whole model on the meta device: shapes and names, no memory."""

    def initialize(self, name: str, p: Tensor) -> None:
        """Fills the parameter of that name."""

    def layers(self, model: Any) -> list[nn.Module]:
        """The model as layers that follow each other; they hold its parameters."""

    def loss(self, output: Tensor, target: Any) -> Tensor:
        """The summed loss of a micro-batch, from the last layer's output."""

    def steps(
        self, epoch: int, part: int, parts: int, num_microbatches: int | None
    ) -> Iterator[Step]:
        """The steps of an epoch; None: as many micro-batches as suit the device."""

    def test_batches(self, part: int, parts: int) -> list[tuple[Any, Any]]:
        """Inputs and targets that are not trained on."""

    def score(self, output: Tensor, target: Any) -> Tensor:
        """[summed loss, right answers, number of answers] of a test batch, in float64."""

    def describe(self) -> str:
        """What is trained on what, for a person."""

    def last_words(self, weights: dict[str, Tensor]) -> str:
        """What else a person wants to know of the trained model."""


def materialize(task: Task, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The whole model with its initial weights."""
    model: Any = task.skeleton().to(dtype).to_empty(device=device)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # to_empty has given each use of a tied parameter memory of its own
    for name, p in model.named_parameters():
        task.initialize(name, p)
    return model


def make_task(args: argparse.Namespace, world: World, data: Data) -> Task:
    """The task that the options name."""
    if isinstance(data, PictureSets):
        return PictureTask(args, world, data)
    return TextTask(args, world, data)


def _cut(n: int, parts: int) -> list[slice]:
    """n examples in at most `parts` micro-batches, all but the last of the same size."""
    size = max(1, -(-n // parts))
    return [slice(i, i + size) for i in range(0, n, size)]


class _Scored:
    """What both tasks say of outputs: a class is right or not, for a picture or a token."""

    device: torch.device
    dtype: torch.dtype

    def _score(self, loss: Tensor, output: Tensor, labels: Tensor) -> Tensor:
        right = (output.argmax(-1) == labels).sum()
        count = torch.tensor(len(labels), device=loss.device)
        return torch.stack([loss.detach(), right, count]).double().cpu()


class PictureTask(_Scored):
    """VGG16 that tells the classes of pictures apart."""

    unit = answers = "pictures"

    def __init__(self, args: argparse.Namespace, world: World, sets: PictureSets) -> None:
        self.args, self.sets, self.device = args, sets, world.device
        self.dtype = torch.float64 if args.precision == "fp64" else torch.float32
        self.batches = GlobalBatches(len(sets.train), args.batch_size, args.seed)
        self.steps_per_epoch = len(self.batches)
        self.loss: Callable[[Tensor, Any], Tensor] = picture_loss
        self.layers = vgg_layers

    def skeleton(self) -> nn.Sequential:
        """See `Task`."""
        with torch.device("meta"):
            return vgg16(len(self.sets.classes), self.args.vgg_width)

    def initialize(self, name: str, p: Tensor) -> None:
        """See `Task`."""
        initialize_vgg_parameter(name, p, self.args.seed)

    def _to_device(self, pictures: Pictures, index: Any) -> tuple[Tensor, Tensor]:
        images, labels = pictures.images[index], pictures.labels[index]
        return to_inputs(images.to(self.device), self.dtype), labels.to(self.device)

    def steps(
        self, epoch: int, part: int, parts: int, num_microbatches: int | None
    ) -> Iterator[Step]:
        """See `Task`."""
        for indices in self.batches.epoch(epoch):
            mine = indices[part::parts]
            cut = [
                self._to_device(self.sets.train, mine[at])
                for at in _cut(len(mine), num_microbatches or 1)
            ]
            inputs, targets = [x for x, _ in cut], [y for _, y in cut]
            yield Step(inputs, targets, len(indices), len(mine), len(mine))

    def test_batches(self, part: int, parts: int) -> list[tuple[Any, Any]]:
        """See `Task`."""
        mine = range(part, len(self.sets.test), parts)
        starts = range(0, len(mine), EVAL_BATCH)
        return [self._to_device(self.sets.test, list(mine[i : i + EVAL_BATCH])) for i in starts]

    def score(self, output: Tensor, target: Any) -> Tensor:
        """See `Task`."""
        return self._score(self.loss(output, target), output, target)

    def describe(self) -> str:
        """See `Task`."""
        sets = self.sets
        return (
            f"{self.args.dataset}: {len(sets.train):,} pictures of {len(sets.classes)} classes to "
            f"train, {len(sets.test):,} to test"
        )

    def last_words(self, weights: dict[str, Tensor]) -> str:  # noqa: ARG002
        """See `Task`."""
        return ""


class TextTask(_Scored):
    """GPT-2 that learns to translate."""

    unit, answers = "sentences", "tokens"

    def __init__(self, args: argparse.Namespace, world: World, texts: Texts) -> None:
        self.args, self.texts, self.device = args, texts, world.device
        self.dtype = torch.float64 if args.precision == "fp64" else torch.float32
        self.tokenizer = shared_tokenizer(args, args.model, texts, world)
        self.pad_id = self.tokenizer.convert_tokens_to_ids(self.tokenizer.pad_token)
        self.examples: dict[str, list[Encoded]] = {
            split: encode(pairs, self.tokenizer, args.src, args.tgt, args.model_max_length)
            for split, pairs in texts.splits.items()
        }
        self.config: GPT2Config = gpt2_config(
            args.model, args.vocab_size or round_vocab(len(self.tokenizer)), args.model_max_length,
            dropout=args.dropout, n_layer=args.n_layer, n_embd=args.n_embd, n_head=args.n_head,
        )  # fmt: skip
        self.fill = initializer(self.config, args.seed)
        self.batches = GlobalBatches(len(self.examples["train"]), args.batch_size, args.seed)
        self.steps_per_epoch = len(self.batches)
        self.length = args.model_max_length if args.padding == "max_length" else None
        self.loss: Callable[[Tensor, Any], Tensor] = loss_of_targets
        self.layers: Callable[[Any], list[nn.Module]] = partial(gpt2_layers, halves=False)

    def skeleton(self) -> GPT2LMHeadModel:
        """See `Task`."""
        with torch.device("meta"):
            return GPT2LMHeadModel(self.config)

    def initialize(self, name: str, p: Tensor) -> None:
        """See `Task`."""
        self.fill(name, p)

    def steps(
        self, epoch: int, part: int, parts: int, num_microbatches: int | None
    ) -> Iterator[Step]:
        """See `Task`."""
        cut = num_microbatches is None and self.length is None and self.device.type == "cpu"
        loader = RankLoader(
            self.examples["train"], self.batches, rank=part, world_size=parts, pad_id=self.pad_id,
            device=self.device, length=self.length, accumulation=num_microbatches or 1,
            max_positions=CPU_POSITIONS if cut else None,
        )  # fmt: skip
        for step in loader.steps(epoch):
            pairs = [_inputs_and_targets(batch) for batch in step.micro_batches]
            yield Step(
                [x for x, _ in pairs],
                [y for _, y in pairs],
                step.target_tokens,
                sum(len(x[0]) for x, _ in pairs),
                step.positions,
            )

    def test_batches(self, part: int, parts: int) -> list[tuple[Any, Any]]:
        """See `Task`."""
        mine = sorted(self.examples["validation"], key=lambda e: len(e.ids))[part::parts]
        starts = range(0, len(mine), EVAL_BATCH)
        return [
            _inputs_and_targets(
                to_batch(mine[i : i + EVAL_BATCH], self.pad_id, self.device, self.length)
            )
            for i in starts
        ]

    def score(self, output: Tensor, target: Any) -> Tensor:
        """See `Task`."""
        ids, weights = target
        return self._score(self.loss(output, target), output, ids[weights != 0])

    def describe(self) -> str:
        """See `Task`."""
        sizes = " / ".join(f"{len(self.texts.splits[split]):,}" for split in SPLITS)
        return (
            f"{self.args.dataset}: {sizes} pairs to train / validate / test, {self.args.src} to "
            f"{self.args.tgt}, vocabulary {self.config.vocab_size:,}"
        )

    def last_words(self, weights: dict[str, Tensor]) -> str:
        """See `Task`: the BLEU of the test split and a translation."""
        model = materialize(self, self.device)
        model.load_state_dict(weights, strict=False)  # the tied head is in it under one name
        args, test = self.args, self.texts.splits["test"]
        pairs = Partition(test, range(len(test)))
        sentences = generate(
            model, [pairs[i] for i in range(len(pairs))], args.src, args.tgt, self.tokenizer,
            args.model_max_length, self.device, "Translating",
        )  # fmt: skip
        bleu = evaluate_bleu(test, sentences, args.tgt)["bleu"]
        return f"BLEU {bleu:.1f}; {test[0][args.src]!r} becomes {sentences[0]!r}"


def _inputs_and_targets(batch: dict[str, Tensor]) -> tuple[Any, Any]:
    weights = batch["label_token_weights"]
    return (batch["input_ids"], weights), (batch["labels"], weights)
