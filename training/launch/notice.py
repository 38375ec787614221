"""The notice that a scheduler gives before it takes a machine away: SIGTERM, or SIGUSR1.

Problem: two minutes later everything is killed. What was computed since the last checkpoint is lost
unless all ranks save it now, after the same step; and the signal may reach only one of them.

Idea: a signal only sets a flag. At the end of a step the ranks sum their flags, in the all-reduce
that they make anyway (training/optimization.py); so all see it after the same step, save and end.
In evaluation and translation, which no checkpoint holds, they sum them in all-reduces that nobody
waits for (`Agreement`), and end at the same turn of the loop. Whoever starts ranks passes the
signal on to them as SIGUSR1, which may come several times. A second SIGTERM ends at once.

Cost: one number in an all-reduce, or two in one of their own; a step's time until the save.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import RunError, handled, torchrun
from .world import World

NOTICES = (signal.SIGTERM, signal.SIGUSR1)
TOGETHER = 1.0  # seconds in which two SIGTERMs are one: `timeout` sends two
BEHIND = 2  # rounds that a rank may be ahead of another

_given: dict[int, float] = {}  # signals of this process, inside `heeded`, and when each first came


class Ended(RunError):  # noqa: N818 (nothing failed)
    """The run has ended early because it was asked to. Its status, 75, says: try again later. On
    one host torchrun gets 0, since it restarts ranks that end with another one. On several that is
    right: hosts that got no notice go on without the one that is taken away, if they may."""

    @property
    def status(self) -> int:  # type: ignore[override]
        """The exit status of the process."""
        return 0 if torchrun("GROUP_WORLD_SIZE", None) == 1 else os.EX_TEMPFAIL


@contextmanager
def heeded(on_signal: str = "save", processes: Sequence[Any] = ()) -> Iterator[Collection[int]]:
    """Within it a notice sets the flag, and is passed on to the processes, unless `on_signal` is
    "end". A second SIGTERM meets what was there before. Yields the signals so far, in order."""
    with ExitStack() as stack:

        def heed(number: int, _: Any) -> None:
            heard = bool(_given)
            first = _given.setdefault(number, time.monotonic())
            if number == signal.SIGTERM and time.monotonic() > first + TOGETHER:
                stack.close()  # what was there before is there again
                os.kill(os.getpid(), number)
            for process in () if heard else processes:  # a second might find them at their end
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)

        stack.callback(_given.clear)
        if on_signal != "end":
            stack.enter_context(handled(NOTICES, heed))
        yield _given


def given() -> bool:
    """Whether this process was given notice."""
    return bool(_given)


class Agreement:
    """Ends a loop on all ranks at the same turn if one was given notice. In every round each rank
    begins to sum the flags, and reads the sum of the round `BEHIND` before, so nobody waits:

        rank 0   begin 0   begin 1   begin 2, read 0   begin 3, read 1   ...

    All ranks make it together, and call `turn` as often as they like, then `end`.

    Args:
        every: turns of a round.
    """

    def __init__(self, world: World = World(), every: int = 1) -> None:  # noqa: B008 (immutable)
        self._alone, self._every, self._turns = world.world_size == 1, every, 0
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
        if not self._alone:
            self._begun.append((dist.all_reduce(said, async_op=True), said))
            if len(self._begun) <= BEHIND:
                return True
            work, said = self._begun.popleft()
            work.wait()
        if said[0]:
            raise Ended
        return bool(said[1])
