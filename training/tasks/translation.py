"""GPT-2 that learns to translate: the pairs, the tokenizer, the score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any

from training.launch.errors import UserError, counted
from training.launch.world import World

from .generation import bleu_tokenizer, evaluate_bleu
from .sequences import MAX_VOCAB, SHOWN, SequenceTask
from .task import Score, Translator
from .text_files import Pair
from .tokens import Tokens, encode, ends_of, evenly, get_tokenizer, ids_of

PAIRS_FOR_BPE = 1 << 20  # pairs that a tokenizer learns from


class TranslationTask(SequenceTask):
    """Pairs of sentences; see `training.tasks.sequences.SequenceTask`."""

    score_name = "BLEU"
    needs_an_epoch = True
    test_pairs: list[Pair]

    @cached_property
    def score_details(self) -> dict[str, str]:
        """What BLEU takes for a word."""
        references = (pair[self.args.tgt] for pair in self.test_pairs)
        return {"bleu_tokenizer": bleu_tokenizer(references)}

    @property
    def score_title(self) -> str:
        """With the tokenizer, if it is not the usual one."""
        tokenizer = self.score_details["bleu_tokenizer"]
        return "BLEU" if tokenizer == "13a" else f"BLEU {tokenizer}"

    def train_tokenizer(self, folder: Path) -> None:
        """Trains one for both languages, on the pairs that train has."""
        args, texts = self.args, self.texts
        _, train = texts.parts({split: texts.size(split) for split in texts.splits}, [])["train"]
        pairs = evenly(texts.pairs("train"), len(train), PAIRS_FOR_BPE)
        get_tokenizer(pairs, args.vocab_size or MAX_VOCAB, args.src, args.tgt, folder)

    def special_tokens(self) -> dict[str, Any]:
        """Padding, and the end of each language."""
        return ends_of(self.args.src, self.args.tgt)

    def encoded(self, split: str) -> Iterator[tuple[Any, Any]]:
        """A sequence per pair."""
        return encode(self.texts.pairs(split), self.tokenizer, self.args.src, self.args.tgt)

    def chosen(self, files: Mapping[str, Tokens]) -> dict[str, Tokens]:
        """As many pairs as are asked for."""
        args, length = self.args, self.args.model_max_length
        parts = self.texts.parts({split: len(pairs) for split, pairs in files.items()}, self.notes)
        chosen = {split: files[origin].of(part) for split, (origin, part) in parts.items()}
        origin, part = parts["test"]
        last = self.about[origin]["last"]  # test, if it is held out, has the last of these
        self.test_pairs = last[len(last) - len(part) :]
        for split, pairs in chosen.items():
            there = counted(len(pairs), "pair")
            if split == "validation" == parts[split][0] and len(pairs) == args.n_validation:
                self.notes.append(f"validation: the first {there} (--n_validation).")
            if len(pairs) < args.dp:
                asked = getattr(args, f"n_{split}")
                larger = f", or a larger --n_{split}," if len(pairs) == asked else ""
                raise UserError(
                    f"--dataset {args.dataset}: {split} has {there} with text on both sides, and a "
                    f"run of {counted(args.dp, 'rank')} needs {args.dp} or more; more text{larger} "
                    "works"
                )
            if cut := pairs.num_cut():
                long = f"{cut:,} of {there}"
                self.notes.append(f"{split}: {long} cut to --model_max_length {length} tokens.")
        if not any(example.num_targets for example in chosen["train"]):
            raise UserError(
                f"--model_max_length {length}: every source sentence fills it, and no target is "
                "left to learn; --model_max_length 128 works"
            )
        return chosen

    def score(self, world: World, model: Translator, loss: float, accuracy: float) -> Score:  # noqa: ARG002
        """BLEU of the test split's translations."""
        args, test = self.args, self.test_pairs
        generated = self.translated(world, model, [pair[args.src] for pair in test])
        return Score(evaluate_bleu(test, generated, args.tgt)["bleu"], generated)

    def translated(self, world: World, model: Translator, sources: Sequence[str]) -> list[str]:
        """The translations of all ranks' sentences, greedily. One ends at its end token, or where
        source and translation fill --model_max_length. All ranks call it."""
        prompts = ids_of(sources, self.tokenizer, self.args.src)
        most = [self.args.model_max_length - len(prompt) for prompt in prompts]  # or none
        texts = self.continued(world, model, prompts, most, "Translating")
        return [text.strip() for text in texts]

    def about_data(self) -> str:
        """The number of pairs in each split."""
        sizes = " / ".join(f"{len(pairs):,}" for pairs in self.examples.values())
        return f"{sizes} pairs to train / validate / test, {self.args.src} to {self.args.tgt}"

    def scored_examples(self) -> list[Any]:
        """The pairs of the test split."""
        return self.test_pairs

    def examples_to_show(self, generated: list[str]) -> str:
        """The first translations, each below its source and target. A long one, such as an
        untrained model's, is cut to a line."""
        src, tgt = self.args.src, self.args.tgt
        return "\n".join(
            f"  {src:>9}   {pair[src]}\n  {tgt:>9}   {pair[tgt]}\n"
            f"  this model  {shorten(sentence, 120)}\n"
            for pair, sentence in zip(self.test_pairs[:SHOWN], generated, strict=False)
        )
