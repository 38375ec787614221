"""How n things are cut into even parts: examples, layers, blocks."""

from __future__ import annotations


def even_sizes(n: int, parts: int) -> list[int]:
    """The sizes of `parts` parts of n things. They differ by at most one, the larger first."""
    size, larger = divmod(n, parts)  # the first `larger` parts have one more
    return [size + (part < larger) for part in range(parts)]
