"""A rank's part of a model spread over ranks: its own layers, under the model's names.

The layers of all ranks are built on the meta device, where a parameter is a shape without memory.
A rank allocates the parameters of its own layers. Their initial values depend on the name, never on
the layout: so every cut starts from the same model, and no rank ever holds all of it.

A parameter used by several ranks (tied weights) has a copy on each. The first of these ranks owns
it, so that norms and checkpoints count it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from runtime.graph import Initialize


def names_of(model: nn.Module) -> dict[Tensor, str]:
    """By tensor, since its parts have other names for it."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {tensor: name for name, tensor in named}


def users(
    parts: Sequence[nn.Module], ranks: Sequence[int], names: Mapping[Tensor, str]
) -> dict[str, list[int]]:
    """For every parameter, the rank of each stage that uses it; ``parts`` and ``ranks`` are those
    of the stages."""
    found: dict[str, list[int]] = {}
    for part, r in zip(parts, ranks, strict=True):
        for p in part.parameters():
            found.setdefault(names[p], []).append(r)
    return found


def materialize(
    own: nn.Module, names: dict[Tensor, str], device: torch.device, initialize: Initialize | None
) -> None:
    """Allocate and fill the tensors of ``own`` that are on the meta device, and add them to
    ``names``; move the others to ``device``."""
    made: dict[Tensor, Tensor] = {}  # meta -> real: tied tensors stay one
    for module in own.modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    if initialize is None:
                        raise ValueError(
                            f"{names[tensor]} is on the meta device, without a value: give "
                            "initialize"
                        )
                    new = torch.empty_like(tensor, device=device)
                    with torch.no_grad():
                        initialize(names[tensor], new)
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, tensor.requires_grad)
                    names[new], made[tensor] = names[tensor], new
                table[key] = made[tensor]  # type: ignore[assignment]
    own.to(device)  # those that had values
