"""A whole model on every rank, whose gradients are averaged over the ranks.

Problem: W copies of a model must stay equal, though each sees other examples. After backward every
rank has the gradient of its own examples; before the optimizer step all need the mean.

Idea: rank 0's weights are sent to all once. After that only gradients travel. Their mean has the
same bits on every rank, and so has the optimizer's update. Three ways, simplest first:

    per_parameter   average_gradients: an all-reduce for each parameter, after backward
    flat            average_gradients_flat: one all-reduce of everything, after backward
    overlap         GradientBuckets: a few, each started as soon as its last gradient is ready

Idea of the buckets: backward produces gradients from the last layer to the first. Parameters are
grouped, in that order, into flat buckets; p.grad is a view into its bucket. A full bucket is sent
while backward continues with earlier layers.

    backward:    block 3 | block 2 | block 1 | block 0 | embedding |
    network:             | bucket 0 .... | bucket 1 ...... | bucket 2 |

`DistributedDataParallel` is a module with buckets around it:

    model = DistributedDataParallel(net)          # broadcast_params
    loss = loss_fn(model(mine)) * W / whole       # a sum over this rank's part of `whole` examples
    loss.backward()                               # buckets leave as they fill
    model.average_gradients()                     # p.grad is the mean over the ranks
    optimizer.step()

CPU ranks of one machine read each other's buckets (runtime/communicator.py), and nothing travels: a
full bucket is announced while backward runs, and all are averaged in finish(). To average what has
arrived between the layers of backward was no faster, since it takes the core that computes.

Cost: one broadcast of the parameters. A ring all-reduce of G bytes over W ranks sends
2 * G * (W-1)/W bytes from each rank, for any grouping; fewer buckets pay the latency less often,
more buckets overlap better. Memory: every rank holds all parameters, gradients and optimizer state
(fsdp.py is for models too large for that); the buckets are the gradients; with `comm_dtype` a
bucket in transit has a copy in that type.

Papers: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020; Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.communicator import Communicator, Finish
from runtime.recorder import Recorder, acting
from runtime.waits import control_device

TensorT = TypeVar("TensorT", bound=Tensor)
BROADCAST_BYTES = 25 << 20  # at a time


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replaces every gradient by its mean over the ranks, one parameter at a time.

    A gradient that exists only on some ranks counts as zero on the others. A parameter without a
    gradient on any rank keeps none, so the optimizer skips it.
    """
    for gradient in _gradients(model, group):
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)


def average_gradients_flat(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """The same with one all-reduce per dtype: gradients are packed, reduced and copied back."""
    for alike in group_by_size(_gradients(model, group), sys.maxsize):
        flat = torch.cat([gradient.flatten() for gradient in alike])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        copy_back(flat, alike)


def _gradients(model: nn.Module, group: dist.ProcessGroup | None) -> list[Tensor]:
    """The gradients that exist on any rank, in one order on all; zeros where this one has none."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        return []
    device = control_device(group, parameters[0].device)
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=device)
    dist.all_reduce(has, op=dist.ReduceOp.MAX, group=group)
    for p, somewhere in zip(parameters, has.tolist(), strict=True):
        _make_dense(p)
        if somewhere and p.grad is None:
            p.grad = torch.zeros_like(p)
    return [p.grad for p in parameters if p.grad is not None]


def _make_dense(p: nn.Parameter) -> None:
    """Collectives take dense gradients; an embedding's may be sparse."""
    if p.grad is not None and p.grad.is_sparse:
        p.grad = p.grad.to_dense()


class _Bucket:
    """`flat`: a buffer of gradients, followed by one flag per parameter: 1 if this rank has its
    gradient. The flags are summed with the gradients, which tells every rank which parameters have
    a gradient on any rank."""

    def __init__(self, parameters: list[nn.Parameter], communicator: Communicator) -> None:
        self.parameters, first = parameters, parameters[0]
        numels = [p.numel() for p in parameters]
        numel = sum(numels) + len(parameters)
        self.flat = communicator.keep(numel, first.dtype, first.device)
        *parts, self.flags = self.flat.split([*numels, len(parameters)])
        self.views = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        self.waiting = len(parameters)  # gradients that this backward has yet to produce
        self.arrived = 0  # of backwards that send nothing
        self.complete = True  # every parameter has a gradient on this rank
        self.finish: Finish | None = None  # replaces it by the mean, flags too
        self.sent_at = 0.0

    def adopt(self) -> None:
        """Makes gradients views of the buffer. After optimizer.zero_grad() autograd allocates new
        ones, which are copied once: on a GPU by one kernel. (Zeroing the views and adding to them
        would move twice as much memory.)"""
        views, gradients = [], []
        for p, view in zip(self.parameters, self.views, strict=True):
            _make_dense(p)
            if p.grad is not None and p.grad.data_ptr() != view.data_ptr():
                views.append(view)
                gradients.append(p.grad)
                p.grad = view  # a next backward adds to it in place
        if views:
            torch._foreach_copy_(views, gradients)

    def complete_locally(self) -> None:
        """Fills the buffer, with zeros where this rank has no gradient, and sets the flags."""
        self.adopt()
        is_there = [p.grad is not None for p in self.parameters]
        self.complete = all(is_there)
        if self.complete:
            self.flags.fill_(1)
            return
        for has, view, flag in zip(is_there, self.views, self.flags, strict=True):
            flag.fill_(has)
            if not has:
                view.zero_()  # it may hold an earlier step's

    def hand_back(self) -> None:
        """Sets p.grad to its view for every parameter with a gradient on any rank."""
        # Reading the flags waits for the GPU, so read them only if a gradient is missing here.
        somewhere = [True] * len(self.views) if self.complete else self.flags.tolist()
        for p, view, has in zip(self.parameters, self.views, somewhere, strict=True):
            p.grad = view if has else None
        self.finish, self.waiting = None, len(self.parameters)


class GradientBuckets:
    """Averages gradients over the ranks while backward is still running.

        buckets = GradientBuckets(model.parameters())
        buckets.watch()                  # backward says what is ready
        with buckets.no_sync():          # accumulation: local, no communication
            loss(first).backward()
        loss(second).backward()          # the buckets leave as they fill
        buckets.finish()                 # p.grad is the mean over the ranks

    All ranks must call finish() equally often; a rank with no examples left contributes zeros.
    Buckets leave in the same order on all ranks, and nothing else may be sent over `group` between
    a backward and finish(). A caller that adds to p.grad without autograd calls `ready` after each
    addition, and does not call `watch`.

    Args:
        parameters: of a model, each once, already on their device; frozen ones are skipped.
        apart: parameters that get a bucket each, such as tied ones: their bucket neighbours differ
            between ranks, yet all must get the same bits. (With three or more ranks a number's
            place in its bucket may decide the order in which a ring adds.)
        group: the ranks to average over; by default all of them.
        bucket_bytes: the largest bucket, unless a single parameter is larger; by default 25 MiB on
            a GPU, as in PyTorch, since each is a few kernels and GPUs fill it in a millisecond;
            4 MiB on a CPU, which stay in the cores' caches.
        comm_dtype: the type in which gradients are sent and summed; by default their own.
        recorder: is told of each bucket's `all_reduce`. Where buckets travel while backward runs,
            it lasts from the start to the result; where ranks read each other's memory, it is the
            averaging in `finish`, and a `barrier` follows, which only such ranks wait for.

    Raises:
        ValueError: the model has nothing to train.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int | None = None,
        comm_dtype: torch.dtype | None = None,
        recorder: Recorder | None = None,
        apart: Collection[nn.Parameter] = (),
    ) -> None:
        # Backward reaches the parameters roughly in reverse order of creation.
        trained = [p for p in parameters if p.requires_grad][::-1]
        if not trained:
            raise ValueError("the model has no parameter that requires a gradient")
        self.recorder = recorder
        self._device = trained[0].device
        most = bucket_bytes or (4 if self._device.type == "cpu" else 25) << 20
        separate = set(apart)  # only looked up in: its order may differ between ranks
        groups = group_by_size([p for p in trained if p not in separate], most)
        groups += [[p] for p in trained if p in separate]
        self._communicator = Communicator(group or dist.group.WORLD, comm_dtype=comm_dtype)
        self.buckets = [_Bucket(ps, self._communicator) for ps in groups]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._sync = True  # whether a backward sends
        self._next = 0  # the first bucket not yet sent

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward accumulates gradients locally and sends nothing."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def watch(self) -> None:
        """From now on every backward says which gradients are ready."""
        # The garbage collector does not see what a hook refers to: it must not keep the buckets.
        ready = weakref.WeakMethod(self.ready)

        def tell(p: Tensor) -> None:
            if (call := ready()) is not None:
                call([cast(nn.Parameter, p)])

        for p in self._bucket_of:  # a hook runs in each backward, once its p.grad is added to
            p.register_post_accumulate_grad_hook(tell)

    def ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """A backward has added the gradients of these parameters to their p.grad: buckets that are
        full now leave."""
        for p in parameters:
            bucket = self._bucket_of[p]
            if bucket.finish is not None:
                raise RuntimeError(
                    "call finish() after each backward, or accumulate inside no_sync()"
                )
            if not self._sync:
                bucket.arrived += 1
                if bucket.arrived % len(bucket.parameters) == 0:  # else their memory stays, too
                    bucket.adopt()
                continue
            bucket.waiting -= 1  # a full bucket waits for earlier ones: one order everywhere
            while self._next < len(self.buckets) and not self.buckets[self._next].waiting:
                self._send(self.buckets[self._next])

    def finish(self) -> None:
        """Sends the remaining buckets, waits for all, and leaves the mean in every p.grad."""
        while self._next < len(self.buckets):  # backward has not filled this one, or one before it
            self._send(self.buckets[self._next])
        for i, bucket in enumerate(self.buckets):
            assert bucket.finish is not None
            start = bucket.sent_at if self._communicator.overlaps(self._device) else None
            with acting(self.recorder, "all_reduce", i, device=self._device, start=start):
                bucket.finish()
        with acting(self.recorder, "barrier"):  # all ranks have written their parts of my buckets
            self._communicator.barrier(self._device)
        for bucket in self.buckets:
            bucket.hand_back()
        self._next = 0

    def _send(self, bucket: _Bucket) -> None:
        bucket.complete_locally()
        bucket.sent_at = time.perf_counter()
        bucket.finish = self._communicator.start_mean(bucket.flat)
        self._next += 1


class DistributedDataParallel(nn.Module):
    """Keeps `module` the same on all ranks.

    All ranks must construct it together, with the same module. Buffers are sent once, with the
    parameters; later writes to them (the averages of a batch norm) stay on their rank.

    Args:
        module: already on its device.
        group: the ranks; by default all.
        bucket_bytes, comm_dtype, recorder: see `GradientBuckets`.

    Raises:
        ValueError: names, shapes, types or what is trained differ between ranks; or there is
            nothing to train.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int | None = None,
        comm_dtype: torch.dtype | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.group = group
        self._check_that_all_have_the_same_module()
        self.broadcast_params()
        self.buckets = GradientBuckets(
            module.parameters(), group, bucket_bytes, comm_dtype, recorder
        )
        self.buckets.watch()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's output for this rank's part of the batch."""
        return self.module(*inputs, **kwargs)

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Overwrites every rank's parameters and buffers with rank 0's, many at a time, since one
        broadcast per tensor would pay the latency for every bias."""
        tensors = [*self.module.parameters(), *self.module.buffers()]  # a shared one comes once
        for alike in group_by_size(tensors, BROADCAST_BYTES):
            # bytes, since gloo does not send every dtype
            flat = torch.cat([t.detach().flatten().view(torch.uint8) for t in alike])
            dist.broadcast(flat, group=self.group, group_src=0)  # overwrites all but rank 0's
            copy_back(flat.view(alike[0].dtype), alike)

    def average_gradients(self) -> None:
        """Waits until every p.grad is the mean over the ranks. Call it after each backward outside
        `no_sync()`, equally often on all ranks."""
        self.buckets.finish()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward accumulates gradients locally and sends nothing."""
        return self.buckets.no_sync()

    def _check_that_all_have_the_same_module(self) -> None:
        """Otherwise broadcasts of different sizes would hang or mix up the weights."""
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        described = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]
        by_rank: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(by_rank, described, self.group)
        others = [rank for rank, other in enumerate(by_rank) if other != by_rank[0]]
        if others:  # the same on all ranks: all raise, or none
            raise ValueError(
                f"ranks {others} have another module than rank 0: all must construct the same one"
            )


def group_by_size(tensors: Iterable[TensorT], most_bytes: int) -> list[list[TensorT]]:
    """Groups tensors, in their order, by type and device, into at most `most_bytes` each, unless a
    single one is larger. Groups come in the order in which they fill."""
    done: list[list[TensorT]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[TensorT]] = {}  # one open group of each
    for t in tensors:
        group = filling.setdefault((t.dtype, t.device), [])
        if group and sum(other.nbytes for other in group) + t.nbytes > most_bytes:
            done.append(group)
            group = filling[t.dtype, t.device] = []
        group.append(t)
    return done + [group for group in filling.values() if group]


def copy_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies consecutive parts of `flat` into the tensors."""
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        t.copy_(part.view_as(t))
