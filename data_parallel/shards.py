"""The units of a model on one rank: gathered parameters, and gradients in transit.

`Parameters` gathers units before a layer computes and frees them afterwards. `Gradients` sends a
layer's gradients to the ranks that hold its shards. fsdp.py decides when, exchange.py how.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from data_parallel.exchange import Exchange, Finish, Reduction
from data_parallel.sharding import Unit


class ShardedUnit:
    """A unit, this rank's shard of it, and the shard's gradient.

    Attributes:
        whole: the flat unit, while it is gathered.
        shard: flat; trained by the optimizer.
        published: the shard in `compute_dtype`, as others gather it; the shard itself if its type
            is the same.
        kept: with zero 1 and 2, memory for the whole parameters.
        gradient: of the shard, summed over all ranks once settled.
        has_gradient: there was a backward since the last optimizer step.
        accumulated: with zero 1, this rank's whole gradients; `reduced`: summed over the ranks.
        lent, arriving: with zero 3, the memory of `whole`; while gathering, its `Finish`.
    """

    def __init__(self, unit: Unit, exchange: Exchange, zero: int) -> None:
        self.unit = unit
        self.whole: Tensor | None = None
        numel = unit.shard_numel if zero == 3 else unit.numel
        # zeroed; with SharedExchange at one offset on all ranks, which read each other's
        storage = exchange.storage(numel, unit.compute_dtype)
        self.kept = storage if zero < 3 else None
        self.published = storage if zero == 3 else storage[unit.part(exchange.rank)]
        shard = self.published
        if unit.compute_dtype != unit.dtype:
            shard = torch.zeros_like(shard, dtype=unit.dtype)  # private; see `publish`
        self.shard = nn.Parameter(shard, unit.trainable)
        self.gradient: Tensor | None = None
        self.accumulated: Tensor | None = None
        if zero == 1 and unit.trainable:
            self.accumulated = exchange.storage(unit.numel, unit.dtype)  # others read their parts
            self.gradient = self.accumulated[unit.part(exchange.rank)]  # replaced by the sum
        self.has_gradient = self.reduced = False
        self.lent: Tensor | None = None
        self.arriving: Finish | None = None

    @property
    def nbytes(self) -> int:
        """Of the parameters held permanently."""
        published = self.published if self.kept is None else self.kept
        apart = self.unit.compute_dtype != self.unit.dtype
        return published.nbytes + (self.shard.nbytes if apart else 0)

    def publish(self) -> None:
        """Copies a changed shard to the memory that other ranks gather."""
        if self.unit.compute_dtype != self.unit.dtype:
            self.published.copy_(self.shard.data)

    def position_of(self, tensor: Tensor) -> int | None:
        """The element of the gathered unit at which the tensor starts; None outside it."""
        if self.whole is None:
            return None
        distance = tensor.data_ptr() - self.whole.data_ptr()  # bytes
        return distance // self.whole.itemsize if 0 <= distance < self.whole.nbytes else None


class Parameters:
    """Gathers and frees whole units."""

    def __init__(self, units: Sequence[ShardedUnit], exchange: Exchange) -> None:
        self.units = units
        self.exchange = exchange

    def start(self, units: Iterable[ShardedUnit]) -> None:
        """Starts to gather those units that are neither gathered nor in transit."""
        for u in units:
            if u.whole is None and u.arriving is None:
                if u.kept is None:
                    u.lent = self.exchange.parameters.take(u.unit.nbytes)  # zero 3: until `free`
                u.arriving = self.exchange.start_gather(u.unit, u.published, _memory(u))

    def finish(self, units: Iterable[ShardedUnit]) -> None:
        """Waits until these units are gathered."""
        for u in units:
            if u.arriving is not None:
                u.arriving()
                u.arriving, u.whole = None, _memory(u)  # zero 1 and 2: until `outdate`

    def free(self, units: Iterable[ShardedUnit]) -> None:
        """Gives lent memory back; zero 1 and 2 keep theirs."""
        for u in units:
            if u.lent is not None:
                self.finish([u])  # a gather still on its way writes there
                self.exchange.parameters.give(u.lent)
                u.lent, u.whole = None, None

    def outdate(self, frozen: bool = False) -> None:
        """Call after the shards have changed on all ranks; `frozen`: frozen ones too."""
        self.free(self.units)
        for u in self.units:
            if u.unit.trainable or frozen:
                u.publish()
                u.whole = None  # zero 1 and 2: gather again, into the same memory


def _memory(u: ShardedUnit) -> Tensor:
    if u.kept is not None:
        return u.kept
    assert u.lent is not None
    return u.lent[: u.unit.nbytes].view(u.unit.compute_dtype)


class Gradients:
    """Sums whole gradients over the ranks; each rank keeps the sums of its shards."""

    def __init__(self, units: Sequence[ShardedUnit], exchange: Exchange, zero: int) -> None:
        self.units = [u for u in units if u.unit.trainable]
        self.exchange = exchange
        self.zero = zero
        self._on_its_way: Finish | None = None

    def add(
        self, layer: int, found: Mapping[int, Sequence[Tensor | None]], last: bool = False
    ) -> None:
        """Takes the gradients of a layer's units: `found`, by unit index. Missing ones count as
        zero.

        With zero 1 they accumulate on this rank until the `last` backward of a step.
        """
        units = [u for u in self.units if layer in u.unit.layers]
        if self.zero == 1:
            for u in units:
                self._accumulate(u, found.get(u.unit.index, ()))
            # A shared unit is complete after the first layer that uses it, the last in backward.
            self._reduce_accumulated([u for u in units if last and layer == u.unit.layers[0]])
            return
        self._finish()  # its memory is reused
        reductions = []
        for u in units:
            lent = self.exchange.gradients.take(u.unit.gradient_nbytes)  # the exchange returns it
            whole = lent[: u.unit.gradient_nbytes].view(u.unit.dtype)
            _lay_out(u.unit, whole, found.get(u.unit.index, ()))
            if u.gradient is None:
                u.gradient = torch.empty_like(u.shard)  # the first reduction overwrites it
            reductions.append(Reduction(u.unit, whole, u.gradient, u.has_gradient, lent))
            u.has_gradient = True
        self._start(reductions)

    @property
    def settled(self) -> bool:
        """Whether every shard has its gradient."""
        return self._on_its_way is None and not self._left

    def settle(self) -> None:
        """Waits until every shard has its gradient."""
        for u in self._left[::-1]:  # zero 1, and no backward was the `last`
            self._reduce_accumulated([u])
        self._finish()

    def clear(self) -> None:
        """Call after the optimizer step: the next gradients replace these."""
        for u in self.units:
            u.has_gradient = u.reduced = False

    @property
    def _left(self) -> list[ShardedUnit]:
        """With zero 1, units whose gradients have not been reduced yet."""
        return [u for u in self.units if self.zero == 1 and u.has_gradient and not u.reduced]

    def _accumulate(self, u: ShardedUnit, found: Sequence[Tensor | None]) -> None:
        if u.reduced:
            raise RuntimeError(
                "backward(last=True) has summed the gradients over the ranks: with zero 1 no other "
                "may follow before optimizer_step; give last=False to all but the last"
            )
        assert u.accumulated is not None
        if u.has_gradient:  # `found` is empty on a rank without examples, which adds nothing
            for view, gradient in zip(u.unit.views(u.accumulated), found, strict=False):
                if gradient is not None:
                    view += gradient
        else:
            _lay_out(u.unit, u.accumulated, found)  # replaces the last step's
        u.has_gradient = True

    def _reduce_accumulated(self, units: Sequence[ShardedUnit]) -> None:
        reductions = []
        for u in units:
            assert u.accumulated is not None and u.gradient is not None
            reductions.append(Reduction(u.unit, u.accumulated, u.gradient, accumulate=False))
            u.reduced = True  # so `u.gradient` is the sum as soon as this reduction is finished
        self._start(reductions)

    def _start(self, reductions: list[Reduction]) -> None:
        if reductions:
            self._finish()  # only one is under way at a time
            self._on_its_way = self.exchange.start_reduce(reductions)

    def _finish(self) -> None:
        if self._on_its_way is not None:
            self._on_its_way()
            self._on_its_way = None


def _lay_out(unit: Unit, whole: Tensor, found: Sequence[Tensor | None]) -> None:
    """Writes gradients end to end into `whole`; missing ones and gaps become zero."""
    for gap in unit.gaps:
        whole[gap].zero_()
    views = unit.views(whole)
    for view, gradient in zip(views, [*found, *[None] * (len(views) - len(found))], strict=True):
        if gradient is None:
            view.zero_()
        else:
            view.copy_(gradient)
