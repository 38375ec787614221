"""Who a rank is among the others, what it does, and what all ranks do together."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .errors import UserError

T = TypeVar("T")
_BEAT = 0.1  # seconds between signs of life: less than any time-out


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
    """Who this process is. `local_rank` counts on this machine, `rank` over all machines; `last` is
    its last action."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (it is immutable)
    last: LastAction = field(default_factory=LastAction, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        """Rank 0 prints, draws the progress bars and writes what is written once."""
        return self.rank == 0


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


def choose_backend(device: str, local_world_size: int) -> str:
    """NCCL where every rank has a GPU of its own, and gloo for what their hosts tell each other, so
    that they need not wait for the GPUs; gloo alone otherwise."""
    on_gpu = choose_device(device, 0, local_world_size).type == "cuda"
    one_each = on_gpu and torch.cuda.device_count() >= local_world_size
    return "cpu:gloo,cuda:nccl" if one_each else "gloo"


def on_main(world: World, work: Callable[[], None]) -> None:
    """Runs work() on rank 0 while the others wait, however long it takes: rank 0 keeps sending
    signs of life, so no time-out ends them. `work` must not communicate. If it raises, rank 0
    raises; the others continue."""
    _while_others_wait(world, work if world.is_main else None)


def on_all(world: World, work: Callable[[], None]) -> None:
    """Like `on_main`; then it runs work() on every other rank, which may find it done."""
    on_main(world, work)
    _while_others_wait(world, None if world.is_main else work)


def _while_others_wait(world: World, work: Callable[[], None] | None) -> None:
    """Runs work() where there is some, until it has ended on all ranks."""
    if world.world_size == 1:
        if work is not None:
            work()
        return
    done = torch.zeros(())  # reduced again and again, until it is 1
    if work is None:
        while not done.item():
            dist.all_reduce(done.fill_(1), dist.ReduceOp.MIN)  # pairs with one in `tell`
        return
    finished = threading.Event()

    def tell() -> None:
        with suppress(RuntimeError):  # another rank is gone: the launcher notices
            while not done.item():
                done.fill_(finished.wait(_BEAT))  # 1 when the work has ended
                dist.all_reduce(done, dist.ReduceOp.MIN)

    teller = threading.Thread(target=tell, name="tell the others", daemon=True)
    teller.start()
    try:
        work()
    finally:
        finished.set()
        teller.join()  # from here on other collectives may follow


def gather_over_ranks(value: T, world: World, group: Any = None) -> list[T]:
    """Every rank's value, by rank, on every rank."""
    if world.world_size == 1:
        return [value]
    parts: list[Any] = [None] * world.world_size
    dist.all_gather_object(parts, value, group)
    return parts


def sum_over_parts(values: Sequence[float], parts: int, world: World) -> list[float]:
    """Sums each value over the parts of a batch; ranks with the same part, as the stages of one
    pipeline, count once. All ranks call it."""
    copies = world.world_size / parts  # ranks that have the same part
    every = gather_over_ranks(values, world)
    return [sum(by_rank) / copies for by_rank in zip(*every, strict=True)]


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
