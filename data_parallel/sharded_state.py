"""What a rank holds of a sharded model, by the names of its parameters: to save, load, compare.

A `Piece` is what this rank holds of one parameter, a stretch of it flattened, as a view of the
shard: reading it saves, writing to it loads. No rank needs more memory for that. `gather` brings
whole parameters to rank 0, one at a time, for checks and for export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from data_parallel.exchange import Exchange
from data_parallel.sharding import Piece
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

    def parameter_pieces(self) -> list[Piece]:
        """What this rank holds of every parameter."""
        return [p for u in self.units for p in u.unit.pieces(self.rank, u.shard.data)]

    def gradient_pieces(self) -> list[Piece]:
        """The gradients of those, summed over ranks and backwards since the last step; none of
        parameters that had no backward."""
        self._gradients.settle()
        return [p for u in self.units for p in self._gradient_pieces(u)]

    def optimizer_pieces(self) -> dict[str, list[Piece]]:
        """Optimizer state that goes with elements, as ``exp_avg``, by its key."""
        found: dict[str, list[Piece]] = {}
        for u in self.units:
            for key, value in self.optimizer.state.get(u.shard, {}).items():
                if isinstance(value, Tensor) and value.shape == u.shard.shape:
                    found.setdefault(key, []).extend(u.unit.pieces(self.rank, value))
        return found

    def optimizer_scalars(self) -> dict[str, Tensor]:
        """Optimizer state that does not, as ``step``: the same for all parameters."""
        found: dict[str, Tensor] = {}
        for u in self.units:
            for key, value in self.optimizer.state.get(u.shard, {}).items():
                if isinstance(value, Tensor) and value.shape != u.shard.shape:
                    found[key] = value
        return found

    def new_optimizer_state(
        self, keys: Iterable[str], scalars: Mapping[str, Tensor]
    ) -> dict[str, list[Piece]]:
        """Optimizer state of zeros, to be filled through the pieces that are returned."""
        keys = list(keys)
        for u in self.units:
            if u.unit.trainable:
                state = self.optimizer.state[u.shard]
                state.update({key: torch.zeros_like(u.shard.data) for key in keys})
                state.update({key: value.clone() for key, value in scalars.items()})
        return self.optimizer_pieces()

    def parameters_changed(self) -> None:
        """To be called, by all ranks, after writing to `parameter_pieces`. Where a forward came
        before the writing, there must be a barrier in between: other ranks may still read there."""
        self._parameters.outdate(frozen=True)
        self.exchange.after_update()

    def release_buffers(self) -> None:
        """Gives the memory that layers borrow back to the system, until the next pass borrows it
        anew; after an optimizer step that is all of it. A rank may call it by itself. Kept, memory
        need not be zeroed by the system every time: 2% of a step of a small GPT-2."""
        self.exchange.trim()

    def gradient_norm(self) -> Tensor:
        """The Euclidean norm of the whole gradient. All ranks must call it."""
        self._gradients.settle()
        squares = [
            u.gradient.square().sum()
            for u in self.units
            if u.has_gradient and u.gradient is not None
        ]
        total = (
            torch.stack(squares).sum() if squares else torch.zeros((), device=self.exchange.device)
        )
        dist.all_reduce(total, group=self.group)
        return total.sqrt()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradient down to max_norm where it is longer; its norm before."""
        norm = self.gradient_norm()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for u in self.units:
            if u.has_gradient and u.gradient is not None:
                u.gradient *= scale
        return norm

    def gather(self, what: str = "parameters") -> Iterator[tuple[str, Tensor | None]]:
        """Every parameter's name, in order, and on rank 0 the whole of it; None on the others.

        All ranks must go through all of it. Only one parameter is whole at a time.

        Args:
            what: ``parameters``, ``gradients``, or a key of the optimizer state.
        """
        self._gradients.settle()
        source = self._source(what)
        for u in self.units:
            shard = source(u)
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

    def _gradient_pieces(self, u: ShardedUnit) -> list[Piece]:
        if not u.has_gradient or u.gradient is None:
            return []
        return u.unit.pieces(self.rank, u.gradient)

    def _source(self, what: str) -> Callable[[ShardedUnit], Tensor | None]:
        if what == "parameters":
            return lambda u: u.shard.data
        if what == "gradients":
            return lambda u: u.gradient if u.has_gradient else None
        return lambda u: self.optimizer.state.get(u.shard, {}).get(what)

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
