"""A layer of experts, in the place of a block's MLP.

    x ─ router ─▸ choice of each position
    x ─▸ a row per choice ─▸ sorted by expert ─▸ experts ─▸ in order again ─▸ weighted sum

Problem. E experts have E times the parameters of one MLP and, if k of them see each position, k
times its arithmetic. E small layers, each with modules and parameters of its own, would be E times
as many names, buckets and gathers.

Idea. A parameter of all experts is one tensor with the experts along its first dimension. A rank
that shares experts with others has a rectangle of it: some experts, whole. So initial values,
checkpoints and gradients know nothing of experts. The product of all experts is one autograd
function over rows that lie by expert, with a matrix product for each run of rows, written in place.

Its gradient of the weights may wait (runtime/linear.py), and is added to the sum over micro-batches
expert by expert: a stage makes one [E, K, M] per step, and not one per micro-batch.

On a GPU the runs of all experts are one product (grouped.py), once rows are sorted.

Rejected: padding all experts' rows to the longest for one batched product, and, on CPUs,
`torch._grouped_mm`; docs/mathematics.md has the times.

Cost: parameters and optimizer state of E MLPs, divided by the ranks that share them. Activations
of k MLPs, and twice k copies of the layer's input.

Shapes: N positions, C width, E experts of the layer, of which this rank has some, k of them for a
position; R rows, each a position for one expert; K features in, M features out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from runtime.communicator import Communicator
from runtime.linear import Product, add_product, add_rows, multiplied
from runtime.meta import names_of
from runtime.sums import narrowed

from .dispatch import Segments, exchange, experts_per_rank, put_back, segments_of, swapped
from .grouped import Grouped, may_group, order_by_expert
from .routing import Choice, choose, refuse_top_k


class Experts(nn.Module):
    """Several MLPs like `mlp`, and the router; all on this rank, until `share_experts`.

    Args:
        mlp: with c_fc and c_proj, whose weights are [K, M], with `act` and `dropout`.
        num_experts, top_k: E and k. Raises ValueError if k is not one of 1 to E.
        shared: an MLP like `mlp`, of any inner width, that sees every position, or None.
        by_bias: whether a bias, 0 at first, counts where experts are chosen.

    Attributes:
        ranks: those that share the experts.
    """

    def __init__(
        self, mlp: Any, num_experts: int, top_k: int, shared: Any = None, by_bias: bool = False
    ) -> None:
        super().__init__()
        refuse_top_k(top_k, num_experts)
        self.num_experts, self.top_k, self.ranks = num_experts, top_k, Communicator()
        like = mlp.c_fc.weight
        self.router = nn.Linear(
            len(like), num_experts, bias=by_bias, device=like.device, dtype=like.dtype
        )
        self.experts = nn.ModuleDict(
            {
                name: StackedLinear(getattr(mlp, name).weight, num_experts)
                for name in ("c_fc", "c_proj")
            }
        )
        self.act, self.dropout, self.shared = mlp.act, mlp.dropout, shared

    def forward(self, x: Tensor) -> tuple[Tensor, Choice]:
        """[..., C] to the same, and the choice of each of the N positions."""
        positions = x.flatten(0, -2)  # N C
        choice = choose(positions, self.router.weight, self.top_k, self.router.bias)
        chosen = choice.experts.flatten()  # R = N k
        order = chosen.argsort(stable=True)  # by expert
        counts = chosen.new_zeros(self.num_experts).scatter_add(0, chosen, torch.ones_like(chosen))
        positions = narrowed(positions)  # rows travel in the type of the products
        # Copies, then a permutation: the gradients of k rows are added in one order, on a GPU, too.
        rows = positions[:, None].expand(-1, self.top_k, -1).flatten(0, 1)
        results = self._computed(rows.index_select(0, order), counts)
        results = put_back(results, order)  # by position again
        by_choice = results.view(len(positions), self.top_k, results.size(1))
        y = (by_choice * choice.weights[..., None]).sum(1).to(x.dtype).view(x.shape)
        if self.shared is not None:
            y = y + self.shared.c_proj(self.act(self.shared.c_fc(x)))
        return y, choice

    def _computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The experts' outputs for rows that lie by expert, `counts` of each, [E]."""
        by_rank = self.ranks.all_gather(counts[None], 0)  # [senders, E]
        of_ranks = by_rank.tolist()  # the layer's one wait for a GPU
        lengths, segments = segments_of(of_ranks, self.ranks.rank)
        rows = exchange(rows, self.ranks, lengths)
        if may_group(rows, *(n for p in self.experts.parameters() for n in p.shape[1:])):
            counts = self.ranks.shard_of(by_rank, 1)  # [senders, this rank's experts]
            order, ends = order_by_expert(counts, len(rows))
            results = self._multiplied(rows.index_select(0, order), Grouped(ends))
            results = put_back(results, order)
        else:
            results = self._multiplied(rows, Segmented(segments))
        return exchange(results, self.ranks, swapped(lengths))

    def _multiplied(self, rows: Tensor, product: Product) -> Tensor:
        y: Tensor = self.experts["c_proj"](self.act(self.experts["c_fc"](rows, product)), product)
        return y


class StackedLinear(nn.Module):
    """A product x w + b for each expert. `like`: the weight of one, [K, M]."""

    def __init__(self, like: Tensor, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.new_empty(num_experts, *like.shape))  # [E, K, M]
        self.bias = nn.Parameter(like.new_empty(num_experts, like.size(1)))  # [E, M]

    def forward(self, x: Tensor, product: Product) -> Tensor:
        """[R, K] to [R, M], each row by its expert."""
        return multiplied(product, x, self.weight, self.bias)


def share_experts(model: nn.Module, ranks: Communicator) -> dict[str, tuple[int, ...]]:
    """Leaves this rank its part of the experts of a model, which may be on the meta device. Returns
    the shapes of the experts' whole parameters, by name. Afterwards only the model's state_dict()
    can be copied, not the model. Raises ValueError if the number of ranks does not divide the
    experts, or they are shared already."""
    names, shapes = names_of(model), dict[str, tuple[int, ...]]()
    for module in model.modules():
        if not isinstance(module, Experts):
            continue
        if module.ranks.size > 1:
            raise ValueError(f"these experts are shared already, by {module.ranks.size} ranks")
        experts_per_rank(module.num_experts, ranks.size)
        module.ranks = ranks
        for layer in module.experts.values():
            for key, p in list(layer.named_parameters()):
                shapes[names[p]] = tuple(p.shape)
                setattr(layer, key, nn.Parameter(ranks.shard_of(p.detach(), 0), p.requires_grad))
    return shapes


class Segmented:
    """A product for each segment of rows, by its expert's [K, M] of the weight [E, K, M]. An expert
    may have several segments, one from each rank. See `runtime.linear.Product`."""

    torch_differentiates = False  # it writes into its results

    def __init__(self, segments: Segments) -> None:
        self._segments = segments

    def y(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        assert b is not None
        y = x.new_empty(len(x), w.size(2))
        for e, rows, results in self._runs(x, y):
            torch.addmm(b[e], rows, w[e], out=results)
        return y

    def dx(self, dy: Tensor, w: Tensor) -> Tensor:
        dx = dy.new_empty(len(dy), w.size(1))
        for e, gradients, results in self._runs(dy, dx):
            torch.mm(gradients, w[e].t(), out=results)
        return dx

    def add_dw(self, total: Tensor, x: Tensor, dy: Tensor, fresh: bool) -> None:
        for of_expert, unwritten, rows, gradients in self._runs_into(total, fresh, x, dy):
            add_product(of_expert, rows.t(), gradients, unwritten)

    def add_db(self, total: Tensor, dy: Tensor, fresh: bool) -> None:
        for of_expert, unwritten, gradients in self._runs_into(total, fresh, dy):
            add_rows(of_expert, gradients, unwritten)

    def _runs(self, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """The expert of each segment that has rows, and its rows of the tensors: views."""
        sizes = [n for _, n in self._segments]
        rows_of = zip(*(t.split(sizes) for t in tensors), strict=True)
        for (e, n), rows in zip(self._segments, rows_of, strict=True):
            if n:
                yield e, *rows

    def _runs_into(self, total: Tensor, fresh: bool, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """The same with the expert's part of `total`, and whether nothing was written there yet.
        Writing zeros first would be a pass over `total`, a tenth of the products' time."""
        unwritten = {*range(len(total))} if fresh else set[int]()
        for e, *rows in self._runs(*tensors):
            yield total[e], e in unwritten, *rows
            unwritten.discard(e)
        for e in unwritten:  # without a row
            total[e].zero_()
