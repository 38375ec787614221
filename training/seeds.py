"""Independent random streams from the one seed of a run.

Problem: a run draws for many purposes (the data order of every epoch, dropout on every rank, the
initial weights). Sums such as seed + epoch overlap: epoch 1 of seed 0 is epoch 0 of seed 1, and
runs that should be independent samples share their data order.

Idea: hash the purpose of the stream. Equal arguments give the same stream on every machine and in
every process; different arguments give unrelated streams.

Note: torch's CPU generator uses the low 32 bits of its seed, so two of its streams coincide with
probability 2^-32. Python's uses all.
"""

from __future__ import annotations

import hashlib
import json


def stream(seed: int, purpose: str, *numbers: int | str) -> int:
    """The seed, 0 ... 2^63 - 1, of the stream for `purpose`.

    Args:
        seed: of the run.
        purpose: in words: "data order", "dropout", "initial weights".
        numbers: which of that purpose's streams: an epoch, a rank, a parameter's name.
    """
    key = json.dumps([seed, purpose, *numbers]).encode()  # unambiguous: [1, 12] is not [11, 2]
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
