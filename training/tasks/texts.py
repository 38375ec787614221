"""Reads the pairs of sentences that --dataset names.

Problem: --dataset must become pairs, or one line that says what is wrong with it; and the text may
be larger than memory.

What it may be, and how it is read: text_files.py. A missing split is cut off the end of train. Rows
with an empty text are skipped and counted.

Idea: a split is no list. Its text is read anew each time that it is used, some lines at a time. The
first start reads it twice, for what each start must know (`remembered`: how many pairs, a hash, the
test pairs), and keeps that in a folder that is named by the files' paths, sizes and times. A later
start only looks whether that folder is there. Plain text: plain_text.py.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from training.files import json_text, writing
from training.launch.errors import UserError, counted
from training.launch.world import World
from training.progress import moving

from .text_files import Again, Pair, Source, find_source, texts_of

Sizes = Mapping[str, int | None]

SPLITS = ("train", "validation", "test")
TAKEN = {"validation": 1000, "test": 100}  # pairs at most, out of train if there is no such split


@dataclass
class Texts:
    """The examples of each split, and notes on how they were made. A split is iterated over again
    and again, and has a length; that of test is a list.

    Attributes:
        plain: it is text to continue, not pairs; there is no test split.
        hashes: of each split's examples, in order.
    """

    splits: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)
    plain: bool = False
    hashes: dict[str, str] = field(default_factory=dict, repr=False)

    def fingerprints(self) -> dict[str, str]:
        """A hash of each split's examples, in order."""
        self.hashes = self.hashes or {split: hash_of(rows) for split, rows in self.splits.items()}
        return self.hashes


def hash_of(examples: Iterable[Any]) -> str:
    """A hash of the examples, in order: of their list in JSON."""
    digest, before = hashlib.sha256(b"["), ""
    for example in examples:
        digest.update((before + json.dumps(example)).encode())
        before = ", "
    digest.update(b"]")
    return digest.hexdigest()


def load_pairs(
    dataset: str, src: str, tgt: str, sizes: Sizes, dp: int, world: World, folder: Path
) -> Texts:
    """The pairs of a run. All ranks call it together: the first one of each host reads.

    Args:
        dataset: see text_files.py.
        src, tgt: the keys of the languages: file endings, columns.
        sizes: the maximum number of pairs per split; None takes all there are.
        dp: every split must hold at least a pair for each of so many ranks.
        folder: for what later starts need not read again.

    Raises:
        UserError: there are no usable pairs; the message says why, and what works.
    """
    source = find_source(dataset, src, tgt, world)
    if source.is_plain(src, tgt):
        raise UserError(
            f"--dataset {dataset}: this is plain text, and the program translates; "
            f"project/train.py ddp --model gpt2-mini --dataset {shlex.quote(dataset)} learns it"
        )
    return pairs_of(source, (src, tgt), sizes, dp, world, folder)


def pairs_of(
    source: Source, keys: tuple[str, str], sizes: Sizes, dp: int, world: World, folder: Path
) -> Texts:
    """See `load_pairs`."""
    examine = partial(_examine, source, keys, sizes, dp)
    facts = remembered(examine, world, folder, source.identity, keys, sizes)
    _check_sizes(source, facts["ranges"], dp)
    splits: dict[str, Any] = {
        split: Again(partial(_usable, source, of, keys, first, size), size)
        for split, (of, first, size) in facts["ranges"].items()
    }
    notes = [*source.notes, *facts["notes"]]
    return Texts(splits | {"test": facts["test"]}, notes, hashes=facts["hashes"])


def _check_sizes(source: Source, ranges: Mapping[str, tuple[str, int, int]], dp: int) -> None:
    """Raises UserError if a rank has no pair of a split."""
    for split, (_, _, size) in ranges.items():
        if size < dp:
            raise UserError(
                f"--dataset {source.dataset}: {split} has {counted(size, 'pair')} with text on "
                f"both sides, and a run of {counted(dp, 'rank')} needs {dp} or more; "
                f"a larger --n_{split}, or more text, works"
            )


def _examine(source: Source, keys: tuple[str, str], sizes: Sizes, dp: int) -> dict[str, Any]:
    """Returns, for each split, the source's split, the first pair in it, the number of pairs and a
    hash; and the test pairs, and notes for the user."""
    ranges, notes = {}, []
    for split in [split for split in SPLITS if split in source.rows]:
        pairs = moving(_pairs(source, split, keys), f"Reading {split}", None, "pair")
        usable = Counter(all(pair.values()) for pair in pairs)
        ranges[split] = (split, 0, usable[True])
        if usable[False]:
            empty = counted(usable[False], "row")
            notes.append(f"{split}: skipped {empty} with an empty text.")
    for split in ("test", "validation"):  # test is cut off first: it has the last pairs
        if split not in ranges:
            *_, size = ranges.get("train", ("train", 0, 0))
            count = min(sizes[split] or TAKEN[split], -(-(size - 1) // 10))  # a pair stays
            ranges["train"] = ("train", 0, size - count)
            ranges[split] = ("train", size - count, count)
            held_out = counted(count, "pair")
            notes.append(f"no {split} split: {held_out} held out from the end of train.")
    for split, most in sizes.items():
        of, first, size = ranges[split]
        if most is not None and size < most:
            there = counted(size, "pair")
            notes.append(f"{split}: all {there}; --n_{split} {most:,} asks for more.")
        ranges[split] = (of, first, min(size, size if most is None else most))
    ranges = {split: ranges[split] for split in SPLITS}
    _check_sizes(source, ranges, dp)
    test, hashes = list[Pair](), dict[str, str]()
    rest = {of: _usable(source, of, keys) for of in source.rows}
    done = dict.fromkeys(rest, 0)
    for split, (of, first, size) in ranges.items():  # a source's pairs are read once, in order
        some: Iterable[Pair] = islice(rest[of], first - done[of], first - done[of] + size)
        done[of] = first + size
        if split == "test":
            some = test = list(some)
        hashes[split] = hash_of(moving(some, f"Reading {split} again", size, "pair"))
    return {"ranges": ranges, "hashes": hashes, "test": test, "notes": notes}


def _usable(
    source: Source, split: str, keys: tuple[str, str], first: int = 0, size: int | None = None
) -> Iterator[Pair]:
    """`size` pairs with text on both sides, after the first `first` ones; by default all."""
    usable = (pair for pair in _pairs(source, split, keys) if all(pair.values()))
    return islice(usable, first, None if size is None else first + size)


def _pairs(source: Source, split: str, keys: tuple[str, str]) -> Iterator[Pair]:
    """All pairs of a source's split, without blanks around their texts."""
    for texts in texts_of(source, split, keys):
        yield {key: text.strip() for key, text in texts.items()}


# What a start need not read again


def made_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Fills a folder by make(folder), if it is not there. It gets its name when it is whole; of
    several processes one gives it. Raises RunError if it cannot be written."""
    if folder.exists():
        return
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(dir=folder.parent, suffix=".part") as part:
                new = Path(part) / "new"  # with the permissions of other folders
                new.mkdir()
                make(new)
                with suppress(OSError):  # another has given the name
                    new.rename(folder)
        finally:
            with suppress(OSError):  # it is not empty
                folder.parent.rmdir()


def place(folder: Path, *made_of: Any) -> Path:
    """The folder, within another one, of what is made of these things."""
    return folder / hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]


def remembered(
    examine: Callable[[], dict[str, Any]], world: World, folder: Path, *of: Any
) -> dict[str, Any]:
    """What examine() returns, or has returned to an earlier start."""
    file = place(folder, "facts", *of) / "facts.json"

    def make(new: Path) -> None:
        (new / file.name).write_text(json_text(examine(), None), "utf-8")

    world.on_hosts(lambda: made_once(file.parent, make))
    facts: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return facts
