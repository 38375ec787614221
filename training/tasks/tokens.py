"""Texts as token ids: the tokenizer, and rectangles of padded examples.

A pair is one sequence, and the loss counts only its second half:

    ids      w1 w2 w3 <eos_de> v1 v2 <eos_en>         labels are the ids, shifted by one
    weights         0  0     0  1  1        1         of the labels: 1 on target tokens

All texts become ids once, before training, while they are read. One rank of a host does this on all
cores; the others wait. The ids of a split are in one file, one after another; the bounds of sources
and targets are in a second one:

    train.ids       w1 w2 w3 <eos_de> v1 v2 <eos_en> ...         2 bytes each; 4 above 65,536 ids
    train.bounds    0 4 7 ...                                    8 bytes each

A rank maps the files while it reads the examples of a batch, so text may be larger than memory.

Padding: a rectangle is as long as its longest sentence. Micro-batches of similar lengths compute
about 1.2 positions per real token on real text; padding everything to 128 computes about 4.
Whole batches of similar lengths compute 1.02, but then each step sees sentences of one length: an
epoch of Multi30k ended at a validation loss of 5.2 instead of 4.5 (docs/log.md).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from tokenizers.implementations import ByteLevelBPETokenizer
from torch import Tensor

from training.files import moving

from .task import to_device
from .text_files import pieces, try_hub

if TYPE_CHECKING:  # see training/tasks/gpt2.py
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")
Batch = dict[str, Tensor]
PAD = "<pad>"
TEXTS_AT_ONCE = 1024  # pairs, or parts of text, tokenized together: they stay in a core's cache
AT_ONCE = 1 << 20  # examples whose lengths are in memory together
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def eos(language: str) -> str:
    """The token that ends a sentence of `language`."""
    return f"<eos_{language}>"


def ends_of(src: str, tgt: str) -> dict[str, Any]:
    """The special tokens of translation, by their uses."""
    return {"pad_token": PAD, "eos_token": eos(tgt), "extra_special_tokens": [eos(src)]}


def get_tokenizer(
    examples: Iterable[dict[str, str]], vocab_size: int, src_key: str, tgt_key: str, workdir: Path
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over both languages: any text can be encoded, nothing is unknown. Writes it to
    workdir/tokenizer.json, too.

    Args:
        vocab_size: maximum number of tokens: 256 bytes, 3 special tokens, and merges. A small
            text may give fewer merges.
    """
    texts = (pair[key] for pair in examples for key in (src_key, tgt_key))
    special, uses = [PAD, eos(src_key), eos(tgt_key)], ends_of(src_key, tgt_key)
    tokenizer = train_bpe(texts, vocab_size, special, uses)
    tokenizer.save_pretrained(workdir)
    return tokenizer


def evenly(items: Iterable[T], size: int, most: int) -> Iterator[T]:
    """Of the first `size` items about `most`, or fewer, evenly spaced: counting the words of ten
    million pairs took 10 GB."""
    return islice(items, 0, size, -(-size // most) or 1)


def train_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: list[str], uses: Mapping[str, Any]
) -> PreTrainedTokenizerFast:
    """Byte-level BPE. The special tokens come first: their ids are 0, 1, ...; `uses` says what they
    are to `transformers`, e.g. {"pad_token": "<pad>"}."""
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    parts = (part for text in texts for part in pieces(text))
    read = moving(parts, "Learning tokens", None, "text")
    bpe.train_from_iterator(
        read, vocab_size, min_frequency=2, special_tokens=special_tokens, show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, clean_up_tokenization_spaces=False
    )
    tokenizer.add_special_tokens(uses)
    return tokenizer


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The contents of the files that `save_pretrained` has written into a folder."""
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES}


def read_tokenizer(name: str) -> Any:
    """A tokenizer in a folder, also in GPT-2's own form, or on the hub. It puts no space before a
    text: a long text is tokenized in parts. Raises what its readers raise."""
    from transformers import AutoTokenizer, GPT2TokenizerFast

    folder = Path(name)
    if not folder.is_dir():
        try_hub()
    of_gpt2 = (folder / "merges.txt").exists() and not (folder / TOKENIZER_FILES[0]).exists()
    tokenizer = (GPT2TokenizerFast if of_gpt2 else AutoTokenizer).from_pretrained(name)
    if hasattr(first := tokenizer.backend_tokenizer.pre_tokenizer, "add_prefix_space"):
        first.add_prefix_space = False
    return tokenizer


def load_tokenizer(files: Mapping[str, bytes]) -> PreTrainedTokenizerFast:
    """The tokenizer in these files, as `save_pretrained` writes them. It pads on the left, since
    generation appends on the right."""
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")


@dataclass(frozen=True)
class Encoded:
    """The token ids of a pair or of a stretch of text; how many of the first ones have no loss (the
    source with its end token, or the first token); its index in its split."""

    ids: Any  # [T] numbers
    num_source: int
    number: int = 0

    @property
    def num_targets(self) -> int:
        """Labels with weight 1: the target's tokens, including its end token."""
        return max(0, len(self.ids) - self.num_source)


def encode(
    pairs: Iterable[Mapping[str, str]], tokenizer: PreTrainedTokenizerFast, src: str, tgt: str
) -> Iterator[tuple[Any, Any]]:
    """The tokens of pairs, some pairs at a time, when asked for: their ids, one after another, and
    the sizes of all sources and targets with their ends, [source, target, source, target, ...]."""
    ends = tokenizer.convert_tokens_to_ids([eos(src), eos(tgt)])
    for some in groups(pairs, TEXTS_AT_ONCE):
        ids, lengths = tokens_of([pair[key] for pair in some for key in (src, tgt)], tokenizer)
        yield np.insert(ids, np.cumsum(lengths), np.resize(ends, len(lengths))), lengths + 1


def tokens_of(texts: Sequence[str | None], tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    """The token ids of texts in one row, [sum of lengths], and how many tokens each has, [N]: 0
    if it is None. A text that looks like a special token is text: callers add those."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True  # as the text that they are
    parts = [[*pieces(text)] if text else [""] for text in texts]
    encoded = backend.encode_batch_fast([*chain.from_iterable(parts)], add_special_tokens=False)
    of_parts = np.fromiter(map(len, encoded), np.int64, len(encoded))
    firsts = np.cumsum([0, *map(len, parts)])[:-1]
    lengths = np.add.reduceat(of_parts, firsts) if parts else of_parts
    # The ids of a text are a new list, which is gone before the next text's is made.
    ids = chain.from_iterable(one.ids for one in encoded)
    return np.fromiter(ids, np.int32, lengths.sum()), lengths


def ids_of(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, language: str
) -> list[list[int]]:
    """The token ids of each text, with the end of its language."""
    end = tokenizer.convert_tokens_to_ids(eos(language))
    ids, lengths = tokens_of(texts, tokenizer)
    ends = np.cumsum(lengths)
    return [[*ids[b - n : b].tolist(), end] for b, n in zip(ends, lengths, strict=True)]


def encode_in_memory(
    pairs: Sequence[Mapping[str, str]],
    tokenizer: PreTrainedTokenizerFast,
    src: str,
    tgt: str,
    max_length: int,
) -> list[Encoded]:
    """The examples of pairs, each cut to max_length inputs and their labels."""
    sides = (ids_of([pair[key] for pair in pairs], tokenizer, key) for key in (src, tgt))
    most = max_length + 1
    return [
        Encoded((source + target)[:most], min(len(source), most), number)
        for number, (source, target) in enumerate(zip(*sides, strict=True))
    ]


def groups(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items, `size` at a time."""
    rest = iter(items)
    return iter(lambda: list(islice(rest, size)), [])


def write_tokens(path: Path, encoded: Iterable[tuple[Any, Any]], dtype: Any) -> str:
    """Writes ids and sizes, as `encode` gives them, to `path`.ids and `path`.bounds. Returns a hash
    of the ids."""
    digest = hashlib.sha256()
    with path.with_suffix(".ids").open("wb") as ids, path.with_suffix(".bounds").open("wb") as ends:
        bounds: Any = np.zeros(1, np.int64)
        ends.write(bounds)
        for some, sizes in encoded:
            content = some.astype(dtype)
            digest.update(content)
            ids.write(content)  # numpy's `tofile` may not see a full disk
            bounds = bounds[-1] + np.cumsum(sizes)
            ends.write(bounds)
        for file in (ids, ends):  # the content is on disk before the folder has its name
            file.flush()
            os.fsync(file.fileno())
    return digest.hexdigest()


class OpenFiles:
    """The files of a split, open until nobody reads them any more: the folder may be gone before.
    `path`: as in `write_tokens`."""

    def __init__(self, path: Path) -> None:
        self.ids, self.bounds = (path.with_suffix(end).open("rb") for end in (".ids", ".bounds"))

    def __del__(self) -> None:
        for file in vars(self).values():
            file.close()


class Tokens(Sequence[Encoded]):
    """Examples, read from the files of a split when they are asked for: each is a row of them.

    Args:
        path: as in `write_tokens`.
        length: the most inputs of an example. Longer pairs are cut, and so are their labels.

    Attributes:
        part: which rows are examples; by default all.
    """

    def __init__(self, path: Path, dtype: Any, length: int) -> None:
        self.files = OpenFiles(path)
        self.dtype, self.length = np.dtype(dtype), length
        self.part = range(self.size())

    def size(self) -> int:
        """The number of pairs in the files."""
        return (len(_mapped(self.files.bounds, np.int64)) - 1) // 2

    def of(self, part: range) -> Tokens:
        """A different part of the same files."""
        other = copy(self)
        other.part = part
        return other

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, number: Any) -> Any:
        return self.__getitems__([range(len(self))[number]])[0]  # raises IndexError

    def __getitems__(self, numbers: Sequence[int]) -> list[Encoded]:
        """The examples of a batch. The files are mapped, and in memory, only meanwhile."""
        ids, places = _mapped(self.files.ids, self.dtype), self.places(numbers)
        rows = zip(*(column.tolist() for column in places), numbers, strict=True)
        return [Encoded(np.array(ids[a:b]), source, number) for a, source, b, number in rows]

    def sizes(self, numbers: Sequence[int]) -> tuple[Any, Any]:
        """The tokens of these examples, and their `num_targets`, both [N]."""
        first, num_source, end = self.places(numbers)
        return end - first, np.maximum(end - first - num_source, 0)

    def places(self, numbers: Sequence[int]) -> tuple[Any, Any, Any]:
        """The first token, `num_source` and the end of these examples, each [N]."""
        bounds = _mapped(self.files.bounds, np.int64)
        at = 2 * (self.part.start + np.asarray(numbers))
        first = bounds[at]
        end = np.minimum(bounds[at + 2], first + self.length + 1)
        return first, np.minimum(bounds[at + 1], end) - first, end

    def num_cut(self) -> int:
        """How many pairs are longer than `length`."""
        firsts = _mapped(self.files.bounds, np.int64)[::2][self.part.start : self.part.stop + 1]
        parts = (firsts[k : k + AT_ONCE + 1] for k in range(0, len(self), AT_ONCE))
        return int(sum((np.diff(part) > self.length + 1).sum() for part in parts))


class Stream(Tokens):
    """A text in one row, as examples of `length` inputs; the last may be shorter. An example ends
    with the token that the next one begins with, and the first token of all is only an input.
    `part`: which tokens."""

    def size(self) -> int:
        """The number of tokens in the file."""
        return os.fstat(self.files.ids.fileno()).st_size // self.dtype.itemsize

    def __len__(self) -> int:
        return -(-(len(self.part) - 1) // self.length)

    def places(self, numbers: Sequence[int]) -> tuple[Any, Any, Any]:
        """See `Tokens`."""
        first = self.part.start + self.length * np.asarray(numbers)
        end = np.minimum(first + self.length + 1, self.part.stop)
        return first, np.ones_like(first), end


def _mapped(file: Any, dtype: Any) -> Any:
    """The content of an open file, mapped into memory."""
    return np.asarray(np.memmap(file, dtype, "r"))


def collate_batch(
    examples: Sequence[Encoded] | Sequence[dict[str, str]],
    src_key: str,
    tgt_key: str,
    tokenizer: PreTrainedTokenizerFast,
    model_max_length: int,
    device: torch.device | str,
    *,
    padding: str = "max_length",
) -> Batch:
    """Pads examples, tokenized or not, to one rectangle of token ids.

    Args:
        padding: `max_length` pads to model_max_length, `longest` to the longest example.

    Returns:
        input_ids, labels, label_token_weights, each [B, T]; weight 1 only on target tokens.
    """
    encoded: Any = examples
    if examples and isinstance(examples[0], dict):
        encoded = encode_in_memory(encoded, tokenizer, src_key, tgt_key, model_max_length)
    pad_id = tokenizer.convert_tokens_to_ids(tokenizer.pad_token)
    longest = max((len(e.ids) - 1 for e in encoded), default=0)  # inputs; ids have one more
    T = model_max_length if padding == "max_length" else longest
    # [B, T + 1]: the inputs are all columns but the last, the labels all but the first.
    # Filled in numpy: torch takes ten times as long for a row.
    ids: Any = np.full((len(encoded), T + 1), pad_id)
    weights: Any = np.zeros_like(ids)
    for row, example in enumerate(encoded):
        ids[row, : len(example.ids)] = example.ids  # padding is on the right
        weights[row, example.num_source : len(example.ids)] = 1  # target tokens, with their end
    ids, weights = torch.from_numpy(ids), torch.from_numpy(weights)
    batch = {  # each [B, T]
        "input_ids": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "label_token_weights": weights[:, 1:].contiguous(),
    }
    return to_device(batch, device)
