"""Draws labelled 32 x 32 pictures of shapes and textures from a seed.

Only the shape or texture gives the class. Position, size, rotation, both colours, lighting, a
distracting spot and noise are random in the same way for every class, so no pixel, mean colour or
histogram gives the class away. All pictures of a chunk are computed at once, on a pixel grid u, v
that is shifted, rotated and scaled for each picture: a disc is u^2 + v^2 < 1.

Cost: about 0.1 ms a picture. Picture i depends on the seed and i only, not on how many are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

SIZE = 32  # pixels of an edge
Array = np.ndarray[Any, np.dtype[Any]]


def _cross(u: Array, v: Array) -> Array:
    near, far = np.minimum(abs(u), abs(v)), np.maximum(abs(u), abs(v))
    return (near < 0.3) & (far < 1)


# True where a pixel is foreground. u, v: shapes fill -1 ... 1; textures have period 2.
SHAPES: dict[str, Callable[[Array, Array], Array]] = {
    "disc": lambda u, v: u * u + v * v < 1,
    "ring": lambda u, v: (u * u + v * v < 1) & (u * u + v * v > 0.3),
    "square": lambda u, v: np.maximum(abs(u), abs(v)) < 0.85,
    "triangle": lambda u, v: (v < 0.6) & (v > 1.8 * abs(u) - 1.05),
    "cross": _cross,
}
TEXTURES: dict[str, Callable[[Array, Array], Array]] = {
    "rows": lambda u, v: np.sin(np.pi * v) > 0,  # noqa: ARG005
    "columns": lambda u, v: np.sin(np.pi * u) > 0,  # noqa: ARG005
    "diagonals": lambda u, v: np.sin(np.pi * (u + v) * 0.71) > 0,
    "checkerboard": lambda u, v: np.sin(np.pi * u) * np.sin(np.pi * v) > 0,
    "dots": lambda u, v: (np.sin(np.pi * u) + np.sin(np.pi * v)) > 0.9,
}
CLASSES = (*SHAPES, *TEXTURES)
_DRAWS = 24  # random numbers of a picture, besides its noise
_CHUNK = 500  # pictures computed at once: 2 MB a plane


def draw(n: int, seed: Sequence[int]) -> tuple[Array, Array]:
    """n pictures as bytes [n, 3, 32, 32], and their classes [n]; picture i has class i % 10."""
    randoms, noises = (np.random.default_rng([*seed, stream]) for stream in (0, 1))
    labels = np.arange(n) % len(CLASSES)
    images = np.empty((n, 3, SIZE, SIZE), np.uint8)
    for start in range(0, n, _CHUNK):
        part = slice(start, min(n, start + _CHUNK))
        size = part.stop - part.start
        noise = noises.standard_normal((size, 3, SIZE, SIZE), np.float32)
        images[part] = _render(labels[part], randoms.random((size, _DRAWS), np.float32), noise)
    return images, labels


def _render(labels: Array, randoms: Array, noise: Array) -> Array:
    r = iter(randoms.T[:, :, None, None])  # each [n, 1, 1]
    x, y, turn, scale = next(r), next(r), next(r), next(r)
    axis = np.linspace(-1, 1, SIZE, dtype=np.float32)
    across, down = axis[None, None, :], axis[None, :, None]

    foreground = np.zeros((len(labels), SIZE, SIZE), bool)
    for label, (name, inside) in enumerate({**SHAPES, **TEXTURES}.items()):
        at = labels == label  # [n], the pictures of this class
        dx, dy = across - 0.6 * (x[at] - 0.5), down - 0.6 * (y[at] - 0.5)
        angle = 0.6 * (turn[at] - 0.5)
        unit = 0.5 + 0.2 * scale[at] if name in SHAPES else 0.17 + 0.12 * scale[at]
        u = (dx * np.cos(angle) + dy * np.sin(angle)) / unit  # [of the class, 32, 32]
        v = (dy * np.cos(angle) - dx * np.sin(angle)) / unit
        foreground[at] = inside(u, v)

    colours = np.stack([next(r) for _ in range(6)], 1).reshape(len(labels), 2, 3, 1, 1)
    below, above = 0.5 * colours[:, 0], 0.5 + 0.5 * colours[:, 1]
    picture = np.where(foreground[:, None], above, below)  # [n, 3, 32, 32], from 0 to 1
    light = (next(r) - 0.5) * across + (next(r) - 0.5) * down
    picture = picture + 0.3 * light[:, None]
    spot = (across - 2 * next(r) + 1) ** 2 + (down - 2 * next(r) + 1) ** 2 < 0.05 * next(r)
    colour = np.stack([next(r) for _ in range(3)], 1)
    picture = np.where(spot[:, None], colour, picture)
    picture = picture + 0.12 * next(r)[:, None] * noise
    return np.clip(picture * 255, 0, 255).astype(np.uint8)
