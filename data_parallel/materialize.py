"""Gives sharded parameters their values, no rank ever holding more than one of them whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.sharding import Place, Unit
from data_parallel.shards import ShardedUnit
from runtime.graph import Initialize


@torch.no_grad()
def materialize(
    layers: Sequence[nn.Module],
    places: Sequence[Sequence[Place]],
    units: Sequence[ShardedUnit],
    buffers: Mapping[Tensor, str],
    init: Initialize | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> None:
    """Fills the shards and empties the modules.

    Parameters and buffers on the meta device get what `init` says; those that have values get rank
    0's. The modules' parameters are on the meta device afterwards, their buffers, whole, on
    `device`.
    """
    where: dict[tuple[int, int], list[Place]] = {}
    for place in (place for of_layer in places for place in of_layer):
        where.setdefault((place.unit, place.entry), []).append(place)
    for (index, i), users in where.items():
        parameter = users[0].module._parameters[users[0].attribute]
        assert parameter is not None
        _fill(units[index], i, parameter, init, device, group)
        if not parameter.is_meta:
            empty = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
            for place in users:
                setattr(place.module, place.attribute, empty)
    _materialize_buffers(layers, buffers, init, device, group)


def _fill(
    u: ShardedUnit,
    index: int,
    parameter: nn.Parameter,
    init: Initialize | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> None:
    """This rank's part of one parameter."""
    rank = dist.get_rank(group)
    entry = u.unit.entries[index]
    begin, end = u.unit.held(entry, rank)
    if not parameter.is_meta:
        whole = parameter.detach().to(device).contiguous()
        dist.broadcast(whole, _first_of(group), group=group)
    elif begin < end:
        whole = torch.empty(entry.shape, dtype=u.unit.dtype, device=device)
        assert init is not None
        init(entry.name, whole)
    if begin < end:
        start = entry.start + begin - u.unit.part(rank).start
        u.shard.data[start : start + end - begin] = whole.flatten()[begin:end]


def _first_of(group: dist.ProcessGroup | None) -> int:
    """The rank, among all, of the group's first."""
    return 0 if group is None else dist.get_global_rank(group, 0)


def _materialize_buffers(
    layers: Sequence[nn.Module],
    names: Mapping[Tensor, str],
    init: Initialize | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> None:
    """Buffers, as the statistics of a batch norm, are small: every rank has all of them."""
    for module in (m for layer in layers for m in layer.modules()):
        for key, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            if buffer.is_meta:
                assert init is not None
                module._buffers[key] = filled = torch.empty_like(buffer, device=device)
                init(names[buffer], filled)
            else:
                module._buffers[key] = filled = buffer.to(device).contiguous()
                if filled.numel():
                    flat = filled.flatten().view(torch.uint8)  # gloo does not know every type
                    dist.broadcast(flat, _first_of(group), group=group)


def names_of_buffers(
    layers: Sequence[nn.Module], names: Mapping[Tensor, str] | None
) -> dict[Tensor, str]:
    """The names of the layers' buffers that are on the meta device: those that are given or, where
    none are, those of ``nn.Sequential(*layers)``.

    Raises:
        ValueError: names are given, and not all of them.
    """
    found = {b: name for name, b in nn.Sequential(*layers).named_buffers() if b.is_meta}
    if names is None:
        return found
    for buffer, name in found.items():
        if buffer not in names:
            raise ValueError(
                f"buffer {name} of the layers is on the meta device and has no name: give its name "
                "too, as {b: name for name, b in model.named_buffers()}"
            )
    return {buffer: names[buffer] for buffer in found}


def require_init(
    places: Sequence[Sequence[Place]],
    units: Sequence[Unit],
    buffers: Mapping[Tensor, str],
    init: Initialize | None,
) -> None:
    """Raises ValueError, on all ranks alike, where there is no `init` and something needs it."""
    names = [
        units[place.unit].entries[place.entry].name
        for place in (place for of_layer in places for place in of_layer)
        if place.module._parameters[place.attribute].is_meta  # type: ignore[union-attr]
    ]
    names += buffers.values()
    if names and init is None:
        raise ValueError(
            f"{names[0]} is on the meta device: give init, a function of (name, tensor) that "
            "fills it"
        )
