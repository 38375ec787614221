"""The text that --dataset names: pairs of sentences, or documents to continue.

Problem: --dataset must become examples, or one line that says what is wrong with it; and the text
may be larger than memory.

What it may be, and how it is read: text_files.py. Rows without text, and documents with only
blanks, are left out.

Idea: text is never a list in memory. It is read a few lines at a time, to train the tokenizer and
to make files of tokens (tokens.py); all else that a run needs are rows of these files. So a missing
split is a range of rows at the end of train. A later start reads no text: it finds the files in a
folder that is named by a hash of what they are made of.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from training.files import moving, writing
from training.launch.errors import UserError, counted, listed
from training.launch.world import World
from training.options import Options, spelt

from .text_files import Pair, Source, TextPiece, find_source, pieces

SPLITS = ("train", "validation", "test")
TAKEN = {"validation": 1000, "test": 100}  # pairs at most, out of train if there is no such split
FIRST_ROWS = 1000  # in which the columns are looked for: a row may lack one
HALF_LETTER = re.compile("[\ud800-\udfff]")  # a lone surrogate, e.g. in JSON text that was cut


@dataclass
class Texts:
    """The text of a run, before it becomes tokens.

    Attributes:
        keys: the languages of pairs, source and target; of plain text none.
        asked: the number of pairs in each split; None: all.
        skipped: rows without text in the split that was read last.
        last: the last pairs of that split, from which test may be held out.
    """

    dataset: str
    source: Source
    keys: Sequence[str]
    asked: Mapping[str, int | None]
    skipped: int = 0
    last: deque[Pair] = field(default_factory=deque)

    @property
    def plain(self) -> bool:
        """Whether the text is documents to continue, and not pairs."""
        return not self.keys

    @property
    def splits(self) -> list[str]:
        """The splits that the source has. Plain text has no use for a test split."""
        used = SPLITS if self.keys else SPLITS[:2]
        return [split for split in used if split in self.source.rows]

    @property
    def identity(self) -> Any:
        """What tells it apart from other texts, before it is read."""
        return self.source.identity, self.keys, self.asked

    def pairs(self, split: str) -> Iterator[Pair]:
        """The pairs of a split with text on both sides, without blanks around it. All of train,
        if other splits are held out from its end; else as many as are asked for. Raises
        UserError."""
        whole = split == "train" and len(self.splits) < len(SPLITS)
        most = None if whole else self.asked[split]
        self.last = deque(maxlen=None if split == "test" else self.asked["test"] or TAKEN["test"])
        for pair in islice(self._pairs(split), most):
            self.last.append(pair)
            yield pair

    def _pairs(self, split: str) -> Iterator[Pair]:
        self.skipped = 0
        for texts in self._texts(split, self.keys):
            pair = {key: text.strip() for key, text in texts.items()}
            if all(pair.values()):
                yield pair
            else:
                self.skipped += 1

    def pieces(self, split: str) -> Iterator[TextPiece]:
        """The pieces of a split's documents, without blank documents. Raises UserError."""
        self.skipped = 0
        begun = False
        for piece in self.source.rows[split]() if self.source.in_pieces else self._pieces(split):
            if begun or (piece and piece.strip()):  # a blank piece is a blank document, see `BREAK`
                begun = piece is not None
                yield piece
            elif piece is None and not self.source.in_pieces:
                self.skipped += 1

    def _pieces(self, split: str) -> Iterator[TextPiece]:
        for row in self._texts(split, ("text",)):
            yield from pieces(row["text"])
            yield None

    def _texts(self, split: str, keys: Sequence[str]) -> Iterator[Pair]:
        """The texts of each row by key; a missing one is empty."""
        for number, row in enumerate(self.source.rows[split](), 1):
            columns = columns_of(row)
            texts = {key: "" if columns.get(key) is None else columns[key] for key in keys}
            for key, text in texts.items():
                if not isinstance(text, str) or HALF_LETTER.search(text):
                    raise UserError(
                        f"--dataset {self.dataset}: row {number} of {split}: {key} is "
                        f"{text!r:.40}, and not a string of valid Unicode"
                    )
            yield texts

    def size(self, split: str) -> int:
        """The number of pairs or pieces in a split, counted by reading it."""
        examples, unit = (self.pieces, "piece") if self.plain else (self.pairs, "pair")
        return sum(1 for _ in moving(examples(split), f"Reading {split}", None, unit))

    def parts(self, sizes: Mapping[str, int], notes: list[str]) -> dict[str, tuple[str, range]]:
        """Returns for each split the source's split, and which of its `sizes[split]` pairs. Splits
        that the source does not have are held out from the end of train."""
        parts = {split: (split, range(size)) for split, size in sizes.items()}
        for split in ("test", "validation"):  # test first: it has the last pairs
            if split not in parts:
                _, train = parts["train"]
                count = min(self.asked[split] or TAKEN[split], -(-(len(train) - 1) // 10))
                left = len(train) - count  # at least one
                parts |= {"train": ("train", train[:left]), split: ("train", train[left:])}
                pairs = counted(count, "pair")
                notes.append(f"no {split} split: {pairs} held out from the end of train.")
        return {split: (parts[split][0], parts[split][1][: self.asked[split]]) for split in SPLITS}


def load_texts(args: Options, world: World, translates: bool = False) -> Texts:
    """The pairs or the plain text that the options ask for. All ranks call it together.

    Args:
        translates: whether only pairs can be used.

    Raises:
        UserError: there is no usable text; the message says why, and what works.
    """
    dataset, keys = args.dataset, (args.src, args.tgt)
    source = find_source(dataset, *keys, world)
    plain = source.in_pieces or is_plain(dataset, source, *keys)
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
    useless = sorted(args.typed & ({"src", "tgt"} if plain else {"documents"}))
    if useless:
        found = "plain text, with nothing in these languages" if plain else "pairs, a row for each"
        words = " ".join(spelt(name, getattr(args, name)) for name in useless)
        raise UserError(f"{words}: --dataset {dataset} has {found}; it works without")
    asked = {split: getattr(args, f"n_{split}") for split in SPLITS}
    return Texts(dataset, source, (), {}) if plain else Texts(dataset, source, keys, asked)


def is_plain(dataset: str, source: Source, src: str, tgt: str) -> bool:
    """Whether rows are plain text, and no pairs. Raises UserError if they are neither."""
    names = dict[str, None]()
    rows = chain.from_iterable(read() for read in source.rows.values())
    for columns in map(columns_of, islice(rows, FIRST_ROWS)):
        if "text" in columns and not columns.keys() & {src, tgt}:
            return True
        if columns.keys() >= {src, tgt}:
            return False
        names |= dict.fromkeys(columns)
    found = f"none of the first rows has both {src} and {tgt}, but {', '.join(names)}"
    raise UserError(
        f"--dataset {dataset}: {found if names else 'it is empty, or its rows have no columns'}; "
        "--src and --tgt name the columns of pairs, or a column named text holds plain text"
    )


def columns_of(row: Any) -> Mapping[str, Any]:
    """A row's values by column, or by language if it has a `translation` of both."""
    columns = row if isinstance(row, Mapping) else {}
    translation = columns.get("translation")
    return translation if isinstance(translation, Mapping) else columns


# What a start need not read again


def made_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Fills a folder by make(folder), if it is not there. It gets its name when it is complete; of
    several processes, one gives it that. Raises RunError if it cannot be written."""
    if folder.exists():
        return
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, suffix=".part") as part:
            new = Path(part) / "new"  # with the permissions of other folders
            new.mkdir()
            make(new)
            with suppress(OSError):  # another process has given the name
                new.rename(folder)


@contextmanager
def still_there(folder: Path) -> Iterator[None]:
    """Within it what `made_once` has made is read. Raises UserError if some of it was deleted."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} was deleted; delete all of {folder}, too") from error


def place(folder: Path, *made_of: Any) -> Path:
    """The subfolder for what is made of these things."""
    return folder / hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
