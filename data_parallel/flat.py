"""The flat layout of the parameters of a list of layers, and the shard that each rank holds.

Problem: cutting each parameter by itself would take a collective per parameter, and rows do not
divide evenly.

Idea: the parameters of a layer are put end to end into one flat unit, and the unit is cut into W
equal shards, anywhere. One collective then moves a whole layer:

    unit      [ ln_1.weight | ln_1.bias | attn.weight ............ | attn.bias | gap ]
    shards    [       rank 0        |       rank 1       |       rank 2              ]

Parameters shared by several layers (GPT-2's tied embedding: first and last) form a unit of their
own, gathered for each of those layers. So do frozen parameters, and each dtype.

Cost: every parameter and every shard starts on a cache line: at most 64 bytes of zeros each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from runtime.shared_memory import ALIGNMENT


class Entry(NamedTuple):
    """A parameter's place in its unit: elements start ... stop."""

    name: str
    shape: torch.Size
    start: int
    stop: int


class FlatPiece(NamedTuple):
    """A rank's part of one parameter: elements offset ... offset + len(tensor) of the flattened
    parameter. The tensor is a view, so writing to it changes the shard."""

    name: str
    shape: torch.Size  # of the whole parameter
    offset: int
    tensor: Tensor


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
        self.shard_numel = -(-end // (world_size * step)) * step  # starts on a cache line
        self.numel = world_size * self.shard_numel
        self.gaps.append(slice(end, self.numel))

    @property
    def nbytes(self) -> int:
        """Of the whole gathered unit."""
        return self.numel * self.compute_dtype.itemsize

    @property
    def gradient_nbytes(self) -> int:
        """Of the gradients of the whole unit."""
        return self.numel * self.dtype.itemsize

    def part(self, rank: int) -> slice:
        """A rank's shard, as a slice of the unit."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters, or their gradients, as views of the whole unit `flat`."""
        return [flat[e.start : e.stop].view(e.shape) for e in self.entries]

    def pieces(self, rank: int, shard: Tensor) -> list[FlatPiece]:
        """The parts of parameters in a rank's shard; parameters outside it are left out."""
        part, pieces = self.part(rank), []
        for e in self.entries:
            start, stop = max(part.start, e.start), min(part.stop, e.stop)  # in the unit
            if start < stop:
                here = shard[start - part.start : stop - part.start]
                pieces.append(FlatPiece(e.name, e.shape, start - e.start, here))
        return pieces


class Place(NamedTuple):
    """Where a layer keeps a parameter: an attribute of a module, and the entry of a unit."""

    module: nn.Module
    attribute: str
    unit: int
    entry: int


def make_units(
    layers: Sequence[nn.Module],
    names: Mapping[Tensor, str],
    world_size: int,
    compute_dtype: torch.dtype | None,
    kind: Callable[[str], Hashable],
) -> tuple[list[Unit], list[list[nn.Parameter]], list[list[Place]]]:
    """The units of the layers, in the order of their first use; their parameters, by unit and
    entry; and each layer's places.

    Args:
        kind: of a name; parameters of different kinds go into different units.
    """
    found = [  # one per use: a tied parameter comes once for each module that has it
        (p, layer, module, key)
        for layer, whole in enumerate(layers)
        for module in whole.modules()
        for key, p in module._parameters.items()
        if p is not None
    ]
    users: dict[nn.Parameter, dict[int, None]] = {}  # inner: an ordered set of layers
    for p, layer, _, _ in found:
        users.setdefault(p, {})[layer] = None
    groups: dict[object, list[nn.Parameter]] = {}  # one per unit
    for p, used_by in users.items():
        alike = (tuple(used_by), p.dtype, p.requires_grad, kind(names[p]))  # share a unit
        groups.setdefault(alike, []).append(p)
    parameters = list(groups.values())
    units, where = [], {}  # where: by parameter, its unit and entry
    for index, group in enumerate(parameters):
        named = [(names[p], p) for p in group]
        units.append(Unit(index, tuple(users[group[0]]), named, world_size, compute_dtype))
        where.update({p: (index, i) for i, p in enumerate(group)})
    places: list[list[Place]] = [[] for _ in layers]  # by layer
    for p, layer, module, key in found:
        places[layer].append(Place(module, key, *where[p]))
    return units, parameters, places
