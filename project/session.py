"""What the programs do alike before and after training: texts to model, model to results."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from data_parallel.dataset import Partition
from project.options import plain
from project.rules import check_warmup, model_name
from project.utils import (
    EpochTotals,
    autocast,
    evaluate_bleu,
    evaluate_loss,
    generate,
    get_tokenizer,
    precision_notes,
    sum_over_ranks,
)
from training.agreement import check_same
from training.checkpoint import Checkpoint, clean
from training.cores import core_notes
from training.data import (
    PAD,
    Batch,
    Encoded,
    GlobalBatches,
    RankLoader,
    encode,
    eos,
    load_tokenizer,
    to_batch,
)
from training.export import export
from training.launch import RunError, UserError, World, core_slice, on_main
from training.model import (
    PRESETS,
    build_model,
    gpt2_config,
    import_transformers,
    round_vocab,
)
from training.optimization import Recipe
from training.pretrained import load_pretrained
from training.record import (
    HEADER,
    OPTIONS,
    EpochResult,
    clear_results,
    epoch_line,
    spread,
    write_epoch,
    write_json,
    writing,
)
from training.text import SPLITS, Texts, load_texts
from training.timeline import TRACE, Timeline

if TYPE_CHECKING:  # see training/model.py
    from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

MAX_VOCAB = 4096  # tokens that BPE may learn where --vocab_size does not say
EVAL_BATCH = 64
CHECKPOINTS = "checkpoints"  # their folder in the workdir
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")  # of the workdir, in each
CPU_POSITIONS = 384  # of a micro-batch at most; docs/log.md has what was tried

T = TypeVar("T")


def read_texts(args: argparse.Namespace, world_size: int) -> Texts:
    """The texts that the options name; see `training.text.load_texts`."""
    sizes = {split: getattr(args, f"n_{split}") for split in SPLITS}
    texts = load_texts(args.dataset, args.src, args.tgt, sizes, world_size)
    check_warmup(args, len(texts.splits["train"]))
    return texts


@dataclass
class Session:
    """A run's model and data on one rank."""

    args: argparse.Namespace
    world: World
    texts: Texts
    tokenizer: PreTrainedTokenizerFast
    model: GPT2LMHeadModel  # on the CPU, until the program places it
    examples: dict[str, list[Encoded]]
    sentences: list[str] = field(default_factory=list)  # the last translations of the test split
    times: list[tuple[float, float]] = field(default_factory=list)  # seconds, positions/s of epochs
    saved: Checkpoint | None = None  # the one to go on from
    timeline_saved: bool = False
    translator: Any = None  # the model that translates: `model`, or a copy of it on one device

    @property
    def learning_rate(self) -> float:
        """--learning_rate, or what suits the model's size."""
        return self.args.learning_rate or (1e-3 if self.model.config.n_embd <= 512 else 1e-4)

    @property
    def recipe(self) -> Recipe:
        """How the options say that weights are updated."""
        args = self.args
        return Recipe(
            learning_rate=self.learning_rate,
            steps_per_epoch=-(-len(self.examples["train"]) // args.batch_size),
            n_epochs=args.n_epochs,
            lr_scheduler=args.lr_scheduler,
            warmup_steps=args.warmup_steps,
            max_grad_norm=args.max_grad_norm,
            on_nan=args.on_nan,
        )

    @cached_property
    def pad_id(self) -> int:
        """The id of the padding token."""
        return self.tokenizer.convert_tokens_to_ids(PAD)

    def loader(self, world_size: int, rank: int, accumulation: int | None = None) -> RankLoader:
        """The training steps of one of `world_size` data-parallel ranks, in `accumulation`
        micro-batches each, or in as many as suit the device."""
        examples, args = self.examples["train"], self.args
        fixed = args.padding == "max_length"
        # On a CPU a few hundred positions keep the cores as busy as thousands do, and shorter
        # micro-batches have less padding; a GPU wants all it can get.
        cut = accumulation is None and not fixed and self.world.device.type == "cpu"
        return RankLoader(
            examples,
            GlobalBatches(len(examples), args.batch_size, args.seed),
            rank=rank,
            world_size=world_size,
            pad_id=self.pad_id,
            device=self.world.device,
            length=args.model_max_length if fixed else None,
            accumulation=accumulation or 1,
            max_positions=CPU_POSITIONS if cut else None,
        )

    def validation_batches(self, world_size: int, rank: int) -> list[Batch]:
        """This rank's part of the validation split, batches of like lengths."""
        mine = sorted(self.examples["validation"], key=lambda e: len(e.ids))[rank::world_size]
        length = self.args.model_max_length if self.args.padding == "max_length" else None
        return [
            to_batch(mine[i : i + EVAL_BATCH], self.pad_id, self.world.device, length)
            for i in range(0, len(mine), EVAL_BATCH)
        ]

    def validation_loss(self, loss_fn: Callable[[Batch], Tensor]) -> float:
        """The mean over all target tokens of the validation split, over all ranks."""
        world = self.world
        batches = self.validation_batches(world.world_size, world.rank)
        with autocast(world.device, self.args.precision):
            sums = evaluate_loss(self.model, batches, loss_fn, "Validating", world.rank)
        loss_sum, targets = sum_over_ranks(sums, world.device)
        return loss_sum / max(1.0, targets)

    def translate(self) -> tuple[list[str], float]:
        """The translations of the test split, each rank having done a part, and their BLEU."""
        world, args, test = self.world, self.args, self.texts.splits["test"]
        mine = Partition(test, range(world.rank, len(test), world.world_size))
        with autocast(world.device, args.precision):
            parts = gather_over_ranks(
                generate(
                    self.translator or self.model, [mine[i] for i in range(len(mine))],
                    args.src, args.tgt, self.tokenizer, args.model_max_length, world.device,
                    "Translating", world.rank,
                ),
                world.world_size,
            )  # fmt: skip
        sentences = [parts[i % len(parts)][i // len(parts)] for i in range(len(test))]
        return sentences, evaluate_bleu(test, sentences, args.tgt)["bleu"]

    def options(self) -> dict[str, Any]:
        """The options of the run as text and numbers. Where one was left to the program, what it
        chose; and `cores`, the CPU cores that each process may use."""
        config, device = self.model.config, self.world.device
        chosen = {
            "model": model_name(self.args, device),
            **{k: getattr(config, k) for k in ("n_layer", "n_embd", "n_head", "vocab_size")},
            "learning_rate": self.learning_rate,
            "device": device.type,
            "cores": len(core_slice(0, 1)) or None,
        }
        return {**plain(vars(self.args)), **chosen}

    def start(
        self, loss_fn: Callable[[Batch], Tensor], first: int = 0, notes: Sequence[str] = ()
    ) -> None:
        """Says what is about to be trained from epoch `first` on, and how well a model does that is
        not trained yet."""
        if self.world.is_main:  # before the others write theirs: end_epoch() waits for all
            clear_results(self.args.workdir, first)
            write_json(self.args.workdir / OPTIONS, self.options())
        slow = precision_notes(self.world.device, self.args.precision)
        shared = core_notes(self.world)
        self.say("\n".join([self.describe(), *self.texts.notes, *slow, *shared, *notes]))
        self.say(HEADER)
        if self.saved is not None:
            return
        _, bleu = self.translate()
        self.say(epoch_line("start", bleu, self.validation_loss(loss_fn)))

    def end_epoch(
        self,
        epoch: int,
        totals: EpochTotals,
        loss_fn: Callable[[Batch], Tensor],
        file_rank: int | None,
    ) -> None:
        """Evaluates, writes the result files of this rank, and says a line."""
        loss_sum, targets = sum_over_ranks(
            (totals.loss_sum, totals.target_tokens), self.world.device
        )
        sentences, bleu = self.translate()
        result = EpochResult(
            training_loss=loss_sum / targets if targets else math.nan,
            validation_loss=self.validation_loss(loss_fn),
            bleu=bleu,
            training_time=totals.seconds,
            tokens_per_sec=totals.positions / totals.seconds,
            real_tokens_per_sec=totals.tokens / totals.seconds,
            skipped_steps=totals.skipped,
        )
        test = self.texts.splits["test"]
        write_epoch(self.args.workdir, epoch, result, test, sentences, file_rank)
        self.sentences = sentences
        speeds = sum_over_ranks(
            (result.tokens_per_sec, result.real_tokens_per_sec), self.world.device
        )
        self.times.append((totals.seconds, speeds[0]))
        self.say(epoch_line(str(epoch), bleu, result.validation_loss, result, speeds))

    def save_timeline(self, timeline: Timeline, epoch: int) -> None:
        """Writes what was recorded, once: after the epoch in which all steps have been, or the
        last."""
        last = epoch == self.args.n_epochs - 1
        if self.args.timeline and not self.timeline_saved and (timeline.done or last):
            timeline.save(self.args.workdir)
            self.timeline_saved = True

    def close(self) -> None:
        """Shows a few translations, draws the curves, and says where the results are."""
        src, tgt, test = self.args.src, self.args.tgt, self.texts.splits["test"]
        seconds, speeds = zip(*(self.times[1:] or self.times), strict=True)
        mean = f"{spread(seconds, 's')}, {spread(speeds, 'positions/s')}"
        which = "an epoch, the first left out" if len(self.times) > 1 else "the epoch"
        self.say(f"{which}: {mean}\n")
        for pair, sentence in list(zip(test, self.sentences, strict=True))[:3]:
            self.say(f"  {src:>9}   {pair[src]}")
            self.say(f"  {tgt:>9}   {pair[tgt]}")
            self.say(f"  {'this model':>9}  {sentence}\n")
        if self.world.is_main:
            from project.plot import plot_training  # here: matplotlib takes a second to import

            workdir = self.args.workdir
            try:
                picture = plot_training(workdir)
            except UserError as error:  # its way out is an option of plot.py's, not of this program
                raise RunError(
                    f"--workdir {workdir} has all results, but not their picture, which python "
                    f"project/plot.py training {workdir} draws ({error})"
                ) from error
            if self.timeline_saved:
                self.say(
                    f"The recorded steps: python project/plot.py timeline {self.args.workdir}, or "
                    f"open {self.args.workdir / TRACE} in https://ui.perfetto.dev."
                )
            self.say(
                f"Results, translations and tokenizer are in {self.args.workdir}/; "
                f"loss and BLEU are drawn in {picture}."
            )
            self.export_model()

    def export_model(self) -> None:
        """Writes the model for transformers, if it is asked for."""
        if self.args.export is not None:
            export(self.args.export, self.translator or self.model, self.tokenizer)
            self.say(f"Model and tokenizer, for transformers, are in {self.args.export}/.")

    def describe(self) -> str:
        """What is trained, on what, and how, in two lines."""
        args, config, world = self.args, self.model.config, self.world
        sizes = " / ".join(f"{len(self.texts.splits[split]):,}" for split in SPLITS)
        parameters = sum(p.numel() for p in self.model.parameters())
        return (
            f"{model_name(args, world.device)}: {config.n_layer} blocks of width {config.n_embd}, "
            f"vocabulary {config.vocab_size:,}, {parameters / 1e6:.1f} M parameters\n"
            f"{args.dataset}: {sizes} pairs to train / validate / test, {args.src} to {args.tgt}; "
            f"batches of {args.batch_size}, {args.precision}, {world.device.type}"
        )

    def say(self, text: str) -> None:
        """Prints, on rank 0 alone."""
        if self.world.is_main:
            print(text, flush=True)


def gather_over_ranks(value: T, world_size: int) -> list[T]:
    """Every rank's value, by rank, on every rank."""
    if world_size == 1:
        return [value]
    parts: list[Any] = [None] * world_size
    dist.all_gather_object(parts, value)
    return parts


def open_session(
    args: argparse.Namespace, world: World, texts: Texts, saved: Checkpoint | None = None
) -> Session:
    """Makes tokenizer, token ids and model. Rank 0 writes tokenizer and config to the workdir,
    and the others read the tokenizer there, so that all have the same: that of the checkpoint
    `saved`, if there is one to go on from."""
    name = model_name(args, world.device)
    tokenizer = shared_tokenizer(args, name, texts, world, saved)
    vocab_size = args.vocab_size or round_vocab(len(tokenizer))
    if name in PRESETS:
        config = gpt2_config(
            name, vocab_size, args.model_max_length, dropout=args.dropout,
            n_layer=args.n_layer, n_embd=args.n_embd, n_head=args.n_head,
        )  # fmt: skip
        model = build_model(config, args.seed)
    else:
        model = load_pretrained(name, len(tokenizer), args.dropout, args.seed)
    if world.is_main:
        with writing(args.workdir / "config.json"):
            model.config.save_pretrained(args.workdir)
    examples = {
        split: encode(pairs, tokenizer, args.src, args.tgt, args.model_max_length)
        for split, pairs in texts.splits.items()
    }
    check_targets(args.model_max_length, examples["train"])
    return Session(args, world, texts, tokenizer, model, examples, saved=saved)


def check_targets(max_length: int, examples: Sequence[Encoded]) -> None:
    """Raises UserError where no target is left to learn."""
    if not any(example.num_targets for example in examples):
        raise UserError(
            f"--model_max_length {max_length}: every source sentence fills it, and no target is "
            "left to learn; --model_max_length 128 works"
        )


def shared_tokenizer(
    args: argparse.Namespace,
    name: str,
    texts: Texts,
    world: World,
    saved: Checkpoint | None = None,
) -> PreTrainedTokenizerFast:
    """The tokenizer of model `name`, or that of a checkpoint: rank 0 writes it to the workdir, and
    all read it there."""
    import_transformers()

    def make() -> None:
        clean(args.workdir / CHECKPOINTS)
        if saved is None:
            _make_tokenizer(args, name, texts.splits["train"])
        else:
            for file in FILES:
                with writing(args.workdir / file):
                    (args.workdir / file).write_bytes(saved.read(file))

    on_main(world, make)
    if world.world_size > 1:
        dist.barrier()  # where rank 0 has failed, there is nothing to read, and the run ends
    tokenizer = load_tokenizer(args.workdir)
    check_same(world, {"the tokenizer": tokenizer.backend_tokenizer.to_str().encode()})
    return tokenizer


def _make_tokenizer(args: argparse.Namespace, name: str, pairs: Sequence[dict[str, str]]) -> None:
    if name in PRESETS:
        size = args.vocab_size or MAX_VOCAB
        get_tokenizer(pairs, size, args.src, args.tgt, args.workdir)
        return
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"--model {name}: no tokenizer comes with it ({reason})") from error
    tokenizer.add_special_tokens(
        {"pad_token": PAD, "additional_special_tokens": [eos(args.src), eos(args.tgt)]}
    )
    with writing(args.workdir / "tokenizer.json"):
        tokenizer.save_pretrained(args.workdir)
