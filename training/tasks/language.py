"""GPT-2 as a language model on plain text, scored by perplexity.

    stream       <|endoftext|> a b c d <|endoftext|> e f g <|endoftext|> h ...
    sequence 0   <|endoftext|> a b c                  predicts  a b c d
    sequence 1   d <|endoftext|> e f                            <|endoftext|> e f g

Documents are joined, with an end token around each, and cut into sequences of equal length: only
the last one is padded, and every token is predicted once per epoch. As in GPT-2 itself, a token can
attend to earlier documents and sees the end token between them. To separate documents, every layout
would have to carry an attention mask, with which the fused kernel computes all T^2 scores instead
of half, and `transformers` would compute another function with the same weights.

Paper: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from training.launch.errors import UserError
from training.launch.world import World

from .any_text import END, pieces
from .sequences import MAX_VOCAB, SHOWN, SequenceTask
from .task import Score, Translator
from .tokens import TEXTS_AT_ONCE, Rows, Tokens, evenly, groups, tokens_of, train_bpe

PROMPT = 8  # tokens of a sample prompt at the end of an epoch
CONTINUED = 24  # new tokens of a sample


class LanguageTask(SequenceTask):
    """Plain text; see `training.tasks.sequences.SequenceTask`."""

    score_name = "perplexity"
    needs_an_epoch = False

    def train_tokenizer(self, folder: Path) -> None:
        """Learns merges within lines."""
        texts = (text.removesuffix(END) for text in evenly(self.texts.splits["train"]))
        lines = (line for text in texts for line in text.splitlines(True))
        vocabulary, uses = self.args.vocab_size or MAX_VOCAB, self.special_tokens()
        train_bpe(lines, vocabulary, [END], uses).save_pretrained(folder)

    def special_tokens(self) -> dict[str, Any]:
        """The end of a text, which also pads."""
        return {"eos_token": END, "pad_token": END}

    def encoded(self, split: str) -> Iterator[Rows]:
        """Stretches of the stream: an end token at the beginning and after every document."""
        parts = (part for text in self.texts.documents(split) for part in pieces(text))
        for ids, sizes in tokens_of(groups(chain([END], parts), TEXTS_AT_ONCE), self.tokenizer):
            yield Rows(ids, sizes, 0)

    def load(self, world: World) -> dict[str, Tokens]:
        """Sequences of --model_max_length inputs; the last is shorter."""
        args, examples = self.args, {}
        length = args.model_max_length
        for split in self.texts.splits:
            most = getattr(args, f"n_{split}")
            found = examples[split] = self.stored(world, split, length, most)
            n = found.num_tokens - 1  # the first token is not predicted
            if split == "train" and n < length:
                raise UserError(
                    f"--dataset {args.dataset} --model_max_length {length}: the text has {n} "
                    f"tokens, fewer than one sequence; --model_max_length {max(2, n // 4)} works, "
                    "or more text"
                )
            if len(found) < found.there:
                self.texts.notes.append(
                    f"{split}: the first {most:,} of {found.there:,} sequences; --n_{split} all "
                    "takes all."
                )
        return examples

    def score(self, world: World, model: Translator, loss: float, accuracy: float) -> Score:  # noqa: ARG002
        """The perplexity of the validation text, and sample continuations."""
        prompts = self._prompts()
        most = [min(CONTINUED, self.args.model_max_length - len(prompt)) for prompt in prompts]
        generated = self.continued(world, model, prompts, most, "Continuing")
        return Score(math.exp(min(loss, 700)), generated)

    def _prompts(self) -> list[list[int]]:
        """Sample prompts: beginnings of sequences of the validation split."""
        room = min(PROMPT, self.args.model_max_length // 2)
        shown = islice(self.examples["validation"], SHOWN) if room else ()
        return [[int(t) for t in example.ids[:room]] for example in shown]

    def about_data(self) -> str:
        """Sequences of each split."""
        sizes = " / ".join(f"{len(examples):,}" for examples in self.examples.values())
        return f"{sizes} sequences of {self.args.model_max_length} tokens to train / validate"

    def tested(self) -> list[Any]:
        """The sample prompts."""
        return [self.tokenizer.decode(p, skip_special_tokens=True) for p in self._prompts()]

    def examples_to_show(self, generated: list[str]) -> str:
        """Prompts and their continuations."""
        return "\n".join(
            f"  {'text':>10}  {' '.join(prompt.split())}\n  this model  {' '.join(text.split())}\n"
            for prompt, text in zip(self.tested(), generated, strict=True)
        )
