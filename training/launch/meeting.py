"""Ranks that torchrun has started agree on a fresh part of its store.

Problem: torchrun keeps one store for all its attempts and never clears it, so restarted ranks find
addresses of the attempt before, and connect to ranks that are gone. The hosts' counts of restarts
(TORCHELASTIC_RESTART_COUNT) differ, as does the number of ranks if a host has left.

Idea: every rank writes a new random word. Rank 0 reads the words of all, and proposes their list.
A rank that finds its own word in the list confirms it. If all have confirmed it, no word was left
by a rank that is gone, and rank 0 closes the meeting; otherwise it reads the words again.

Cost: a few messages of a rank, and at most BEAT seconds after the last has come.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from .errors import RunError

BEAT = 0.02  # seconds between looks


def fresh_part(store: Any, rank: int, world_size: int, timeout: float) -> Any:
    """The part of torchrun's store that only the ranks of this attempt have. All call it together.

    Raises:
        RunError: a rank did not come within `timeout` seconds; it names those that are missing.
    """
    word, end = uuid4().hex, time.monotonic() + timeout
    words = [f"word {r} of {world_size}" for r in range(world_size)]
    proposed = f"list of {world_size}"
    store.set(words[rank], word)
    while time.monotonic() < end:
        if rank == 0 and store.check(words):
            store.set(proposed, " ".join(store.get(key).decode() for key in words))
        if store.check([proposed]):
            found = store.get(proposed).decode()
            if found.split()[rank] == word:
                store.set(f"{found} {rank}", "confirmed")
                if rank == 0 and store.check([f"{found} {r}" for r in range(world_size)]):
                    store.set(f"{found} closed", "")
                if store.check([f"{found} closed"]):
                    own = found.split()[0]  # rank 0's, which no other attempt has
                    return dist.PrefixStore(own, store)  # type: ignore[attr-defined]
        time.sleep(BEAT)
    there = store.get(proposed).decode() if store.check([proposed]) else ""
    keys = [f"{there} {r}" for r in range(world_size)] if word in there else words
    missing = [r for r, key in enumerate(keys) if not store.check([key])] or [0]
    ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    raise RunError(
        f"rank {rank} has waited {timeout:g} s at the start, and {ranks} of {world_size} did not "
        "come: look at their hosts, or give them longer with --timeout"
    )
