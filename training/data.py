"""From texts to batches of token ids.

Problem: sentence pairs come from the built-in text, from files or from a hub; a step of
training wants, on every rank, its part of one global batch as rectangles of token ids.

Idea: everything that can be done once is done once, before training: pairs are read and checked
(`load_pairs`), a tokenizer is trained on them (`train_tokenizer`), all pairs become token ids
(`encode`). What remains per step is to pick indices and to pad. Which examples form the global
batch of step k is a pure function of the seed, the epoch and k (`GlobalBatches`), and never of
the number of ranks; rank r of W takes places r, r+W, ... of it. So every rank knows, without
asking, how many target tokens the whole batch has, and the loss of a step can be the mean over
exactly those.

A pair is one sequence, and only its second half is learnt:

    ids      w1 w2 w3 <eos_de> v1 v2 <eos_en>         labels are the ids, one place on
    weights         0  0     0  1  1        1         of the labels: 1 on target tokens

Cost: padding. A rectangle is as long as its longest sentence. Micro-batches of like lengths
compute about 1.2 positions per real token on real text, where padding all to 128 computes about 4.
Whole batches of like lengths compute 1.02, but each then teaches about sentences of one length: an
epoch of Multi30k ended at a validation loss of 5.2 instead of 4.5 (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers.implementations import ByteLevelBPETokenizer
from torch import Tensor

from data_parallel.dataset import even_slices, shuffled_indices
from training.seeds import stream

if TYPE_CHECKING:  # see training/model.py
    from transformers import PreTrainedTokenizerFast

Batch = dict[str, Tensor]
PAD = "<pad>"


def eos(language: str) -> str:
    """The token that ends a sentence of `language`."""
    return f"<eos_{language}>"


def train_tokenizer(
    pairs: Sequence[dict[str, str]], vocab_size: int, src: str, tgt: str
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over both languages: any text can be encoded, nothing is unknown.

    Args:
        vocab_size: the most tokens it may have: 256 bytes, 3 special ones, and merges, of which
            a small text may give fewer.
    """
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        (pair[key] for pair in pairs for key in (src, tgt)),
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[PAD, eos(src), eos(tgt)],
        show_progress=False,
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that `save_pretrained` has written into `folder`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@dataclass(frozen=True)
class Encoded:
    """The token ids of a pair, and how many of them are its source (with its end token)."""

    ids: list[int]
    num_source: int

    @property
    def num_targets(self) -> int:
        """Labels with weight 1: the target's tokens, its end token among them."""
        return max(0, len(self.ids) - self.num_source)


def encode(
    pairs: Sequence[dict[str, str]],
    tokenizer: PreTrainedTokenizerFast,
    src: str,
    tgt: str,
    max_length: int,
) -> list[Encoded]:
    """Token ids of all pairs, each cut to max_length + 1: max_length inputs and their labels."""
    if not pairs:
        return []
    sources = tokenizer([pair[src] + eos(src) for pair in pairs])["input_ids"]
    targets = tokenizer([pair[tgt] + eos(tgt) for pair in pairs])["input_ids"]
    return [
        Encoded((s + t)[: max_length + 1], min(len(s), max_length + 1))
        for s, t in zip(sources, targets, strict=True)
    ]


def to_batch(
    examples: Sequence[Encoded], pad_id: int, device: torch.device | str, length: int | None = None
) -> Batch:
    """Pads examples to one rectangle.

    Args:
        length: of the rectangle; by default the longest example's.

    Returns:
        input_ids, labels, label_token_weights, each [B, T]; weight 1 on target tokens alone. And
        target_index [N], the places of those in the flattened [B * T]: a model need compute
        logits for no others.
    """
    T = max((len(e.ids) - 1 for e in examples), default=0) if length is None else length
    ids = torch.full((len(examples), T + 1), pad_id)
    weights = torch.zeros(len(examples), T + 1, dtype=torch.long)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        weights[row, example.num_source : len(example.ids)] = 1
    batch = {
        "input_ids": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "label_token_weights": weights[:, 1:].contiguous(),
    }
    batch["target_index"] = batch["label_token_weights"].flatten().nonzero().squeeze(1)
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


class GlobalBatches:
    """Which examples form which global batch: every example once per epoch, in a shuffled order,
    another one for every epoch of every seed.

    Args:
        num_examples: there are so many.
        batch_size: examples in a global batch; an epoch's last one may hold fewer.
        seed: of the shuffles, together with the epoch.
    """

    def __init__(self, num_examples: int, batch_size: int, seed: int) -> None:
        self.num_examples = num_examples
        self.batch_size = batch_size
        self.seed = seed

    def __len__(self) -> int:
        return -(-self.num_examples // self.batch_size)

    def epoch(self, epoch: int) -> list[list[int]]:
        """The global batches of an epoch, as indices of examples."""
        order = shuffled_indices(self.num_examples, stream(self.seed, "data order", epoch))
        return [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]


@dataclass(frozen=True)
class Step:
    """What one rank computes in one step: its part of a global batch."""

    micro_batches: list[Batch]  # empty where the global batch has fewer examples than ranks
    target_tokens: int  # of the global batch, over all ranks: what the loss is the mean over
    positions: int  # of this rank, padding included
    tokens: int  # of this rank, padding not included


class RankLoader:
    """The steps of one rank.

    The examples of a global batch are put in order of length before they are dealt out, so that
    all ranks have as much to do, and a rank's part is cut into micro-batches of like lengths. The
    step's loss and gradient depend on neither.

    Args:
        examples: all examples, the same on every rank.
        length: pad to this, and keep the order; by default to the longest of each micro-batch.
        accumulation: micro-batches into which a rank's part is cut, of as many examples or one
            less; where the part has fewer examples, of one each.
        max_positions: instead, as few micro-batches as hold no more positions than this each.
    """

    def __init__(
        self,
        examples: Sequence[Encoded],
        batches: GlobalBatches,
        *,
        rank: int,
        world_size: int,
        pad_id: int,
        device: torch.device | str,
        length: int | None = None,
        accumulation: int = 1,
        max_positions: int | None = None,
    ) -> None:
        self.examples = examples
        self.batches = batches
        self.rank = rank
        self.world_size = world_size
        self.pad_id = pad_id
        self.device = device
        self.length = length
        self.accumulation = accumulation
        self.max_positions = max_positions

    def __len__(self) -> int:
        return len(self.batches)

    def steps(self, epoch: int, start: int = 0) -> Iterator[Step]:
        """The steps of an epoch, from step `start` on."""
        for indices in self.batches.epoch(epoch)[start:]:
            whole = [self.examples[i] for i in indices]
            if self.length is None:
                whole.sort(key=lambda example: len(example.ids))
            mine = whole[self.rank :: self.world_size]
            parts = [
                to_batch(part, self.pad_id, self.device, self.length) for part in self._cut(mine)
            ]
            yield Step(
                micro_batches=parts,
                target_tokens=sum(e.num_targets for e in whole),
                positions=sum(part["input_ids"].numel() for part in parts),
                tokens=sum(max(0, len(e.ids) - 1) for e in mine),
            )

    def _cut(self, mine: list[Encoded]) -> list[list[Encoded]]:
        if self.max_positions is None:
            return [mine[at] for at in even_slices(len(mine), self.accumulation)]
        parts: list[list[Encoded]] = []
        for example in mine:  # from the shortest to the longest
            positions = self.length or len(example.ids) - 1
            if parts and (len(parts[-1]) + 1) * positions <= self.max_positions:
                parts[-1].append(example)
            else:
                parts.append([example])
        return parts
