"""A whole model on every rank; each rank computes the gradients of its part of the batch.

Problem: W copies of a model must stay equal, though each sees other examples.

Idea: rank 0's weights are sent to all once. After that only gradients travel. Their mean has the
same bits on every rank, and so has the optimizer's update. See gradients.py for the exchange.

    model = DistributedDataParallel(net)          # broadcast_params
    loss = loss_fn(model(mine)) * W / whole       # a sum over this rank's part of `whole` examples
    loss.backward()                               # buckets leave as they fill
    model.average_gradients()                     # p.grad is the mean over the ranks
    optimizer.step()

Cost: one broadcast of the parameters; per step the exchange of the gradients. Every rank holds all
parameters, gradients and optimizer state; fsdp.py is for models too large for that.

Paper: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from data_parallel.gradients import GradientBuckets, copy_back, default_bucket_bytes, in_groups
from runtime.recorder import Recorder


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
        self._bucket_bytes = bucket_bytes or default_bucket_bytes(dist.get_backend(group))
        self._check_that_all_have_the_same_module()
        self.broadcast_params()
        self.buckets = GradientBuckets(
            module.parameters(), group, bucket_bytes, comm_dtype, recorder
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for this rank's part of the batch."""
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Overwrites every rank's parameters and buffers with rank 0's: one broadcast per
        bucket_bytes, since one per tensor would pay the latency for every bias."""
        tensors = [*self.module.parameters(), *self.module.buffers()]  # a shared one comes once
        for group in in_groups(tensors, self._bucket_bytes):
            flat = torch.cat([t.flatten() for t in group])
            dist.broadcast(flat, group=self.group, group_src=0)  # overwrites all but rank 0's
            copy_back(flat, group)

    def average_gradients(self) -> None:
        """Waits until every p.grad is the mean over the ranks. Call it after each backward outside
        `no_sync()`, equally often on all ranks."""
        self.buckets.finish()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward accumulates gradients locally and sends nothing."""
        return self.buckets.no_sync()

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        self.buckets.close()

    def _check_that_all_have_the_same_module(self) -> None:
        """Otherwise broadcasts of different sizes would hang or mix up the weights."""
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        mine = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]
        every: list[Any] = [None] * dist.get_world_size(self.group)  # by rank
        dist.all_gather_object(every, mine, self.group)
        for rank, theirs in enumerate(every):  # the same comparison everywhere: all raise, or none
            if theirs != every[0]:
                names = ", ".join(sorted({name for name, *_ in set(theirs) ^ set(every[0])})[:3])
                raise ValueError(
                    f"rank {rank} has another module than rank 0, see {names}; all ranks must "
                    "construct the same one"
                )
