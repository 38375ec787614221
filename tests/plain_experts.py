"""Experts, plainly: every expert computes every position, and what was not chosen counts for
nothing. In one process, without sending or sorting rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn


class PlainExperts(nn.Module):
    """In the place of an MLP of transformers, with the project's names of parameters."""

    def __init__(
        self, mlp: Any, num_experts: int, top_k: int, shared: Any = None, by_bias: bool = False
    ) -> None:
        super().__init__()
        self.shared, self.top_k, self.gelu, self.dropout = shared, top_k, mlp.act, mlp.dropout
        width, inner = mlp.c_fc.weight.shape

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(mlp.c_fc.weight.new_empty(num_experts, *shape))

        def module(**parameters: nn.Parameter) -> nn.Module:
            made = nn.Module()
            for name, p in parameters.items():
                setattr(made, name, p)
            return made

        bias = {"bias": parameter()} if by_bias else {}
        self.router = module(weight=parameter(width), **bias)
        self.experts = nn.Module()
        self.experts.c_fc = module(weight=parameter(width, inner), bias=parameter(inner))
        self.experts.c_proj = module(weight=parameter(inner, width), bias=parameter(width))
        # The project's layers call c_fc, act and c_proj, one after the other.
        self.act = self.c_proj = nn.Identity()
        self.__dict__["c_fc"] = self.mixed

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]. transformers drops activations after it."""
        return self.dropout(self.mixed(x))

    def mixed(self, x: Tensor) -> Tensor:
        """What the experts make of it."""
        first, second = cast(Any, self.experts.c_fc), cast(Any, self.experts.c_proj)
        router = cast(Any, self.router)
        self.logits = torch.einsum("btc,ec->bte", x, router.weight)
        p = self.logits.softmax(-1)
        number, score = torch.arange(p.size(-1)), p.detach() + getattr(router, "bias", 0)
        # One expert comes before another if it is more probable, with its bias, or, of equal ones,
        # has the lower number; the first k see the position.
        ahead = (score[..., None, :] > score[..., None]) | (
            (score[..., None, :] == score[..., None]) & (number < number[:, None])
        )
        self.chosen, self.probabilities = ahead.sum(-1) < self.top_k, p
        hidden = self.gelu(torch.einsum("btc,ecm->betm", x, first.weight) + first.bias[:, None])
        y = torch.einsum("betm,emc->betc", hidden, second.weight) + second.bias[:, None]
        mixed = torch.einsum("betc,bte->btc", y, p * self.chosen)
        return mixed if self.shared is None else mixed + self.shared(x)  # drops nothing itself

    def balance(self, lengths: Sequence[int]) -> list[Tensor]:
        """The balance loss of each sequence of the last batch."""
        losses = []
        for chosen, p, T in zip(self.chosen, self.probabilities, lengths, strict=True):
            share = chosen[:T].to(p.dtype).sum(0) / (T * self.top_k)
            losses.append(p.size(-1) * (share * p[:T].mean(0)).sum())
        return losses

    def squares(self, lengths: Sequence[int]) -> list[Tensor]:
        """The router's z of each sequence of the last batch."""
        z = self.logits.exp().sum(-1).log() ** 2
        return [row[:T].mean() for row, T in zip(z, lengths, strict=True)]

    def excess(self, lengths: Sequence[int]) -> Tensor:
        """How much more often than the mean the last batch has chosen each expert."""
        rows = [chosen[:T] for chosen, T in zip(self.chosen, lengths, strict=True)]
        counts = torch.cat(rows).sum(0)
        return counts - sum(lengths) * self.top_k / len(counts)


def with_experts(
    model: Any, num_experts: int, top_k: int, shared: int = 0, by_bias: bool = False
) -> Any:
    """A GPT-2 of transformers, its MLPs replaced."""
    for block in model.transformer.h:
        mlp = block.mlp
        always = type(mlp)(shared * mlp.c_fc.nf, model.config) if shared else None
        if always is not None:
            always.dropout = nn.Identity()
        block.mlp = PlainExperts(mlp, num_experts, top_k, always, by_bias)
    return model


def added_of(
    model: Any, lengths: Sequence[int], targets: Sequence[int], balance: float, z: float
) -> Tensor:
    """What experts add to the loss of the last batch: the mean over its target tokens of the
    balance and the z of their sequence, summed over the layers; where there are biases, in the
    place of the balance, what has as their gradient how busy experts were."""
    total = torch.zeros(())
    for block in model.transformer.h:
        mlp, router = block.mlp, block.mlp.router
        of_sequences = z * torch.stack(mlp.squares(lengths))
        if hasattr(router, "bias"):
            total = total + (router.bias * mlp.excess(lengths)).sum() / sum(targets)
        else:
            of_sequences = of_sequences + balance * torch.stack(mlp.balance(lengths))
        total = total + (of_sequences * torch.tensor(targets)).sum() / sum(targets)
    return total
