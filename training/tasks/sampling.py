"""Samples tokens, where generation.py takes the most probable ones.

A prompt has a seed, from which the numbers are drawn that choose its tokens: what is sampled does
not depend on the prompts beside it. Shapes: B unfinished sentences, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.float64 import device_of_float64


def chances_of(seeds: Sequence[int], most: int, device: torch.device | str) -> Tensor:
    """The numbers, uniform from 0 to 1, that choose the tokens of each prompt: [prompts, most],
    used from left to right."""
    chances = torch.empty(len(seeds), most, dtype=torch.float64)
    for row, seed in zip(chances, seeds, strict=True):
        row.uniform_(generator=torch.Generator().manual_seed(seed))
    return chances.to(device_of_float64(torch.device(device)))


def sample(
    logits: Tensor, num_tokens: int, chances: Tensor, temperature: float, top_k: int | None
) -> Tensor:
    """Samples tokens, B, from logits B V.

    Args:
        chances: [B], float64, uniform from 0 to 1: looked up in the cumulative probabilities, on
            the device where they are.
        temperature: divides the logits; a small one leaves only the most probable token.
        top_k: samples from this many of the most probable tokens; None: from all.
    """
    device = logits.device
    logits = logits[:, :num_tokens].to(chances.device).double() / temperature
    if top_k is not None and top_k < num_tokens:
        least = logits.topk(top_k).values[:, -1:]  # [B, 1], the smallest that stays
        logits = logits.masked_fill(logits < least, -math.inf)
    ends = logits.softmax(-1).cumsum(-1)  # [B, V], rising to about 1
    wanted = chances[:, None] * ends[:, -1:]  # [B, 1], scaled to the last end
    found = torch.searchsorted(ends, wanted, right=True)[:, 0].clamp(max=ends.size(1) - 1)
    return found.to(device)
