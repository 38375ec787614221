"""The units of a model on one rank: their first values, gathered parameters, gradients in transit.

fsdp.py decides when to gather and to reduce, exchange.py how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.exchange import Exchange, Finish, Reduction
from runtime.graph import Initialize

from .flat import Unit


class ShardedUnit:
    """A unit, this rank's shard of it, and the shard's gradient.

    Attributes:
        whole: the flat unit, while it is gathered.
        shard: flat; trained by the optimizer.
        published: the shard in `compute_dtype`, as others gather it; the shard itself if its type
            is the same.
        kept: with zero 1 and 2, memory for the whole parameters; with zero 3 it is lent.
        gradient: of the shard, summed over all ranks once settled.
        has_gradient: there was a backward since the last optimizer step.
        accumulated: with zero 1, this rank's whole gradients.
        reduced: since the last optimizer step they have been summed over the ranks.
    """

    def __init__(self, unit: Unit, exchange: Exchange, zero: int) -> None:
        self.unit, self.exchange = unit, exchange
        self.whole: Tensor | None = None
        numel = unit.shard_numel if zero == 3 else unit.numel
        # zeroed; with SharedExchange at one offset on all ranks, which read each other's
        storage = exchange.storage(numel, unit.compute_dtype)
        self.kept = storage if zero < 3 else None
        self.published = storage if zero == 3 else storage[unit.part(exchange.rank)]
        shard = self.published
        self.apart = unit.compute_dtype != unit.dtype
        if self.apart:
            shard = torch.zeros_like(shard, dtype=unit.dtype)  # private; see `publish`
        self.shard = nn.Parameter(shard, unit.trainable)
        self.nbytes = storage.nbytes + (shard.nbytes if self.apart else 0)  # held permanently
        self.gradient: Tensor | None = None
        self.accumulated: Tensor | None = None
        if zero == 1 and unit.trainable:
            self.accumulated = exchange.storage(unit.numel, unit.dtype)  # others read their parts
            self.gradient = self.accumulated[unit.part(exchange.rank)]  # replaced by the sum
        self.has_gradient = self.reduced = False
        self._lent: Tensor | None = None  # the memory of `whole`
        self._arriving: tuple[Finish, Tensor] | None = None  # the second will be `whole`

    @torch.no_grad()
    def fill(
        self, parameters: Sequence[nn.Parameter], init: Initialize | None
    ) -> list[nn.Parameter]:
        """Fills the shard, of which one parameter at a time is whole: one on the meta device by
        `init`, another by rank 0's values. Returns parameters without memory that replace them."""
        group, device = self.exchange.group, self.shard.device
        pieces = {p.name: p for p in self.unit.pieces(self.exchange.rank, self.shard.data)}
        for entry, parameter in zip(self.unit.entries, parameters, strict=True):
            if not parameter.is_meta:
                whole = parameter.detach().to(device).contiguous()
                dist.broadcast(whole, group=group, group_src=0)
            elif entry.name in pieces:  # else no part of it is here
                whole = torch.empty(entry.shape, dtype=self.unit.dtype, device=device)
                assert init is not None
                init(entry.name, whole)
            if entry.name in pieces:
                _, _, begin, piece = pieces[entry.name]
                piece.copy_(whole.flatten()[begin : begin + len(piece)])
        return [nn.Parameter(p.to("meta"), p.requires_grad) for p in parameters]

    def publish(self) -> None:
        """Call after the shard has changed: others gather the new values, and so does this rank."""
        self.free()
        self.whole = None  # zero 1 and 2: gathered again, into the same memory
        if self.apart:
            self.published.copy_(self.shard.data)

    @property
    def arriving(self) -> bool:
        """Whether a gather has started and is not finished."""
        return self._arriving is not None

    def start_gather(self) -> None:
        """Does nothing if it is gathered or arriving."""
        if self.whole is None and self._arriving is None:
            memory = self.kept
            if memory is None:
                self._lent = self.exchange.parameters.take(self.unit.nbytes)
                memory = self._lent[: self.unit.nbytes].view(self.unit.compute_dtype)
            finish = self.exchange.start_gather(self.published, memory)
            self._arriving = finish, memory

    def finish_gather(self) -> None:
        """Waits for a gather that was started."""
        if self._arriving is not None:
            finish, memory = self._arriving
            finish()
            self._arriving, self.whole = None, memory

    def free(self) -> None:
        """Gives lent memory back; zero 1 and 2 keep theirs."""
        if self._lent is not None:
            self.finish_gather()  # it writes there
            self.exchange.parameters.give(self._lent)
            self._lent = self.whole = None

    def position_of(self, tensor: Tensor) -> int | None:
        """The element of the gathered unit at which the tensor starts; None outside it."""
        if self.whole is None:
            return None
        distance = tensor.data_ptr() - self.whole.data_ptr()  # bytes
        return distance // self.whole.itemsize if 0 <= distance < self.whole.nbytes else None


class Gradients:
    """Sums whole gradients over the ranks; each rank keeps the sums of its shards."""

    def __init__(self, units: Sequence[ShardedUnit], exchange: Exchange, zero: int) -> None:
        self.units = [u for u in units if u.unit.trainable]
        self.exchange = exchange
        self.zero = zero
        self._on_its_way: Finish | None = None

    def add(self, layer: int, found: Mapping[int, Sequence[Tensor | None]], last: bool) -> None:
        """Takes the gradients of a layer's units: `found`, by unit index, and empty on a rank
        without examples. Missing ones count as zero.

        With zero 1 they accumulate on this rank until the `last` backward of a step.
        """
        units = [u for u in self.units if layer in u.unit.layers]
        if self.zero > 1:
            self._reduce(units, found)
            return
        for u in units:
            assert u.accumulated is not None
            if u.reduced:  # it holds the other ranks' gradients too
                raise RuntimeError("with zero 1, optimizer_step must follow the last backward")
            of_unit = found.get(u.unit.index)
            if not u.has_gradient:
                _lay_out(u.unit, u.accumulated, of_unit)  # replaces the last step's
            elif of_unit is not None:
                views = zip(u.unit.views(u.accumulated), of_unit, strict=True)
                here = [(view, gradient) for view, gradient in views if gradient is not None]
                if here:
                    torch._foreach_add_([view for view, _ in here], [dw for _, dw in here])
            u.has_gradient = True
        if last:  # A shared unit is complete after the first layer that uses it.
            self._reduce([u for u in units if layer == u.unit.layers[0]])

    @property
    def settled(self) -> bool:
        """Whether every shard has its gradient."""
        return self._on_its_way is None and not self._left

    def settle(self) -> None:
        """Waits until every shard has its gradient."""
        for u in self._left[::-1]:  # no backward was the `last`
            self._reduce([u])
        self._finish()

    def clear(self) -> None:
        """Call after the optimizer step: the next gradients replace these."""
        for u in self.units:
            u.has_gradient = u.reduced = False

    @property
    def _left(self) -> list[ShardedUnit]:
        """With zero 1, units whose gradients have not been reduced yet."""
        return [u for u in self.units if self.zero == 1 and u.has_gradient and not u.reduced]

    def _reduce(
        self, units: Sequence[ShardedUnit], found: Mapping[int, Sequence[Tensor | None]] = {}
    ) -> None:
        """Starts to sum `found`, or with zero 1 what has accumulated."""
        if not units:
            return
        self._finish()  # only one is under way at a time, and its memory is reused
        reductions = []
        for u in units:
            whole, lent = u.accumulated, None
            if whole is None:
                lent = self.exchange.gradients.take(u.unit.gradient_nbytes)  # it gives it back
                whole = lent[: u.unit.gradient_nbytes].view(u.unit.dtype)
                _lay_out(u.unit, whole, found.get(u.unit.index))
            if u.gradient is None:
                u.gradient = torch.empty_like(u.shard)  # the first reduction overwrites it
            accumulate = u.has_gradient and self.zero > 1
            reductions.append(Reduction(u.unit, whole, u.gradient, accumulate, lent))
            u.has_gradient = u.reduced = True
        self._on_its_way = self.exchange.start_reduce(reductions)

    def _finish(self) -> None:
        if self._on_its_way is not None:
            self._on_its_way()
            self._on_its_way = None


def _lay_out(unit: Unit, whole: Tensor, found: Sequence[Tensor | None] | None) -> None:
    """Writes gradients end to end into `whole`; missing ones and gaps become zero."""
    if found is None:
        whole.zero_()
        return
    both = list(zip(unit.views(whole), found, strict=True))
    empty = [view for view, gradient in both if gradient is None]
    empty += [whole[gap] for gap in unit.gaps if gap.start < gap.stop]
    here = [(view, gradient) for view, gradient in both if gradient is not None]
    if empty:  # all in one call: on a GPU, one kernel
        torch._foreach_zero_(empty)
    if here:
        torch._foreach_copy_([view for view, _ in here], [gradient for _, gradient in here])
