"""Experts, plainly: every expert computes every position, and what was not chosen counts for
nothing. One process, no rows that travel, none sorted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn


class PlainExperts(nn.Module):
    """In the place of an MLP of transformers, with the parameters' names of the product."""

    def __init__(self, mlp: Any, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k, self.gelu, self.dropout = top_k, mlp.act, mlp.dropout
        width, inner = mlp.c_fc.weight.shape

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(mlp.c_fc.weight.new_empty(num_experts, *shape))

        def module(**parameters: nn.Parameter) -> nn.Module:
            made = nn.Module()
            for name, p in parameters.items():
                setattr(made, name, p)
            return made

        self.router = module(weight=parameter(width))
        self.experts = nn.Module()
        self.experts.c_fc = module(weight=parameter(width, inner), bias=parameter(inner))
        self.experts.c_proj = module(weight=parameter(inner, width), bias=parameter(width))
        # The product's layers call c_fc, act and c_proj, one after the other.
        self.act = self.c_proj = nn.Identity()
        self.__dict__["c_fc"] = self.mixed

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]. transformers drops activations after it."""
        return self.dropout(self.mixed(x))

    def mixed(self, x: Tensor) -> Tensor:
        """What the experts make of it."""
        first, second = cast(Any, self.experts.c_fc), cast(Any, self.experts.c_proj)
        p = torch.einsum("btc,ec->bte", x, cast(Any, self.router).weight).softmax(-1)
        number = torch.arange(p.size(-1))
        # One expert comes before another if it is more probable or, of equal ones, has the lower
        # number; the first k see the position.
        ahead = (p[..., None, :] > p[..., None]) | (
            (p[..., None, :] == p[..., None]) & (number < number[:, None])
        )
        self.chosen, self.probabilities = ahead.sum(-1) < self.top_k, p
        hidden = self.gelu(torch.einsum("btc,ecm->betm", x, first.weight) + first.bias[:, None])
        y = torch.einsum("betm,emc->betc", hidden, second.weight) + second.bias[:, None]
        return torch.einsum("betc,bte->btc", y, p * self.chosen)

    def balance(self, lengths: Sequence[int]) -> list[Tensor]:
        """The balance loss of each sequence of the last batch."""
        losses = []
        for chosen, p, T in zip(self.chosen, self.probabilities, lengths, strict=True):
            share = chosen[:T].to(p.dtype).sum(0) / (T * self.top_k)
            losses.append(p.size(-1) * (share * p[:T].mean(0)).sum())
        return losses


def with_experts(model: Any, num_experts: int, top_k: int) -> Any:
    """A GPT-2 of transformers, its MLPs replaced."""
    for block in model.transformer.h:
        block.mlp = PlainExperts(block.mlp, num_experts, top_k)
    return model


def balance_of(model: Any, lengths: Sequence[int], targets: Sequence[int]) -> Tensor:
    """The mean over the target tokens of the last batch of the balance of their sequence, summed
    over the layers."""
    by_layer = [torch.stack(block.mlp.balance(lengths)) for block in model.transformer.h]
    of_sequences = torch.stack(by_layer).sum(0)
    return (of_sequences * torch.tensor(targets)).sum() / sum(targets)
