"""Which devices compute in float64."""

from __future__ import annotations

import torch

WITHOUT = ("mps",)  # Apple's GPUs refuse to hold such a tensor


def device_of_float64(device: torch.device) -> torch.device:
    """Where to compute in float64 with what is on `device`: there, or on the CPU if it cannot. Move
    a tensor first and convert it then: a device refuses to convert it, too."""
    return torch.device("cpu") if device.type in WITHOUT else device
