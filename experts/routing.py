"""Which experts see a position, with what weight; and the loss that keeps them equally busy.

Problem. A layer has E experts, and a position is to be seen by k of them. Whatever chooses must
learn to, and must not send everything to one expert, which would then be the only one that learns.

Idea. The router is a matrix: its logits give probabilities p over the experts, and the k most
probable ones see the position. Of equal probabilities the lower number wins. Experts' outputs are
added up with the weights p, which is how the router gets a gradient. The weights are not divided by
their sum: with k = 1 that would be 1, and the router would learn nothing (as in Switch; Mixtral
divides). Choosing is done in float32 at least, since bf16 has many equal probabilities.

Nothing is dropped: an expert takes all positions that have chosen it. Most systems give experts a
capacity, and drop what is beyond it. Whether a position is dropped then depends on its neighbours
in the batch, and so on how the batch is cut.

The balance loss of a sequence with T positions, not counting padding, is

    E * sum over e of f_e P_e        f_e: the part of its T k choices that fell on expert e
                                     P_e: the mean probability of expert e

It is 1 if all experts are chosen equally often, and up to E if one is always chosen. No gradient
flows through f. The balance loss is a property of a sequence (in Switch, of a rank's batch), so it
depends neither on micro-batches nor on ranks. To the loss of a step with n target tokens it adds

    coefficient / n * sum over the sequences of (target tokens) * (sum over the layers of balance)

that is, every target token adds the balance of its sequence, scaled as its own loss is.

The balance loss also pulls the router away from what the tokens' loss wants. --balance_by bias does
without it: an expert has a bias, which is added to its probability where experts are chosen, and
nowhere else, so it has no gradient. After a step it moves down by --balance_rate if its expert was
chosen more often than the mean, else up. "More often" is a count over the global batch. A count is
a sum over micro-batches and ranks, as a gradient is, so it travels as one:

    added = sum over e of b_e (count_e - mean count)         its gradient for b_e is the excess

Every layout sums it as it sums gradients, shards it, and saves b as a weight. Only the update
differs: by the sign, and at a rate of its own (training/optimization.py); the norm leaves it out.
So the bias is equal under every layout. If the counts of one rank moved it, it would not be.

Logits may grow until their exponentials overflow or round. --router_z adds to the loss, as the
balance loss is added, the mean over a sequence of (log of the sum of exponentials of its logits)^2.

Papers: Shazeer et al., "Outrageously Large Neural Networks", 2017; Fedus et al., "Switch
Transformers", 2021; Zoph et al., "ST-MoE", 2022 (z); Dai et al., "DeepSeekMoE", 2024 (shared
experts); Jiang et al., "Mixtral of Experts", 2024; Wang et al., "Auxiliary-Loss-Free Load
Balancing Strategy for Mixture-of-Experts", 2024; DeepSeek-AI, "DeepSeek-V3", 2024.

Shapes: N positions, C width, E experts, k of them for each position; B sequences of T positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Choice(NamedTuple):
    """Which experts see each position.

    Attributes:
        probabilities: [N, E].
        experts: [N, k], the most probable first; with a bias, the largest sum of both first.
        logits: [N, E], from which the probabilities come.
    """

    probabilities: Tensor
    experts: Tensor
    logits: Tensor

    @property
    def weights(self) -> Tensor:
        """[N, k]: the probabilities of the chosen experts."""
        return self.probabilities.gather(1, self.experts)


def refuse_top_k(top_k: int, num_experts: int) -> None:
    """Raises ValueError unless `top_k` is one of 1 to the number of experts."""
    if top_k not in range(1, num_experts + 1):
        raise ValueError(
            f"{top_k} of {num_experts} experts for each position: 1 to {num_experts} work"
        )


def choose(rows: Tensor, router: Tensor, top_k: int, bias: Tensor | None = None) -> Choice:
    """The choice for rows [N, C], by a router [E, C] and, if there is one, a bias [E]. Raises
    ValueError like `refuse_top_k`."""
    refuse_top_k(top_k, len(router))
    with torch.autocast(rows.device.type, enabled=False):
        dtype = torch.promote_types(rows.dtype, torch.float32)
        logits = F.linear(rows.to(dtype), router.to(dtype))
        probabilities = logits.softmax(-1)
    scores = probabilities.detach() + (0 if bias is None else bias.detach())
    # Not topk, which orders equal ones by chance.
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return Choice(probabilities, order[:, :top_k], logits)


class Balance(NamedTuple):
    """What the balance loss of a micro-batch is made of. It travels through the layers.

    Attributes:
        lengths: [B], the positions of each sequence, without padding.
        targets: [B], its target tokens.
        total: what the layers so far add to the loss, summed over the target tokens; a scalar.
    """

    lengths: Tensor
    targets: Tensor
    total: Tensor


def tally(choice: Choice, real: Tensor) -> tuple[Tensor, Tensor]:
    """How often each expert was chosen in each sequence, and the sum of its probabilities: [B, E].

    Args:
        real: [B, T], whether a position is not padding. N is B T.
    """
    B, T = real.shape
    E = choice.probabilities.size(1)
    is_chosen = choice.experts[..., None] == torch.arange(E, device=real.device)  # N k E
    chosen = is_chosen.sum(1).view(B, T, E) * real[..., None]
    probabilities = choice.probabilities.view(B, T, E) * real[..., None]
    return chosen.sum(1), probabilities.sum(1)


def balance_loss(chosen: Tensor, probabilities: Tensor, lengths: Tensor, top_k: int) -> Tensor:
    """The balance loss of each sequence, [B], from what `tally` returns. Raises ValueError like
    `refuse_top_k`."""
    E = chosen.size(1)
    refuse_top_k(top_k, E)
    T = lengths.clamp(min=1)[:, None].to(probabilities.dtype)
    return E * (chosen / (T * top_k) * probabilities / T).sum(1)


def router_z_loss(choice: Choice, real: Tensor, lengths: Tensor) -> Tensor:
    """[B]: the mean of the squared log of the sum of exponentials of a sequence's logits."""
    squares = choice.logits.logsumexp(-1).square().view(real.shape) * real  # B T
    return squares.sum(1) / lengths.clamp(min=1)


def excess(chosen: Tensor, bias: Tensor) -> Tensor:
    """How much more often each expert was chosen than the mean of all, [E]. The sum of its product
    with the bias has it as the gradient of the bias. `chosen`: from `tally`."""
    counts = chosen.sum(0).to(bias.dtype)
    return counts - counts.mean()
