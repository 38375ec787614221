"""The cache of keys and values for generation: of sentences that are continued.

Sentences are aligned at their ends, so that all grow in the same column:

    column    0  1  2  3  4 | 5  6          all rows are read up to column 4;
    row 0     .  .  .  a  b | c  <eos>      then all write column 5, 6, ...
    row 1     .  .  .  d  e | f  g
    row 2     h  i  j  k  l | m  n          a finished row leaves the cache

Memory: 2 B S C per attention layer, and for one of them a copy while it grows, by `transformers`.
That takes as long as room to grow (docs/log.md).

Shapes: B unfinished sentences, S columns so far, T the newest of them, C width, H heads, E width of
a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Cache:
    """The lengths of the sentences so far, and the keys and values of this process' attention
    layers.

    Args:
        prompts: the index of each row's prompt.
        lengths: of these prompts, in tokens.

    Attributes:
        S: columns so far.
    """

    def __init__(
        self, prompts: Sequence[int], lengths: Sequence[int], device: torch.device | str = "cpu"
    ) -> None:
        from transformers import DynamicCache  # here: see training/tasks/gpt2.py

        self.prompts, self.S = prompts, max(lengths)
        self.lengths = torch.tensor(lengths, device=device)  # [B]
        self._layers: Any = DynamicCache()  # keys and values, B H S E, by number in the model
        self._mask: Tensor | None = None  # of the newest tokens

    def extend(self) -> None:
        """Every sentence has one more token, for the next forward."""
        self.lengths += 1
        self.S, self._mask = self.S + 1, None

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows, in this order, in a copy. Call `extend` next."""
        self.prompts = [self.prompts[row] for row in rows]
        self.lengths = self.lengths[rows]
        self._layers.batch_select_indices(rows)  # never two copies of all of them

    def positions(self, hidden: Tensor) -> Tensor:
        """B T: the position in its sentence, from 0, of each newest token, whose hidden states are
        B T C."""
        newest = torch.arange(-hidden.size(1), 0, device=hidden.device)
        return (self.lengths.to(hidden.device)[:, None] + newest).clamp(min=0)

    def update(self, number: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the newest keys and values of a layer, each B H T E; returns all, B H S E."""
        return self._layers.update(k, v, number)

    def mask(self, hidden: Tensor) -> Tensor:
        """The mask, B 1 T S, to add to attention scores: causal, and without padding. Made once per
        forward and device, for the newest tokens with hidden states B T C."""
        if self._mask is None or self._mask.device != hidden.device:
            columns = torch.arange(self.S, device=hidden.device)  # [S]
            newest = columns[-hidden.size(1) :, None]  # [T, 1]
            starts = self.S - self.lengths.to(hidden.device)  # [B], where each begins
            allowed = (columns <= newest) & (columns >= starts[:, None, None, None])
            # Finite: padding attends to nothing, and a softmax of -inf alone is NaN.
            lowest = torch.finfo(hidden.dtype).min
            mask = torch.zeros(allowed.shape, dtype=hidden.dtype, device=hidden.device)
            self._mask = mask.masked_fill_(~allowed, lowest)
        return self._mask
