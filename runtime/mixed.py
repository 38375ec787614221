"""Seeds for draws that belong to a place: a layer, a site in the model, a micro-batch."""

from __future__ import annotations


def mixed(number: int, site: int, index: int) -> int:
    """A well-spread 63-bit seed (the finaliser of splitmix64); ``index`` is below 2^32."""
    z = (number + 0x9E3779B97F4A7C15 * ((site << 32) + index + 1)) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) >> 1
