"""Who this process is in its run, what it does, and what all ranks do together.

This file has the `World` of a single process, and what every `World` can do; distributed.py has
that of a rank among others.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import UserError
from .notice import Agreement

T = TypeVar("T")


class LastAction(ctypes.Structure):
    """What a rank does, or did last; a failure prints that of all (last_actions.py). Place,
    micro-batch and peer may be -1: none. `begun` is time.monotonic, which all processes of a
    machine share; `step` is the step of the run."""

    _fields_ = (
        ("name", ctypes.c_char * 32),
        ("place", ctypes.c_int),
        ("microbatch", ctypes.c_int),
        ("peer", ctypes.c_int),
        ("begun", ctypes.c_double),
        ("step", ctypes.c_int),
    )

    def note(self, name: str, place: int = -1, microbatch: int = -1, peer: int = -1) -> None:
        """Notes an action that begins now."""
        self.name = name.encode()
        self.place, self.microbatch, self.peer = place, microbatch, peer
        self.begun = time.monotonic()


@dataclass(frozen=True)
class World:
    """A process that is alone in its run, the interface of those that are not (distributed.py). All
    ranks call the methods together. `local_rank` counts on this machine, `rank` over all machines;
    `last` is this process' last action.

    `group` is the process group in which the ranks meet; None: there is none, or the default one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (it is immutable)
    last: LastAction = field(default_factory=LastAction, compare=False, repr=False)
    group: Any = field(default=None, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        """Rank 0 prints, draws the progress bars and writes what is written once."""
        return self.rank == 0

    def on_main(self, work: Callable[[], None]) -> None:
        """Runs work() on rank 0 while the others wait, however long it takes. `work` must not
        communicate. If it raises, rank 0 raises; the others continue."""
        work()

    def on_all(self, work: Callable[[], None]) -> None:
        """Like `on_main`; then it runs work() on every other rank, which may find it done."""
        work()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        return [value]

    def from_main(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        return value

    def sum(self, values: Tensor) -> None:
        """Adds up the values of all ranks, in place."""

    def of_parts(self, part: int, value: T) -> list[T]:
        """The value of each part of a batch, on every rank. This one has a `part`, as may others,
        such as the stages of one pipeline: of these the last one's."""
        found = dict(self.gather((part, value)))
        return [found[part] for part in sorted(found)]

    def apart(self, seconds: float) -> World:  # noqa: ARG002
        """The same ranks in a group of their own on the CPU, where a rank waits so long for
        another: what they do there may run beside what they do here."""
        return self

    def agreement(self, every: int = 1) -> Agreement:  # noqa: ARG002
        """Ends a loop on all ranks at the same turn, looking for notice in every so many turns."""
        return Agreement()


def choose_device(device: str, local_rank: int, local_world_size: int) -> torch.device:
    """`auto` takes a GPU if there is one. If there are more ranks than GPUs, ranks share GPUs."""
    gpus = torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise UserError("--device cuda: no GPU is visible here; --device cpu works everywhere")
    if device == "mps" and (local_world_size > 1 or not torch.backends.mps.is_available()):
        raise UserError("--device mps: it takes an Apple GPU, and one rank; --device cpu works")
    if device == "cuda" or (device == "auto" and gpus):
        return torch.device("cuda", local_rank % gpus)
    return torch.device("mps" if device == "mps" else "cpu")


def quiet_libraries() -> None:
    """Silences the advice and progress bars of libraries: through the environment for later
    imports, here and in the ranks, and through loggers for the rest."""
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HF_HUB_VERBOSITY": "error",
        "DATASETS_VERBOSITY": "critical",  # its errors are raised as well
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "true",
        # oneDNN keeps what it compiled for each of the last 1,024 shapes, and batches of like
        # lengths have many: a bf16 run of gpt2-mini grew to 3 GB a rank. With 32: 0.7 GB, as fast.
        "LRU_CACHE_CAPACITY": "32",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    }.items():
        os.environ.setdefault(name, value)
    for library in ("transformers", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
