"""A whole model on every rank; each rank computes its part of the batch.

Problem: W copies of a model must stay equal, though each sees other examples.

Idea: rank 0's weights are sent to all once. After that only gradients travel. Their mean has the
same bits on every rank, and so has the optimizer's update. It is computed bucket by bucket, while
backward still runs: see gradients.py.

    model = DistributedDataParallel(net)          # broadcast_params
    loss = loss_fn(model(mine)) * W / whole       # a sum over this rank's part of `whole` examples
    loss.backward()                               # buckets leave as they fill
    model.average_gradients()                     # p.grad is the mean over the ranks
    optimizer.step()

The mean over ranks is the mean over examples only if all ranks have equally many. For any other
division, scale each rank's *summed* loss by W / (examples of the whole batch).

Cost: one broadcast of the parameters, P bytes; per step each rank sends 2 * G * (W-1)/W bytes of
gradients. Memory: every rank holds all parameters, gradients and optimizer state. Use `fsdp.py` for
models too large for that.

Paper: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.gradients import GradientBuckets, group_parameters
from runtime.recorder import Recorder


class DistributedDataParallel(nn.Module):
    """Keeps `module` the same on all ranks.

    All ranks must construct it together. Buffers are sent once, with the parameters; later writes
    to them (the averages of a batch norm) stay on their rank.

    Args:
        module: already on its device.
        group: the ranks; by default all.
        bucket_bytes, comm_dtype, share_memory, recorder: see `GradientBuckets`.

    Raises:
        ValueError: names, shapes or types differ between ranks; or there is nothing to train.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 4 << 20,
        comm_dtype: torch.dtype | None = None,
        share_memory: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.group = group
        self._bucket_bytes = bucket_bytes
        self._check_that_all_have_the_same_module()
        self.broadcast_params()
        self.buckets = GradientBuckets(
            module.parameters(), group, bucket_bytes, comm_dtype, share_memory, recorder
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for this rank's part of the batch."""
        return self.module(*args, **kwargs)

    def broadcast_params(self) -> None:
        """Overwrites every rank's parameters and buffers with rank 0's."""
        for tensors, flat in self._of_first_rank():
            parts = flat.split([t.numel() for t in tensors])  # one per tensor of the group
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.detach().copy_(part.view_as(tensor))

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

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        """Parameters and buffers; a shared tensor only under its first name."""
        return [*self.module.named_parameters(), *self.module.named_buffers()]

    def _of_first_rank(self) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Groups of tensors, and rank 0's values of each group, concatenated: one broadcast per
        bucket_bytes, since one per tensor would pay the latency for every bias."""
        source = dist.get_global_rank(self.group or dist.group.WORLD, 0)  # type: ignore[arg-type]
        tensors = [tensor for _, tensor in self._named_tensors()]
        for group in group_parameters(tensors, self._bucket_bytes):
            flat = torch.cat([t.detach().flatten() for t in group])
            dist.broadcast(flat, source, group=self.group)  # overwrites all but rank 0's
            yield group, flat

    def _check_that_all_have_the_same_module(self) -> None:
        """Otherwise broadcasts of different sizes would hang or mix up the weights."""
        mine = [(name, tuple(t.shape), str(t.dtype)) for name, t in self._named_tensors()]
        ranks: list[Any] = [None] * dist.get_world_size(self.group)  # by rank
        dist.all_gather_object(ranks, mine, self.group)
        for rank, theirs in enumerate(ranks):  # the same comparison everywhere: all raise, or none
            if theirs != ranks[0]:
                first, other = next(
                    (a, b)
                    for a, b in zip([*ranks[0], "no more"], [*theirs, "no more"], strict=False)
                    if a != b
                )
                raise ValueError(
                    f"rank {rank} has another module than rank 0: {other} where that has {first}; "
                    "all ranks must construct the same one"
                )
