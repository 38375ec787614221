"""The cache of keys and values for generation: of sentences that are continued.

Sentences are aligned at their ends, so that all grow in the same column, and there is room to grow:

    column    0  1  2  3  4 | 5  6          all rows are read up to column 4;
    row 0     .  .  .  a  b | c  <eos>      then all write column 5, 6, ...
    row 1     .  .  .  d  e | f  g
    row 2     h  i  j  k  l | m  n          a finished row leaves the cache

Memory: 2 B S C per attention layer, plus up to a quarter (at least 16 columns) as room to grow.

Shapes: B unfinished sentences, S columns so far, T the newest of them, C width, H heads, E width of
a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GROWTH = 16  # minimum number of columns by which the cache grows


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
        self.prompts, self.S = prompts, max(lengths)
        self.lengths = torch.tensor(lengths, device=device)  # [B]
        self._layers: dict[int, Tensor] = {}  # 2 B H room E, by number in the model
        self._mask: Tensor | None = None  # of the newest tokens

    def extend(self) -> None:
        """Every sentence has one more token, for the next forward."""
        self.lengths += 1
        self.S, self._mask = self.S + 1, None

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows, in this order, in a copy. Call `extend` next."""
        self.prompts = [self.prompts[row] for row in rows]
        self.lengths = self.lengths[rows]
        for number, kv in self._layers.items():  # never two copies of all of them
            self._layers[number] = kv[:, rows]

    def positions(self, hidden: Tensor) -> Tensor:
        """B T: the position in its sentence, from 0, of each newest token, whose hidden states are
        B T C."""
        newest = torch.arange(-hidden.size(1), 0, device=hidden.device)
        return (self.lengths.to(hidden.device)[:, None] + newest).clamp(min=0)

    def update(self, number: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the newest keys and values of a layer, each B H T E; returns all, B H S E."""
        B, H, T, E = k.shape
        kept = self._layers.get(number)
        if kept is None or kept.size(3) < self.S:
            grown = k.new_empty(2, B, H, self.S + max(GROWTH, self.S // 4), E)  # keys, then values
            if kept is not None:
                grown[:, :, :, : self.S - T] = kept[:, :, :, : self.S - T]
            kept = self._layers[number] = grown
        kept[0, :, :, self.S - T : self.S] = k
        kept[1, :, :, self.S - T : self.S] = v
        keys, values = kept[:, :, :, : self.S]  # views
        return keys, values

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
