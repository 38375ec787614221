"""A rank's part of a model spread over ranks: its own layers, under the model's names.

The layers of all ranks are built on the meta device, where a parameter is a shape without memory.
A rank allocates the parameters of its own layers (runtime/meta.py), and no rank ever holds all of
the model.

A parameter used by several ranks (tied weights) has a copy on each. The first of these ranks owns
it, so that norms and checkpoints count it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn


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
