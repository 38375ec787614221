"""Who this process is in its run, what it does, and what all ranks do together.

A rank that waits for rank 0's work, which may take minutes, would reach its time-out. So rank 0
sends signs of life while it works.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.waits import DISK_GROUP

from .errors import RunError, UserError
from .last_actions import LastAction

T = TypeVar("T")
_BEAT = 0.1  # seconds between signs of life: less than any time-out


@dataclass(frozen=True)
class World:
    """A rank among others, or a process that is alone in its run. All ranks call the methods
    together, and a wait there is noted as a rank's last action. `local_rank` counts on this
    machine, `rank` over all machines; `last` is this process' last action.

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

    def on_main(self, work: Callable[[], T]) -> T:
        """Runs work() on rank 0 while the others wait, however long it takes. Returns on every rank
        what work() returned. `work` must not communicate. If it raises UserError or RunError, all
        ranks raise it."""
        (result,) = self._on_some(self.is_main, work)
        return result

    def on_hosts(self, work: Callable[[], object]) -> None:
        """The same on the first rank of every host."""
        self._on_some(self.local_rank == 0, lambda: bool(work()))

    def _on_some(self, chosen: bool, work: Callable[[], T]) -> list[T]:
        """Runs work() if this rank is `chosen`, waits until it has ended on all, and returns all
        results. Meanwhile a thread of each rank tells the others again and again whether this rank
        has ended: so all wait, and notice a rank that is gone."""
        if self.world_size == 1:
            return [work()]
        results: list[T | UserError | RunError] = []
        ended, all_ended = threading.Event(), torch.zeros(())

        def tell() -> None:
            while not all_ended.item():
                all_ended.fill_(ended.wait(_BEAT))
                dist.all_reduce(all_ended, dist.ReduceOp.MIN, self.group)

        with ThreadPoolExecutor(1, "tell the others") as teller:
            telling = teller.submit(tell)
            try:
                if chosen:
                    results.append(work())
            except (UserError, RunError) as error:
                results.append(error)
            finally:
                ended.set()
            with self.last.waiting():
                telling.result()  # raises if another rank is gone
        gathered = list(chain(*self.gather(results)))
        for result in gathered:
            if isinstance(result, (UserError, RunError)):
                raise result
        return cast(list[T], gathered)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank; as bytes, so it may be of any kind."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            with self.last.waiting():
                dist.all_gather_object(values, value, self.group)
        return values

    def sum(self, values: Tensor) -> None:
        """Adds up the values of all ranks, in place and where they are: the bits are the same on
        all ranks."""
        if self.world_size > 1:
            with self.last.waiting():
                dist.all_reduce(values, group=self.group)

    def of_parts(self, part: int, value: T) -> list[T]:
        """Gathers one value per part of the batch. If several ranks share a part, such as the
        stages of one pipeline, the highest rank's value is used."""
        values = dict(self.gather((part, value)))
        return [values[part] for part in sorted(values)]

    def apart(self, seconds: float) -> World:
        """The same ranks in a separate group on the CPU, with a time-out of `seconds`: what they do
        there may overlap with what they do here. It is for checkpoints: the time-outs of steps do
        not apply to it."""
        if self.world_size == 1:
            return self
        limit = timedelta(seconds=seconds)
        return replace(self, group=dist.new_group(None, limit, "gloo", group_desc=DISK_GROUP))


def choose_device(device: str, local_rank: int = 0) -> torch.device:
    """`auto` takes a GPU if there is one. If there are more ranks than GPUs, ranks share GPUs."""
    gpus = torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise UserError("--device cuda: no GPU is visible here; --device cpu works everywhere")
    if device == "cuda" or (device == "auto" and gpus):
        return torch.device("cuda", local_rank % gpus)
    return torch.device("cpu")


def memory_here(device: torch.device) -> int:
    """Bytes of memory of this host or, for a GPU, of all its GPUs."""
    if device.type == "cuda":
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return sum(gpu.total_memory for gpu in gpus)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def quiet_libraries() -> None:
    """Silences the advice and progress bars of libraries that are imported later, here and in the
    ranks."""
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_VERBOSITY": "error",
        "DATASETS_VERBOSITY": "critical",  # its errors are raised as well
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "true",
        # oneDNN keeps what it compiled for each of the last 1,024 shapes, and batches of similar
        # lengths have many: a bf16 run of gpt2-mini grew to 3 GB a rank. With 32: 0.7 GB, as fast.
        "LRU_CACHE_CAPACITY": "32",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    }.items():
        os.environ.setdefault(name, value)
