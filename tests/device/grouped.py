"""Stands for torch's grouped matrix product on the device: refuses the strides that it refuses, and
gives NaN where its kernels write nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Of each group of a's rows and one matrix of b; or of a's columns and b's rows, where some
    kernels write nothing for an empty group (pytorch issue 172439): NaN here."""
    for x in (a, b):
        steps = sorted(x.stride()[-2:])
        if x.dtype != torch.bfloat16 or steps[0] != 1 or steps[1] * x.itemsize % 16:
            raise RuntimeError("_grouped_mm: strides should be multiple of 16 bytes")
    found: Tensor = torch._grouped_mm(a, b, offs=offs)
    if a.dim() == b.dim() == 2:
        begins = torch.cat([offs.new_zeros(1), offs[:-1]])
        found[begins == offs] = math.nan
    return found
