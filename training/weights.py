"""The weights of a checkpoint, whole, in one process."""

from __future__ import annotations

import torch
from torch import Tensor

from training.checkpoint import Checkpoint, Saver

from .layouts.layout import Held


def weights_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every weight by name, whole, in this process."""
    found = {
        name.removeprefix("model."): torch.empty(t.size, dtype=t.properties.dtype)
        for name, t in checkpoint.tensors.items()
        if name.startswith("model.")
    }
    held = [Held.whole(f"model.{name}", t) for name, t in found.items()]
    Saver(checkpoint.folder.parent).load(checkpoint, held)
    return found
