"""Memory and values for a model on the meta device, where a tensor is a shape without memory.

Problem: a model that is to be spread over ranks may fit on none of them, and every layout must
start from the same values.

Idea: all ranks build the whole model on the meta device. Each then makes only the tensors that it
holds, or holds a part of. A value depends on the tensor's name and on nothing else, so any cut
starts from the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

Initialize = Callable[[str, Tensor], object]
"""Called with (name, tensor): writes the initial value of a parameter or buffer. The value must
depend on nothing but the name, since a rank asks only for the tensors it holds a part of."""


def names_of(model: nn.Module) -> dict[Tensor, str]:
    """The names of parameters and buffers, by tensor, since a part of the model names them
    differently. A tied parameter has the first of its names."""
    return {t: name for name, t in [*model.named_parameters(), *model.named_buffers()]}


@torch.no_grad()
def filled(empty: Tensor, name: str, device: torch.device, initialize: Initialize | None) -> Tensor:
    """A tensor like `empty`, with memory and its value. Raises ValueError without `initialize`."""
    if initialize is None:
        raise ValueError(f"{name} is on the meta device: give the function that fills it by name")
    made = torch.empty_like(empty, device=device, requires_grad=False)
    initialize(name, made)
    return made


def materialize(
    module: nn.Module,
    names: Mapping[Tensor, str],
    device: torch.device,
    initialize: Initialize | None,
) -> dict[Tensor, str]:
    """Gives the module's tensors on the meta device memory and values, and moves the others to
    `device`. Tied parameters stay one. Returns `names` with the new tensors."""
    made: dict[Tensor, Tensor] = {}  # by the empty one
    for submodule in module.modules():
        for table in (submodule._parameters, submodule._buffers):
            for key, empty in table.items():
                if empty is None or not empty.is_meta:
                    continue
                if empty not in made:
                    new = filled(empty, names[empty], device, initialize)
                    if isinstance(empty, nn.Parameter):
                        new = nn.Parameter(new, empty.requires_grad)
                    made[empty] = new
                table[key] = made[empty]  # type: ignore[assignment]
    module.to(device)  # those that had values
    return {**names, **{new: names[empty] for empty, new in made.items()}}
