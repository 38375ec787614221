"""Kernels of a GPU that draw from a seed of the caller's, and such seeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def drawing(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, kernels draw from the device's default generator, seeded with ``seed``; a stage's own
    seeds (randomness.py) do not count here. Afterwards the generator is as before. All of this is
    the host's: no kernel runs, and nobody waits."""
    module = torch.get_device_module(device)
    with torch._C.DisableTorchFunction(), torch.accelerator.device_index(device.index):
        state = module.get_rng_state()
        module.manual_seed(seed)
        try:
            yield
        finally:
            module.set_rng_state(state)


def mixed(number: int, site: int, index: int) -> int:
    """A well-spread 63-bit seed (the finaliser of splitmix64); ``index`` is below 2^32."""
    z = (number + 0x9E3779B97F4A7C15 * ((site << 32) + index + 1)) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) >> 1
