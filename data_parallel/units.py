"""The units of a model on one rank: their first values, gathered parameters, and gradients.

fsdp.py decides when to gather and to reduce, runtime/buffers.py how.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.buffers import Buffers, Sum
from runtime.meta import Initialize, filled
from runtime.shared_memory import Wait

from .flat import Unit


class ShardedUnit:
    """A unit, this rank's shard of it, and the shard's gradient.

    Attributes:
        whole: the flat unit, while it is gathered or arriving.
        shard: flat; trained by the optimizer. Its grad is the sum over all ranks and all backwards
            since the last update, once fsdp.py has waited for it.
        published: the shard in `compute_dtype`, as others gather it; the shard itself if its type
            is the same.
        kept: with zero 2, memory for the whole parameters; with zero 3 it is lent.
        empty: by entry, parameters without memory: what modules hold between the passes.
        gradient: memory for the shard's grad, from the first backward on.
    """

    def __init__(self, unit: Unit, buffers: Buffers, zero: int) -> None:
        self.unit, self.buffers = unit, buffers
        self.whole: Tensor | None = None
        self.empty: list[nn.Parameter] = []
        numel = unit.shard_numel if zero == 3 else unit.numel
        storage = buffers.keep(numel, unit.compute_dtype)
        self.kept = storage if zero == 2 else None
        self.published = storage if zero == 3 else storage[unit.part(buffers.rank)]
        shard = self.published
        self.apart = unit.compute_dtype != unit.dtype
        if self.apart:
            shard = torch.zeros_like(shard, dtype=unit.dtype)  # private; see `publish`
        self.shard = nn.Parameter(shard, unit.trainable)
        self.nbytes = storage.nbytes + (shard.nbytes if self.apart else 0)  # held permanently
        self.gradient: Tensor | None = None
        self._lent: Tensor | None = None  # the memory of `whole`
        self._arrived: Wait | None = None  # of a gather that has started and is not finished

    @torch.no_grad()
    def fill(self, parameters: Sequence[nn.Parameter], init: Initialize | None) -> None:
        """Fills the shard, of which one parameter at a time is whole: one on the meta device by
        `init`, another by rank 0's values. `empty` then replaces them."""
        pieces = {p.name: p for p in self.unit.pieces(self.buffers.rank, self.shard.data)}
        for entry, parameter in zip(self.unit.entries, parameters, strict=True):
            if parameter.is_meta and entry.name not in pieces:
                continue  # no part of it is here
            whole = first_value(parameter, entry.name, self.buffers, init)
            if entry.name in pieces:
                _, _, begin, piece = pieces[entry.name]
                piece.copy_(whole.flatten()[begin : begin + len(piece)])
        self.empty = [nn.Parameter(p.to("meta"), p.requires_grad) for p in parameters]

    def parameters(self) -> list[nn.Parameter]:
        """Views of the gathered unit: new leaves each time, so that each graph has its own."""
        assert self.whole is not None and not self.arriving, "the parameters are not gathered"
        return [nn.Parameter(view, self.unit.trainable) for view in self.unit.views(self.whole)]

    def publish(self) -> None:
        """Call after the shard has changed: others gather the new values, and so does this rank."""
        self.free()
        self.whole = None  # zero 2: gathered again, into the same memory
        if self.apart:
            self.published.copy_(self.shard.data)

    @property
    def arriving(self) -> bool:
        """Whether a gather has started and is not finished."""
        return self._arrived is not None

    def start_gather(self) -> None:
        """Does nothing if it is gathered or arriving."""
        if self.whole is None:
            self.whole = self.kept
            if self.whole is None:
                self._lent = self.buffers.scratch.take(self.unit.nbytes)
                self.whole = self._lent[: self.unit.nbytes].view(self.unit.compute_dtype)
            self._arrived = self.buffers.start_gather(self.published, self.whole)

    def finish_gather(self) -> None:
        """Waits for a gather that was started."""
        if self._arrived is not None:
            self._arrived()
            self._arrived = None

    def free(self) -> None:
        """Gives lent memory back; zero 2 keeps its own."""
        if self._lent is not None:
            self.finish_gather()  # it writes there
            self.buffers.scratch.give(self._lent)
            self._lent = self.whole = None

    def reduction(self, found: Sequence[Tensor | None] | None) -> Sum:
        """The sum over the ranks to be started next: of `found`, this rank's gradients by entry;
        None counts as zero. It becomes the shard's grad, or is added to that."""
        lent = self.buffers.terms.take(self.unit.gradient_nbytes)  # goes back when it is summed
        whole = lent[: self.unit.gradient_nbytes].view(self.unit.dtype)
        _lay_out(self.unit, whole, found)
        if self.gradient is None:
            self.gradient = torch.empty_like(self.shard)
        accumulate = self.shard.grad is not None
        self.shard.grad = self.gradient
        return Sum(whole, self.gradient, accumulate, lent)

    def position_of(self, tensor: Tensor) -> int | None:
        """The element of the gathered unit at which the tensor starts; None outside it."""
        if self.whole is None:
            return None
        distance = tensor.data_ptr() - self.whole.data_ptr()  # bytes
        return distance // self.whole.itemsize if 0 <= distance < self.whole.nbytes else None


def first_value(tensor: Tensor, name: str, buffers: Buffers, init: Initialize | None) -> Tensor:
    """The value of a parameter or buffer with which training begins: on the meta device what `init`
    writes, otherwise rank 0's, for which all ranks must call this together."""
    if tensor.is_meta:
        return filled(tensor, name, buffers.device, init)
    value = tensor.detach().to(buffers.device).contiguous()
    every_byte = value.flatten().view(torch.uint8)  # gloo does not support every dtype
    dist.broadcast(every_byte, group=buffers.group, group_src=0)
    return value


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
