"""y = x w + b, whose weight gradient may wait: backward in two halves.

Problem. In a pipeline, another stage waits for gradients of activations. Gradients of weights are
needed only at the end of the step, but autograd computes both, layer by layer, in one pass. It also
makes each weight's gradient for each micro-batch before adding it to the sum: with small
micro-batches that takes a tenth of the second half.

Idea. Nearly all work on weights is in products y = x w + b, and all our layers compute them by
`linear`, or by `multiplied`, which it calls: whole matrices, those that are cut over ranks, and
those of experts. While a stage runs a layer, both use an autograd function whose backward returns
dx = dy w' at once and, instead of dw = x' dy and db = sum of dy, notes (x, dy).
`WeightsLater.add_products` computes dw and db from the notes when the schedule says so; the product
x' dy is added to the sum over micro-batches directly. A whole backward is the first half followed
at once by the second, so the bits are the same. Everything else (norms, embeddings, convolutions,
products of a user's own) is differentiated in the first half. Outside a stage, as in data
parallelism, `linear` is torch's own function.

During a step `WeightsMayWait` gives `nn.Linear` and transformers' `Conv1D` a forward that calls
`linear`. A `Product` need not be by one matrix: that of experts is by several. All products have
the same autograd function.

Where each rank has some columns of w, its dx is only one term of a sum over the ranks. An
`AroundProduct` starts that sum before the weight's gradient is computed, if the latter is not left
for later.

Rejected: two calls of `torch.autograd.grad` over the same graph, first for the inputs and then for
the parameters (as torch.distributed.pipelining does): they compute much of the path twice. A
`TorchFunctionMode` that replaces products wherever they are called: it costs each torch call a
microsecond, and does not see into autograd functions, such as those of cut layers.

Cost: x and dy of every product are held between the halves. (Backward held x anyway; it is gathered
if it was scattered.)

Zero Bubble Pipeline Parallelism, Qi et al., 2023; its schedule ZB-H1 is in pipeline/schedules/.
Adding products directly to the sum: Megatron-LM's gradient accumulation fusion.

Shapes: R rows, K features in, N features out. A weight is K N, like Conv1D's; transposed it is N K,
like nn.Linear's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.graph import Gradients
from runtime.sums import narrowed


class AroundProduct(NamedTuple):
    """What the ranks that share a weight exchange around a product."""

    gather: Callable[[Tensor], Tensor]
    """All rows, of which x has some; or x itself."""
    start_sum: Callable[[Tensor], Callable[[], Tensor]]
    """Begins the sum of the ranks' dx; what it returns waits for it."""


class Product(Protocol):
    """How rows, weight and bias are multiplied. `OneMatrix` here; experts/layer.py has segments of
    rows, each with a matrix of its own.

    `add_dw` and `add_db` add to `total`, which has the parameter's shape and strides. If it is
    `fresh`, they write: its memory holds no numbers yet. x and dy may be narrower than `total`,
    under autocast.
    """

    torch_differentiates: bool
    """Whether `y` consists of torch's own functions."""

    def y(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor: ...
    def dx(self, dy: Tensor, w: Tensor) -> Tensor: ...
    def add_dw(self, total: Tensor, x: Tensor, dy: Tensor, fresh: bool) -> None: ...
    def add_db(self, total: Tensor, dy: Tensor, fresh: bool) -> None: ...


@dataclass
class OneMatrix:
    """All rows by one weight, [K, N]; `transposed`: [N, K]."""

    transposed: bool
    torch_differentiates: bool = True

    def y(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.linear(x, w if self.transposed else w.t(), b)

    def dx(self, dy: Tensor, w: Tensor) -> Tensor:
        return dy.mm(w if self.transposed else w.t())

    def add_dw(self, total: Tensor, x: Tensor, dy: Tensor, fresh: bool) -> None:
        # [N, R] x [R, K], or [K, R] x [R, N]: the shape of the weight
        add_product(total, *((dy.t(), x) if self.transposed else (x.t(), dy)), fresh)

    def add_db(self, total: Tensor, dy: Tensor, fresh: bool) -> None:
        add_rows(total, dy, fresh)


_ONE_MATRIX = {transposed: OneMatrix(transposed) for transposed in (False, True)}


def add_product(total: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """total += a b; `fresh`: total = a b."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=0 if fresh else 1)  # one kernel, and no product in memory
    else:
        (total.copy_ if fresh else total.add_)(a.mm(b))


def add_rows(total: Tensor, rows: Tensor, fresh: bool) -> None:
    """total += the sum of the rows; `fresh`: total = that."""
    if fresh and rows.dtype == total.dtype:
        torch.sum(rows, 0, out=total)
    else:
        (total.copy_ if fresh else total.add_)(rows.sum(0))


@dataclass
class Operands:
    """Of one product: what the gradients of its parameters are computed from."""

    product: Product
    weight: nn.Parameter
    bias: nn.Parameter | None  # None: there is none, or it is frozen
    x: Tensor  # R K
    dy: Tensor  # R N
    exchanged: bool  # then dw is computed, then added: the same bits as if computed at once
    dw: Tensor | None = None  # if it was computed at once

    @property
    def trained(self) -> list[nn.Parameter]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def gradient(self, p: nn.Parameter) -> Tensor:
        """dw, or db where p is the bias: new memory, with the strides of p, as a kernel that
        updates p may demand."""
        if p is self.weight and self.dw is not None:
            return self.dw
        total = torch.empty_like(p.detach())
        self._add(p, total, fresh=True)
        return total

    def add_gradient(self, p: nn.Parameter, total: Tensor) -> None:
        """Adds `gradient` of p to `total`."""
        if p is self.weight and self.exchanged:
            total.add_(self.gradient(p))
        else:
            self._add(p, total, fresh=False)

    def _add(self, p: nn.Parameter, total: Tensor, fresh: bool) -> None:
        if p is self.weight:
            self.product.add_dw(total, self.x, self.dy, fresh)
        else:
            self.product.add_db(total, self.dy, fresh)


class WeightsLater:
    """The gradients of one micro-batch in a stage, on their way to the totals over micro-batches.

    Inside `with later:` the products of this thread leave their weights' gradients for later: their
    backwards append to `products`. A parameter with several gradients in the micro-batch (from
    several products, or from a product and something else) has them added up in `sums` first. So
    each parameter has one sum per micro-batch, in the order of the backward, whenever the halves
    run.

    Args:
        totals: over micro-batches.
        shared: parameters that get gradients elsewhere, too; theirs are added up in `sums` as well.
        casts: weights in autocast's type, kept for one step, as autocast does.

    Attributes:
        at_once: whether the second half follows at once, so that it may run during an exchange.
    """

    def __init__(
        self, totals: Gradients, shared: Collection[nn.Parameter], casts: dict[Tensor, Tensor]
    ) -> None:
        self.products: list[Operands] = []
        self.sums: Gradients = {}
        self.at_once = True
        self._totals, self._shared, self._casts = totals, shared, casts

    def __enter__(self) -> None:
        self._before, _thread.later = _thread.later, self

    def __exit__(self, *_: object) -> None:
        _thread.later = self._before

    def cast(self, parameter: Tensor) -> Tensor:
        if parameter not in self._casts:
            self._casts[parameter] = narrowed(parameter.detach())
        return self._casts[parameter]

    def add(self, gradients: Gradients) -> None:
        """Adds what the first half of a backward has computed."""
        more = {p for product in self.products for p in product.trained} | {*self._shared}
        # dense: an embedding's may be sparse, and a product's, or another layer's, is not
        _add(self.sums, {p: g.to_dense() for p, g in gradients.items() if p in more})
        _add(self._totals, {p: g for p, g in gradients.items() if p not in more})

    def add_products(self) -> None:
        """The second half. Frees each product after use."""
        uses = Counter(p for product in self.products for p in product.trained)
        several = {p for p, n in uses.items() if n > 1} | self.sums.keys() | {*self._shared}
        self.products.reverse()  # pop takes the last: this keeps backward's order
        while self.products:
            product = self.products.pop()
            for p in product.trained:
                target = self.sums if p in several else self._totals
                if (total := target.get(p)) is not None:
                    product.add_gradient(p, total)  # in place
                else:
                    target[p] = product.gradient(p)  # new memory, not a view: may be written to

    def end(self) -> None:
        """When the micro-batch's backward is over."""
        _add(self._totals, self.sums)
        self.sums.clear()


class _Thread(threading.local):
    """Per thread, like grad mode: where the weights' gradients are left; None: nowhere."""

    later: WeightsLater | None = None


_thread = _Thread()


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """x w + b, [..., K] to [..., N]. Inside `WeightsLater` the backward leaves the gradients of
    parameters for later. (Not if x is a single vector, the numbers are complex, the weight is no
    parameter, the bias is spread over several features, or torch.func differentiates.)

    Args:
        weight: [K, N]; `transposed`: [N, K].
    """
    return multiplied(_ONE_MATRIX[transposed], x, weight, bias, None)


def multiplied(
    product: Product, x: Tensor, weight: Tensor, bias: Tensor | None, exchange: AroundProduct | None
) -> Tensor:
    """`linear` by any product.

    Args:
        exchange: with the ranks that have the other columns. Weight and bias are parameters then.
    """
    later = _later_of(x, weight, bias)
    if later is None and exchange is None and product.torch_differentiates:
        return product.y(x, weight, bias)
    w, b = weight, bias  # perhaps cast below; weight, bias: the parameters themselves
    if torch.is_autocast_enabled(x.device.type):
        # Cast here: backward needs the cast operands too, and inside the autograd function
        # (no_grad) autocast would cast every weight anew for every micro-batch.
        cast = narrowed if later is None else later.cast
        x, w, b = narrowed(x), cast(weight), None if b is None else cast(b)
    # Function.apply looks for torch.func's transforms, which takes as long as a small product.
    # `_apply` does not: `_later_of` has looked for them.
    apply = _Multiplied.apply if later is None else _apply
    y: Tensor = apply(x, weight, bias, w, b, product, exchange, later)
    return y


class WeightsMayWait:
    """Inside `with`, every `nn.Linear` and `Conv1D` in the modules computes by `linear`. That
    changes no result, and no name, and nothing outside.

    One thread at a time may enter it; other threads may compute with the modules meanwhile.

    Args:
        others: forwards for other classes, by their names.
    """

    def __init__(
        self, modules: Iterable[nn.Module], others: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        by_class = {**_LINEAR, **(others or {})}
        self._forwards: list[tuple[dict[str, Any], Callable[..., Any]]] = []
        for m in dict.fromkeys(m for module in modules for m in module.modules()):
            name = f"{type(m).__module__}.{type(m).__qualname__}"
            if name in by_class:
                self._forwards.append((vars(m), partial(by_class[name], m)))
        self._changed: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        for attributes, forward in self._forwards:
            if "forward" not in attributes:  # not someone else's
                attributes["forward"] = forward
                self._changed.append(attributes)

    def __exit__(self, *_: object) -> None:
        while self._changed:
            del self._changed.pop()["forward"]


def _as_linear(module: Any, input: Tensor) -> Tensor:
    return linear(input, module.weight, module.bias, transposed=True)


def _as_conv1d(module: Any, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


# Layers that compute x w + b and nothing else. Callers may pass the argument by its name.
_LINEAR = {
    "torch.nn.modules.linear.Linear": _as_linear,
    "transformers.pytorch_utils.Conv1D": _as_conv1d,
}


def _later_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> WeightsLater | None:
    """Where the backward of a product leaves the gradients of its parameters; None: nowhere."""
    may_wait = (
        x.dim() > 1
        and isinstance(weight, nn.Parameter)
        and weight.requires_grad
        and not weight.is_complex()
        and (bias is None or _bias_may_wait(bias, weight, x))
        and torch.is_grad_enabled()
        and not torch._C._are_functorch_transforms_active()  # they differentiate it themselves
    )
    return _thread.later if may_wait else None


def _bias_may_wait(bias: Tensor, weight: Tensor, x: Tensor) -> bool:
    """Whether a bias has a number for each feature out, and is a parameter if it is trained."""
    one_each = bias.dim() == weight.dim() - 1 and bias.numel() * x.size(-1) == weight.numel()
    return one_each and (isinstance(bias, nn.Parameter) or not bias.requires_grad)


class _Multiplied(torch.autograd.Function):
    """`weight` and `bias` are arguments so that the result has a graph even if x has none, and
    to get their gradients if nothing is left for later. `w` and `b` are the operands, perhaps cast.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        w: Tensor,
        b: Tensor | None,
        product: Product,
        exchange: AroundProduct | None,
        later: WeightsLater | None,
    ) -> Tensor:
        needed = w if ctx.needs_input_grad[0] else None  # the batch has no dx, so w may change
        ctx.save_for_backward(x, needed)  # of a scattered x this rank's rows
        trained_bias = bias if bias is not None and bias.requires_grad else None
        ctx.notes = weight, trained_bias, product, exchange, later
        x = x if exchange is None else exchange.gather(x)
        # Autograd forbids in-place changes of a view made by a function; .data is no view, and
        # costs no kernel.
        y: Tensor = product.y(x, w, b).data
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """With an `exchange` this rank's dx is a term of a sum that travels during the product dw:

        compute     dx = dy w' | dw = x' dy | dx goes on to the layer before
        exchange               start   sum(dx)   finish
        """
        x, w = ctx.saved_tensors
        weight, bias, product, exchange, later = ctx.notes
        if torch.is_grad_enabled() and (later is None or exchange is not None):
            raise RuntimeError(
                "products that are cut over ranks, and experts, cannot be differentiated twice: no "
                "create_graph=True"
            )
        if w is not None and torch.is_grad_enabled() and w.dtype != weight.dtype:
            w = weight.to(w.dtype)  # differentiated again: the kept copy has no graph
        x = x if exchange is None else exchange.gather(x)
        rows = dy.flatten(0, -2)  # R N, any of which may be 0
        inputs = x.detach().flatten(0, -2)  # R K; not x itself, which keeps the graph
        operands = Operands(product, weight, bias, inputs, rows, exchanged=exchange is not None)
        dx = None
        if ctx.needs_input_grad[0]:  # not if, e.g., x is the batch
            dx = product.dx(rows, w).view(x.shape)
        finish = exchange.start_sum(dx) if exchange is not None and dx is not None else lambda: dx
        at_once = later is None or (exchange is not None and later.at_once)
        if at_once and ctx.needs_input_grad[1]:  # not if it is frozen
            operands.dw = operands.gradient(weight)  # during the sum
        if later is not None:
            later.products.append(operands)
            return finish(), *(None,) * 7
        db = None if bias is None else operands.gradient(bias)
        return finish(), operands.dw, db, *(None,) * 5


_apply = super(torch.autograd.Function, _Multiplied).apply


def _add(totals: Gradients, new: Gradients) -> None:
    """Adds the gradients to their totals, in one call for all.

    A first gradient is copied: totals are written to, and its memory may be another gradient's too.
    (Autograd hands the same tensor to both terms of a sum.) A total has its parameter's strides.
    """
    known = [p for p in new if p in totals]
    for p in known:
        if totals[p].is_sparse and not new[p].is_sparse:  # a table, this time used as a whole, too
            totals[p] = torch.zeros_like(p.detach()).add_(totals[p])
    if known:
        torch._foreach_add_([totals[p] for p in known], [new[p] for p in known])
    for p, gradient in new.items():
        if p not in totals:
            dense = not gradient.is_sparse  # an embedding's may be
            totals[p] = torch.empty_like(p).copy_(gradient) if dense else gradient.clone()
