"""Texts as token ids: the tokenizer, and rectangles of padded examples.

A pair is one sequence, and the loss counts only its second half:

    ids      w1 w2 w3 <eos_de> v1 v2 <eos_en>         labels are the ids, shifted by one
    weights         0  0     0  1  1        1         of the labels: 1 on target tokens

All texts become ids once, before training, on all cores: in a file, one after another, beside an
index of where each begins. A rank maps the index and reads the examples of its batches, so that
text may be larger than memory. The folder is named by a hash of text and tokenizer, where a later
run finds it, and it gets its name when it is whole.

Cost: 2 bytes a token on disk (4 of more than 65,536 tokens); 12 an example, on disk and in memory
that the ranks of a host share. Padding: a rectangle is as long as its longest sentence.
Micro-batches of similar lengths compute about 1.2 positions per real token on real text; padding
everything to 128 computes about 4.
Whole batches of similar lengths compute 1.02, but then each step sees sentences of one length: an
epoch of Multi30k ended at a validation loss of 5.2 instead of 4.5 (docs/log.md).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from tokenizers.implementations import ByteLevelBPETokenizer
from torch import Tensor

from training.files import writing
from training.launch.errors import torchrun

from .task import to_device

if TYPE_CHECKING:  # see training/tasks/gpt2.py
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")
Batch = dict[str, Tensor]
PAD = "<pad>"
INDEX = np.dtype([("end", np.int64), ("num_source", np.int32)])  # of an example in a file of tokens
TEXTS_AT_ONCE = 1024  # pairs, or parts of text, tokenized together: they stay in a core's cache
AHEAD = 3  # such lists are tokenized ahead of the one that is used
FOR_BPE = 1 << 20  # texts that a tokenizer learns from
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def eos(language: str) -> str:
    """The token that ends a sentence of `language`."""
    return f"<eos_{language}>"


def ends_of(src: str, tgt: str) -> dict[str, Any]:
    """The special tokens of translation, by their uses."""
    return {"pad_token": PAD, "eos_token": eos(tgt), "extra_special_tokens": [eos(src)]}


def get_tokenizer(
    examples: Sequence[dict[str, str]], vocab_size: int, src_key: str, tgt_key: str, workdir: Path
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over both languages: any text can be encoded, nothing is unknown. Writes it to
    workdir/tokenizer.json, too.

    Args:
        vocab_size: maximum number of tokens: 256 bytes, 3 special tokens, and merges. A small
            text may give fewer merges.
    """
    texts = (pair[key] for pair in evenly(examples) for key in (src_key, tgt_key))
    special, uses = [PAD, eos(src_key), eos(tgt_key)], ends_of(src_key, tgt_key)
    tokenizer = train_bpe(texts, vocab_size, special, uses)
    tokenizer.save_pretrained(workdir)
    return tokenizer


def evenly(texts: Sequence[T]) -> Sequence[T]:
    """At most `FOR_BPE` of them, evenly spaced: to count the words of ten million pairs took
    10 GB."""
    return texts[:: -(-len(texts) // FOR_BPE) or 1]


def train_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: list[str], uses: Mapping[str, Any]
) -> PreTrainedTokenizerFast:
    """Byte-level BPE. The special tokens come first: their ids are 0, 1, ...; `uses` says what they
    are to `transformers`, e.g. {"pad_token": "<pad>"}."""
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size, min_frequency=2, special_tokens=special_tokens, show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, clean_up_tokenization_spaces=False
    )
    tokenizer.add_special_tokens(uses)
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

    ids: Sequence[int]
    num_source: int
    number: int = 0

    @property
    def num_targets(self) -> int:
        """Labels with weight 1: the target's tokens, including its end token."""
        return max(0, len(self.ids) - self.num_source)


class Rows(NamedTuple):
    """Examples one after another: the tokens of all in one row, [sum of sizes]; of each example its
    size, and how many of its first tokens have no loss, both [N] (the latter may be 0, for all)."""

    ids: Any
    sizes: Any
    num_source: Any

    def examples(self) -> list[Encoded]:
        """One by one."""
        every: Any = np.split(self.ids, np.cumsum(self.sizes)[:-1])
        return [
            Encoded(ids, int(n), number)
            for number, (ids, n) in enumerate(zip(every, self.num_source, strict=True))
        ]


def encode(
    pairs: Iterable[dict[str, str]],
    tokenizer: PreTrainedTokenizerFast,
    src: str,
    tgt: str,
    max_length: int,
) -> Iterator[Rows]:
    """The tokens of pairs, some pairs at a time, when asked for. Each is cut to max_length + 1:
    max_length inputs and their labels."""
    texts = ([p[key] for p in some for key in (src, tgt)] for some in groups(pairs, TEXTS_AT_ONCE))
    eos_ids = tokenizer.convert_tokens_to_ids([eos(src), eos(tgt)])
    for ids, lengths in tokens_of(texts, tokenizer):
        ids = np.insert(ids, np.cumsum(lengths), np.resize(eos_ids, len(lengths)))
        sizes = lengths.reshape(-1, 2) + 1  # of source and target, with their ends
        whole, most = sizes.sum(1), max_length + 1
        if whole.max() > most:
            place = np.arange(len(ids)) - np.repeat(np.cumsum(whole) - whole, whole)
            ids = ids[place < most]
        yield Rows(ids, np.minimum(whole, most), np.minimum(sizes[:, 0], most))


def tokens_of(
    texts: Iterable[list[str]], tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[Any, Any]]:
    """For each list of texts: their token ids in one row, [sum of lengths], and how many tokens
    each text has, [N]. While these are used, all cores tokenize the next `AHEAD` lists."""

    def arrays(some: list[str]) -> tuple[Any, Any]:
        found = tokenizer.backend_tokenizer.encode_batch_fast(some)
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        # The ids of a text are a new list, which is gone before the next text's is made.
        ids = chain.from_iterable(one.ids for one in found)
        return np.fromiter(ids, np.int32, lengths.sum()), lengths

    # Several threads: to tokenize does not hold Python's lock, to make arrays does.
    with ThreadPoolExecutor(AHEAD) as pool:
        waiting = deque[Future[tuple[Any, Any]]]()
        for some in texts:
            waiting.append(pool.submit(arrays, some))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        for one in waiting:
            yield one.result()


def groups(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items, `size` at a time."""
    rest = iter(items)
    return iter(lambda: list(islice(rest, size)), [])


def write_tokens(folder: Path, make: Callable[[], Iterable[Rows]], dtype: Any) -> None:
    """Writes the examples that make() gives, some at a time, for `Tokens` to read, if they are not
    there: of several processes one does. Nothing is in `folder` until all are written. Raises
    RunError."""
    # Each rank has its own: where there are no locks, several write at once.
    part, end = folder.with_name(f"{folder.name}.{torchrun('RANK', 0)}.part"), 0
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / "lock").open("w") as lock:
            with suppress(OSError):  # some file systems have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
            if folder.exists():
                return
            part.mkdir()
            with (part / "ids").open("wb") as ids, (part / "index").open("wb") as index:
                for some in make():
                    ids.write(some.ids.astype(dtype))  # numpy's `tofile` may not see a full disk
                    rows: Any = np.empty(len(some.sizes), INDEX)
                    rows["end"] = end + np.cumsum(some.sizes)
                    rows["num_source"] = some.num_source
                    index.write(rows)
                    end = rows["end"][-1]
                for file in (ids, index):  # the content is on disk before the name
                    file.flush()
                    os.fsync(file.fileno())
            try:
                part.replace(folder)
            except OSError:  # another rank has given its own the name
                shutil.rmtree(part)
                if not folder.exists():
                    raise


def _mapped(file: Any, dtype: Any) -> Any:
    """What is in an open file. The system maps no empty one."""
    size = os.fstat(file.fileno()).st_size
    return np.asarray(np.memmap(file, dtype, "r")) if size else np.empty(0, dtype)


class Tokens(Sequence[Encoded]):
    """Examples that `write_tokens` has written, read when they are asked for.

    Args:
        length: cut what was written anew: all of it, in one row, into examples of so many inputs,
            of which the last may be shorter. An example ends with the token that the next one
            begins with, and the first token of all is only an input.
        most: examples, at most.
    """

    def __init__(
        self, folder: Path, dtype: Any, length: int | None = None, most: int | None = None
    ) -> None:
        # Open from here on: the folder may be gone later.
        self.file, self.dtype, self.length = (folder / "ids").open("rb"), np.dtype(dtype), length
        with (folder / "index").open("rb") as index:
            self.where = _mapped(index, INDEX)
        self.num_tokens = int(self.where["end"][-1:].sum())
        self.there = -(-(self.num_tokens - 1) // length) if length else len(self.where)
        self.n = min(self.there, most or self.there)

    def mapped(self) -> Any:
        """All tokens, one after another. What is read of them leaves memory with this array."""
        return _mapped(self.file, self.dtype)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self.n:
            raise IndexError(number)
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Encoded]:
        """The examples of a batch. They are read, not mapped: each is on a page of its own, which
        takes more than twice as long to map, and stays in memory."""
        places = zip(*(of.tolist() for of in self._places(numbers)), numbers, strict=True)
        return [Encoded(self._read(a, b), source, number) for a, b, source, number in places]

    def sizes(self, numbers: Sequence[int]) -> tuple[Any, Any]:
        """The tokens of these examples, and their `num_targets`, both [N]."""
        first, end, num_source = self._places(numbers)
        return end - first, np.maximum(end - first - num_source, 0)

    def _read(self, first: int, end: int) -> Any:
        size = self.dtype.itemsize
        found = os.pread(self.file.fileno(), (end - first) * size, first * size)
        return np.frombuffer(found, self.dtype)

    def _places(self, numbers: Sequence[int]) -> tuple[Any, Any, Any]:
        """Of these examples the first token, the end, and `num_source`, each [N]."""
        at = np.asarray(numbers)
        if self.length:
            end = np.minimum((at + 1) * self.length + 1, self.num_tokens)
            return at * self.length, end, np.ones_like(at)
        where = self.where[at]
        return np.where(at > 0, self.where["end"][at - 1], 0), where["end"], where["num_source"]


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
        every = encode(encoded, tokenizer, src_key, tgt_key, model_max_length)
        encoded = [example for rows in every for example in rows.examples()]
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
