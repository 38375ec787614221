"""A rank's part of a model spread over ranks: its own layers, under the model's names.

The layers of all ranks are built on the meta device, where a parameter is a shape without memory.
A rank allocates the parameters of its own layers. Their initial values depend on the name, never on
the layout: so every cut starts from the same model, and no rank ever holds all of it.

A parameter used by several ranks (tied weights) has a copy on each. The first of these ranks owns
it, so that norms and checkpoints count it once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runtime.graph import Initialize


class Ownership:
    """The parameters of ``partitions[own]``, all layers of this rank (one stage or several), by the
    model's names.

    ``ranks``: for every parameter of the model, the ranks that use it, in order.
    """

    def __init__(self, partitions: Sequence[nn.Sequential], own: int, model: nn.Module) -> None:
        self._own = own
        self._module = partitions[own]
        # by tensor: the parts have other names for it
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._names.update((b, name) for name, b in model.named_buffers())
        self.ranks: dict[str, list[int]] = {}
        for r, part in enumerate(partitions):
            for name, p in part.named_parameters():
                if p not in self._names:
                    raise ValueError(
                        f"parameter {name} of rank {r} is not one of the model's: give the model "
                        "whose layers these are"
                    )
                self.ranks.setdefault(self._names[p], []).append(r)  # in ascending order

    def materialize(self, device: torch.device, initialize: Initialize | None) -> None:
        """Allocate and fill tensors on the meta device; move the others to ``device``."""
        made: dict[Tensor, Tensor] = {}  # meta -> real: tied tensors stay one
        for module in self._module.modules():
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None and tensor.is_meta:
                        if tensor not in made:
                            made[tensor] = self._make(tensor, device, initialize)
                        table[key] = made[tensor]  # type: ignore[assignment]
        self._module.to(device)  # those that had values

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters of this rank."""
        return {self._names[p]: p for p in self._module.parameters()}

    def owned(self) -> dict[str, nn.Parameter]:
        """The parameters this rank owns. Over all ranks: each parameter of the model once."""
        return {n: p for n, p in self.parameters().items() if self.ranks[n][0] == self._own}

    def tied(self) -> dict[str, nn.Parameter]:
        """The parameters that other ranks use too, in the same order on all ranks."""
        return {n: p for n, p in sorted(self.parameters().items()) if len(self.ranks[n]) > 1}

    def _make(self, tensor: Tensor, device: torch.device, initialize: Initialize | None) -> Tensor:
        name = self._names[tensor]
        if initialize is None:
            raise ValueError(
                f"parameter {name} is on the meta device and has no value: give initialize, a "
                "function of (name, tensor) that writes it"
            )
        new = torch.empty_like(tensor, device=device)
        with torch.no_grad():
            initialize(name, new)
        made = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        self._names[made] = name  # `parameters` looks it up
        return made
