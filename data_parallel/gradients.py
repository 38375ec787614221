"""A whole model on every rank, whose gradients are averaged over the ranks.

Problem: W copies of a model must stay equal, though each sees different examples. After backward
every rank has the gradient of its own examples; before the optimizer step all need the mean.

Idea: rank 0's weights are sent to all once. After that only gradients travel. Their mean has the
same bits on every rank, and so has the optimizer's update. Three ways, simplest first:

    per_parameter   average_gradients: an all-reduce for each parameter, after backward
    flat            average_gradients_flat: one all-reduce of everything, after backward
    overlap         DistributedDataParallel: a few, each started when its last gradient is ready

The third wraps a module and keeps its gradients in buckets (buckets.py):

    model = DistributedDataParallel(net)          # broadcast_params
    loss = loss_fn(model(mine)) * W / whole       # a sum over this rank's part of `whole` examples
    loss.backward()                               # buckets leave as they fill
    model.average_gradients()                     # p.grad is the mean over the ranks
    optimizer.step()

Cost: one broadcast of the parameters. A ring all-reduce of G bytes over W ranks sends
2 * G * (W-1)/W bytes from each rank, for any grouping. Memory: every rank holds all parameters,
gradients and optimizer state (zero1.py and fsdp.py are for models too large for that).

Paper: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.communicator import Communicator
from runtime.recorder import Recorder
from runtime.waits import control_device

from .buckets import (
    GradientBuckets,
    SummedBucket,
    group_by_size,
    in_backward_order,
    make_dense,
    refuse_other_tensors,
)  # fmt: skip

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
        make_dense(p)
        if somewhere and p.grad is None:
            p.grad = torch.zeros_like(p)
    return [p.grad for p in parameters if p.grad is not None]


class DistributedDataParallel(nn.Module):
    """Keeps `module` the same on all ranks.

    All ranks must construct it together, with the same module. Buffers are sent once, with the
    parameters; later writes to them (the averages of a batch norm) stay on their rank. So would a
    layer's writes to its parameters: no embedding may have `max_norm`. A hook on a gradient sees
    this rank's gradient, before the mean: clipping there does not clip the mean.

    Args:
        module: already on its device.
        group: the ranks; by default all.
        bucket_bytes: see `in_backward_order`.
        comm_dtype: the type in which gradients are sent and summed; by default their own.
        recorder: see `GradientBuckets`.

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
        self.communicator = Communicator(group or dist.group.WORLD, comm_dtype=comm_dtype)
        tensors = *module.named_parameters(), *module.named_buffers()
        refuse_other_tensors(tensors, [self.communicator.group])
        self.broadcast_params()
        self._trained = {p for p in module.parameters() if p.requires_grad}
        groups, size = in_backward_order(module.parameters(), bucket_bytes), self.communicator.size
        self.buckets = GradientBuckets(
            [SummedBucket(group, self.communicator, size) for group in groups], recorder
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
            plain = [t.detach().resolve_conj().resolve_neg().contiguous() for t in alike]
            flat = torch.cat([t.flatten().view(torch.uint8) for t in plain])
            # overwrites all but rank 0's
            dist.broadcast(flat, group=self.communicator.group, group_src=0)
            copy_back(flat.view(alike[0].dtype), alike)

    def average_gradients(self) -> None:
        """Waits until every p.grad is the mean over the ranks. Call it after each backward outside
        `no_sync()`, equally often on all ranks. Raises ValueError if a parameter was unfrozen,
        replaced (as by `load_state_dict(..., assign=True)`) or added after it was wrapped."""
        for name, p in self.module.named_parameters():
            if p.requires_grad and p not in self._trained:
                raise ValueError(
                    f"{name} was unfrozen, replaced or added after the module was wrapped, and is "
                    "in no bucket: each rank has a gradient of its own; wrap the module anew"
                )
        self.buckets.finish()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward accumulates gradients locally and sends nothing."""
        return self.buckets.no_sync()


def copy_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies consecutive parts of `flat` into the tensors."""
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        t.copy_(part.view_as(t))
