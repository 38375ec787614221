"""Fills sharded parameters. No rank ever holds more than one of them whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.sharding import Place
from data_parallel.shards import ShardedUnit
from runtime.graph import Initialize


def require_init(
    layers: Sequence[nn.Module], names: Mapping[Tensor, str], init: Initialize | None
) -> None:
    """Raises ValueError if a tensor is on the meta device and nothing can fill it."""
    model = nn.Sequential(*layers)
    for own_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta and (init is None or tensor not in names):
            raise ValueError(
                f"{names.get(tensor, own_name)} is on the meta device: give init, a function of "
                "(name, tensor) that fills it, and its name in names"
            )


@torch.no_grad()
def materialize(
    layers: Sequence[nn.Module],
    places: Sequence[Sequence[Place]],
    units: Sequence[ShardedUnit],
    names: Mapping[Tensor, str],
    init: Initialize | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> None:
    """Fills the shards and empties the modules.

    `init` fills parameters and buffers on the meta device; the others get rank 0's values.
    Afterwards the modules' parameters are on the meta device. Their buffers, which are small (batch
    norm's statistics), are whole on `device`.
    """
    first = 0 if group is None else dist.get_global_rank(group, 0)  # its rank 0, in the world
    users: dict[tuple[int, int], list[Place]] = {}  # by (unit, entry); several for a tied one
    for place in (place for of_layer in places for place in of_layer):
        users.setdefault((place.unit, place.entry), []).append(place)
    for (index, i), used_at in users.items():  # the same order on all ranks, for the broadcasts
        parameter = used_at[0].module._parameters[used_at[0].attribute]
        assert parameter is not None
        whole = None
        if not parameter.is_meta:
            whole = parameter.detach().to(device).contiguous()
            dist.broadcast(whole, first, group=group)
            empty = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
            for place in used_at:  # the same for all: tied stays tied
                setattr(place.module, place.attribute, empty)
        _fill(units[index], i, whole, init, device, dist.get_rank(group))
    for module in (m for layer in layers for m in layer.modules()):
        for key, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            if buffer.is_meta:
                assert init is not None
                module._buffers[key] = filled = torch.empty_like(buffer, device=device)
                init(names[buffer], filled)  # on every rank: all keep it whole
            else:
                module._buffers[key] = filled = buffer.to(device).contiguous()
                if filled.numel():
                    flat = filled.flatten().view(torch.uint8)  # gloo does not support every dtype
                    dist.broadcast(flat, first, group=group)


def _fill(
    u: ShardedUnit,
    index: int,
    whole: Tensor | None,
    init: Initialize | None,
    device: torch.device,
    rank: int,
) -> None:
    """Writes this rank's part of one parameter, from `whole` or, without it, from `init`."""
    entry = u.unit.entries[index]
    begin, end = u.unit.held(entry, rank)
    if begin == end:
        return  # no part of it is here, so `init` need not run
    if whole is None:
        whole = torch.empty(entry.shape, dtype=u.unit.dtype, device=device)
        assert init is not None
        init(entry.name, whole)
    start = entry.start + begin - u.unit.part(rank).start  # in this rank's shard
    u.shard.data[start : start + end - begin] = whole.flatten()[begin:end]
