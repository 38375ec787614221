"""GPT-2 on sequences of tokens: what its tasks share.

    tasks/translation.py     a sequence is a pair of sentences; only the second one is learnt
    tasks/language.py        a sequence is a stretch of text

Before training, the tokenizer is trained and all texts become token ids, in files (tokens.py). A
step only picks examples and pads them.

Rank 0 makes the tokenizer, or takes it from a checkpoint, and sends its files to the others: hosts
need no shared folder.
"""

from __future__ import annotations

import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from data_parallel.dataset import even_slices, global_batches, partition_dataset
from runtime.cores import all_cores
from runtime.dropout import Keys
from training.files import TOKENS, json_text, moving
from training.launch.errors import UserError, counted, parameters
from training.launch.world import World
from training.options import Options
from training.tasks.task import stream

from .generation import continue_all
from .gpt2 import (
    MEASURED_AT_ONCE,
    Sequences,
    gpt2_config,
    gpt2_layers,
    initializer,
    loss_of_targets,
    numbers_of_targets,
    round_vocab,
)
from .task import Step, TrainingTask, Translator, rectangles, steps_of_epoch, to_device
from .texts import Texts, made_once, place, still_there
from .tokens import (
    TEXTS_AT_ONCE,
    Encoded,
    Tokens,
    collate_batch,
    load_tokenizer,
    read_tokenizer,
    tokenizer_files,
    write_tokens,
)

if TYPE_CHECKING:  # see training/tasks/gpt2.py
    from transformers import GPT2Config, GPT2LMHeadModel

MAX_VOCAB = 4096  # tokens that BPE may learn without --vocab_size
CPU_POSITIONS = 384  # at most, per micro-batch; docs/log.md has other values that were tried
ABOUT = "about.json"  # beside the files of tokens
SPREAD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: multiples of it are far apart
SHOWN = 3  # outputs at the end of a run
# Positions of a cache for each position of a micro-batch. A layer keeps 16 numbers of the model's
# width for backward, and the cache 2, or 4 while it grows; with recomputation a layer keeps two.
CACHED = {"never": 6.0}


class SequenceTask(TrainingTask, ABC):
    """See `training.tasks.task.TrainingTask`.

    Args:
        args: the options of the run.
        files: on rank 0, those of the tokenizer of a checkpoint; by default they are made.
        pretrained: the weights that the model begins with, a `pretrained.Pretrained`; None: it is a
            preset.
    """

    units: Sequence[str] = ("positions/s", "real tokens/s")
    cpu_positions = CPU_POSITIONS
    tokens_class = Tokens

    def __init__(
        self, args: Options, world: World, texts: Texts, files: dict[str, bytes] | None = None,
        pretrained: Any = None,
    ) -> None:  # fmt: skip
        # Takes seconds, so all ranks do it at the same time, before one waits for another.
        from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast  # noqa: F401

        self.args, self.texts, self.device = args, texts, world.device
        self.pretrained = pretrained
        self.notes = [*texts.source.notes]
        with all_cores():  # the threads of `tokenizers` start at their first use
            self.files = world.on_main(lambda: files or self._tokenizer())  # hosts share no folder
            self.tokenizer = load_tokenizer(self.files)
            self.examples: Mapping[str, Tokens] = self.chosen(self._tokens(world))
        self.config, self._initialize = self.config_and_weights(len(self.tokenizer))
        self.files["config.json"] = self.config.to_json_string().encode()
        self.steps_per_epoch = steps_of_epoch(args, len(self.examples["train"]))
        # Pad all to this; None: each micro-batch to its longest sentence.
        self.length = args.model_max_length if args.padding == "max_length" else None

    @abstractmethod
    def train_tokenizer(self, folder: Path) -> None:
        """Writes a tokenizer that is trained on the train split, for a model without pretrained
        weights."""

    @abstractmethod
    def special_tokens(self) -> dict[str, Any]:
        """Padding and ends, by their uses."""

    @abstractmethod
    def encoded(self, split: str) -> Iterator[tuple[Any, Any]]:
        """The tokens of a split, some at a time, for `write_tokens`."""

    @abstractmethod
    def chosen(self, files: Mapping[str, Tokens]) -> dict[str, Tokens]:
        """The examples of every split, chosen from the files of the source's splits. Adds notes.
        Raises UserError if there is nothing to learn."""

    @abstractmethod
    def about_data(self) -> str:
        """What the model is trained on, for a person."""

    def _tokens(self, world: World) -> dict[str, Tokens]:
        """The tokens of the source's splits. The first rank of each host writes their files, if
        they are not there, and `ABOUT`, which says what is known of the text afterwards."""
        args, texts = self.args, self.texts
        folder = place(args.workdir / TOKENS, "tokens", texts.identity, self.files)
        dtype = np.uint16 if len(self.tokenizer) <= 1 << 16 else np.int32

        def make(new: Path) -> None:
            about = {}
            for split in texts.splits:
                what, encoded = f"Tokenizing {split}", self.encoded(split)
                unit = "piece" if texts.plain else "pair"
                line = moving(encoded, what, None, unit, shown=world.is_main, size=TEXTS_AT_ONCE)
                digest = write_tokens(new / split, line, dtype)
                about[split] = {"hash": digest, "skipped": texts.skipped, "last": [*texts.last]}
            (new / ABOUT).write_text(json_text(about, None), "utf-8")

        world.on_hosts(lambda: made_once(folder, make))
        with still_there(folder):
            self.about = json.loads((folder / ABOUT).read_text("utf-8"))
            length = args.model_max_length
            read = {split: self.tokens_class(folder / split, dtype, length) for split in self.about}
        for split, about in self.about.items():
            if about["skipped"]:
                sides = " on both sides" if texts.keys else ""
                rows = counted(about["skipped"], "row")
                self.notes.append(f"{split}: skipped {rows} without text{sides}.")
        return read

    def skeleton(self) -> GPT2LMHeadModel:
        """The whole model on the meta device."""
        from transformers import GPT2LMHeadModel

        with torch.device("meta"):
            return GPT2LMHeadModel(self.config)

    def initialize(self, name: str, p: Tensor) -> None:
        """From the seed and the parameter's name, or from pretrained weights."""
        self._initialize(name, p)

    def layers(self, model: Any) -> list[Any]:
        """Embedding, two halves per block, head."""
        return gpt2_layers(model)

    @property
    def blocks(self) -> Sequence[int]:
        """Two layers a block; the embedding is in the first one, the head in the last."""
        n = self.config.n_layer
        return [2 + (k == 0) + (k == n - 1) for k in range(n)]

    def steps(
        self, epoch: int, dp_rank: int, dp_size: int, num_microbatches: int | None, start: int = 0
    ) -> Iterator[Step]:
        """The steps of an epoch. Which examples form a global batch depends on the seed and the
        epoch alone; each batch is divided by length, so that all parts have equal work."""
        examples, size = self.examples["train"], self.args.batch_size
        seed = stream(self.args.seed, "data order", epoch)
        dealt = global_batches(len(examples), size, seed, start)
        drop = stream(self.args.seed, "dropout", epoch)
        loader = partition_dataset(
            dp_rank, dp_size, examples, size,
            partial(self._collate, num_microbatches, drop), seed=seed,
            by_length=self.length is None, start=start,
        )  # sorted if lengths differ  # fmt: skip
        nothing: Any = ([], [])  # for a rank that gets none of the last, smaller batch
        for batch, (mine, micro_batches) in zip_longest(dealt, loader, fillvalue=nothing):
            yield Step(
                inputs=[x for x, _ in micro_batches],
                targets=[labels for _, labels in micro_batches],
                count=int(examples.sizes(batch)[1].sum()),  # of all ranks
                positions=sum(x.hidden.numel() for x, _ in micro_batches),  # B T of each
                tokens=sum(max(0, len(e.ids) - 1) for e in mine),
            )

    def _collate(self, num_microbatches: int | None, drop: int, mine: list[Encoded]) -> Any:
        """A rank's part of a global batch, and its micro-batches: sequences, and the labels of
        their targets. All that depends on values is done here, on the CPU: on a GPU the host would
        wait for them."""
        parts = []
        for part in self._cut(mine, num_microbatches):
            ids, labels, weights = self._batch(part)
            targets = numbers_of_targets(weights)
            x = Sequences(ids, targets, self._keys(part, drop), starts=self.starts(ids))
            parts.append(to_device((x, labels.flatten()[targets]), self.device))
        return mine, parts

    def _keys(self, examples: Sequence[Encoded], drop: int) -> Keys:
        """What selects the dropout masks of the examples, see runtime/dropout.py; `drop` changes
        them every epoch."""
        if self.device.type != "cpu":
            return stream(drop, "examples", *(example.number for example in examples))
        keys = [(drop + SPREAD * example.number) % 2**63 for example in examples]
        return torch.tensor(keys, dtype=torch.long)

    def starts(self, ids: Tensor) -> Tensor | None:  # noqa: ARG002
        """`Sequences.starts` of token ids [B, T]."""
        return None

    def _batch(self, examples: Sequence[Encoded]) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, labels and their weights, each [B, T], on the CPU."""
        args = self.args
        batch = collate_batch(
            examples, args.src, args.tgt, self.tokenizer, args.model_max_length, "cpu",
            padding=args.padding,
        )  # fmt: skip
        return batch["input_ids"], batch["labels"], batch["label_token_weights"]

    def _cut(self, mine: list[Encoded], num_microbatches: int | None) -> list[list[Encoded]]:
        """On a CPU a few hundred positions keep the cores as busy as thousands, and smaller
        micro-batches have less padding. A GPU takes all examples at once."""
        if self._by_number(num_microbatches):
            return [mine[at] for at in even_slices(len(mine), num_microbatches or 1)]
        lengths = [len(example.ids) - 1 for example in mine]
        return [mine[at] for at in rectangles(lengths, self.cpu_positions)]

    def _by_number(self, num_microbatches: int | None) -> bool:
        """Whether a rank's examples are cut by number of micro-batches, and not by positions."""
        return bool(num_microbatches or self.length or self.device.type != "cpu")

    @cached_property
    def _positions_of_batch(self) -> int:
        """The positions of the first global batch."""
        examples, args = self.examples["train"], self.args
        seed = stream(args.seed, "data order", 0)
        batch = next(global_batches(len(examples), args.batch_size, seed))
        lengths = examples.sizes(batch)[0] - 1
        return int(len(batch) * self.length if self.length else lengths.sum())

    def positions_at_once(self, dp_size: int, num_microbatches: int | None) -> int:
        """Positions of a micro-batch in training, without padding. Evaluation takes no more."""
        if not self._by_number(num_microbatches):
            return self.cpu_positions
        return self._positions_of_batch // (dp_size * (num_microbatches or 1))

    def validation_batches(
        self, dp_rank: int, dp_size: int, num_microbatches: int | None
    ) -> tuple[int, Iterator[tuple[Any, Any]]]:
        """Batches of similar lengths, and the labels of their targets. Batches have weights
        [B, T], not the targets' numbers, since stages in threads cut them."""
        examples = self.examples["validation"]
        lengths = examples.sizes(range(len(examples)))[0] - 1
        own = np.argsort(lengths, kind="stable")[dp_rank::dp_size]  # lengths are dealt out
        padded = [self.length] * len(own) if self.length else lengths[own].tolist()
        cut = rectangles(padded, self.positions_at_once(dp_size, num_microbatches))
        numbers = (own[at].tolist() for at in cut)
        return len(cut), map(self._validation_batch, map(examples.__getitems__, numbers))

    def _validation_batch(self, examples: Sequence[Encoded]) -> tuple[Sequences, Tensor]:
        ids, labels, weights = self._batch(examples)
        x = Sequences(ids, weights, starts=self.starts(ids))
        return to_device((x, labels[weights != 0]), self.device)

    def to_measure(self, x: Sequences, target: Tensor) -> Sequences:
        """The input with its labels, for the head."""
        if x.targets is not None and x.targets.dim() == 2:  # stages in threads cut them, too
            target = torch.zeros_like(x.targets).masked_scatter(x.targets != 0, target)
        return x._replace(labels=target)

    def measure(self, output: Tensor, target: Any) -> Tensor:  # noqa: ARG002
        """See `TrainingTask`. `output`: [n, 3] from the head, a row for each part of a batch."""
        return output.sum(0).cpu()

    def input_to_compare(self, dp_rank: int, dp_size: int, num_microbatches: int | None) -> Any:
        """With targets at first positions only: if the head is cut, no rank holds all logits."""
        x = super().input_to_compare(dp_rank, dp_size, num_microbatches)
        if x is None:
            return None
        first = x.targets.flatten().cumsum(0) <= max(1, MEASURED_AT_ONCE // self.config.vocab_size)
        return x._replace(targets=x.targets * first.view_as(x.targets))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The summed loss over the target tokens."""
        return loss_of_targets(output, target)

    def describe(self) -> str:
        """Sizes of the model and of the splits."""
        args, config = self.args, self.config
        size = parameters(sum(p.numel() for p in self.skeleton().parameters()))
        blocks = counted(config.n_layer, "block")
        return (
            f"{args.model}: {blocks} of width {config.n_embd}, "
            f"vocabulary {config.vocab_size:,}, {size}\n"
            f"{args.dataset}: {self.about_data()}; "
            f"batches of {args.batch_size}, {args.precision}, {self.device.type}"
            + "".join(f"\n{note}" for note in self.notes)
        )

    def continued(
        self, world: World, model: Translator, prompts: Sequence[Any], most: Sequence[int], bar: str
    ) -> list[str]:
        """The continuations of all prompts, in their order, on every rank. Part p generates those
        of the prompts p, p + parts, ...; `most` and `bar` as in `continue_all`."""
        rank, size = model.sentences
        mine = slice(rank, None, size)
        positions = self.positions_at_once(size, model.num_microbatches)
        texts = continue_all(
            model, self.tokenizer, prompts[mine], most[mine], self.device, positions,
            CACHED.get(self.args.recompute, 1.0), bar if world.is_main else None,
        )  # fmt: skip
        every = world.of_parts(rank, texts)
        return [every[i % size][i // size] for i in range(len(prompts))]

    def fingerprints(self) -> dict[str, str]:
        """A hash of the tokens of the source's splits, and how many examples train has."""
        n = len(self.examples["train"])
        return {split: f"{about['hash']} {n}" for split, about in self.about.items()}

    def _tokenizer(self) -> dict[str, bytes]:
        """The files of a given tokenizer, or of one that is trained now, or was before."""
        args = self.args
        if self.pretrained or args.tokenizer:
            with tempfile.TemporaryDirectory() as name:
                tokenizer = read_tokenizer(args.tokenizer or args.model)
                tokenizer.add_special_tokens(self.special_tokens())
                tokenizer.save_pretrained(name)
                return tokenizer_files(Path(name))
        folder = place(args.workdir / TOKENS, "tokenizer", args.vocab_size, self.texts.identity)
        made_once(folder, self.train_tokenizer)
        with still_there(folder):
            return tokenizer_files(folder)

    def config_and_weights(
        self, num_tokens: int
    ) -> tuple[GPT2Config, Callable[[str, Tensor], None]]:
        """The configuration, and a function that fills a parameter by its name."""
        args = self.args
        if self.pretrained:
            return self.pretrained.config(num_tokens), self.pretrained.initialize
        if num_tokens > (args.vocab_size or num_tokens):
            raise UserError(
                f"--vocab_size {args.vocab_size}: the tokenizer needs {num_tokens} tokens, for "
                f"bytes and ends of texts; --vocab_size {num_tokens} works"
            )
        config = gpt2_config(
            args.model, args.vocab_size or round_vocab(num_tokens), args.model_max_length,
            dropout=args.dropout, n_layer=args.n_layer, n_embd=args.n_embd, n_head=args.n_head,
        )  # fmt: skip
        return config, initializer(config, args.seed)

    def model_content(self) -> bytes:
        """The configuration, and a hash of pretrained weights."""
        weights = self.pretrained.content() if self.pretrained else ""
        return (self.config.to_json_string() + weights).encode()
