"""Averages the gradients of the ranks.

Problem: after backward every rank holds the gradient of its own examples; before the optimizer
steps all must hold the mean. Three ways, from the one to explain to the one to use:

    per_parameter   average_gradients: an all-reduce for each parameter, after backward
    flat            average_gradients_flat: one all-reduce of everything, after backward
    overlap         GradientBuckets: a few, each started as soon as its last gradient is there

Idea of the buckets: backward produces gradients from the last layer to the first. Parameters are
grouped, in that order, into flat buckets; p.grad is a view of its place in the bucket. When the
last gradient of a bucket has arrived the bucket is all-reduced asynchronously, while backward
goes on with the layers before it. Afterwards nothing is copied back: the optimizer reads the
views.

    backward:    block 3 | block 2 | block 1 | block 0 | embedding |
    network:             | bucket 0 .... | bucket 1 ...... | bucket 2 |

Cost: a ring all-reduce of G bytes of gradients over W ranks sends 2 * G * (W-1)/W bytes from
each rank, whatever the grouping; the grouping decides how often its latency is paid, and the
overlap how much of the rest is hidden. Memory: the buckets are the gradients; with `comm_dtype`
a copy in that type is held while a bucket is on its way. CPU ranks of one machine have no network
to hide: they add each other's buckets where they lie, in shared memory. A bucket is then summed
after a small all-reduce of its flags, to which each rank comes when its bucket is full, and
gradients are used after a barrier.

Papers: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020; Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.recorder import Recorder, listening
from runtime.shared_memory import CHUNK, SharedBuffers, add_up, aligned

TensorT = TypeVar("TensorT", bound=Tensor)


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replaces every gradient by its mean over the ranks, one parameter at a time.

    A parameter that has a gradient on some ranks only counts as zero on the others; one that
    has none anywhere keeps none, so that the optimizer leaves it alone.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p, somewhere in zip(parameters, _has_gradient(parameters, group), strict=True):
        if not somewhere:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size(group)


def average_gradients_flat(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """The same with one all-reduce per type of gradient: packed, reduced, and copied back."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    somewhere = _has_gradient(parameters, group)
    used = [p for p, has in zip(parameters, somewhere, strict=True) if has]
    for dtype in dict.fromkeys(p.dtype for p in used):
        alike = [p for p in used if p.dtype == dtype]
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in alike]
        )
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for p, part in zip(alike, flat.split([p.numel() for p in alike]), strict=True):
            if p.grad is None:
                p.grad = torch.empty_like(p)
            p.grad.copy_(part.view_as(p))


def _has_gradient(parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> list[bool]:
    """For each parameter, whether any rank has a gradient of it."""
    if not parameters:
        return []
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    has = has.to(parameters[0].device)
    dist.all_reduce(has, op=dist.ReduceOp.MAX, group=group)
    return [bool(h) for h in has.tolist()]


class _Bucket:
    """A flat buffer of gradients, and behind them one flag per parameter.

    A flag is 1 where the rank has a gradient of that parameter. Being summed over the ranks along
    with the gradients, or just before them, the flags tell each rank, at no further collective,
    which parameters have a gradient on any rank.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.numel = sum(p.numel() for p in parameters)
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        self.waiting = len(parameters)  # gradients that this backward has not brought yet
        self.complete = True  # every parameter has a gradient on this rank
        self.work: dist.Work | None = None
        self.sent: Tensor | None = None  # what is on its way: all, or flags, or a copy
        self.sent_at = 0.0

    @property
    def nbytes(self) -> int:
        """Of the buffer, rounded up so that the next one starts on a cache line."""
        return aligned((self.numel + len(self.parameters)) * self.dtype.itemsize)

    def lay_out(self, flat: Tensor) -> None:
        """Takes `flat`, zeros, as the buffer."""
        self.flat = flat
        self.gradients, self.flags = flat[: self.numel], flat[self.numel :]
        parts = self.gradients.split([p.numel() for p in self.parameters])
        self.views = [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]

    def adopt(self, i: int) -> None:
        """Makes the gradient of parameter i a view of the buffer, where it is not yet: after
        optimizer.zero_grad() autograd has left a tensor of its own, which is moved in by one copy
        and freed. (Keeping the view and zeroing it would move twice as much memory: zero it, then
        read, add and write.)"""
        p, view = self.parameters[i], self.views[i]
        if p.grad is not None and p.grad.data_ptr() != view.data_ptr():
            view.copy_(p.grad)
            p.grad = view

    def complete_locally(self) -> None:
        """Puts zeros where this rank has no gradient, and sets the flags."""
        for i, p in enumerate(self.parameters):
            self.adopt(i)  # a gradient that came by another way than backward
            if p.grad is None:
                self.views[i].zero_()
        here = [p.grad is not None for p in self.parameters]
        self.complete = all(here)
        if self.complete:
            self.flags.fill_(1)
        else:
            self.flags.copy_(torch.tensor(here))

    def hand_back(self) -> None:
        """Gives every parameter that has a gradient on any rank its view."""
        # The flags are read, which on a GPU waits for it, only where they can say something new.
        somewhere = [True] * len(self.views) if self.complete else self.flags.tolist()
        for p, view, has in zip(self.parameters, self.views, somewhere, strict=True):
            p.grad = view if has else None
        self.work, self.sent, self.waiting = None, None, len(self.parameters)


class GradientBuckets:
    """Averages gradients over the ranks while backward is still running.

        buckets = GradientBuckets(model)
        with buckets.no_sync():          # accumulation: local, no communication
            loss(first).backward()
        loss(second).backward()          # the buckets leave as they fill
        buckets.finish()                 # p.grad is the mean over the ranks
        optimizer.step()
        optimizer.zero_grad()

    All ranks must call finish() equally often, with or without a backward before it: a rank
    that has no examples left takes part with zeros. Ranks send the buckets in the same order,
    whatever the order in which their gradients arrive, since collectives are matched by order.
    For the same reason nothing else may be sent over `group` between a backward and finish():
    one rank may have sent its buckets by then, and another not.

    Args:
        model: its trainable parameters; a tied weight is one parameter and is sent once. Must
            be on its device before, and keep its parameters after.
        group: the ranks to average over; by default all of them.
        bucket_bytes: a bucket is closed when the next parameter would make it larger. A
            parameter that is larger by itself gets a bucket of its own.
        comm_dtype: the type in which gradients travel and are summed, by default their own.
        share_memory: lets CPU ranks of one machine sum in shared memory, where they can.
        recorder: is told of each bucket's `all_reduce`, from its leaving until this rank has
            waited for the result, and of the `barrier` after shared memory.

    Raises:
        ValueError: bucket_bytes is not positive, or the model has nothing to train.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 4 << 20,
        comm_dtype: torch.dtype | None = None,
        share_memory: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes {bucket_bytes} must be positive, for example {4 << 20}")
        # Backward reaches the parameters roughly in the reverse of the order of their creation.
        parameters = [p for p in model.parameters() if p.requires_grad][::-1]
        if not parameters:
            raise ValueError("the model has no parameter that requires a gradient")
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.comm_dtype = comm_dtype
        self.recorder = recorder
        self.buckets = [_Bucket(ps) for ps in group_parameters(parameters, bucket_bytes)]
        self.shared: SharedBuffers | None = None
        on_cpu = all(bucket.device.type == "cpu" for bucket in self.buckets)
        if share_memory and on_cpu and comm_dtype is None:
            self.shared = SharedBuffers.open(sum(b.nbytes for b in self.buckets), group)
        self._lay_out()
        self._sync = True
        self._next = 0  # the first bucket not yet sent
        self._handles = [
            p.register_post_accumulate_grad_hook(self._make_hook(bucket, i))
            for bucket in self.buckets
            for i, p in enumerate(bucket.parameters)
        ]

    def _lay_out(self) -> None:
        self._as_held: list[list[Tensor]] = []  # with shared memory: a bucket as each rank has it
        offset = 0
        for b in self.buckets:
            numel = b.numel + len(b.parameters)
            if self.shared is None:
                b.lay_out(torch.zeros(numel, dtype=b.dtype, device=b.device))
                continue
            b.lay_out(self.shared.view(self.shared.rank, offset, numel, b.dtype))
            self._as_held.append(
                [self.shared.view(r, offset, b.numel, b.dtype) for r in range(self.world_size)]
            )
            offset += b.nbytes

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward accumulates gradients locally and sends nothing."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish(self) -> None:
        """Sends what has not left yet, waits for all, and leaves the mean in every p.grad."""
        while self._next < len(self.buckets):
            self._send(self.buckets[self._next])
        for i in range(len(self.buckets)):
            self._receive(i)
        if self.shared is not None:
            start = time.perf_counter()
            dist.barrier(self.group)  # until all ranks have written their parts of my buckets
            self._record("barrier", -1, start)
        for bucket in self.buckets:
            bucket.hand_back()
        self._next = 0

    def close(self) -> None:
        """Takes the hooks off the parameters; their gradients stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _make_hook(self, bucket: _Bucket, i: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if bucket.work is not None:
                raise RuntimeError(
                    "backward ran again while the gradients of the last one were being averaged: "
                    "call finish() after each backward, or accumulate inside no_sync()"
                )
            bucket.adopt(i)
            if self._sync:
                bucket.waiting -= 1
                while self._next < len(self.buckets) and not self.buckets[self._next].waiting:
                    self._send(self.buckets[self._next])

        return hook

    def _send(self, bucket: _Bucket) -> None:
        bucket.complete_locally()
        bucket.sent_at = time.perf_counter()
        if self.shared is not None:
            bucket.sent = bucket.flags  # says that this rank's bucket is full
        elif self.comm_dtype is None:
            bucket.sent = bucket.flat
        else:
            bucket.sent = bucket.flat.to(self.comm_dtype)
        bucket.work = dist.all_reduce(bucket.sent, group=self.group, async_op=True)
        self._next += 1

    def _receive(self, i: int) -> None:
        bucket = self.buckets[i]
        assert bucket.work is not None and bucket.sent is not None
        bucket.work.wait()
        if self.shared is not None:
            _average_in_place(self._as_held[i], self.shared.rank)
        else:
            if bucket.sent is not bucket.flat:
                bucket.flat.copy_(bucket.sent)
            bucket.gradients.div_(self.world_size)
        self._record("all_reduce", i, bucket.sent_at)

    def _record(self, kind: str, i: int, start: float) -> None:
        if (recorder := listening(self.recorder)) is not None:
            if (device := self.buckets[i].device).type == "cuda":
                torch.cuda.synchronize(device)  # kernels run later than they are launched
            recorder(kind, i, -1, start, time.perf_counter())


def group_parameters(parameters: list[TensorT], bucket_bytes: int) -> list[list[TensorT]]:
    """Cuts the parameters, or other tensors, in their order, into groups of one type and device and
    of at most bucket_bytes each, unless a single one is larger. Groups come in the order in which
    they are full."""
    done: list[list[TensorT]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[TensorT]] = {}
    for p in parameters:
        group = filling.setdefault((p.dtype, p.device), [])
        if group and sum(q.nbytes for q in group) + p.nbytes > bucket_bytes:
            done.append(group)
            group = filling[p.dtype, p.device] = []
        group.append(p)
    return done + [group for group in filling.values() if group]


def _average_in_place(parts: list[Tensor], rank: int) -> None:
    """Writes the mean of this rank's part of a bucket, as the ranks hold it in shared memory, into
    all of them.

    Rank r adds part r of W of all ranks' buckets, always in the order of ranks:

        bucket of rank 0   [ part 0 | part 1 ]     rank 0 reads both parts 0, writes both parts 0
        bucket of rank 1   [ part 0 | part 1 ]     rank 1 reads both parts 1, writes both parts 1

    Parts are disjoint, so nobody waits within a bucket. Per rank, G bytes are read and G written,
    whatever W; gloo's ring takes about four times the copies.
    """
    world_size, numel = len(parts), parts[0].numel()
    begin, end = (numel * r // world_size for r in (rank, rank + 1))
    for start in range(begin, end, CHUNK):
        chunks = [part[start : min(end, start + CHUNK)] for part in parts]
        mean = add_up(chunks) / world_size
        for chunk in chunks:
            chunk.copy_(mean)
