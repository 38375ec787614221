"""Greedy translation, many sentences at a time, by whatever holds the model.

Problem. A token needs a forward, and the next one that of all before it. A model that fits only in
shards or stages cannot be brought together for that, and its ranks must not lose step.

Idea. The loop asks one thing of the model: the next token of each sentence, given the newest ones
(`Decoder`). How that is found is the layout's affair. Ranks that hold stages of one model run the
loop on the same sentences and are told the same tokens; ranks that hold shards run it on sentences
of their own, and one that has finished takes part until all have. Keys and values stay in the
process that computed them: each has a `Prefix`, filled by the attention layers that it runs.

Cost: a forward of one position per token. Memory: keys and values, 2 B S C per attention layer.

Shapes: B sentences that have not ended, S positions so far, T the newest of them, C width, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from training.data import eos

if TYPE_CHECKING:  # see training/model.py
    from transformers import PreTrainedTokenizerFast


class Prefix:
    """What the sentences have been so far.

    Attributes:
        keep: B S, 1 where there is a token and 0 where there is padding.
        cache: the keys and values of the positions before the newest. Attention layers add to it by
            their number in the model; this process need not run all of them.
    """

    def __init__(self, keep: Tensor) -> None:
        from transformers import DynamicCache

        self.keep = keep
        self.cache = DynamicCache()

    def positions(self, T: int) -> Tensor:
        """B T: where in its sentence each of the newest tokens is, from 0."""
        return (self.keep.cumsum(1) - 1).clamp(min=0)[:, -T:]

    def select(self, rows: Tensor) -> None:
        """Goes on with these sentences only."""
        self.keep = self.keep[rows]
        self.cache.batch_select_indices(rows)

    def extend(self) -> None:
        """Every sentence has one more token."""
        self.keep = torch.cat([self.keep, torch.ones_like(self.keep[:, :1])], dim=1)


class Decoder(Protocol):
    """A model in evaluation mode, or this rank's part of one, that continues sentences."""

    def next_tokens(self, ids: Tensor, prefix: Prefix, num_tokens: int) -> Tensor:
        """The likeliest next token, of the first `num_tokens` of the vocabulary, of each sentence:
        B, on every rank. `ids`, B T, are the newest of the prefix."""

    def end(self) -> None:
        """This rank has no sentences left. Returns when no rank has."""


def likeliest(logits: Tensor, num_tokens: int) -> Tensor:
    """B of B V. Rows of the embedding beyond the tokenizer's are no tokens."""
    return logits[:, :num_tokens].argmax(-1)


def newest_alone(ids: Tensor) -> Tensor:
    """Weights B T that ask the layers of training/model.py for the logits of the last position."""
    weights = torch.zeros(ids.shape, device=ids.device)
    weights[:, -1] = 1
    return weights


def translate(
    decoder: Decoder,
    sources: Sequence[str],
    src_key: str,
    tgt_key: str,
    tokenizer: PreTrainedTokenizerFast,
    max_length: int,
    device: torch.device | str,
    batch_size: int = 128,
    bar: str | None = None,
) -> list[str]:
    """Translates this rank's sentences. All ranks that share the model must call it.

    A sentence ends at its end token, or where source and translation fill `max_length`.

    Args:
        batch_size: of sentences of like lengths.
        bar: the text of a progress bar; None shows none.
    """
    prompts = [tokenizer(source + eos(src_key))["input_ids"] for source in sources]
    stop = tokenizer.convert_tokens_to_ids(eos(tgt_key))
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    chunks = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    sentences = [""] * len(prompts)
    for chunk in tqdm(chunks, bar, disable=True if bar is None else None, leave=False):
        rows = continue_greedily(
            decoder, [prompts[i] for i in chunk], stop, len(tokenizer), max_length, device
        )
        for i, row in zip(chunk, rows, strict=True):
            sentences[i] = tokenizer.decode(row, skip_special_tokens=True).strip()
    decoder.end()
    return sentences


@torch.no_grad()
def continue_greedily(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    stop: int,
    num_tokens: int,
    max_length: int,
    device: torch.device | str,
) -> list[list[int]]:
    """The continuation of each prompt, up to `stop` or to `max_length` with the prompt.

    A sentence that has ended is computed no further.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    live = [k for k, prompt in enumerate(prompts) if len(prompt) < max_length]
    if not live:
        return rows
    ids, keep = _padded([prompts[k] for k in live], device)
    prefix = Prefix(keep)
    while True:
        tokens = decoder.next_tokens(ids, prefix, num_tokens)
        going = []  # places in `live`
        for place, (k, token) in enumerate(zip(live, tokens.tolist(), strict=True)):
            if token != stop:
                rows[k].append(token)
                if len(prompts[k]) + len(rows[k]) < max_length:
                    going.append(place)
        if not going:
            return rows
        if len(going) < len(live):
            live = [live[place] for place in going]
            rest = torch.tensor(going, device=device)
            tokens = tokens[rest]
            prefix.select(rest)
        ids = tokens[:, None]
        prefix.extend()


def _padded(prompts: Sequence[Sequence[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Ids B S, padded on the left, so that all sentences grow at the same place; and `keep`."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    keep = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        keep[row, longest - len(prompt) :] = 1
    return ids.to(device), keep.to(device)


def evaluate_bleu(
    examples: Sequence[dict[str, str]], gen_sents: Sequence[str], tgt_key: str
) -> dict[str, float]:
    """The corpus BLEU of the translations, by sacrebleu: {"bleu": 0 ... 100}."""
    from sacrebleu.metrics import BLEU

    references = [[example[tgt_key] for example in examples]]
    return {"bleu": BLEU().corpus_score(list(gen_sents), references).score}
