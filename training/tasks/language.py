"""GPT-2 as a language model on plain text, scored by perplexity.

    stream       <|endoftext|> a b c d <|endoftext|> e f g <|endoftext|> h ...
    sequence 0   <|endoftext|> a b c                  predicts  a b c d
    sequence 1   d <|endoftext|> e f                            <|endoftext|> e f g

Documents are joined, with an end token around each, and cut into sequences of equal length: only
the last one is padded, and every token is predicted once per epoch. In a file of plain text the
mark <|endoftext|> ends a document; in other files a row is one.

A sequence holds several documents, or a part of a long one. With --documents apart none sees
another: a document begins with the end token before it, which predicts its first token, and ends
with the end token behind it, which its last token predicts. So no target is lost, and none depends
on another document; positions count from 0 in each (runtime/documents.py has the attention). A
document that a sequence's end cuts begins anew in the next sequence. With --documents together, as
in GPT-2 itself, a token attends to earlier documents and sees the end token between them.

What the layers must know is the start of each position's document. The task finds it in the token
ids, and it travels with them, as `Sequences.starts`, through stages, shards and recomputation.

Papers: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; Krell et al.,
"Efficient Sequence Packing without Cross-contamination", 2021.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.launch.errors import UserError
from training.launch.world import World

from .sequences import MAX_VOCAB, SHOWN, SequenceTask
from .task import Score, Translator
from .text_files import END
from .tokens import AT_ONCE, TEXTS_AT_ONCE, Stream, Tokens, evenly, groups, tokens_of, train_bpe

PROMPT = 8  # tokens of a sample prompt at the end of an epoch
CONTINUED = 24  # new tokens of a sample
PIECES_FOR_BPE = 1 << 14  # pieces, of some thousand letters, that a tokenizer learns from
HELD_OUT = 20  # one part in this number is held out for validation


class LanguageTask(SequenceTask):
    """Plain text; see `training.tasks.sequences.SequenceTask`."""

    tokens_class = Stream
    score_name = "perplexity"
    needs_an_epoch = False

    def train_tokenizer(self, folder: Path) -> None:
        """Learns merges within lines, of what is not held out."""
        n = self.texts.size("train")
        if "validation" not in self.texts.splits:
            n = max(1, n * (HELD_OUT - 1) // HELD_OUT)
        some = evenly(self.texts.pieces("train"), n, PIECES_FOR_BPE)
        parts = (part for part in some if part is not None)
        lines = (line for part in parts for line in io.StringIO(part, newline="\n"))
        vocabulary, uses = self.args.vocab_size or MAX_VOCAB, self.special_tokens()
        train_bpe(lines, vocabulary, [END], uses).save_pretrained(folder)

    def special_tokens(self) -> dict[str, Any]:
        """The end of a text, which also pads."""
        return {"eos_token": END, "pad_token": END}

    def encoded(self, split: str) -> Iterator[tuple[Any, Any]]:
        """Stretches of the stream: an end token at the beginning and after every document."""
        parts = chain([None], self.texts.pieces(split))
        end = self.tokenizer.convert_tokens_to_ids(END)
        for some in groups(parts, TEXTS_AT_ONCE):
            ids, lengths = tokens_of(some, self.tokenizer)
            is_end = [part is None for part in some]
            ids = np.insert(ids, np.cumsum(lengths)[is_end], end)
            yield ids, [len(ids)]

    def starts(self, ids: Tensor) -> Tensor | None:
        """A document starts at the end token before it; or, if a row cuts it, with the row."""
        if self.args.documents == "together":
            return None
        is_end = ids == self.tokenizer.convert_tokens_to_ids(END)
        starts = torch.where(is_end, torch.arange(ids.size(1)), 0).cummax(1).values
        return starts if starts.any() else None  # None: each row is one document

    def chosen(self, files: Mapping[str, Tokens]) -> dict[str, Tokens]:
        """Sequences of --model_max_length inputs; the last is shorter. Without a validation split,
        the last tokens are held out for it."""
        args, length, chosen = self.args, self.args.model_max_length, dict(files)
        if "validation" not in files:
            stream = files["train"]
            n, most = len(stream.part), args.n_validation
            share = n - n * (HELD_OUT - 1) // HELD_OUT
            held_out = max(2, min(share, n if most is None else most * length + 1))  # predicts one
            cut = max(0, n - held_out)
            chosen = {"train": stream.of(range(cut)), "validation": stream.of(range(cut, n))}
            taken = f"{100 // HELD_OUT} % of the text is"
            if held_out < share:
                taken = f"{held_out:,} tokens (--n_validation) are"
            self.notes.append(f"no validation split: {taken} taken from its end.")
        for split, least in (("train", length), ("validation", 1)):
            tokens, most = chosen[split].part, getattr(args, f"n_{split}")
            n = max(0, len(tokens) - 1)  # the first token is not predicted
            if n < least:
                shorter = ", or a smaller length" if n else ""
                raise UserError(
                    f"--dataset {args.dataset} --model_max_length {length}: {split} has {n} "
                    f"tokens, fewer than one sequence; more text works{shorter}"
                )
            if most is not None and most * length < n:
                chosen[split] = chosen[split].of(tokens[: most * length + 1])
                self.notes.append(f"{split}: the first {most:,} sequences (--n_{split}).")
        return chosen

    def score(self, world: World, model: Translator, loss: float, accuracy: float) -> Score:  # noqa: ARG002
        """The perplexity of the validation text, and sample continuations."""
        prompts = self._prompts()
        most = [min(CONTINUED, self.args.model_max_length - len(prompt)) for prompt in prompts]
        generated = self.continued(world, model, prompts, most, "Continuing")
        return Score(math.exp(min(loss, 700)), generated)

    def _prompts(self) -> list[list[int]]:
        """Sample prompts: beginnings of sequences of the validation split. If documents are apart,
        only the last document of each."""
        room = min(PROMPT, self.args.model_max_length // 2)
        shown = islice(self.examples["validation"], SHOWN) if room else ()
        prompts = [[int(t) for t in example.ids[:room]] for example in shown]
        starts = [self.starts(torch.tensor([prompt])) for prompt in prompts]
        first = [0 if of_prompt is None else int(of_prompt[0, -1]) for of_prompt in starts]
        return [prompt[n:] for prompt, n in zip(prompts, first, strict=True)]

    def about_data(self) -> str:
        """Sequences of each split, and how its documents are told apart."""
        sizes = " / ".join(f"{len(examples):,}" for examples in self.examples.values())
        train, length = self.examples["train"], self.args.model_max_length
        first = train.__getitems__(range(min(len(train), AT_ONCE // length or 1)))
        ids: Any = np.concatenate([example.ids[1:] for example in first])
        ends = np.flatnonzero(ids == self.tokenizer.convert_tokens_to_ids(END))
        of_document = np.median(np.diff([-1, *ends]) if len(ends) else [len(ids)])
        told = f"which {END} ends" if self.texts.source.in_pieces else "one in a row of the file"
        see = "none sees another" if self.args.documents == "apart" else "each sees those before it"
        return (
            f"{sizes} sequences of {length} tokens to train / validate; documents, {told}, of "
            f"{int(of_document):,} tokens (median): {see}"
        )

    def scored_examples(self) -> list[Any]:
        """The sample prompts."""
        return [self.tokenizer.decode(p, skip_special_tokens=True) for p in self._prompts()]

    def examples_to_show(self, generated: list[str]) -> str:
        """Prompts and their continuations."""
        return "\n".join(
            f"  {'text':>10}  {' '.join(prompt.split())}\n  this model  {' '.join(text.split())}\n"
            for prompt, text in zip(self.scored_examples(), generated, strict=True)
        )
