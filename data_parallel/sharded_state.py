"""What a rank holds of a sharded model: whole parameters for checks and for export, and its bytes.

`gather` brings whole parameters to rank 0, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from data_parallel.exchange import Exchange
from data_parallel.shards import Gradients, Parameters, ShardedUnit


@dataclass(frozen=True)
class HeldBytes:
    """Memory of this rank for a model and its training; activations are not in it.

    Attributes:
        buffers, peak_buffers: lent for gathered parameters and for whole gradients; now, at most.
        peak_gathered: the most that was gathered of parameters at the same time beyond those that
            are in `parameters`.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    peak_buffers: int
    peak_gathered: int

    @property
    def state(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer


class ShardedState:
    """The units of a model and their optimizer, as this rank holds them."""

    units: list[ShardedUnit]
    exchange: Exchange
    optimizer: torch.optim.Optimizer
    _parameters: Parameters
    _gradients: Gradients

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @property
    def world_size(self) -> int:
        return self.exchange.world_size

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.exchange.group

    def parameters_changed(self) -> None:
        """To be called, by all ranks, after writing to the shards. Where a forward came
        before the writing, there must be a barrier in between: other ranks may still read there."""
        self._parameters.outdate(frozen=True)
        self.exchange.after_update()

    def gather(self, what: str = "parameters") -> Iterator[tuple[str, Tensor | None]]:
        """Every parameter's name, in order, and on rank 0 the whole of it; None on the others.

        All ranks must go through all of it. Only one parameter is whole at a time.

        Args:
            what: ``parameters`` or ``gradients``.
        """
        self._gradients.settle()
        for u in self.units:
            shard = u.shard.data if what == "parameters" else self._gradient(u)
            if shard is not None:
                for i in range(len(u.unit.entries)):
                    yield u.unit.entries[i].name, self._gather_entry(u, i, shard)

    def held_bytes(self) -> HeldBytes:
        """What this rank holds now."""
        buffers = self.exchange.buffers
        kept = sum(u.accumulated.touched for u in self.units if u.accumulated is not None)
        shards = sum(u.gradient.nbytes for u in self.units if u.gradient is not None)
        state = self.optimizer.state.values()
        return HeldBytes(
            parameters=sum(u.nbytes for u in self.units),
            gradients=kept or shards,
            optimizer=sum(t.nbytes for s in state for t in s.values() if isinstance(t, Tensor)),
            buffers=buffers.held_bytes - kept,
            peak_buffers=buffers.peak_bytes - kept,
            peak_gathered=self._parameters.peak_bytes,
        )

    def _gradient(self, u: ShardedUnit) -> Tensor | None:
        return u.gradient if u.has_gradient else None

    def _gather_entry(self, u: ShardedUnit, index: int, shard: Tensor) -> Tensor | None:
        entry = u.unit.entries[index]
        world = self.group or dist.group.WORLD
        assert world is not None
        whole = (
            torch.empty(entry.numel, dtype=shard.dtype, device=shard.device)
            if not self.rank
            else None
        )
        for rank in range(self.world_size):
            begin, end = u.unit.held(entry, rank)
            if begin == end or self.rank not in (0, rank):
                continue
            if rank == self.rank:
                first = entry.start + begin - u.unit.part(rank).start
                mine = shard[first : first + end - begin]
                if whole is None:
                    dist.send(mine, dist.get_global_rank(world, 0), group=self.group)
                else:
                    whole[begin:end] = mine
            elif whole is not None:
                dist.recv(whole[begin:end], dist.get_global_rank(world, rank), group=self.group)
        return None if whole is None else whole.view(entry.shape)
