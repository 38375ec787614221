"""The units of a model as one rank holds them: parameters on loan, gradients on their way.

`Parameters` gathers units before a layer computes and frees them after; `Gradients` hands the
gradients of a layer over to the ranks that hold its shards. When they do so is decided in fsdp.py,
how in exchange.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from data_parallel.buffers import Buffer
from data_parallel.exchange import Exchange, Finish, Reduction
from data_parallel.sharded_layer import Gathered
from data_parallel.sharding import Unit


class ShardedUnit(Gathered):
    """A unit, this rank's shard of it, and the shard's gradient.

    Attributes:
        shard: flat; what the optimizer trains.
        published: the same in the type in which it is gathered; where that is its own, itself.
        kept: with zero 1 and 2, memory for the whole parameters.
        gradient: of the shard, summed over all ranks once settled.
        has_gradient: there was a backward since the last optimizer step.
        accumulated: with zero 1, memory for the gradients of this rank, whole.
        reduced: with zero 1, those have been summed over the ranks.
        buffer, arriving: with zero 3, memory that is lent; while it is being filled.
    """

    def __init__(self, unit: Unit, exchange: Exchange, zero: int) -> None:
        super().__init__(unit)
        storage = exchange.storage(unit, whole=zero < 3)
        self.published = storage if zero == 3 else storage[unit.part(exchange.rank)]
        shard = self.published
        if unit.compute_dtype != unit.dtype:
            shard = torch.zeros_like(shard, dtype=unit.dtype)
        self.shard = nn.Parameter(shard, unit.trainable)
        self.kept = storage if zero < 3 else None
        self.gradient: Tensor | None = None
        self.has_gradient = self.reduced = False
        self.accumulated: Buffer | None = None
        self.buffer: Buffer | None = None
        self.arriving: Finish | None = None

    @property
    def nbytes(self) -> int:
        """Of the parameters that are held all the time."""
        published = self.published if self.kept is None else self.kept
        apart = self.unit.compute_dtype != self.unit.dtype
        return published.nbytes + (self.shard.nbytes if apart else 0)

    def publish(self) -> None:
        """Makes a changed shard what other ranks will gather."""
        if self.unit.compute_dtype != self.unit.dtype:
            self.published.copy_(self.shard.data)


class Parameters:
    """Gathers and frees whole units.

    Attributes:
        peak_bytes: the most that was gathered, or on its way, at the same time beyond what is kept.
    """

    def __init__(self, units: Sequence[ShardedUnit], exchange: Exchange) -> None:
        self.units = units
        self.exchange = exchange
        self.peak_bytes = 0

    def start(self, units: Iterable[ShardedUnit]) -> None:
        """Sends for those units that are neither here nor on their way."""
        for u in units:
            if u.whole is not None or u.arriving is not None:
                continue
            if u.kept is None:
                u.buffer = self.exchange.buffers.take(u.unit.nbytes)
            u.arriving = self.exchange.start_gather(u.unit, u.published, self._memory(u))
        self._count()

    def finish(self, units: Iterable[ShardedUnit]) -> None:
        """Waits until they are here."""
        for u in units:
            if u.arriving is not None:
                u.arriving()
                u.arriving, u.whole = None, self._memory(u)

    def free(self, units: Iterable[ShardedUnit]) -> None:
        """Gives back the memory of those that are not kept."""
        for u in units:
            if u.buffer is not None:
                self.finish([u])
                self.exchange.buffers.give(self.take_buffer(u))

    def take_buffer(self, u: ShardedUnit) -> Buffer:
        """Frees a unit, but for its memory, which is the caller's now."""
        assert u.buffer is not None
        buffer, u.buffer, u.whole = u.buffer, None, None
        return buffer

    def outdate(self, frozen: bool = False) -> None:
        """The shards have changed, here and elsewhere; whether also those of frozen parameters."""
        self.free(self.units)
        for u in self.units:
            if u.unit.trainable or frozen:
                u.publish()
                u.whole = None

    def _memory(self, u: ShardedUnit) -> Tensor:
        if u.kept is not None:
            return u.kept
        assert u.buffer is not None
        return u.buffer.view(u.unit.numel, u.unit.compute_dtype)

    def _count(self) -> None:
        lent = sum(u.unit.nbytes for u in self.units if u.buffer is not None)
        self.peak_bytes = max(self.peak_bytes, lent)


class Gradients:
    """Sums whole gradients over the ranks, each rank's part into its shards' gradients."""

    def __init__(
        self, units: Sequence[ShardedUnit], parameters: Parameters, exchange: Exchange, zero: int
    ) -> None:
        self.units = [u for u in units if u.unit.trainable]
        self.parameters = parameters
        self.exchange = exchange
        self.zero = zero
        self._on_its_way: tuple[Finish, list[Buffer]] | None = None

    def add(
        self,
        layer: int,
        found: Mapping[int, Sequence[Tensor | None]],
        free: Sequence[ShardedUnit],
        last: bool,
    ) -> None:
        """Takes the gradients of a layer's units: `found`, by index; those that are not there are
        zero.

        Args:
            free: the units whose parameters are done with: their memory serves for the gradients.
            last: no more will come before the optimizer step. Only zero 1 makes use of it.
        """
        units = [u for u in self.units if layer in u.unit.layers]
        if self.zero == 1:
            for u in units:
                self._accumulate(u, found.get(u.unit.index, ()))
            # What several layers use is complete after the first of them, which comes last.
            self._reduce_accumulated([u for u in units if last and layer == u.unit.layers[0]])
            return
        reductions = []
        for u in units:
            same = u.unit.compute_dtype == u.unit.dtype
            if same and u in free and u.buffer is not None:
                buffer = self.parameters.take_buffer(u)
            else:
                buffer = self.exchange.buffers.take(u.unit.gradient_nbytes)
            _fill(u.unit, buffer.view(u.unit.numel, u.unit.dtype), found.get(u.unit.index, ()))
            if u.gradient is None:
                u.gradient = torch.empty_like(u.shard)
            reductions.append(Reduction(u.unit, buffer, u.gradient, u.has_gradient))
            u.has_gradient = True
        self._start(reductions)

    @property
    def settled(self) -> bool:
        """Whether every shard has its gradient."""
        return self._on_its_way is None and not self._left

    def settle(self) -> None:
        """Waits until every shard has its gradient."""
        for u in self._left[::-1]:
            self._reduce_accumulated([u])
        self._finish()

    def clear(self) -> None:
        """After the optimizer step: the next gradients replace these."""
        for u in self.units:
            u.has_gradient = u.reduced = False

    @property
    def _left(self) -> list[ShardedUnit]:
        """With zero 1, units whose gradients have not been sent yet."""
        return [u for u in self.units if self.zero == 1 and u.has_gradient and not u.reduced]

    def _accumulate(self, u: ShardedUnit, found: Sequence[Tensor | None]) -> None:
        if u.reduced:
            raise RuntimeError(
                "backward(last=True) has summed the gradients over the ranks: with zero 1 no other "
                "may follow before optimizer_step; give last=False to all but the last"
            )
        if u.accumulated is None:
            u.accumulated = self.exchange.buffers.keep(u.unit.gradient_nbytes)
            whole = u.accumulated.view(u.unit.numel, u.unit.dtype)
            u.gradient = whole[u.unit.part(self.exchange.rank)]
        whole = u.accumulated.view(u.unit.numel, u.unit.dtype)
        if u.has_gradient:
            for view, gradient in zip(u.unit.views(whole), found, strict=False):
                if gradient is not None:
                    view += gradient
        else:
            _fill(u.unit, whole, found)
        u.has_gradient = True

    def _reduce_accumulated(self, units: Sequence[ShardedUnit]) -> None:
        reductions = []
        for u in units:
            assert u.accumulated is not None and u.gradient is not None
            reductions.append(Reduction(u.unit, u.accumulated, u.gradient, accumulate=False))
            u.reduced = True
        self._start(reductions)

    def _start(self, reductions: list[Reduction]) -> None:
        if reductions:
            self._finish()
            lent = [r.buffer for r in reductions] if self.zero > 1 else []
            self._on_its_way = self.exchange.start_reduce(reductions), lent

    def _finish(self) -> None:
        if self._on_its_way is not None:
            finish, lent = self._on_its_way
            finish()
            for buffer in lent:
                self.exchange.buffers.give(buffer)
            self._on_its_way = None


def _fill(unit: Unit, whole: Tensor, found: Sequence[Tensor | None]) -> None:
    """Lays gradients out flat; those of none, and all gaps, are zero."""
    for gap in unit.gaps:
        whole[gap].zero_()
    views = unit.views(whole)
    for view, gradient in zip(views, [*found, *[None] * (len(views) - len(found))], strict=True):
        if gradient is None:
            view.zero_()
        else:
            view.copy_(gradient)
