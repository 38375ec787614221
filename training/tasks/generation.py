"""Generates text, e.g. translations, many sentences at a time and under any layout.

Problem. A token depends on all tokens before it. A model that fits only in shards or stages cannot
be gathered for that, and its ranks must stay in step.

Idea. The loop asks one thing of the model: the next token of each sentence, given the newest ones
(`Translator`). Ranks with stages of one model run the loop on the same sentences and receive the
same tokens. Ranks with shards run it on their own sentences; one that has finished takes part in
collectives until all have. Keys and values stay in the process that computed them
(training/tasks/cache.py).

Cost: a forward of one position per token.

Shapes: B unfinished sentences, T their newest positions, V vocabulary.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from training.files import moving

from .cache import Cache
from .task import Translator, rectangles

if TYPE_CHECKING:  # see training/tasks/gpt2.py
    from transformers import PreTrainedTokenizerFast

# The first words of Unicode's names of their letters.
SCRIPTS_WITHOUT_SPACES = (
    "CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "YI",
)  # fmt: skip


def greedy(logits: Tensor, num_tokens: int) -> Tensor:
    """The most probable tokens, B, from logits B V. Logits from `num_tokens` on belong to none."""
    return logits[:, :num_tokens].argmax(-1)


@torch.no_grad()
def continue_all(
    model: Translator,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Sequence[int]],
    most: Sequence[int],
    device: torch.device | str,
    positions: int = 4096,
    cached: float = 1.0,
    bar: str | None = None,
) -> list[str]:
    """The continuations of this rank's prompts, in their order. All ranks that share the model must
    call it.

    Args:
        tokenizer: its end token ends a continuation, and is not in it.
        most: maximum number of new tokens per prompt. With 0 or less there are none.
        positions: the most of a batch, whose prompts have similar lengths.
        cached: a batch's cache has room for at most `cached` times as many positions.
        bar: the text of a progress bar; None shows none.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    order = [i for i in range(len(prompts)) if most[i] > 0]
    order.sort(key=lambda i: len(prompts[i]))  # by length: little padding
    stop, num_tokens = tokenizer.eos_token_id, len(tokenizer)
    line = moving(None, bar or "", len(order), "text", shown=bar is not None)
    # The longest of a batch comes last.
    lengths = [max(len(prompts[i]), (len(prompts[i]) + most[i]) / cached) for i in order]
    for at in rectangles(lengths, positions):
        batch = order[at]
        # [B, T], padded on the left, so that all sentences grow in the same column.
        newest = pad_sequence(
            [torch.tensor(prompts[i]) for i in batch], batch_first=True, padding_side="left"
        ).to(device)
        cache = Cache(batch, [len(prompts[i]) for i in batch], device)
        while cache.prompts:
            tokens = model.next_tokens(newest, cache, num_tokens)  # [B]
            going = []  # rows that continue
            for row, (i, token) in enumerate(zip(cache.prompts, tokens.tolist(), strict=True)):
                if token != stop:
                    rows[i].append(token)
                if token == stop or len(rows[i]) == most[i]:
                    line.update(1)
                else:
                    going.append(row)
            if len(going) < len(cache.prompts):  # finished sentences leave the batch
                cache.keep(going)
                tokens = tokens[going]
            cache.extend()  # a column for the tokens just found
            newest = tokens[:, None]
    line.close()
    model.end()  # other ranks may have sentences left
    return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]


def evaluate_bleu(
    examples: Sequence[dict[str, str]], gen_sents: Sequence[str], tgt_key: str
) -> dict[str, float]:
    """The corpus BLEU of the translations, by sacrebleu: {"bleu": 0 ... 100}. Words are those of
    `bleu_tokenizer`."""
    from sacrebleu.metrics import BLEU

    references = [example[tgt_key] for example in examples]
    bleu = BLEU(tokenize=bleu_tokenizer(references))
    return {"bleu": bleu.corpus_score(list(gen_sents), [references]).score}


def bleu_tokenizer(references: Iterable[str]) -> str:
    """The name of sacrebleu's tokenizer for these texts. BLEU counts words, and in a script without
    spaces a whole sentence would be one. So: "zh" for Chinese; "char" (a letter is
    a word) for Japanese, Thai and other such scripts; "13a", the usual one, for the rest. The
    letters decide, since a column of translations may have any name."""
    scripts = Counter[str]()
    for letter, times in Counter("".join(references)).items():
        if letter.isalpha():
            scripts[unicodedata.name(letter, "").split(" ")[0]] += times
    unspaced = sum(scripts[script] for script in SCRIPTS_WITHOUT_SPACES)
    if unspaced <= scripts.total() / 2:
        return "13a"
    return "zh" if scripts["CJK"] > 0.9 * unspaced else "char"  # Japanese has kana among them
