"""Memory shared by the CPU ranks of one host: one stretch per rank, mapped by all.

Problem: on one machine gloo sends through the loopback interface. The kernel copies every byte in
and out; with one core per rank, these copies take the core that should compute.

Idea: ranks put their data in memory that the others can read. Only the announcement that it is
ready is sent: eight bytes, through a pipe to each other rank. The system closes a pipe when its
process ends, in whatever way, so a rank that waits for it notices.

Cost: an announcement takes 20 microseconds between two ranks, where an all-reduce of gloo takes
400 to 700. Pages that are never written to take no memory.

Ownership: the memory (a memfd) and the pipes are anonymous. They have no name that could be left
behind, and are freed with the last process that has them, however that process ends. Other ranks
open them through /proc (one machine, one user, Linux only); elsewhere `SharedMemory.open` returns
None.
"""

from __future__ import annotations

import mmap
import os
import select
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .waits import time_out_of

ELEMENTS_AT_ONCE = 1 << 18  # elements added at a time, so that they stay in cache
ALIGNMENT = 64  # bytes: a cache line, and the widest vector

Wait = Callable[[], None]
"""Waits for something that was started. Call each once, in the order of the starts."""


def add_up(terms: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The sum, in rank order; 16-bit numbers are summed in fp32 and rounded once. A single term is
    returned as it is. `out`: memory for the sum of wider numbers."""
    if len(terms) == 1:
        return terms[0]
    total = torch.add(terms[0].to(wide(terms[0])), terms[1], out=out)  # in the wide type
    for term in terms[2:]:
        total += term
    return total.to(terms[0].dtype)


def wide(x: Tensor) -> torch.dtype:
    """The type for sums of such numbers."""
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype


def sum_into(
    terms: Sequence[Tensor], targets: Sequence[Tensor], divisor: int = 1, accumulate: bool = False
) -> None:
    """Writes the sum of the terms, divided by `divisor`, into every target, or adds it to the
    target (`accumulate`). A target may be one of the terms. On a CPU works on chunks that stay in
    cache."""
    first = targets[0]
    size = ELEMENTS_AT_ONCE if first.device.type == "cpu" else max(1, first.numel())
    # Built up in the first target, a sum takes half the time; later terms must not lie there.
    direct = len(terms) > 1 and not accumulate and first.dtype == wide(terms[0]) == terms[0].dtype
    direct = direct and all(first.data_ptr() != term.data_ptr() for term in terms[2:])
    for begin in range(0, first.numel(), size):
        chunk = slice(begin, begin + size)
        total = add_up([term[chunk] for term in terms], first[chunk] if direct else None)
        if divisor > 1:
            total = torch.div(total, divisor, out=total if direct else None)
        for target in targets[direct:]:  # not the first, if the sum was built up there
            if accumulate:
                target[chunk] += total
            else:
                target[chunk] = total


def aligned(nbytes: int) -> int:
    """Rounded up to a multiple of a cache line."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def refuse_copies(_: object) -> NoReturn:
    """The `__getstate__` of what belongs to all ranks together."""
    raise TypeError(
        "memory that ranks share cannot be copied or pickled, nor can what uses it: copy the "
        "module inside, as in copy.deepcopy(ddp.module), and wrap the copy on all ranks"
    )


class SharedMemory:
    """One stretch of memory per rank, each mapped by all ranks; and what says that it is written.

    Args:
        files: descriptors of the memory, by rank.
        inboxes, outboxes: ends of the pipes from and to every other rank, by its number.

    Attributes:
        ranks: by rank, its memory as bytes.
    """

    def __init__(
        self,
        files: list[int],
        nbytes: int,
        rank: int,
        inboxes: Mapping[int, int],
        outboxes: Mapping[int, int],
        group: dist.ProcessGroup | None,
    ) -> None:
        maps = [mmap.mmap(file, ALIGNMENT + nbytes) for file in files]
        self.ranks = [torch.frombuffer(m, dtype=torch.uint8, offset=ALIGNMENT) for m in maps]
        self.rank, self.group = rank, group
        self._taken = 0  # bytes of this rank's memory, see `take`
        self._turn = 0  # announcements so far
        self._files = files  # descriptors by rank, for `read`
        self._inboxes, self._outboxes = inboxes, outboxes
        for file in (*files, *inboxes.values(), *outboxes.values()):
            weakref.finalize(self, os.close, file)

    @classmethod
    def open(cls, nbytes: int, group: dist.ProcessGroup | None = None) -> SharedMemory | None:
        """A zeroed buffer of `nbytes` for every rank of the group; None if they cannot share
        memory. All ranks must call it together, and all get the same answer. The system allocates
        each page when it is first written to."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        secret = os.urandom(16)  # tells this run's file from another one at the same path
        own = _create(secret, nbytes)
        pipes = {r: os.pipe() for r in range(size) if r != rank}  # to read from, to write to
        folder = f"/proc/{os.getpid()}/fd"
        writers = {r: f"{folder}/{writer}" for r, (_, writer) in pipes.items()}
        by_rank: list[Any] = [None] * size
        dist.all_gather_object(by_rank, (f"{folder}/{own}", secret, writers), group)
        files = [own if r == rank else _attach(*by_rank[r][:2]) for r in range(size)]
        attached = [r for r in pipes if files[r] != -1]  # a rank of this machine
        outboxes = {r: os.open(by_rank[r][2][rank], os.O_WRONLY) for r in attached}
        everywhere = torch.tensor(int(-1 not in files))  # so far, on this rank
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)
        for _, writer in pipes.values():  # all have opened what they need of this rank
            os.close(writer)  # only the peer can write now, so that its end shows
        inboxes = {r: reader for r, (reader, _) in pipes.items()}
        if everywhere:
            return cls(files, nbytes, rank, inboxes, outboxes, group)
        for file in {*files, *inboxes.values(), *outboxes.values()} - {-1}:
            os.close(file)
        return None

    def announce(self, *call: object) -> Wait:
        """Tells all ranks that this one has written its memory, and in which call: its kind, size,
        type. The result waits until all have announced as often.

        Raises:
            dist.DistError: a rank has ended, or is silent for longer than the group waits. So does
                `announce`, if a rank has left so many announcements unheard that its pipe is full.
            RuntimeError: the ranks make different calls, so their memory must not be used.
        """
        self._turn += 1
        said = blake2b(repr((self._turn, call)).encode(), digest_size=8).digest()
        for rank, outbox in self._outboxes.items():
            self._wait(rank, outbox, select.POLLOUT)
            with suppress(BrokenPipeError):  # it has ended: the wait below says so
                os.write(outbox, said)

        def wait() -> None:
            heard = {self._hear(r) for r in self._inboxes}  # of all, though one differs
            require_agreement(heard <= {said})

        return wait

    def _wait(self, rank: int, pipe: int, event: int) -> None:
        """Waits until a pipe from or to a rank can be read or written."""
        seconds = time_out_of(self.group).total_seconds()
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(1000 * seconds):
            raise dist.DistError(f"rank {rank} of the group has been silent for {seconds:g} s")

    def _hear(self, rank: int) -> bytes:
        """Waits for the next announcement of a rank."""
        self._wait(rank, self._inboxes[rank], select.POLLIN)
        heard = os.read(self._inboxes[rank], 8)
        if not heard:
            raise dist.DistError(f"rank {rank} of the group has ended")
        return heard

    __getstate__ = refuse_copies

    def view(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements of a rank's memory, from byte `offset` on."""
        return self.ranks[rank][offset : offset + numel * dtype.itemsize].view(dtype)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next `numel` elements of this rank's memory. Ranks that take the same sizes in the
        same order have a tensor at the same place."""
        start, self._taken = self._taken, self._taken + aligned(numel * dtype.itemsize)
        return self.view(self.rank, start, numel, dtype)

    def by_rank(self, x: Tensor) -> list[Tensor]:
        """What all ranks have at the place of a flat tensor in this rank's memory."""
        offset = x.data_ptr() - self.ranks[self.rank].data_ptr()
        return [self.view(rank, offset, len(x), x.dtype) for rank in range(len(self.ranks))]

    def read(self, rank: int, x: Tensor, into: Tensor) -> None:
        """Copies what a rank has at the place of `x`, a tensor in this rank's memory. Unlike a copy
        from the map, this does not make the other rank's pages resident in this process."""
        offset = x.data_ptr() - self.ranks[self.rank].data_ptr()
        target = memoryview(into.view(torch.uint8).numpy().data)
        start, done = ALIGNMENT + offset, 0  # the secret comes before the buffer
        while done < len(target):  # a read may stop early
            done += os.preadv(self._files[rank], [target[done:]], start + done)


def require_agreement(same: bool) -> None:
    """Raises the error for ranks that make different calls, unless they make the same."""
    if not same:
        raise RuntimeError(
            "the ranks diverged: all must make the same calls in the same order, with tensors of "
            "the same size and type; a rank that has no examples makes them, too"
        )


def _create(secret: bytes, nbytes: int) -> int:
    """The descriptor of new memory that starts with the secret; -1 if the system gives none."""
    try:
        file = os.memfd_create("ranks")
        os.ftruncate(file, ALIGNMENT + nbytes)  # the secret, padded, and the buffer
        os.pwrite(file, secret, 0)
    except (AttributeError, OSError):  # not Linux; a sandbox forbids it, or descriptors ran out
        return -1
    return file


def _attach(path: str, secret: bytes) -> int:
    """The descriptor of another rank's memory; -1 if it is not at `path`."""
    try:
        file = os.open(path, os.O_RDWR)
        if os.pread(file, len(secret), 0) == secret:
            return file
        os.close(file)  # another host or container has another file there
    except OSError:
        pass
    return -1
