"""Exchanges in a group of ranks: by shared memory on one host, otherwise by the process group.

Problem. Exchanges in the middle of a layer have hardly any work to overlap with. On CPUs gloo
copies every byte into the kernel and out again. Buckets of gradients and shards of parameters live
as long as the model: a collective that returns a new tensor would copy them every time.

Idea. CPU ranks of one host exchange through memory that all of them map (shared_memory.py). Each
rank announces a tensor that lies there, and reads what it needs of the other ranks' tensors.
Tensors that stay (`keep`), or are made to be summed (`take`), are allocated there and exchanged in
place; all others are copied there first. Sums are taken in rank order, so every rank has the same
bits. An announcement names the call, its turn, and the size and type of its tensor, so ranks that
make different calls end with an error. Whether ranks share a host is found out by trying, not
inferred from their numbers. All other ranks, and GPUs, exchange through the process group: NCCL or
gloo.

Each call is started, and finished later. A process group sends in between. Through memory nothing
happens in between: the tensor is announced when the call starts, and read and added up when it is
finished, on the core that computes. An early start only shortens the wait for a rank that is late.

    rank 0   backward of layer 2 | announce 2 | backward of layer 1 | sum 2, announce 1 | ...
    rank 1   backward of layer 2  | announce 2 | backward of layer 1  | sum 2, announce 1 | ...

Sums of 16-bit numbers (autocast) are taken in fp32 and rounded once: if every rank rounded, small
terms would vanish. So the process group sends fp32; shared memory stays 16-bit. The exception is
`sums_travel_narrow`, for activations of layers that are cut over tensor ranks. There the t terms
are few, of similar size, and rounded to 16 bits already, so their sum is off by at most some t/2
such roundings. Every rank waits for these sums, and fp32 would be twice the bytes. Megatron-LM and
torchtitan sum them in 16 bits, too. (Gradients have as many terms as there are replicas.)

Gloo's own reduce-scatter is an all-reduce that throws most of the result away: 19.7 ms for 12.6 MB
and two ranks of one machine. An all-to-all of the parts, added up here, takes 7.8 ms.

Cost, W ranks, a tensor of G bytes: in a group each rank sends 2 G (W-1)/W for an all-reduce or a
mean, half of that for other calls; through memory it writes G, unless the tensor lies there, and
reads up to W G.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .pool import Pool, private_pool
from .recorder import Recorder, acting
from .shared_memory import SharedMemory, Wait, require_agreement
from .sums import ELEMENTS_AT_ONCE, sum_into, wide
from .waits import control_device

Finish = Callable[[], Tensor]
"""Waits for a started collective and returns its result. Call each once, in the order of the
starts."""

Started = tuple[Callable[..., object], Finish]
"""How to wait for a collective, and how to make its result afterwards."""

Send = Callable[[], Started]
"""Starts a collective in the process group."""

Read = Callable[[list[Tensor]], Tensor]
"""Makes the result of a collective from all ranks' tensors in memory, by rank."""

Lengths = Sequence[Sequence[int]]
"""Numbers of rows, by sender and receiver."""


@dataclass(eq=False)
class Communicator:
    """A group of ranks. All call the same methods in the same order, with tensors of the same
    shapes; in an all-to-all their numbers of rows may differ.

    Args:
        group: their process group; None: this rank is alone.
        recorder: is told of every collective; through memory, of its start and its end separately,
            since nothing happens in between.
        sums_travel_narrow: the process group sends sums of 16-bit numbers in 16 bits.
        comm_dtype: the type in which `start_sum` sends and sums; by default the tensor's own. If it
            is given, everything goes through the process group.

    Attributes:
        rank, size: this rank's number in the group, and the number of ranks.
    """

    group: dist.ProcessGroup | None = None
    recorder: Recorder | None = None
    comm_dtype: torch.dtype | None = None
    sums_travel_narrow: bool = False

    def __post_init__(self) -> None:
        self.size = 1 if self.group is None else dist.get_world_size(self.group)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self._options: Any = {"group": self.group, "async_op": True}
        self._pools: dict[torch.device, Pool] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Refuses copies and pickling with a TypeError if there are other ranks."""
        if self.group is not None:
            raise TypeError(
                "what communicates with other ranks cannot be copied or pickled, since a process "
                "group cannot: copy the model before it is wrapped or cut, or its state_dict()"
            )
        return vars(self)

    # Collectives of tensors, which stay as they are

    def start_all_reduce(self, x: Tensor) -> Finish:
        """Begins the sum of all ranks' `x`."""

        def send() -> Started:
            total = x.to(self._sent(x), copy=True, memory_format=torch.contiguous_format)
            return dist.all_reduce(total, **self._options).wait, lambda: total.to(x.dtype)

        def read(by_rank: list[Tensor]) -> Tensor:
            total = torch.empty_like(x, memory_format=torch.contiguous_format)
            sum_into(total.view(-1), [term.flatten() for term in by_rank])
            return total

        return self._start("all_reduce", x, send, read)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`."""
        return self.start_all_reduce(x)()

    def start_reduce_scatter(
        self, x: Tensor, dim: int, into: Tensor | None = None, accumulate: bool = False
    ) -> Finish:
        """Begins to sum all ranks' `x`; the result is this rank's part of the sum along `dim`. If
        `x` is lent by `take`, its memory goes back when the call is finished. Through shared
        memory it goes back later, when an exchange that starts after that has been waited for: by
        then all ranks have read it.

        Args:
            into: memory for the result.
            accumulate: add to what is in there, instead of overwriting it.

        Raises:
            ValueError: the number of ranks does not divide that dimension.
        """
        own = self.shard_of(x, dim)  # a check: rows might divide by chance, and send wrong parts
        target = torch.empty(own.shape, dtype=x.dtype, device=x.device) if into is None else into

        def send() -> Started:
            parts = torch.cat(x.chunk(self.size, dim)) if dim else x.contiguous()
            parts = parts.to(self._sent(x))  # by rank, along dim 0
            if dist.get_backend(self.group) == "gloo":
                received = torch.empty_like(parts)  # by rank
                work = dist.all_to_all_single(received, parts, **self._options)
                terms = list(received.chunk(self.size))
            else:
                direct = target.dtype == parts.dtype and not accumulate
                terms = [target if direct else parts.new_empty(own.shape)]
                work = dist.reduce_scatter_single(terms[0], parts, **self._options)

            def result() -> Tensor:
                if terms[0] is not target:  # else the sum is there already
                    sum_into(target, terms, accumulate)
                self._pool_of(x.device).give(x)
                return target

            return work.wait, result

        def read(by_rank: list[Tensor]) -> Tensor:
            sum_into(target, [self.shard_of(y, dim) for y in by_rank], accumulate)
            if self.size == 1 and x.device in self._pools:  # else `share` does, once all have read
                self._pools[x.device].give(x)
            return target

        return self._start("reduce_scatter", x, send, read)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part along `dim` of the sum of all ranks' `x`."""
        return self.start_reduce_scatter(x, dim)()

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' `x`, concatenated along `dim`."""

        def send() -> Started:
            whole = x.new_empty(self.size, *x.shape)  # by rank
            work = dist.all_gather_single(whole.flatten(0, 1), x.contiguous(), **self._options)
            return work.wait, lambda: torch.cat(whole.unbind(), dim)

        return self._start("all_gather", x, send, lambda by_rank: torch.cat(by_rank, dim))()

    def start_all_to_all(self, x: Tensor, lengths: Lengths) -> Finish:
        """Begins to exchange rows. Each rank may send and receive a different number of them.

        Args:
            x: this rank's rows, those for rank 0 first: lengths[rank][0] of them, and so on.
            lengths: by sender and receiver, the number of rows; the same on all ranks, for example
                from `gather_numbers`.

        Returns:
            A function that waits, and returns the rows for this rank, those of rank 0 first.
        """

        def send() -> Started:
            received = [row[self.rank] for row in lengths]
            rows = x.new_empty(sum(received), *x.shape[1:])
            sizes = received, list(lengths[self.rank])
            work = dist.all_to_all_single(rows, x.contiguous(), *sizes, **self._options)
            return work.wait, lambda: rows

        def read(by_rank: list[Tensor]) -> Tensor:
            by_sender = zip(by_rank, lengths, strict=True)
            return torch.cat([rows.split(list(row))[self.rank] for rows, row in by_sender])

        return self._start("all_to_all", x, send, read, lengths)

    def all_to_all(self, x: Tensor, lengths: Lengths) -> Tensor:
        """See `start_all_to_all`."""
        return self.start_all_to_all(x, lengths)()

    def gather_numbers(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """The numbers of all ranks, by rank. Each rank gives the same number of them. Waits for a
        GPU only if the group has no CPUs."""
        if self.group is not None:
            device = control_device(self.group, device)
        x = torch.tensor([numbers], device=device)
        gathered: list[list[int]] = self.all_gather(x, 0).tolist()
        return gathered

    def shard_of(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor along `dim`: a view. Raises ValueError if the number of
        ranks does not divide that dimension."""
        size, rest = divmod(x.size(dim), self.size)
        if rest:
            raise ValueError(
                f"dimension {dim} of {tuple(x.shape)} is not a multiple of {self.size}"
            )
        return x.narrow(dim, self.rank * size, size)

    # Memory, and what is exchanged in place

    def keep(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeroed memory, never given back. All ranks ask for the same sizes in the same order."""
        if memory := self._memory_of(device):
            return memory.keep(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Lends memory for one or more elements, to be given to `start_reduce_scatter`."""
        return self._pool_of(device).take(numel, dtype)

    def overlaps(self, device: torch.device) -> bool:
        """Whether a started exchange travels while this rank computes."""
        return self._memory_of(device) is None

    def start_sum(self, x: Tensor, divisor: int = 1) -> Finish:
        """Begins to replace a flat tensor from `keep` by its sum over the ranks, divided by
        `divisor`. Once it is finished, all may read it after the next `barrier`. With one rank `x`
        stays as it is.

        Through memory rank r adds up part r of W, in all ranks' memory:

            memory of rank 0   [ part 0 | part 1 ]     rank 0 reads and writes both parts 0
            memory of rank 1   [ part 0 | part 1 ]     rank 1 reads and writes both parts 1

        Parts are disjoint, so nobody waits. A rank reads G bytes and writes G, for any W.
        """
        if self.size == 1:
            return lambda: x
        memory = self._memory_of(x.device)
        if memory is None:
            sent = x.to((x.is_floating_point() and self.comm_dtype) or x.dtype)  # not if complex
            wait = dist.all_reduce(sent, **self._options).wait
        else:
            by_rank, wait = memory.share("sum", x)

        def finish_sum() -> Tensor:
            wait()
            if memory is None:
                if sent is not x:
                    x.copy_(sent)
                if divisor > 1:
                    x.div_(divisor)
                return x
            begin, end = (len(x) * r // self.size for r in (self.rank, self.rank + 1))
            parts = (y[begin:end].split(ELEMENTS_AT_ONCE) for y in by_rank)
            for terms in zip(*parts, strict=True):  # what stays in cache
                sum_into(terms[0], terms)
                if divisor > 1:
                    terms[0].div_(divisor)
                for other in terms[1:]:
                    other.copy_(terms[0])
            return x

        return finish_sum

    def start_gather(self, shard: Tensor, whole: Tensor) -> Wait:
        """Begins to fill `whole` with all ranks' shards, which are from `keep`. `shard` may be this
        rank's part of `whole`. No rank may change its shard before the next `barrier`. Through
        memory shards are read at the end, without an announcement."""
        if self.size == 1 and shard.data_ptr() == whole.data_ptr():
            return lambda: None
        memory = self._memory_of(shard.device)
        if memory is None:
            return dist.all_gather_single(whole, shard, **self._options).wait  # whole: by rank
        parts = whole.chunk(self.size)  # by rank
        in_place = parts[self.rank].data_ptr() == shard.data_ptr()

        def finish() -> None:
            for rank, part in enumerate(parts):
                if rank != self.rank:
                    memory.copy_from(rank, part if in_place else shard, part)
                elif not in_place:
                    part.copy_(shard)

        return finish

    def barrier(self, device: torch.device, number: int | None = None) -> None:
        """Waits until all ranks have read what they need of this rank's memory on the device, and
        have written what this rank needs of theirs. Does not wait if ranks share no memory.

        Args:
            number: must be the same on all ranks, such as how many steps have led to what is in the
                memory. If it is given, the ranks wait in any case.
        """
        memory = self._memory_of(device)
        if memory is not None:
            memory.announce("barrier", number)()
        elif number is not None:
            said = torch.tensor([number, -number], device=control_device(self.group, device))
            dist.all_reduce(said, dist.ReduceOp.MAX, group=self.group)
            require_agreement(not said.sum())  # the largest number less the smallest

    # The two ways

    def _sent(self, x: Tensor) -> torch.dtype:
        """The type in which the terms of a sum travel through the process group."""
        return x.dtype if self.sums_travel_narrow else wide(x)

    @cached_property
    def _memory(self) -> SharedMemory | None:
        """Opened by the first call that needs it, on all ranks or on none."""
        return SharedMemory.open(self.group) if self.size > 1 else None

    def _memory_of(self, device: torch.device) -> SharedMemory | None:
        return self._memory if device.type == "cpu" and self.comm_dtype is None else None

    def _pool_of(self, device: torch.device) -> Pool:
        device = torch.empty(0, device=device).device  # cuda: tensors there say cuda:0
        if device not in self._pools:
            memory = self._memory_of(device)
            self._pools[device] = memory.pool if memory else private_pool(device)
        return self._pools[device]

    def _start(self, kind: str, x: Tensor, send: Send, read: Read, lengths: Lengths = ()) -> Finish:
        """Starts a collective: `send` through the group, or else `read` makes the result from all
        ranks' tensors in memory."""
        if self.size == 1:
            return lambda: read([x])
        memory = self._memory_of(x.device)
        start: float | None = None
        if memory is None:
            start = time.perf_counter()  # it travels from here on
            wait, result = send()
        else:
            with acting(self.recorder, kind):  # nothing happens until the end
                by_rank, wait = memory.share(kind, x, lengths)

        def finish() -> Tensor:
            with acting(self.recorder, kind, start=start):
                wait()
                return result() if memory is None else read(by_rank)

        return finish
