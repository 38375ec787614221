"""Generates text, e.g. translations, many sentences at a time and under any layout.

Problem. A token depends on all tokens before it. A model that fits only in shards or stages cannot
be gathered for that, and its ranks must stay in step.

Idea. The loop asks one thing of the model: the next token of each sentence, given the newest ones
(`Decoder`). Ranks with stages of one model run the loop on the same sentences and receive the same
tokens. Ranks with shards run it on their own sentences; one that has finished takes part in
collectives until all have. Keys and values stay in the process that computed them
(training/tasks/cache.py).

Cost: a forward of one position per token.

Shapes: B unfinished sentences, T their newest positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from training.launch.notice import Agreement
from training.launch.world import World
from training.progress import moving

from .cache import Cache
from .task import Decoder
from .tokens import eos

if TYPE_CHECKING:  # see training/tasks/gpt2.py
    from transformers import PreTrainedTokenizerFast


def greedy(logits: Tensor, num_tokens: int) -> Tensor:
    """The most probable tokens, B, from logits B V. Logits beyond `num_tokens` belong to none."""
    return logits[:, :num_tokens].argmax(-1)


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
    world: World = World(),  # noqa: B008 (it is immutable)
) -> list[str]:
    """Translates this rank's sentences, greedily. All ranks that share the model must call it.

    A sentence ends at its end token, or where source and translation fill `max_length`. See
    `continue_all`.
    """
    prompts = [tokenizer(source + eos(src_key))["input_ids"] for source in sources]
    stop = tokenizer.convert_tokens_to_ids(eos(tgt_key))
    most = [max_length - len(prompt) for prompt in prompts]  # new tokens; a long source leaves none
    n = len(tokenizer)
    rows = continue_all(decoder, prompts, most, stop, n, device, batch_size, bar, world=world)
    return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]


def continue_all(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    most: Sequence[int],
    stop: int,
    num_tokens: int,
    device: torch.device | str,
    batch_size: int = 128,
    bar: str | None = None,
    new_cache: Callable[[Sequence[int]], Cache] | None = None,
    world: World = World(),  # noqa: B008 (it is immutable)
) -> list[list[int]]:
    """The continuations of this rank's prompts, in their order. All ranks that share the model must
    call it.

    Args:
        most: maximum number of new tokens per prompt; the token `stop` ends it earlier. With 0 or
            less there are none.
        num_tokens: of the vocabulary, without the embedding's unused rows.
        batch_size: prompts of similar lengths that are continued together.
        bar: the text of a line that moves on a terminal; None shows none.
        new_cache: makes the cache of a batch, from the numbers of its prompts, for a decoder that
            needs more in it (sampling.py).
        world: its ranks all call this, and end together if one is given notice.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    order = [i for i in range(len(prompts)) if most[i] > 0]
    order.sort(key=lambda i: len(prompts[i]))  # by length: little padding
    chunks = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    # At most so many tokens: a sentence that ends early takes what it had left off the rest.
    total = sum(most[i] for i in order)
    agreement = world.agreement(every=8)
    line = moving(None, bar or "", total, "token", shown=bar is not None)
    for chunk in chunks:
        some = [prompts[i] for i in chunk]
        cache = new_cache(chunk) if new_cache else Cache([len(ids) for ids in some], device)
        found = continue_together(
            decoder, some, [most[i] for i in chunk], stop, num_tokens, device, cache, agreement,
            line.update,
        )  # fmt: skip
        for i, row in zip(chunk, found, strict=True):
            rows[i] = row
    line.close()
    decoder.end(agreement.turn)  # other ranks may have sentences left
    agreement.end()
    return rows


@torch.no_grad()
def continue_together(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    most: Sequence[int],
    stop: int,
    num_tokens: int,
    device: torch.device | str,
    cache: Cache,
    agreement: Agreement,
    advance: Callable[[int], object] = lambda _: None,
) -> list[list[int]]:
    """One batch of `continue_all`. Finished sentences leave the batch. `advance` is called with how
    many tokens fewer can follow."""
    rows: list[list[int]] = [[] for _ in prompts]
    newest = _padded(prompts, device)  # [B, T]
    live, left = list(range(len(prompts))), sum(most)  # the sentence of each row
    while True:
        agreement.turn()
        tokens = decoder.next_tokens(newest, cache, num_tokens)  # [B]
        going = []  # rows that continue
        for row, (i, token) in enumerate(zip(live, tokens.tolist(), strict=True)):
            if token != stop:
                rows[i].append(token)
                if len(rows[i]) < most[i]:
                    going.append(row)
        before, left = left, sum(most[live[row]] - len(rows[live[row]]) for row in going)
        advance(before - left)
        if not going:
            return rows
        if len(going) < len(live):
            cache.keep(going)
            live, tokens = [live[row] for row in going], tokens[going]
        cache.extend()  # a column for the tokens just found
        newest = tokens[:, None]


def _padded(prompts: Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    """Ids B T, padded on the left, so that all sentences grow in the same column."""
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device)


def evaluate_bleu(
    examples: Sequence[dict[str, str]], gen_sents: Sequence[str], tgt_key: str
) -> dict[str, float]:
    """The corpus BLEU of the translations, by sacrebleu: {"bleu": 0 ... 100}."""
    from sacrebleu.metrics import BLEU

    references = [[example[tgt_key] for example in examples]]
    return {"bleu": BLEU().corpus_score(list(gen_sents), references).score}
