"""Sums of tensors in a fixed order, so that all ranks get the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ELEMENTS_AT_ONCE = 1 << 18  # elements added at a time, so that they stay in cache


def wide(x: Tensor) -> torch.dtype:
    """The type for sums of such numbers."""
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of x."""
    # The name of a device takes the host ten times as long as the first question.
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type)


def narrowed(x: Tensor) -> Tensor:
    """`x` in the type that autocast, where it is on, gives to products; float64 stays as it is."""
    if not is_autocast(x) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def add_up(terms: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The sum, in rank order; 16-bit numbers are summed in fp32 and rounded once. A single term is
    returned as it is. `out`: memory of the type `wide`, in which two or more terms are added up."""
    if len(terms) == 1:
        return terms[0]
    total = torch.add(terms[0].to(wide(terms[0])), terms[1], out=out)  # in the wide type
    for term in terms[2:]:
        total += term
    return total.to(terms[0].dtype)


def sum_into(target: Tensor, terms: Sequence[Tensor], accumulate: bool = False) -> None:
    """Writes the sum of the terms into the target, or adds it to what is there (`accumulate`). The
    target may be one of the terms. On a CPU it works on chunks of rows that stay in cache."""
    rows = ELEMENTS_AT_ONCE * len(target) // max(1, target.numel())
    rows = max(1, rows if target.device.type == "cpu" else len(target))
    # A sum that is built up in the target takes half the time.
    direct = not accumulate and target.dtype == wide(target) == terms[0].dtype
    direct = direct and target.data_ptr() not in [term.data_ptr() for term in terms[2:]]
    for begin in range(0, len(target), rows):
        chunk, *parts = (x[begin : begin + rows] for x in (target, *terms))
        total = add_up(parts, chunk if direct else None)
        if accumulate:
            chunk += total
        elif total is not chunk:
            chunk.copy_(total)
