"""Reads the text that --dataset names: pairs of sentences, or documents to continue.

Problem: --dataset must become examples, or one line that says what is wrong with it; and the text
may be larger than memory.

What it may be, and how it is read: text_files.py. A missing split is cut off the end of train. Rows
without text, and documents with blanks alone, are left out.

Idea: a split is no list. Its text is read anew each time that it is used, a few lines at a time.
The first start reads it twice, for what each start must know (`remembered`: how many examples, a
hash, the test pairs), and keeps that in a folder that is named by the files' paths, sizes and
times. A later start only looks whether that folder is there.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from training.files import TOKENS, json_text, moving, writing
from training.launch.errors import UserError, counted, listed
from training.launch.world import World
from training.options import Options

from .text_files import Again, Pair, Source, find_source, pieces_of, texts_of

Sizes = Mapping[str, int | None]
Ranges = dict[str, tuple[str, int, int]]
"""For each split the source's split, the first example in it, and the number of examples."""

SPLITS = ("train", "validation", "test")
TAKEN = {"validation": 1000, "test": 100}  # pairs at most, out of train if there is no such split


@dataclass
class Texts:
    """The examples of each split, and notes on how they were made. A split is iterated over again
    and again, and has a length; that of test is a list.

    Attributes:
        plain: the examples are pieces of documents, not pairs; there is no test split.
        hashes: of each split's examples, in order.
    """

    splits: Mapping[str, Any]
    hashes: dict[str, str] = field(repr=False)
    notes: list[str] = field(default_factory=list)
    plain: bool = False


def hash_of(examples: Iterable[Any]) -> str:
    """A hash of the examples, in order: of their list in JSON."""
    digest, before = hashlib.sha256(b"["), ""
    for example in examples:
        digest.update((before + json.dumps(example)).encode())
        before = ", "
    digest.update(b"]")
    return digest.hexdigest()


def load_texts(args: Options, world: World, translates: bool = False) -> Texts:
    """The pairs or the plain text that the options ask for. All ranks call it together: the first
    one of each host reads.

    Args:
        translates: whether only pairs can be used.

    Raises:
        UserError: there is no usable text, or a rank has no pair of a split; the message says why,
            and what works.
    """
    dataset, src, tgt = args.dataset, args.src, args.tgt
    sizes: Sizes = {split: getattr(args, f"n_{split}") for split in SPLITS}
    source = find_source(dataset, src, tgt, world)
    plain = source.is_plain(src, tgt)
    if plain and translates:
        raise UserError(
            f"--dataset {dataset}: this is plain text, and the program translates; "
            f"project/train.py ddp --model gpt2-mini --dataset {shlex.quote(dataset)} learns it"
        )
    if "train" not in source.rows:
        raise UserError(
            f"--dataset {dataset}: it has no train split, but {listed(source.rows, 'and')}; text "
            "in a split named train works"
        )
    keys, most = ((), {}) if plain else ((src, tgt), sizes)
    examine = partial(_examine, source, keys, most)
    facts = remembered(examine, world, args.workdir / TOKENS, source.identity, keys, most)
    splits: dict[str, Any] = {
        split: Again(partial(_part, source, keys, *part), part[-1])
        for split, part in facts["ranges"].items()
    }
    if plain and "train" not in splits:
        raise UserError(f"--dataset {dataset}: it has no text to learn; more text works")
    for split, pairs in {} if plain else splits.items():
        if len(pairs) < args.dp:
            more = f"a larger --n_{split}" if len(pairs) == sizes[split] else "more text"
            raise UserError(
                f"--dataset {dataset}: {split} has {counted(len(pairs), 'pair')} with text on "
                f"both sides, and a run of {counted(args.dp, 'rank')} needs {args.dp} or more; "
                f"{more} works"
            )
    notes = [*source.notes, *facts["notes"]]
    return Texts(splits | facts["lists"], facts["hashes"], notes, plain)


def _examine(source: Source, keys: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """What each start must know. Plain text has no keys."""
    ranges: Ranges = {}
    notes: list[str] = []
    unit = "pair" if keys else "piece"
    for split in [split for split in SPLITS if split in source.rows and (keys or split != "test")]:
        skipped = Counter[str]()
        examples = _examples(source, split, keys, skipped)
        size = sum(1 for _ in moving(examples, f"Reading {split}", None, unit))
        if keys or size:
            ranges[split] = (split, 0, size)
        if skipped and not source.in_pieces:
            rows = counted(skipped.total(), "row")
            sides = " on both sides" if keys else ""
            notes.append(f"{split}: skipped {rows} without text{sides}.")
    if keys:
        ranges = _cut(ranges, sizes, notes)
    lists, hashes = dict[str, list[Pair]](), dict[str, str]()
    readers = {origin: _examples(source, origin, keys) for origin in source.rows}
    done = Counter[str]()
    for split, (origin, first, size) in ranges.items():  # each reader goes on where it was
        skip, done[origin] = first - done[origin], first + size
        part: Iterable[Any] = islice(readers[origin], skip, skip + size)
        if split == "test":
            part = lists[split] = list(part)
        hashes[split] = hash_of(moving(part, f"Reading {split} again", size, unit))
    return {"ranges": ranges, "hashes": hashes, "lists": lists, "notes": notes}


def _cut(ranges: Ranges, sizes: Sizes, notes: list[str]) -> Ranges:
    """Returns the splits of pairs, with as many as are asked for. Those that the source does not
    have are cut off the end of train."""
    for split in ("test", "validation"):  # test is cut off first: it has the last pairs
        if split not in ranges:
            *_, size = ranges["train"]
            count = min(sizes[split] or TAKEN[split], -(-(size - 1) // 10))  # a pair stays
            ranges["train"] = ("train", 0, size - count)
            ranges[split] = ("train", size - count, count)
            held_out = counted(count, "pair")
            notes.append(f"no {split} split: {held_out} held out from the end of train.")
    for split, most in sizes.items():
        origin, first, size = ranges[split]
        if most is not None and size < most:
            there = counted(size, "pair")
            notes.append(f"{split}: all {there}; --n_{split} {most:,} asks for more.")
        ranges[split] = (origin, first, min(size, size if most is None else most))
    return {split: ranges[split] for split in SPLITS}


def _part(source: Source, keys: Sequence[str], split: str, first: int, size: int) -> Iterator[Any]:
    """`size` examples of a source's split, after the first `first` ones."""
    return islice(_examples(source, split, keys), first, first + size)


def _examples(
    source: Source, split: str, keys: Sequence[str], skipped: Counter[str] | None = None
) -> Iterator[Any]:
    """All examples of a source's split: pairs with text on both sides, without blanks around it;
    or, without keys, pieces of documents that are not blank. Counts the others in `skipped`."""
    skipped = Counter() if skipped is None else skipped
    for texts in texts_of(source, split, keys) if keys else ():
        pair = {key: text.strip() for key, text in texts.items()}
        if all(pair.values()):
            yield pair
        else:
            skipped[split] += 1
    begun = False
    for piece in () if keys else pieces_of(source, split):
        if begun or (piece and piece.strip()):  # a blank piece is a blank document, see `BREAK`
            begun = piece is not None
            yield piece
        elif piece is None:
            skipped[split] += 1


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
