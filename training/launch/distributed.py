"""What the ranks of a run do together: the `World` of a rank among others.

A rank that waits for rank 0's work, which may take minutes, would reach its time-out. So rank 0
sends signs of life while it works. A rank that is given notice (notice.py) must not leave a loop
alone, since the others would wait for it. So they sum their flags (`RanksAgree`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.waits import DISK_GROUP

from .notice import Agreement, Ended, given
from .world import World

T = TypeVar("T")
_BEAT = 0.1  # seconds between signs of life: less than any time-out
BEHIND = 2  # rounds of an agreement that a rank may be ahead of another


def make_world(rank: int, world_size: int, *more: Any, **facts: Any) -> World:
    """The `World` of a rank. A process that is alone gets the plain one, also in a group of one."""
    return (DistributedWorld if world_size > 1 else World)(rank, world_size, *more, **facts)


@dataclass(frozen=True)
class DistributedWorld(World):
    """A rank among others; see `World`."""

    def on_main(self, work: Callable[[], None]) -> None:
        """Rank 0 keeps sending signs of life, so no time-out ends the others."""
        self._while_others_wait(work if self.is_main else None)

    def on_all(self, work: Callable[[], None]) -> None:
        """The others wait for rank 0, and it for them."""
        self.on_main(work)
        self._while_others_wait(None if self.is_main else work)

    def _while_others_wait(self, work: Callable[[], None] | None) -> None:
        """Runs work() where there is some, until it has ended on all ranks."""
        done = torch.zeros(())  # reduced again and again, until it is 1
        if work is None:
            while not done.item():  # each of these pairs with one in `tell`
                dist.all_reduce(done.fill_(1), dist.ReduceOp.MIN, self.group)
            return
        finished = threading.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # another rank is gone: the launcher notices
                while not done.item():
                    done.fill_(finished.wait(_BEAT))  # 1 when the work has ended
                    dist.all_reduce(done, dist.ReduceOp.MIN, self.group)

        teller = threading.Thread(target=tell, name="tell the others", daemon=True)
        teller.start()
        try:
            work()
        finally:
            finished.set()
            teller.join()  # from here on other collectives may follow

    def gather(self, value: T) -> list[T]:
        """As bytes, so a value may be of any kind."""
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, value, self.group)
        return parts

    def from_main(self, value: T) -> T:
        """As bytes, too."""
        found = [value]
        dist.broadcast_object_list(found, 0, self.group)
        return found[0]

    def sum(self, values: Tensor) -> None:
        """An all-reduce, where the values are: the bits are the same on all ranks."""
        dist.all_reduce(values, group=self.group)

    def apart(self, seconds: float) -> World:
        """The group is for checkpoints: the time-outs of steps leave it as it is."""
        limit = timedelta(seconds=seconds)
        return replace(self, group=dist.new_group(None, limit, "gloo", group_desc=DISK_GROUP))

    def agreement(self, every: int = 1) -> Agreement:
        """See `RanksAgree`."""
        return RanksAgree(every, self.group)


class RanksAgree(Agreement):
    """Ends a loop on all ranks at the same turn if one was given notice. In every round each rank
    begins to sum the flags, and reads the sum of the round `BEHIND` before, so nobody waits:

        rank 0   begin 0   begin 1   begin 2, read 0   begin 3, read 1   ...

    Args:
        every: turns of a round.
        group: the ranks; None: all.
    """

    def __init__(self, every: int, group: Any = None) -> None:
        self._every, self._turns, self._group = every, 0, group
        self._begun: deque[tuple[Any, Tensor]] = deque()

    def turn(self) -> None:
        """A turn begins. Raises Ended."""
        self._turns += 1
        if self._turns % self._every == 0:
            self._round(going=True)

    def end(self) -> None:
        """This rank has no turns left; returns when no rank has. Raises Ended."""
        while self._round(going=False):
            pass
        for work, _ in self._begun:
            work.wait()

    def _round(self, going: bool) -> bool:
        """Returns whether a rank goes on, as far as is known."""
        said = torch.tensor([given(), going], dtype=torch.int32)  # after the sum: how many ranks
        self._begun.append((dist.all_reduce(said, group=self._group, async_op=True), said))
        if len(self._begun) <= BEHIND:
            return True
        work, said = self._begun.popleft()
        work.wait()
        if said[0]:
            raise Ended
        return bool(said[1])
