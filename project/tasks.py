"""The two tasks of project/train.py: VGG16 on pictures, GPT-2 on translations. See task.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from data_parallel.dataset import even_slices
from pipeline.model import gpt2_layers, loss_of_targets
from project.rules import check_warmup
from project.session import CPU_POSITIONS, EVAL_BATCH, FILES, check_targets, shared_tokenizer
from project.task import DATA_PARALLEL, VGG, Data, Step, Task
from project.utils import evaluate_bleu
from training.agreement import check_same
from training.checkpoint import Checkpoint
from training.data import Encoded, GlobalBatches, RankLoader, encode, to_batch
from training.export import export, put_in_place
from training.generation import Decoder, translate
from training.launch import UserError, World
from training.model import PRESETS, gpt2_config, initializer, round_vocab
from training.pictures import Pictures, PictureSets, load_pictures, to_inputs
from training.pretrained import model_content, pretrained_config, pretrained_initializer
from training.record import write_json, writing
from training.text import SPLITS, Texts, load_texts
from training.vgg import initialize_vgg_parameter, picture_loss, vgg16, vgg_layers

if TYPE_CHECKING:  # see training/model.py
    from transformers import GPT2Config, GPT2LMHeadModel

WEIGHTS = "model.safetensors"


def read_data(args: argparse.Namespace) -> Data:
    """Pictures or sentence pairs, whichever the model wants. Raises UserError where there are
    none."""
    if args.model == VGG:
        pictures = load_pictures(args.dataset, args.n_train, args.n_validation, seed=1234)
        check_shares(args, {"train": len(pictures.train), "test": len(pictures.test)})
        check_steps(args, len(pictures.train))
        return pictures
    sizes = {split: getattr(args, f"n_{split}") for split in SPLITS}
    texts = load_texts(args.dataset, args.src, args.tgt, sizes, world_size=1)
    check_shares(args, {name: len(texts.splits[name]) for name in ("train", "validation")})
    check_steps(args, len(texts.splits["train"]))
    return texts


def check_shares(args: argparse.Namespace, sizes: Mapping[str, int]) -> None:
    """Raises UserError where the workers among which batches are dealt are more than the examples
    that there are; the sizes are those of the splits."""
    for split, have in sizes.items() if args.strategy in DATA_PARALLEL else ():
        if have < args.num_workers:
            raise UserError(
                f"--num_workers {args.num_workers} --dataset {args.dataset}: {split} has {have} "
                f"examples, and each worker needs one; --num_workers {have} or less works"
            )


def check_steps(args: argparse.Namespace, num_examples: int) -> None:
    """Raises UserError where the warm-up does not end before the run does."""
    if args.num_batches is None:
        check_warmup(args, num_examples)
    elif args.warmup_steps >= args.num_batches > 1:
        raise UserError(
            f"--warmup_steps {args.warmup_steps} --num_batches {args.num_batches}: the warm-up "
            f"must end before the last step; --warmup_steps {args.num_batches // 10} works"
        )


def make_task(
    args: argparse.Namespace, world: World, data: Data, saved: Checkpoint | None = None
) -> Task:
    """The task that the options name; what a checkpoint has saved is used again."""
    if isinstance(data, PictureSets):
        return PictureTask(args, world, data)
    return TextTask(args, world, data, saved)


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
    small_files = ()

    def __init__(self, args: argparse.Namespace, world: World, sets: PictureSets) -> None:
        self.args, self.data, self.device = args, sets, world.device
        self.dtype = torch.float64 if args.precision == "fp64" else torch.float32
        self.batches = GlobalBatches(len(sets.train), args.batch_size, args.seed)
        self.steps_per_epoch = len(self.batches)
        self.loss: Callable[[Tensor, Any], Tensor] = picture_loss
        self.layers: Callable[[Any], list[Any]] = vgg_layers

    def skeleton(self) -> nn.Sequential:
        """See `Task`."""
        with torch.device("meta"):
            return vgg16(len(self.data.classes), self.args.vgg_width)

    def initialize(self, name: str, p: Tensor) -> None:
        """See `Task`."""
        initialize_vgg_parameter(name, p, self.args.seed)

    def _to_device(self, pictures: Pictures, index: Any) -> tuple[Tensor, Tensor]:
        images, labels = pictures.images[index], pictures.labels[index]
        return to_inputs(images.to(self.device), self.dtype), labels.to(self.device)

    def steps(
        self, epoch: int, part: int, parts: int, num_microbatches: int | None, start: int = 0
    ) -> Iterator[Step]:
        """See `Task`."""
        for indices in self.batches.epoch(epoch)[start:]:
            mine = indices[part::parts]
            cut = [
                self._to_device(self.data.train, mine[at])
                for at in even_slices(len(mine), num_microbatches or 1)
            ]
            inputs, targets = [x for x, _ in cut], [y for _, y in cut]
            yield Step(inputs, targets, len(indices), len(mine), len(mine))

    def test_batches(self, part: int, parts: int) -> list[tuple[Any, Any]]:
        """See `Task`."""
        mine = range(part, len(self.data.test), parts)
        starts = range(0, len(mine), EVAL_BATCH)
        return [self._to_device(self.data.test, list(mine[i : i + EVAL_BATCH])) for i in starts]

    def score(self, output: Tensor, target: Any) -> Tensor:
        """See `Task`."""
        return self._score(self.loss(output, target), output, target)

    def describe(self) -> str:
        """See `Task`."""
        sets = self.data
        return (
            f"{self.args.dataset}: {len(sets.train):,} pictures of {len(sets.classes)} classes to "
            f"train, {len(sets.test):,} to test"
        )

    def show(self, *_: Any) -> str:
        """See `Task`: nothing."""
        return ""

    def export(self, folder: Path, weights: dict[str, Tensor]) -> str:
        """See `Task`: the weights by name."""

        def write(aside: Path) -> None:
            write_json(aside / "config.json", {"model": VGG, "classes": self.data.classes})
            save_file({n: p.contiguous() for n, p in weights.items()}, aside / WEIGHTS)

        put_in_place(folder, write)
        return f"The trained weights are in {folder / WEIGHTS}."


class TextTask(_Scored):
    """GPT-2 that learns to translate."""

    unit, answers = "sentences", "tokens"
    small_files = FILES

    def __init__(
        self, args: argparse.Namespace, world: World, texts: Texts, saved: Checkpoint | None
    ) -> None:
        self.args, self.data, self.device = args, texts, world.device
        self.dtype = torch.float64 if args.precision == "fp64" else torch.float32
        self.tokenizer = shared_tokenizer(args, args.model, texts, world, saved)
        self.pad_id = self.tokenizer.convert_tokens_to_ids(self.tokenizer.pad_token)
        self.examples: dict[str, list[Encoded]] = {
            split: encode(pairs, self.tokenizer, args.src, args.tgt, args.model_max_length)
            for split, pairs in texts.splits.items()
        }
        check_targets(args.model_max_length, self.examples["train"])
        self.config, self.fill = self._sizes_and_weights()
        if world.world_size > 1:
            check_same(world, {"the model": model_content(args.model, self.config)})
        if world.is_main:
            with writing(args.workdir / "config.json"):
                self.config.save_pretrained(args.workdir)
        self.batches = GlobalBatches(len(self.examples["train"]), args.batch_size, args.seed)
        self.steps_per_epoch = len(self.batches)
        self.length = args.model_max_length if args.padding == "max_length" else None
        self.loss: Callable[[Tensor, Any], Tensor] = loss_of_targets
        self.layers: Callable[[Any], list[Any]] = partial(gpt2_layers, halves=True)

    def _sizes_and_weights(self) -> tuple[GPT2Config, Callable[[str, Tensor], None]]:
        """Those of a preset, or those that come with trained weights."""
        args, tokens = self.args, len(self.tokenizer)
        if args.model not in PRESETS:
            config = pretrained_config(args.model, tokens, args.dropout)
            return config, pretrained_initializer(args.model, config, args.seed)
        config = gpt2_config(
            args.model, args.vocab_size or round_vocab(tokens), args.model_max_length,
            dropout=args.dropout, n_layer=args.n_layer, n_embd=args.n_embd, n_head=args.n_head,
        )  # fmt: skip
        return config, initializer(config, args.seed)

    def skeleton(self) -> GPT2LMHeadModel:
        """See `Task`."""
        from transformers import GPT2LMHeadModel

        with torch.device("meta"):
            return GPT2LMHeadModel(self.config)

    def initialize(self, name: str, p: Tensor) -> None:
        """See `Task`."""
        self.fill(name, p)

    def steps(
        self, epoch: int, part: int, parts: int, num_microbatches: int | None, start: int = 0
    ) -> Iterator[Step]:
        """See `Task`."""
        cut = num_microbatches is None and self.length is None and self.device.type == "cpu"
        loader = RankLoader(
            self.examples["train"], self.batches, rank=part, world_size=parts, pad_id=self.pad_id,
            device=self.device, length=self.length, accumulation=num_microbatches or 1,
            max_positions=CPU_POSITIONS if cut else None,
        )  # fmt: skip
        for step in loader.steps(epoch, start):
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
        sizes = " / ".join(f"{len(self.data.splits[split]):,}" for split in SPLITS)
        pairs = (
            f"{self.args.dataset}: {sizes} pairs to train / validate / test, {self.args.src} to "
            f"{self.args.tgt}, vocabulary {self.config.vocab_size:,}"
        )
        return "\n".join([pairs, *self.data.notes])

    def show(self, decoder: Decoder, part: int, parts: int) -> str:
        """See `Task`: BLEU and a translation, unless there were too few steps to learn any."""
        args, test = self.args, self.data.splits["test"]
        if args.num_batches is not None and args.num_batches < self.steps_per_epoch:
            return ""
        sentences = self.translations(decoder, part, parts)
        if not sentences:
            return ""
        bleu = evaluate_bleu(test, sentences, args.tgt)["bleu"]
        return f"BLEU {bleu:.1f}; {test[0][args.src]!r} becomes {sentences[0]!r}"

    def translations(self, decoder: Decoder, part: int, parts: int) -> list[str]:
        """Those of the test split on rank 0, each part done by its ranks; elsewhere nothing."""
        args, test, rank = self.args, self.data.splits["test"], dist.get_rank()
        mine = [pair[args.src] for pair in test[part::parts]]
        sentences = translate(
            decoder, mine, args.src, args.tgt, self.tokenizer, args.model_max_length, self.device,
            bar="Translating" if rank == 0 else None,
        )  # fmt: skip
        found: list[Any] = [None] * dist.get_world_size()
        dist.gather_object((part, sentences), found if rank == 0 else None)
        by_part = dict(found) if rank == 0 else {}
        return [by_part[i % parts][i // parts] for i in range(len(test) if by_part else 0)]

    def export(self, folder: Path, weights: dict[str, Tensor]) -> str:
        """See `Task`: for transformers."""
        in_fp32 = {name: p.float() for name, p in weights.items()}
        export(folder, self.skeleton(), self.tokenizer, in_fp32)
        return f"Model and tokenizer, for transformers, are in {folder}/."


def _inputs_and_targets(batch: dict[str, Tensor]) -> tuple[Any, Any]:
    weights = batch["label_token_weights"]
    return (batch["input_ids"], weights), (batch["labels"], weights)
