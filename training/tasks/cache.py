"""The cache of keys and values of sentences that are continued.

Problem: sentences differ in length, end at different times, and grow by a position per step.
Padding costs as much as tokens, and copying keys and values in every step as much as using them.

Idea. Sentences are aligned at their ends, so that all grow in the same column; sentences of similar
length are read together; and there is room to grow:

    column    0  1  2  3  4 | 5  6          first two rows are read, then the next two, in
    row 0              a  b | c  <eos>      columns up to 4; then all write column 5, 6, ...
    row 1              d  e | f  g
    row 2     h  i  j  k  l | m  n          a finished row is overwritten by the last one
    row 3        o  p  q  r | <eos>

Memory: 2 B S C per attention layer, plus up to a quarter (at least 16 columns) as room to grow.

Shapes: B unfinished sentences, S columns so far, T the newest of them, C width, H heads, E width of
a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

GROWTH = 16  # minimum number of columns by which the cache grows


class Prefix:
    """The lengths of the sentences so far, and the keys and values of this process' attention
    layers.

    Args:
        lengths: of the sentences, in tokens.
        chances: [B, most], uniform numbers from 0 to 1 to sample a row's next tokens with; None
            takes the likeliest tokens.

    Attributes:
        rows: the sentences of the next forward: some while prompts are read, then all.
        S: columns so far.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        chances: Tensor | None = None,
    ) -> None:
        self.lengths = torch.tensor(lengths, device=device)  # [B]
        self.rows, self.S = slice(0, len(lengths)), max(lengths)
        self._chances, self._begin = chances, self.S  # _begin: S of the prompts
        self._first = 0  # the first column that is used
        self._layers: dict[int, Tensor] = {}  # 2 B H room E, by number in the model
        self._masks: dict[torch.device, Tensor] = {}  # of the newest tokens, by device

    def in_parts(self, positions: float) -> Iterator[slice]:
        """Reads the prompts in groups: yields the rows of each, with `positions` positions or a
        little more. Neighbouring sentences should have similar lengths."""
        lengths = self.lengths.tolist()
        begin = 0
        while begin < len(lengths):
            end = begin + 1
            while end < len(lengths) and (end - begin) * lengths[end - 1] < positions:
                end += 1
            self.rows = slice(begin, end)
            self._first = self.S - max(lengths[begin:end])  # up to it, these rows are padding
            self._masks.clear()
            yield self.rows  # their forward runs here, in the caller
            begin = end

    def extend(self) -> None:
        """Every sentence has one more token, for the next forward."""
        self.lengths += 1
        self.S += 1
        self.rows, self._first = slice(0, len(self.lengths)), 0  # all rows, all columns
        self._masks.clear()

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Keeps these rows; the last ones move to the places of others. Returns the row that each
        place had before."""
        order = list(range(len(rows)))
        free = sorted(set(order).difference(rows))
        moved = [row for row in rows if row >= len(rows)]  # as many
        for place, row in zip(free, moved, strict=True):
            order[place] = row
        for number, kv in self._layers.items():
            kv[:, free] = kv[:, moved]  # copies the right side first
            self._layers[number] = kv[:, : len(rows)]  # a view, no copy
        self.lengths = self.lengths[order]
        self._chances = None if self._chances is None else self._chances[order]
        return order

    def chances(self) -> Tensor | None:
        """The numbers, [B], that sample the next tokens of the sentences `rows`."""
        return None if self._chances is None else self._chances[self.rows, self.S - self._begin]

    def positions(self, T: int) -> Tensor:
        """B T: the position of each newest token in its sentence, from 0."""
        lengths = self.lengths[self.rows, None]
        return (lengths + torch.arange(-T, 0, device=lengths.device)).clamp(min=0)

    def update(self, number: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the newest keys and values of a layer, each B H T E; returns those of all columns
        that the mask covers."""
        _, H, T, E = k.shape
        every = self._layers.get(number)
        if every is None or every.size(3) < self.S:
            room = self.S + max(GROWTH, self.S // 4)
            grown = k.new_empty(2, len(self.lengths), H, room, E)  # keys, then values
            if every is not None:
                grown[:, :, :, : self.S - T] = every[:, :, :, : self.S - T]
            every = self._layers[number] = grown
        mine = every[:, self.rows]  # a view: writing to it fills the cache
        if self._first:  # columns never filled: a weight of 0 times NaN would be NaN
            mine[:, :, :, : self._first] = 0
        mine[0, :, :, self.S - T : self.S] = k
        mine[1, :, :, self.S - T : self.S] = v
        keys, values = mine[:, :, :, self._first : self.S]  # views, of the columns from _first on
        return keys, values

    def mask(self, hidden: Tensor) -> Tensor:
        """The mask, B 1 T S, to add to attention scores: causal, and without padding."""
        if hidden.device not in self._masks:
            columns = torch.arange(self._first, self.S, device=hidden.device)  # [columns]
            newest = columns[-hidden.size(1) :, None]  # [T, 1]
            starts = self.S - self.lengths[self.rows].to(hidden.device)  # [B], where each begins
            allowed = (columns <= newest) & (columns >= starts[:, None, None, None])
            # Finite: padding attends to nothing, and a softmax of -inf alone is NaN.
            lowest = torch.finfo(hidden.dtype).min
            mask = torch.zeros(allowed.shape, dtype=hidden.dtype, device=hidden.device)
            self._masks[hidden.device] = mask.masked_fill_(~allowed, lowest)
        return self._masks[hidden.device]
