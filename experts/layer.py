"""A layer of experts, in the place of a block's MLP.

    x ─ router ─▸ choice of each position
    x ─▸ a row per choice ─▸ sorted by expert ─▸ experts ─▸ in order again ─▸ weighted sum

Problem. E experts have E times the parameters of one MLP and, of k that see a position, k times its
arithmetic. E small layers, each with modules and parameters of its own, would be E times as many
names, buckets and gathers.

Idea. A parameter of all experts is one tensor with the experts along its first dimension. A rank
that shares experts with others has a rectangle of it: some experts, whole. So initial values,
checkpoints and gradients know nothing of experts. The product of all experts is one autograd
function over rows that lie by expert, a matrix product for each run of rows, written in place.

Its gradient of the weights may wait (runtime/linear.py), and is added to the sum over micro-batches
expert by expert: a stage makes one [E, K, M] per step, and not one per micro-batch.

Rejected: padding all experts' rows to the longest for one batched product, and
`torch._grouped_mm`; docs/mathematics.md has the times.

Cost: parameters and optimizer state of E MLPs, divided by the ranks that share them. Activations
of k MLPs, and twice k copies of the layer's input.

Shapes: N positions, C width, E experts of the layer, of which this rank has some, k of them for a
position; R rows, each a position for one expert; K features in, M features out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runtime.communicator import Communicator
from runtime.linear import Product, WeightsLater, later_of
from runtime.meta import names_of
from runtime.sums import narrowed

from .dispatch import Segments, exchange, segments_of, swapped
from .routing import Choice, choose


class Experts(nn.Module):
    """Several MLPs like `mlp`, and the router; all on this rank, until `share_experts`.

    Args:
        mlp: with c_fc and c_proj, whose weights are [K, M], with `act` and `dropout`.
        num_experts, top_k: E and k. Raises ValueError if k is not one of 1 to E.

    Attributes:
        ranks: those that share the experts.
    """

    def __init__(self, mlp: Any, num_experts: int, top_k: int) -> None:
        super().__init__()
        if top_k not in range(1, num_experts + 1):
            raise ValueError(
                f"{top_k} of {num_experts} experts for each position: 1 to {num_experts} can be"
            )
        self.num_experts, self.top_k, self.ranks = num_experts, top_k, Communicator()
        like = mlp.c_fc.weight
        self.router = nn.Linear(
            len(like), num_experts, bias=False, device=like.device, dtype=like.dtype
        )
        self.experts = nn.ModuleDict(
            {
                name: StackedLinear(getattr(mlp, name).weight, num_experts)
                for name in ("c_fc", "c_proj")
            }
        )
        self.act, self.dropout = mlp.act, mlp.dropout

    def forward(self, x: Tensor) -> tuple[Tensor, Choice]:
        """[..., C] to the same, and the choice of each of the N positions."""
        positions = x.flatten(0, -2)  # N C
        choice = choose(positions, self.router.weight, self.top_k)
        chosen = choice.experts.flatten()  # R = N k
        order = chosen.argsort(stable=True)  # by expert
        counts = chosen.new_zeros(self.num_experts).scatter_add(0, chosen, torch.ones_like(chosen))
        positions = narrowed(positions)  # rows travel in the type of the products
        # Copies, then a permutation: the gradients of k rows are added in one order, on a GPU, too.
        rows = positions[:, None].expand(-1, self.top_k, -1).flatten(0, 1)
        results = self._computed(rows.index_select(0, order), counts)
        results = torch.empty_like(results).index_copy(0, order, results)  # by position again
        by_choice = results.view(len(positions), self.top_k, results.size(1))
        y = (by_choice * choice.weights[..., None]).sum(1)
        return y.to(x.dtype).view(x.shape), choice

    def _computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What the experts make of rows that lie by expert, `counts` of each, [E]."""
        of_ranks = self.ranks.all_gather(counts[None], 0).tolist()  # the one wait for a GPU
        lengths, segments = segments_of(of_ranks, self.ranks.rank)
        rows = exchange(rows, self.ranks, lengths)
        hidden = self.act(self.experts["c_fc"](rows, segments))
        results = self.experts["c_proj"](hidden, segments)
        return exchange(results, self.ranks, swapped(lengths))


class StackedLinear(nn.Module):
    """As many products x w + b as there are experts. `like`: one weight, [K, M]."""

    def __init__(self, like: Tensor, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.new_empty(num_experts, *like.shape))  # [E, K, M]
        self.bias = nn.Parameter(like.new_empty(num_experts, like.size(1)))  # [E, M]

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """[R, K] to [R, M], each segment of rows by its expert."""
        later = later_of(x, self.weight, self.bias)
        w: Tensor = self.weight
        b: Tensor = self.bias
        if x.dtype != w.dtype:  # autocast's; a stage keeps the narrower weights for a step
            cast = Tensor.to if later is None else later.cast
            w, b = cast(w, x.dtype), cast(b, x.dtype)
        y: Tensor = _Stacked.apply(x, self.weight, self.bias, w, b, segments, later)
        return y


def share_experts(model: nn.Module, ranks: Communicator) -> dict[str, tuple[int, ...]]:
    """Leaves this rank its part of the experts of a model, which may be on the meta device. Returns
    the names of the parameters of experts, and the shapes of the whole ones. Afterwards it cannot
    be copied any more, but for its state_dict(). Raises ValueError if the number of ranks does not
    divide the experts, or they are shared already."""
    names, shapes = names_of(model), dict[str, tuple[int, ...]]()
    for module in model.modules():
        if not isinstance(module, Experts):
            continue
        if module.ranks.size > 1:
            raise ValueError(f"these experts are shared already, by {module.ranks.size} ranks")
        if rest := module.num_experts % ranks.size:
            raise ValueError(
                f"{module.num_experts} experts cannot be shared by {ranks.size} ranks; "
                f"{module.num_experts - rest + ranks.size} can"
            )
        module.ranks = ranks
        for layer in module.experts.values():
            for key, p in list(layer.named_parameters()):
                shapes[names[p]] = tuple(p.shape)
                setattr(layer, key, nn.Parameter(ranks.shard_of(p.detach(), 0), p.requires_grad))
    return shapes


@dataclass
class _StackedProduct(Product):
    """The same product for each segment of rows. The weight is [E, K, M]."""

    segments: Segments = ()

    def gradient(self, p: nn.Parameter) -> Tensor:
        if p is self.weight and self.x.dtype == p.dtype:
            return self._written()
        total = torch.zeros_like(p.detach())
        self.add_gradient(p, total)
        return total

    def _written(self) -> Tensor:
        """dw in new memory. Zeros to add to would be a pass over it, a tenth of the products'
        time."""
        total, fresh = torch.empty_like(self.weight.detach()), {*range(len(self.weight))}
        for e, x, dy in _runs(self.segments, self.x, self.dy):
            total[e].addmm_(x.t(), dy, beta=0 if e in fresh else 1)
            fresh.discard(e)
        for e in fresh:  # without a row
            total[e].zero_()
        return total

    def add_gradient(self, p: nn.Parameter, total: Tensor) -> None:
        for e, x, dy in _runs(self.segments, self.x, self.dy):
            if p is not self.weight:
                total[e] += dy.sum(0)
            elif x.dtype == total.dtype:
                total[e].addmm_(x.t(), dy)
            else:  # under autocast x and dy are narrower
                total[e] += x.t().mm(dy)


class _Stacked(torch.autograd.Function):
    """The parameters and the operands are arguments, as in runtime/linear.py."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter,
        w: Tensor,
        b: Tensor,
        segments: Segments,
        later: WeightsLater | None,
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.notes = weight, bias, segments, later
        y = x.new_empty(len(x), w.size(2))
        for e, rows, results in _runs(segments, x, y):
            torch.addmm(b[e], rows, w[e], out=results)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        weight, bias, segments, later = ctx.notes
        dx = torch.empty_like(x)
        for e, gradients, results in _runs(segments, dy, dx):
            torch.mm(gradients, w[e].t(), out=results)
        product = _StackedProduct(weight, bias, False, x.detach(), dy, True, segments=segments)
        if later is not None:
            later.products.append(product)
            return dx, *(None,) * 6
        return dx, product.gradient(weight), product.gradient(bias), *(None,) * 4


def _runs(segments: Segments, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """The expert of each segment that has rows, and its rows of the tensors: views."""
    sizes = [n for _, n in segments]
    for (e, n), *rows in zip(segments, *(t.split(sizes) for t in tensors), strict=True):
        if n:
            yield e, *rows
