"""Gradients in flat buckets, exchanged while backward runs.

Problem: a collective per parameter pays its latency too often; one for everything, after backward,
leaves the network idle while backward computes.

Idea: backward produces gradients from the last layer to the first. Parameters are grouped, in that
order, into flat buckets; p.grad is a view into its bucket. A full bucket is sent while backward
continues with earlier layers.

    backward:    block 3 | block 2 | block 1 | block 0 | embedding |
    network:             | bucket 0 .... | bucket 1 ...... | bucket 2 |

Where an exchange starts:

    autograd adds to p.grad  >  GradientBuckets.ready  >  start_exchange of a bucket that is full
    GradientBuckets.finish   >  start_exchange of the others, then finish_exchange of each

- Through NCCL or gloo a bucket travels from then on, while backward runs.
- CPU ranks of one machine read each other's buckets, and nothing travels (runtime/communicator.py):
  a full bucket is announced while backward runs, and all are added up in `finish`. This is the
  default on CPUs, and there no sum starts in backward. Adding up buckets that have arrived, between
  the layers of backward, was no faster, since it takes the core that computes.

There are two kinds of bucket. Of a `SummedBucket` each rank gets the whole sum, by an all-reduce;
of a `zero1.ScatteredBucket` it gets a part, by a reduce-scatter. Sums are right if every rank
divides its loss by the count of all ranks together. `DistributedDataParallel` lets each rank have a
loss of its own and wants the mean, so its buckets divide.

Cost: fewer buckets pay the latency less often, more buckets overlap better. The gradients lie in
the buckets; with `comm_dtype` a bucket in transit has a copy in that type.

A gradient lies in its bucket with the strides of its parameter, as autograd would make it: fused
optimizers take both by address. docs/semantics.md says who else hands over memory by address.

Paper: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.communicator import Communicator, Finish
from runtime.recorder import Recorder, acting

TensorT = TypeVar("TensorT", bound=Tensor)

UNFINISHED = (
    "call finish() after each backward, also one that has failed, or accumulate inside no_sync(); "
    "in one backward each weight is ready once: checkpoints of one weight need use_reentrant=False"
)


class Bucket:
    """Parameters whose gradients are exchanged together. Each kind of bucket has its own exchange.

    Args:
        parameters: in the order in which backward reaches them.
        flat: memory for their gradients, from `Communicator.keep`.
        views: of it, one for each parameter.

    Attributes:
        waiting: gradients that this backward has yet to produce.
        started: whether its exchange has started and is not finished.
    """

    kind: str  # of the exchange, for the timeline
    finish_sum: Finish  # set by `start_exchange`

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        flat: Tensor,
        views: Sequence[Tensor],
        communicator: Communicator,
    ) -> None:
        self.parameters, self.flat, self.communicator = parameters, flat, communicator
        self.views = [view_like(p, view) for p, view in zip(parameters, views, strict=True)]
        self.waiting = len(parameters)
        self.started, self.started_at = False, 0.0

    def start_exchange(self) -> None:
        """Sends the buffer, filled with this rank's gradients."""

    def finish_exchange(self) -> None:
        """Waits for the other ranks' gradients, and adds them up."""
        self.finish_sum()

    def hand_back(self) -> None:
        """Puts the result where an optimizer finds it, when all ranks have finished."""

    @torch.no_grad()  # a backward may be recorded, too
    def adopt(self) -> None:
        """Makes gradients views of the buffer. After optimizer.zero_grad() autograd allocates new
        gradients, which are copied there once: on a GPU by one kernel. (Zeroing the views and
        adding to them would move twice as much memory.)"""
        views, gradients = [], []
        for p, view in zip(self.parameters, self.views, strict=True):
            make_dense(p)
            gradient = p.grad
            if gradient is not None and gradient is not view:
                views.append(view)
                gradients.append(gradient)
                p.grad = view  # a next backward adds to it in place
        if views:
            torch._foreach_copy_(views, gradients)

    def fill(self) -> list[bool]:
        """Fills the buffer, with zeros where this rank has no gradient; returns where it has."""
        self.adopt()
        is_there = [p.grad is not None for p in self.parameters]
        for has, view in zip(is_there, self.views, strict=True):
            if not has:
                view.zero_()  # it may hold an earlier step's
        return is_there


class SummedBucket(Bucket):
    """Every rank gets the sum over the ranks, divided by `divisor`, in its own buffer.

    One flag per parameter follows the gradients: 1 if this rank has its gradient. The flags are
    summed with the gradients, which tells every rank which parameters have one on any rank.
    """

    kind = "all_reduce"

    def __init__(
        self, parameters: Sequence[nn.Parameter], communicator: Communicator, divisor: int = 1
    ) -> None:
        first, numels = parameters[0], [p.numel() for p in parameters]
        flat = communicator.keep(sum(numels) + len(numels), first.dtype, first.device)
        *parts, self.flags = flat.split([*numels, len(numels)])
        super().__init__(parameters, flat, parts, communicator)
        self.divisor = divisor
        self.is_there: list[bool] = []  # by parameter, whether this rank has its gradient

    def start_exchange(self) -> None:
        self.is_there = self.fill()
        self.flags.fill_(1)
        for has, flag in zip(self.is_there, self.flags, strict=True):
            if not has:
                flag.zero_()
        self.finish_sum = self.communicator.start_sum(self.flat, self.divisor)

    def hand_back(self) -> None:
        """Sets p.grad to its view for every parameter with a gradient on any rank."""
        # Reading the flags waits for the GPU, so read them only if a gradient is missing here.
        somewhere = self.is_there if all(self.is_there) else self.flags.tolist()
        for p, view, has in zip(self.parameters, self.views, somewhere, strict=True):
            p.grad = view if has else None


class GradientBuckets:
    """Exchanges gradients with the other ranks while backward is still running.

        groups = in_backward_order(model.parameters())
        buckets = GradientBuckets([SummedBucket(group, communicator) for group in groups])
        buckets.watch()                  # backward says what is ready
        with buckets.no_sync():          # accumulation: local, no communication
            loss(first).backward()
        loss(second).backward()          # the buckets leave as they fill
        buckets.finish()                 # p.grad is the sum over the ranks

    All ranks must call finish() equally often; a rank with no examples left contributes zeros.
    Buckets leave in the same order on all ranks, and nothing else may be sent over their group
    between a backward and finish(). After a sum, the next backward must find no gradients, else it
    would add to those of all ranks. A caller that adds to p.grad without autograd calls `ready`
    after each addition, and does not call `watch`.

    Args:
        buckets: of one communicator, in the order in which backward fills them. Their kind says
            what is exchanged: `SummedBucket`, or `zero1.ScatteredBucket`.
        recorder: is told of each bucket's exchange. Where buckets travel while backward runs, an
            exchange lasts from its start to its result. Where ranks read each other's memory, it is
            the adding up in `finish`, and a `barrier` follows, for which only such ranks wait.
    """

    def __init__(self, buckets: Sequence[Bucket], recorder: Recorder | None = None) -> None:
        self.buckets, self.recorder = buckets, recorder
        self._communicator, self._device = buckets[0].communicator, buckets[0].flat.device
        self._bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        self._sync = True  # whether a backward sends
        self._next = 0  # the first bucket not yet sent

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward accumulates gradients locally and sends nothing."""
        if any(bucket.started for bucket in self.buckets):  # inside, only few gradients tell
            raise RuntimeError(UNFINISHED)
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def watch(self) -> None:
        """From now on every backward says which gradients are ready."""
        # The garbage collector does not see what a hook refers to: no hook may keep the buckets.
        weak = weakref.ref(self)

        def tell(p: Tensor, always: bool = False) -> None:
            if (buckets := weak()) and (always or buckets._sync):
                buckets.ready((cast(nn.Parameter, p),))

        for bucket in self.buckets:
            for p in bucket.parameters:  # a hook runs in each backward, once p.grad is added to
                is_last = p is bucket.parameters[-1]
                p.register_post_accumulate_grad_hook(
                    partial(tell, always=True) if is_last else tell
                )

    def ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """A backward has added the gradients of these parameters to their p.grad: buckets that are
        full now leave."""
        for p in parameters:
            bucket = self._bucket_of[p]
            if bucket.started:
                raise RuntimeError(UNFINISHED)
            if not self._sync:
                if p is bucket.parameters[-1]:  # most often the last to come
                    bucket.adopt()  # else the gradients' own memory stays, too
                continue
            bucket.waiting -= 1  # a full bucket waits for earlier ones: one order everywhere
            while self._next < len(self.buckets) and not self.buckets[self._next].waiting:
                self._send_next()

    def finish(self) -> None:
        """Sends the remaining buckets, waits for all, and leaves the result in every gradient."""
        while self._next < len(self.buckets):  # backward has not filled this one, or one before it
            self._send_next()
        travels = self._communicator.overlaps(self._device)
        for i, bucket in enumerate(self.buckets):
            start = bucket.started_at if travels else None
            with acting(self.recorder, bucket.kind, i, device=self._device, start=start):
                bucket.finish_exchange()
        with acting(self.recorder, "barrier"):  # all ranks are done with each other's buckets
            self._communicator.barrier(self._device)
        for bucket in self.buckets:
            bucket.hand_back()
            bucket.started, bucket.waiting = False, len(bucket.parameters)
        self._next = 0

    def _send_next(self) -> None:
        bucket = self.buckets[self._next]
        bucket.started, bucket.started_at = True, time.perf_counter()
        bucket.start_exchange()
        self._next += 1


def in_backward_order(
    parameters: Iterable[nn.Parameter],
    bucket_bytes: int | None = None,
    kind: Callable[[nn.Parameter], Hashable] = lambda _: None,
) -> list[list[nn.Parameter]]:
    """Groups a model's trained parameters into buckets, in the order in which backward fills them.

    Args:
        parameters: each once, already on their device; frozen ones are left out.
        bucket_bytes: the largest bucket, unless a single parameter is larger; by default 25 MiB on
            a GPU, as in PyTorch, since each bucket takes a few kernels and GPUs fill it in a
            millisecond; 4 MiB on a CPU, which stay in the cores' caches.
        kind: parameters of different kinds get different buckets.

    Raises:
        ValueError: the model has nothing to train.
    """
    # Backward reaches the parameters roughly in reverse order of creation.
    trained = [p for p in parameters if p.requires_grad][::-1]
    if not trained:
        raise ValueError("the model has no parameter that requires a gradient")
    most = bucket_bytes or (4 if trained[0].device.type == "cpu" else 25) << 20
    return group_by_size(trained, most, kind)


def group_by_size(
    tensors: Iterable[TensorT], most: int, kind: Callable[[TensorT], Hashable] = lambda _: None
) -> list[list[TensorT]]:
    """Groups tensors, in their order, by type, device and kind, into at most `most` bytes each,
    unless a single one is larger. Groups come in the order of their last tensors."""
    tensors = list(tensors)
    groups: list[list[int]] = []  # places in the list
    filling: dict[Hashable, list[int]] = {}  # the last group of each kind
    for i, t in enumerate(tensors):
        alike = (t.dtype, t.device, kind(t))
        filled = sum(tensors[k].nbytes for k in filling.get(alike, ()))
        if not filled or filled + t.nbytes > most:
            filling[alike] = []
            groups.append(filling[alike])
        filling[alike].append(i)
    groups.sort(key=lambda group: group[-1])
    return [[tensors[i] for i in group] for group in groups]


def refuse_other_tensors(
    named: Iterable[tuple[str, Tensor]], groups: Iterable[dist.ProcessGroup | None]
) -> None:
    """ValueError on all ranks of a group unless they have the same tensors in the same order:
    otherwise collectives would hang, or mix them up. All must call it. (None: a rank alone.)"""
    described = [  # buckets hold gradients in the order in which parameters lie in memory
        (name, tuple(t.shape), t.stride(), str(t.dtype), t.requires_grad) for name, t in named
    ]
    for group in filter(None, groups):
        by_rank: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(by_rank, described, group)
        others = [rank for rank, other in enumerate(by_rank) if other != by_rank[0]]
        if others:  # the same on all ranks: all raise, or none
            raise ValueError(
                f"ranks {others} have a module unlike rank 0's: all must construct the same one"
            )


def make_dense(p: nn.Parameter) -> None:
    """Collectives take dense gradients; an embedding's may be sparse."""
    if p.grad is not None and p.grad.is_sparse:
        p.grad = p.grad.to_dense()


def view_like(p: Tensor, part: Tensor) -> Tensor:
    """A flat tensor of as many elements, seen as a gradient of `p`, with its strides."""
    return part.as_strided(p.shape, torch.empty_like(p, device="meta").stride())
