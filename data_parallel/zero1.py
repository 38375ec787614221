"""ZeRO 1 for any layout: every rank updates its part of the parameters, and all get the result.

Problem. In data parallelism every rank keeps the optimizer state of all parameters, twice their
size with Adam, and repeats the same update.

Idea. The parameters lie end to end in flat tensors. After backward a reduce-scatter sums the
gradients and leaves each rank its part; the rank updates that part of the parameters; an all-gather
sends the new values to all. Any code may compute the gradients: stages and cut matrices work too.
(fsdp.py also shards gradients and parameters, and runs the layers itself.) Both exchanges follow
backward and update, and go by stretches of the flat tensors, so that what is in transit is small.

Cost, W ranks, G bytes of parameters: each rank sends G (W-1)/W for gradients and as much for
parameters, and holds 1/W of the optimizer state. Gradients are moved one by one into a flat tensor
of G bytes, which is freed when the sums of this rank's part are there.

Paper: Rajbhandari et al., "ZeRO", 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runtime.communicator import Communicator

from .shards import FlatSlice, Unit

BYTES_AT_ONCE = 1 << 25  # bytes of all ranks that one collective exchanges


class _Segment(NamedTuple):
    """The parameters of one kind."""

    unit: Unit
    parameters: list[nn.Parameter]  # views of `flat`
    flat: Tensor  # all of it on every rank
    shard: nn.Parameter  # this rank's part, a view of `flat` too

    def stretches(self) -> Iterator[slice]:
        """The slices of every rank's part, one after the other."""
        step = max(1, BYTES_AT_ONCE * len(self.shard) // self.flat.nbytes)  # elements
        for begin in range(0, len(self.shard), step):
            yield slice(begin, begin + step)


class ShardedOptimizer:
    """Parts of flat tensors, and their optimizer. All ranks call the same methods together:

        loss.backward()
        sharded.reduce()
        sharded.optimizer.step()    # then `publish`

    Args:
        parameters: of this rank, by name, all of one dtype and trained, the same on all ranks of
            the communicator. Their data moves into the flat tensors. One without a gradient counts
            as having zeros: AdamW lets it decay.
        make_optimizer: of this rank's parts. It must work element by element, like SGD and AdamW.
        kind: of a name; parameters of different kinds go into different flat tensors.

    Attributes:
        shards: this rank's part of each flat tensor, by kind.
        optimizer: of the shards. After each step all ranks get the new values.

    Raises:
        ValueError: a parameter is frozen.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        communicator: Communicator,
        kind: Callable[[str], Any],
    ) -> None:
        self.communicator = communicator
        named: dict[Any, list[tuple[str, nn.Parameter]]] = {}  # by kind, in one order on all ranks
        for name, p in parameters.items():
            if not p.requires_grad:  # in a shard of trained ones it would decay
                raise ValueError(f"{name} is frozen, and stays on every rank: leave it out")
            named.setdefault(kind(name), []).append((name, p))
        self._segments = []
        for i, group in enumerate(named.values()):
            unit = Unit(i, (), group, communicator.size)
            flat = torch.zeros(unit.numel, dtype=unit.dtype, device=group[0][1].device)  # [numel]
            for (_, p), view in zip(group, unit.views(flat), strict=True):
                p.data = view.copy_(p.detach())
            shard = nn.Parameter(flat[unit.shard_slice(communicator.rank)])
            self._segments.append(_Segment(unit, [p for _, p in group], flat, shard))
        self.shards = dict(zip(named, (segment.shard for segment in self._segments), strict=True))
        self.optimizer = make_optimizer(list(self.shards.values()))
        self.optimizer.register_step_post_hook(lambda *_: self.publish())

    def reduce(self) -> None:
        """Sums the parameters' gradients over the ranks into the gradients of the shards."""
        for segment in self._segments:
            unit, parameters, _, shard = segment
            whole = shard.new_zeros(unit.numel)  # stays zero in gaps and without p.grad
            for p, view in zip(parameters, unit.views(whole), strict=True):
                if p.grad is not None:
                    view.copy_(p.grad)
                    p.grad = None  # freed one by one, as `whole` fills
            by_rank = whole.view(self.communicator.size, -1)  # [W, shard_numel]
            shard.grad = torch.empty_like(shard)
            for stretch in segment.stretches():
                terms = by_rank[:, stretch].flatten()
                shard.grad[stretch] = self.communicator.reduce_scatter(terms, 0)

    @torch.no_grad()
    def publish(self) -> None:
        """Sends the shards' values to all ranks."""
        for segment in self._segments:
            # [W, shard_numel], and so the parameters, which are views of it
            by_rank = segment.flat.view(self.communicator.size, -1)
            for stretch in segment.stretches():
                new = self.communicator.all_gather(segment.shard.detach()[stretch], 0)
                by_rank[:, stretch] = new.view(self.communicator.size, -1)

    def local_info(self) -> list[FlatSlice]:
        """What this rank updates of each parameter."""
        rank = self.communicator.rank
        return [x for segment in self._segments for x in segment.unit.slices(rank, segment.shard)]
