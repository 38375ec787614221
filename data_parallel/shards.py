"""The parameters of a list of layers in flat units, and the shard that each rank holds of each.

Problem: cutting each parameter by itself would take a collective per parameter, and rows do not
divide evenly.

Idea: the parameters of a layer are put end to end into one flat unit, and the unit is cut into W
equal shards, anywhere. One collective then moves a whole layer:

    unit      [ ln_1.weight | ln_1.bias | attn.weight ............ | attn.bias | gap ]
    shards    [       rank 0        |       rank 1       |       rank 2              ]

Parameters shared by several layers (GPT-2's tied embedding: first and last) form a unit of their
own, gathered for each of those layers. Frozen parameters are in units of their own, too, and so are
those of each dtype.

`Unit` says where everything lies, `ShardedUnit` holds this rank's part: its first values, the whole
parameters while they are gathered, the gradients. fsdp.py decides when to gather and to sum,
runtime/communicator.py how.

Cost: every parameter and every shard starts on a cache line: at most 64 bytes of zeros each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.communicator import Communicator, Finish
from runtime.meta import Initialize, filled
from runtime.pool import Pool
from runtime.shared_memory import ALIGNMENT, Wait


class Entry(NamedTuple):
    """A parameter's place in its unit: elements start ... stop."""

    name: str
    shape: torch.Size
    start: int
    stop: int


class FlatSlice(NamedTuple):
    """What a rank holds of one parameter: elements offset ... offset + len(tensor) of the flattened
    parameter. The tensor is a view of the flat shard, so writing to it changes that."""

    name: str
    shape: torch.Size  # of the whole parameter
    offset: int
    tensor: Tensor
    parameter: nn.Parameter | None = None  # the same memory, for an optimizer


Named = list[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[Named], torch.optim.Optimizer]
"""Makes the optimizer of this rank's slices, each with its parameter's name, so that it may treat
some differently. The optimizer works element by element, as AdamW does, or is told where the pieces
of a matrix lie, as Muon is."""


class Unit:
    """Some parameters of one type, end to end, to be cut into `world_size` equal shards.

    Attributes:
        layers: the layers that use it, in order.
        dtype: of the trained parameters and of their gradients.
        compute_dtype: of the gathered parameters, as the layers see them.
        numel, shard_numel: elements of the whole unit and of a shard, gaps included.
        gaps: padding between and after the parameters, if any. Must stay zero.
    """

    def __init__(
        self,
        index: int,
        layers: tuple[int, ...],
        parameters: Sequence[tuple[str, nn.Parameter]],
        world_size: int,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.index = index
        self.layers = layers
        first = parameters[0][1]
        self.dtype, self.trainable = first.dtype, first.requires_grad
        # integers and complex numbers stay what they are
        self.compute_dtype = (self.dtype.is_floating_point and compute_dtype) or self.dtype
        # elements: a cache line of the narrower type, so whole lines of the wider one too
        step = ALIGNMENT // min(self.dtype.itemsize, self.compute_dtype.itemsize)
        self.entries: list[Entry] = []
        self.gaps: list[slice] = []
        end = 0  # of the last parameter, its gap included
        for name, p in parameters:
            used = end + p.numel()
            self.entries.append(Entry(name, p.shape, end, used))
            end = -(-used // step) * step
            self.gaps.append(slice(used, end))
        # A shard starts on a cache line, and has at least one: an empty tensor has no address.
        self.shard_numel = max(1, -(-end // (world_size * step))) * step
        self.numel = world_size * self.shard_numel
        self.gaps.append(slice(end, self.numel))

    def shard_slice(self, rank: int) -> slice:
        """Where a rank's shard lies in the unit."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters, or their gradients, as views of the whole unit `flat`."""
        return [flat[e.start : e.stop].view(e.shape) for e in self.entries]

    def slices(self, rank: int, shard: Tensor) -> list[FlatSlice]:
        """What a rank's shard holds of each parameter; parameters outside it are left out."""
        whole, slices = self.shard_slice(rank), []
        for e in self.entries:
            start, stop = max(whole.start, e.start), min(whole.stop, e.stop)  # in the unit
            if start < stop:
                values = shard.detach()[start - whole.start : stop - whole.start]
                slices.append(FlatSlice(e.name, e.shape, start - e.start, values))
        return slices

    def trained(self, rank: int, shard: Tensor) -> list[FlatSlice]:
        """The same, each with a parameter of its own."""
        return [x._replace(parameter=nn.Parameter(x.tensor)) for x in self.slices(rank, shard)]


class Place(NamedTuple):
    """Where a layer keeps a parameter: an attribute of a module, and the entry of a unit."""

    module: nn.Module
    attribute: str
    unit: int
    entry: int


class Traits(NamedTuple):
    """What the parameters of a unit have in common.

    Attributes:
        group: the ranks that share them; None: all. Other ranks have different ones, or copies.
        exact: whether layers compute with them in their own type.
        kind: anything else that keeps parameters apart.
    """

    group: dist.ProcessGroup | None = None
    exact: bool = False
    kind: Hashable = None


class Plan(NamedTuple):
    """The parameters of a unit by name, and the layers that use them."""

    layers: tuple[int, ...]
    traits: Traits
    parameters: list[tuple[str, nn.Parameter]]


def plan_units(
    layers: Sequence[nn.Module], names: Mapping[Tensor, str], traits: Callable[[str], Traits]
) -> tuple[list[Plan], list[list[Place]]]:
    """The units of the layers, in the order of their first use; and each layer's places.

    Args:
        traits: of a name.
    """
    uses = [  # a tied parameter comes once for each module that has it
        (p, layer, module, key)
        for layer, whole in enumerate(layers)
        for module in whole.modules()
        for key, p in module._parameters.items()
        if p is not None
    ]
    users: dict[nn.Parameter, dict[int, None]] = {}  # inner: an ordered set of layers
    for p, layer, _, _ in uses:
        users.setdefault(p, {})[layer] = None
    plans: dict[object, Plan] = {}
    for p, used_by in users.items():
        name, by = names[p], tuple(used_by)
        alike = by, p.dtype, p.requires_grad, traits(name)  # share a unit
        plans.setdefault(alike, Plan(by, traits(name), [])).parameters.append((name, p))
    indices = {  # by parameter, of its unit and entry
        p: (index, entry)
        for index, plan in enumerate(plans.values())
        for entry, (_, p) in enumerate(plan.parameters)
    }
    places: list[list[Place]] = [[] for _ in layers]  # by layer
    for p, layer, module, key in uses:
        places[layer].append(Place(module, key, *indices[p]))
    return [*plans.values()], places


@dataclass(eq=False)
class ShardedUnit:
    """A unit, this rank's shard of it, and the shard's gradient.

    Attributes:
        whole: the flat unit, while it is gathered or arriving.
        addresses: of its bytes; none while it is neither.
        shard: flat. Its grad is the sum over all ranks and all backwards since the last update,
            once fsdp.py has waited for it.
        trained: its slices, as the optimizer updates them.
        published: the shard in `compute_dtype`, as others gather it; the shard itself if its type
            is the same. Empty if `casts_late`.
        casts, casts_late: whether `compute_dtype` is another type; and whether the shard is cast
            for each gather, and not once after an update.
        kept: with zero 2, memory for the whole parameters; with zero 3 it is lent, unless this rank
            shares with no other.
        empty: by entry, parameters without memory: what modules hold between the passes.
        gradient: memory for the shard's grad, from the first backward on.
        arriving: waits for a gather that has started; None: there is none.
    """

    unit: Unit
    communicator: Communicator
    replicas: Communicator
    pool: Pool
    device: torch.device
    zero: int

    def __post_init__(self) -> None:
        unit, communicator = self.unit, self.communicator
        self.whole: Tensor | None = None
        self.addresses = range(0)
        self.empty: list[nn.Parameter] = []
        # By piece of lent memory: there are few, which are lent again and again.
        self._parameters: dict[int, list[nn.Parameter]] = {}
        self._gradients: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # and of its gaps
        sharded = self.zero == 3 and communicator.size > 1
        self.casts = unit.compute_dtype != unit.dtype
        # In shared memory others may read the shard at any time, so it stays; what a group sends is
        # cast anew for each gather, in the place where it is gathered.
        self.casts_late = self.casts and sharded and communicator.overlaps(self.device)
        numel = 0 if self.casts_late else unit.shard_numel if sharded else unit.numel
        storage = communicator.keep(numel, unit.compute_dtype, self.device)
        self.kept = None if sharded else storage
        self.published = storage if sharded else storage[unit.shard_slice(communicator.rank)]
        shard = self.published
        if self.casts:  # private; see `publish`
            shard = torch.zeros(unit.shard_numel, dtype=unit.dtype, device=self.device)
        self.shard = nn.Parameter(shard, unit.trainable)
        self.trained = unit.trained(communicator.rank, shard) if unit.trainable else []
        self.nbytes = storage.nbytes + (shard.nbytes if self.casts else 0)  # held permanently
        self.gradient: Tensor | None = None
        self._gradient_slices: list[Tensor] = []  # as `trained`
        self.arriving: Wait | None = None

    @torch.no_grad()
    def fill(self, parameters: Sequence[tuple[str, nn.Parameter]], init: Initialize | None) -> None:
        """Fills the shard; only one parameter at a time is whole. Parameters on the meta device are
        made by `init`, all others have rank 0's values. `empty` then replaces them."""
        slices = {s.name: s for s in self.slices(self.shard.data)}
        for name, parameter in parameters:
            if parameter.is_meta and name not in slices:
                continue  # none of it is here
            groups = self.communicator.group, self.replicas.group
            whole = first_value(parameter, name, groups, self.device, init)
            if name in slices:
                _, _, begin, values, _ = slices[name]
                values.copy_(whole.flatten()[begin : begin + len(values)])
        self.empty = [
            nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for _, p in parameters
        ]

    def slices(self, flat: Tensor) -> list[FlatSlice]:
        """What this rank holds of each parameter, or of what is as long as its shard."""
        return self.unit.slices(self.communicator.rank, flat)

    def hand_back(self) -> None:
        """Gives each slice its part of the shard's grad, if there is one."""
        if self.shard.grad is not None:
            give_gradients(self.trained, self._gradient_slices)

    def drop_gradient(self) -> None:
        """Drops the grad of the shard and of its slices."""
        self.shard.grad = None
        give_gradients(self.trained, [None] * len(self.trained))

    def parameters(self) -> list[nn.Parameter]:
        """Views of the gathered unit, made once for each piece of memory: making them takes the
        host as long as computing with them. They share its count of writes."""
        assert self.whole is not None and self.arriving is None, "the parameters are not gathered"
        memory = self.whole.untyped_storage()._cdata
        if memory not in self._parameters:
            views = self.unit.views(self.whole)
            self._parameters[memory] = [nn.Parameter(view, self.unit.trainable) for view in views]
        return self._parameters[memory]

    def publish(self) -> None:
        """Call after the shard has changed: others gather the new values, and so does this rank."""
        self.free()
        self.whole, self.addresses = None, range(0)  # zero 2: gathered again, into the same memory
        if self.casts and not self.casts_late:
            self.published.copy_(self.shard.data)

    def start_gather(self) -> None:
        """Starts to gather the unit, unless it is gathered or arriving."""
        if self.whole is None:
            self.whole = self.kept
            if self.whole is None:
                self.whole = self.pool.take(self.unit.numel, self.unit.compute_dtype)
            begin = self.whole.data_ptr()
            self.addresses = range(begin, begin + self.whole.nbytes)
            shard = self.published
            if self.casts_late:
                shard = self.whole[self.unit.shard_slice(self.communicator.rank)]
                shard.copy_(self.shard.data)
            self.arriving = self.communicator.start_gather(shard, self.whole)

    def finish_gather(self) -> None:
        """Waits for a gather that was started."""
        if self.arriving is not None:
            self.arriving()
            self.arriving = None

    def free(self) -> None:
        """Gives lent memory back; zero 2 keeps its own."""
        if self.whole is not None and self.kept is None:
            self.finish_gather()  # the gather writes there
            self.pool.give(self.whole)
            self.whole, self.addresses = None, range(0)

    def start_sum(self, gradients: Sequence[Tensor | None] | None) -> Finish:
        """Begins to sum gradients over the ranks; this rank's are given by entry, None counts as
        zero. The sum becomes the shard's grad, or is added to it."""
        whole = self.communicator.take(self.unit.numel, self.unit.dtype, self.device)
        memory = whole.untyped_storage()._cdata
        if memory not in self._gradients:
            gaps = [whole[gap] for gap in self.unit.gaps if gap.start < gap.stop]
            self._gradients[memory] = self.unit.views(whole), gaps
        views, gaps = self._gradients[memory]
        pairs = list(zip(views, gradients or [None] * len(views), strict=True))
        zeros = [*(view for view, gradient in pairs if gradient is None), *gaps]
        copies = [(view, gradient) for view, gradient in pairs if gradient is not None]
        if zeros:  # all in one call: on a GPU, one kernel
            torch._foreach_zero_(zeros)
        if copies:
            torch._foreach_copy_([view for view, _ in copies], [gradient for _, gradient in copies])
        if self.gradient is None:
            own = self.shard.numel(), self.unit.dtype, self.device
            self.gradient = self.replicas.keep(*own)
            self._gradient_slices = [x.tensor for x in self.slices(self.gradient)]
        accumulate = self.shard.grad is not None
        self.shard.grad = self.gradient
        return self.communicator.start_reduce_scatter(whole, 0, self.gradient, accumulate)

    def start_sum_of_replicas(self) -> Finish:
        """Begins to add up the shard's grad over the replicas, in place."""
        assert self.gradient is not None, "a backward has made it"
        return self.replicas.start_sum(self.gradient)


def give_gradients(slices: Sequence[FlatSlice], gradients: Sequence[Tensor | None]) -> None:
    """Sets the grad of each slice's parameter."""
    for (_, p), gradient in zip(with_names(slices), gradients, strict=True):
        p.grad = gradient


def with_names(slices: Iterable[FlatSlice]) -> Named:
    """The parameters of slices by name."""
    return [(x.name, x.parameter) for x in slices if x.parameter is not None]


def make_with(
    make_optimizer: MakeOptimizer, slices: Iterable[FlatSlice], device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer of slices. A rank without slices gives it an empty parameter, since optimizers
    refuse an empty list."""
    return make_optimizer(
        with_names(slices) or [("nothing", nn.Parameter(torch.empty(0, device=device)))]
    )


def first_value(
    tensor: Tensor,
    name: str,
    groups: Sequence[dist.ProcessGroup | None],
    device: torch.device,
    init: Initialize | None,
) -> Tensor:
    """The value of a parameter or buffer with which training begins. On the meta device `init`
    writes it. Otherwise the first rank of each group broadcasts its value, group after group, so
    all ranks must call this together. (A group that is None: a rank alone.)"""
    if tensor.is_meta:
        return filled(tensor, name, device, init)
    value = tensor.detach().to(device).resolve_conj().resolve_neg().contiguous()
    in_bytes = value.flatten().view(torch.uint8)  # gloo does not send every dtype
    for group in groups:
        if group is not None:
            dist.broadcast(in_bytes, group=group, group_src=0)
    return value
