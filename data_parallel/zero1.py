"""ZeRO 1 for any layout: every rank updates its part of the parameters, and all get the result.

Problem. In data parallelism every rank keeps the optimizer state of all parameters, twice their
size with Adam, and repeats the same update.

Idea. An all-reduce is a reduce-scatter and an all-gather: the update fits between them. Parameters
lie end to end in flat tensors, their gradients in buckets of the same order (buckets.py). A bucket
that is full leaves while backward runs, as in data parallelism, but each rank gets only its part of
the sum; it updates that part of the parameters; an all-gather sends the new values to all.

    gradients, on each rank   [ part 0 | part 1 ]    rank r gets the sum of the parts r, in place
    parameters                [ part 0 | part 1 ]    and updates its part r; then all get both

With `replicas` there are several groups of W ranks. After the reduce-scatter, ranks with the same
part of the gradients add it up over the groups: G / W bytes over the network between them.

Any code may compute the gradients: stages and cut matrices work too. (fsdp.py also shards gradients
and parameters, and runs the layers itself.)

Cost, W ranks, G bytes of parameters: each rank sends G (W-1)/W for gradients and as much for
parameters: together what an all-reduce sends. It holds 1/W of the optimizer state, and all of the
parameters and gradients. Parameters become contiguous, since a part of one is a range of elements.

Paper: Rajbhandari et al., "ZeRO", 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runtime.communicator import Communicator
from runtime.guards import refuse_to_separate
from runtime.recorder import Recorder, acting

from .buckets import Bucket, GradientBuckets, in_backward_order, refuse_other_tensors
from .shards import MakeOptimizer, Unit, first_value, give_gradients, make_with


class ScatteredBucket(Bucket):
    """Every rank gets its part of the sum over the ranks, as the gradient of `shard`.

    Attributes:
        values: the parameters, end to end; all of them on every rank.
        shard: this rank's part of `values`, a view; `trained`: its slices, for an optimizer.
        replicas: the ranks of other groups with the same part, over which its sums are added up.
    """

    kind = "reduce_scatter"

    def __init__(
        self, named: Mapping[str, nn.Parameter], communicator: Communicator, replicas: Communicator
    ) -> None:
        self.replicas = replicas
        unit = self.unit = Unit(0, (), [*named.items()], communicator.size)
        trained = [*named.values()]
        memory = unit.numel, unit.dtype, trained[0].device
        # Both stay zero in the gaps: these count in norms.
        flat, self.values = communicator.keep(*memory), communicator.keep(*memory)
        groups = communicator.group, replicas.group
        for (name, p), view in zip(named.items(), unit.views(self.values), strict=True):
            p.data = view.copy_(first_value(p, name, groups, p.device, None))
        self._places = [p.data_ptr() for p in trained]
        own = unit.shard_slice(communicator.rank)
        self.shard, self.part = self.values[own], flat[own]
        self.trained = unit.trained(communicator.rank, self.shard)
        self._gradients = [x.tensor for x in unit.slices(communicator.rank, self.part)]
        super().__init__(trained, flat, unit.views(flat), communicator)

    def start_exchange(self) -> None:
        places = [p.requires_grad and p.data_ptr() for p in self.parameters]
        if places != self._places:
            raise RuntimeError(
                "a parameter was frozen, and would still be updated, or its data were replaced, "
                "and would miss the updates: write into the parameter, e.g. p.data.copy_(new), or "
                "make a new ShardedOptimizer"
            )
        self.fill()
        self.finish_sum = self.communicator.start_reduce_scatter(self.flat, 0, self.part)

    def finish_exchange(self) -> None:
        super().finish_exchange()
        if self.replicas.size > 1:
            self.sum_of_replicas = self.replicas.start_all_reduce(self.part)

    def hand_back(self) -> None:
        """Gives the slices their gradients. The parameters' are gone: the sum took their memory."""
        if self.replicas.size > 1:
            self.part.copy_(self.sum_of_replicas())
        give_gradients(self.trained, self._gradients)
        for p in self.parameters:
            p.grad = None


class ShardedOptimizer:
    """Parts of flat tensors, and their optimizer. All ranks call the same methods together:

        sharded.buckets.watch()     # or tell it what is `ready`
        loss.backward()
        sharded.buckets.finish()    # sums over the ranks, into the gradients of the shards
        sharded.optimizer.step()    # then `publish`

    Args:
        parameters: of this rank, by name, all trained, the same on all ranks of the communicator.
            Their data, those of the first rank, move into the flat tensors. No layer may write to
            them, as an embedding with `max_norm` does: only the writes of the rank that updates a
            part would stay. One without a gradient counts as having zeros: AdamW lets it decay.
        make_optimizer: see `shards.MakeOptimizer`.
        kind: of a name; parameters of different kinds go into different flat tensors.
        recorder: is told of the exchanges; see `GradientBuckets`.
        replicas: the ranks with the same parts, in other groups like that of the communicator.

    Attributes:
        slices: of this rank's parts, what it updates of each parameter.
        optimizer: of the slices. After each step all ranks get the new values.

    Raises:
        ValueError: a parameter is frozen, or shares memory with another; or ranks have others.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        make_optimizer: MakeOptimizer,
        communicator: Communicator,
        kind: Callable[[str], Any] = lambda _: None,
        recorder: Recorder | None = None,
        replicas: Communicator | None = None,
    ) -> None:
        for name, p in parameters.items():
            if not p.requires_grad:  # in a shard of trained ones it would decay
                raise ValueError(f"{name} is frozen, and stays on every rank: leave it out")
        self.communicator, self.recorder = communicator, recorder
        names: dict[Tensor, str] = {p: name for name, p in parameters.items()}
        refuse_to_separate(names, "each would move into a flat tensor by itself")
        groups = in_backward_order(parameters.values(), kind=lambda p: kind(names[p]))
        ranks = communicator, replicas or Communicator()
        refuse_other_tensors(parameters.items(), [each.group for each in ranks])
        self._parts = [ScatteredBucket({names[p]: p for p in ps}, *ranks) for ps in groups]
        self.buckets = GradientBuckets(self._parts, recorder)
        self.slices = [x for bucket in self._parts for x in bucket.trained]
        self.optimizer = make_with(make_optimizer, self.slices, self._parts[0].shard.device)
        self.optimizer.register_step_post_hook(lambda *_: self.publish())

    @torch.no_grad()
    def publish(self) -> None:
        """Sends the shards' values to all ranks. No rank may change its shards before it has
        finished a further exchange."""
        device = self._parts[0].shard.device
        with acting(self.recorder, "all_gather", device=device):
            self.communicator.barrier(device)  # all have written theirs
            gathers = [self.communicator.start_gather(b.shard, b.values) for b in self._parts]
            for finish in gathers:
                finish()
