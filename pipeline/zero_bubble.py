"""Backward in two halves: gradients of activations now, those of weights later.

Problem. A stage waits only for gradients of activations. Gradients of weights are needed at the end
of the step, but autograd computes both, layer by layer, in one pass. It also makes each weight's
gradient for each micro-batch before adding it to the sum: with small micro-batches that takes a
tenth of the second half.

Idea. Nearly all work on weights is in matrix products y = x w + b. While a stage runs a forward, a
`TorchFunctionMode` replaces the products with the stage's parameters by an autograd function with
the same y. Its backward returns dx = dy w' at once and, instead of dw = x' dy and db = sum of dy,
notes (x, dy). `add_products` computes dw and db from the notes when the schedule says so; the
product x' dy is added to the sum over micro-batches directly. A whole backward is the first half
followed at once by the second, so the bits are the same. Everything else (norms, embeddings,
products by other calls: `@`, convolutions) is differentiated in the first half.

Rejected: two calls of `torch.autograd.grad` over the same graph, first for the inputs and then for
the parameters (as torch.distributed.pipelining does): they compute much of the path twice.

Cost: between the halves, x (which backward held anyway) and dy of every product; in forward, about
1 us per torch call in Python.

Zero Bubble Pipeline Parallelism, Qi et al., 2023; its schedule ZB-H1 is in schedule.py. Adding
products directly to the sum: Megatron-LM's gradient accumulation fusion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from runtime.graph import Gradients


@dataclass
class Product:
    """One call y = x w + b, R rows of K features to N, with the operands of its gradients."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool  # the weight is N K (nn.Linear), not K N (GPT-2's Conv1D)
    x: Tensor  # R K
    dy: Tensor  # R N

    def gradient(self, p: nn.Parameter) -> Tensor:
        """dw, or db where p is the bias."""
        if p is self.weight:
            a, b = self._factors()  # dw = a b
            return a.mm(b).to(p.dtype)  # under autocast x and dy are narrower
        return self.dy.sum(0).to(p.dtype)

    def add_gradient(self, p: nn.Parameter, total: Tensor) -> None:
        """Add `gradient` of p to ``total``."""
        if p is self.weight and self.x.dtype == self.dy.dtype == total.dtype:
            total.addmm_(*self._factors())  # one kernel, and no dw in memory
        else:
            total.add_(self.gradient(p))

    def _factors(self) -> tuple[Tensor, Tensor]:
        # [N, R] x [R, K], or [K, R] x [R, N]: the shape of the weight
        return (self.dy.t(), self.x) if self.transposed else (self.x.t(), self.dy)


def add_products(
    products: list[Product], totals: Gradients, sums: Gradients, apart: Collection[nn.Parameter]
) -> None:
    """The second half of a micro-batch's backward. Empties ``products``, freeing each after use.

    Gradients are added to the totals over micro-batches. A parameter with several gradients in this
    micro-batch (from several products, in ``sums`` already, or ``apart``) adds them to ``sums``,
    the sums of this micro-batch. So each parameter has one sum per micro-batch, in the order of
    the backward, whenever the halves run.
    """
    uses = Counter(p for product in products for p in (product.weight, product.bias))
    products.reverse()  # pop takes the last: this keeps backward's order
    while products:
        product = products.pop()
        for p in (product.weight, product.bias):
            if p is not None:
                several = uses[p] > 1 or p in sums or p in apart  # this micro-batch has more for p
                target = sums if several else totals
                if p in target:
                    product.add_gradient(p, target[p])  # in place
                else:
                    target[p] = product.gradient(p)  # new memory, not a view: may be written to


def add(totals: Gradients, new: Gradients) -> None:
    """Add the gradients to their totals, in one call for all.

    The first one is copied: totals are written to, and its memory may be another gradient's, too.
    (Autograd hands the same tensor to both terms of a sum.)
    """
    known = [p for p in new if p in totals]
    if known:
        torch._foreach_add_([totals[p] for p in known], [new[p] for p in known])
    for p, gradient in new.items():
        if p not in totals:
            totals[p] = gradient.clone()


class WeightsLater(TorchFunctionMode):
    """Forwards inside ``with later.into(products):`` make backwards append to ``products``.

    ``parameters``: those whose gradients may come later. Lives for one step, since it caches
    weights in autocast's type, as autocast does.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._parameters = set(parameters)
        self._products: list[Product] = []
        self._casts: dict[tuple[Tensor, torch.dtype], Tensor] = {}

    def into(self, products: list[Product]) -> WeightsLater:
        self._products = products
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is torch.addmm and len(args) == 3 and not kwargs:  # transformers' Conv1D
            bias, x, weight = args
            if self._is_ours(weight, bias) and bias.dim() == 1:
                return self._product(x, weight, bias, transposed=False)
        elif func is F.linear:
            x, weight, bias = _linear_arguments(*args, **kwargs)
            if self._is_ours(weight, bias) and x.dim() > 1:  # a vector has no rows
                return self._product(x, weight, bias, transposed=True)
        return func(*args, **kwargs)

    def _is_ours(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether `_Multiply` may compute this product: of matrices, and real."""
        return (
            weight in self._parameters
            and weight.dim() == 2
            and not weight.is_complex()
            and (bias is None or not bias.requires_grad or bias in self._parameters)
            and torch.is_grad_enabled()
            and not torch._C._are_functorch_transforms_active()  # they differentiate it themselves
        )

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Any:
        w, b = weight, bias  # w, b: perhaps cast below; weight, bias: the parameters themselves
        if torch.is_autocast_enabled(x.device.type):
            # Cast here: backward needs the cast operands too, and inside the autograd function
            # (no_grad) autocast would cast every weight anew for every micro-batch.
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype) if x.dtype != torch.float64 else x
            w = self._cast(weight, dtype)
            b = None if bias is None else self._cast(bias, dtype)
        if bias is not None and not bias.requires_grad:
            bias = None  # frozen: no db
        return _Multiply.apply(x, weight, w, b, bias, transposed, self._products)

    def _cast(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        if parameter.dtype in (dtype, torch.float64):
            return parameter
        key = (parameter, dtype)
        if key not in self._casts:
            self._casts[key] = parameter.detach().to(dtype)
        return self._casts[key]


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


class _Multiply(torch.autograd.Function):
    """x w + b. ``weight`` is an argument so that the result has a graph even if x has none."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        w: Tensor,
        b: Tensor | None,
        bias: nn.Parameter | None,
        transposed: bool,
        products: list[Product],
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.notes = weight, bias, transposed, products
        if transposed:
            # For three dimensions the result is a view. Autograd forbids in-place changes of a view
            # made by a function; .data is no view, and costs no kernel.
            return F.linear(x, w, b).data
        assert b is not None  # `torch.addmm` has a bias
        return torch.addmm(b, x, w)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        weight, bias, transposed, products = ctx.notes
        rows = dy.flatten(0, -2)  # R N, any of which may be 0
        inputs = x.detach().flatten(0, -2)  # R K; not x itself, which would keep the graph
        products.append(Product(weight, bias, transposed, inputs, rows))
        if not ctx.needs_input_grad[0]:  # e.g. x is the batch: no dx
            return (None,) * 7
        dx = rows.mm(w if transposed else w.t()).view(x.shape)  # R K, then as x
        return dx, *(None,) * 6
