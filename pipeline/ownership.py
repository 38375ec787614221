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
    """The parameters of ``module``, all layers of the rank ``own``, by the names of ``model``.

    ``parts``, ``ranks``: of each stage, its layers and its rank.

    Attributes:
        ranks: for every parameter of the model, the ranks that use it, ascending.
        tied: those of ``ranks`` that several stages use, in the same order on all ranks.
    """

    def __init__(
        self,
        parts: Sequence[nn.Sequential],
        ranks: Sequence[int],
        module: nn.Sequential,
        own: int,
        model: nn.Module,
    ) -> None:
        self._module, self._own = module, own
        # by tensor: the parts have other names for it
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._names.update((b, name) for name, b in model.named_buffers())
        uses: dict[str, list[int]] = {}  # the rank of every stage that uses it
        for part, r in zip(parts, ranks, strict=True):
            for p in part.parameters():
                uses.setdefault(self._names[p], []).append(r)
        self.ranks = {name: sorted({*users}) for name, users in uses.items()}
        self.tied = {name: self.ranks[name] for name in sorted(uses) if len(uses[name]) > 1}

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

    def _make(self, tensor: Tensor, device: torch.device, initialize: Initialize | None) -> Tensor:
        name = self._names[tensor]
        if initialize is None:
            raise ValueError(f"{name} is on the meta device and has no value: give initialize")
        new = torch.empty_like(tensor, device=device)
        with torch.no_grad():
            initialize(name, new)
        made = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        self._names[made] = name  # `parameters` looks it up
        return made
