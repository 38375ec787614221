"""Reads plain text beside the pairs of texts.py: what a language model learns (language.py).

    .txt       with <|endoftext|> between documents
    the rest   of what text_files.py reads, with a column `text`

It is read in pieces of documents, with None after each document:

    "The first document", None, "The second one, of many let", "ters", None

A document with blanks alone is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from training.launch.errors import UserError, counted
from training.launch.world import World
from training.progress import moving

from .text_files import Again, Source, find_source, refused_if_unreadable, texts_of
from .texts import Sizes, Texts, hash_of, pairs_of, remembered

TextPiece = str | None  # of a document, or its end

END = "<|endoftext|>"  # GPT-2's own: after every document
PIECE, READ = 4096, 1 << 20  # letters
# Where byte-level BPE has no token on both sides.
BREAK = re.compile(r"(?<=\S\n)(?=\S)|(?<=[^\W_])(?=\s+\S)")


def pieces(text: str) -> Iterator[str]:
    """A long text in pieces of some thousand letters, with the same tokens: so all cores work on
    one document."""
    first = 0
    while first < len(text):
        found = BREAK.search(text, first + PIECE)
        end = found.start() if found else len(text)
        yield text[first:end]
        first = end


def load_texts(
    dataset: str, src: str, tgt: str, sizes: Sizes, dp: int, world: World, folder: Path
) -> Texts:
    """The pairs or the plain text of a run; see `training.tasks.texts.load_pairs`."""
    source = find_source(dataset, src, tgt, world)
    if not source.is_plain(src, tgt):
        return pairs_of(source, (src, tgt), sizes, dp, world, folder)
    facts = remembered(partial(_examine, source), world, folder, source.identity)
    splits = {
        split: Again(partial(_pieces_of, source, split), size)
        for split, size in facts["sizes"].items()
    }
    return Texts(splits, [*source.notes, *facts["notes"]], True, facts["hashes"])


def _examine(source: Source) -> dict[str, Any]:
    """The pieces of each split, their hash, and notes for the user."""
    sizes, hashes, notes = {}, {}, []
    for split in ("train", "validation"):
        every = moving(_pieces_of(source, split), f"Reading {split}", None, "piece")
        if size := sum(1 for _ in every):
            sizes[split], hashes[split] = size, hash_of(_pieces_of(source, split))
        rows = () if source.files else texts_of(source, split, ("text",))
        if blank := sum(not row["text"].strip() for row in rows):
            notes.append(f"{split}: skipped {counted(blank, 'row')} with an empty text.")
    if "train" not in sizes:
        raise UserError(f"--dataset {source.dataset}: it has no text to learn; more text works")
    return {"sizes": sizes, "hashes": hashes, "notes": notes}


def _pieces_of(source: Source, split: str) -> Iterator[TextPiece]:
    """The pieces of a split's documents that are not blank."""
    every: Iterable[TextPiece]
    if source.files:
        files = chain(*source.files.get(split, []))
        every = (piece for file in files for piece in _pieces_of_file(file))
    else:
        rows = texts_of(source, split, ("text",))
        every = (piece for row in rows for piece in chain(pieces(row["text"]), [None]))
    begun = False
    for piece in every:
        if begun or (piece and piece.strip()):  # a blank piece is a blank document, see `BREAK`
            begun = piece is not None
            yield piece


def _pieces_of_file(path: Path) -> Iterator[TextPiece]:
    """The pieces of a text file. It may be one long line, of which little is in memory."""
    rest = ""
    with refused_if_unreadable(path), path.open(encoding="utf-8-sig", newline="\n") as file:
        while more := file.read(READ):
            *documents, rest = (rest + more).replace("\r\n", "\n").split(END)
            for document in documents:
                yield from pieces(document)
                yield None
            *whole, rest = list(pieces(rest)) or [""]
            yield from whole
    yield from pieces(rest)
    yield None
