"""y = x w + b, whose weight gradient may wait: backward in two halves.

Problem. In a pipeline, another stage waits for gradients of activations. Gradients of weights are
needed only at the end of the step, but autograd computes both, layer by layer, in one pass. It also
makes each weight's gradient for each micro-batch before adding it to the sum: with small
micro-batches that takes a tenth of the second half.

Idea. Nearly all work on weights is in products y = x w + b, and all our layers compute them by
`linear`, or by `multiplied`, which it calls: whole matrices, those that are cut over ranks, and
those of experts. While a stage runs a layer, the backward of a product computes dx = dy w' at once
and, instead of dw = x' dy and db = sum of dy, notes (x, dy). `WeightsLater.add_products` computes
dw and db from the notes when the schedule says so; the product x' dy is added to the sum over
micro-batches directly. A whole backward is the first half followed at once by the second, so the
bits are the same. Everything else (norms, embeddings, convolutions, products of a user's own) is
differentiated in the first half. Outside a stage, as in data parallelism, `linear` is torch's own
function.

Where dy is found. A product by one whole matrix is torch's own, by a weight that requires no
gradient at that moment; backward asks autograd for the gradient of y, too, which it hands over in
passing. So no Python runs inside that backward. Products of experts, and those that exchange
something with other ranks, have an autograd function, `_Multiplied`. Products inside
`torch.utils.checkpoint`, which must not keep x, do not wait; nor do those in autograd functions,
which differentiate them by themselves.

During a step `WeightsMayWait` gives `nn.Linear` and transformers' `Conv1D` a forward that calls
`linear`. A `Product` need not be by one matrix: that of experts is by several.

Where each rank has some columns of w, its dx is only one term of a sum over the ranks. An
`AroundProduct` starts that sum before the weight's gradient is computed, if the latter is not left
for later.

Rejected: two calls of `torch.autograd.grad` over the same graph, first for the inputs and then for
the parameters (as torch.distributed.pipelining does): they compute much of the path twice. A
`TorchFunctionMode` that replaces products wherever they are called: it costs each torch call a
microsecond, and does not see into autograd functions, such as those of cut layers.

Cost: x and dy of every product are held between the halves. (Backward held x anyway; it is gathered
if it was scattered.) From forward to backward a product is held, with the graph before it, even if
the layer has dropped its result, as when it differentiates inside without create_graph. Inside, a
layer can differentiate by activations, but not by the weights of products: they seem unused.

Zero Bubble Pipeline Parallelism, Qi et al., 2023; its schedule ZB-H1 is in pipeline/schedules/.
Adding products directly to the sum: Megatron-LM's gradient accumulation fusion.

Shapes: R rows, K features in, N features out. A weight is K N, like Conv1D's; transposed it is N K,
like nn.Linear's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

from runtime.graph import Gradients, Graph
from runtime.sums import is_autocast, narrowed


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

    def y(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor: ...
    def dx(self, dy: Tensor, w: Tensor) -> Tensor: ...
    def add_dw(self, total: Tensor, x: Tensor, dy: Tensor, fresh: bool) -> None: ...
    def add_db(self, total: Tensor, dy: Tensor, fresh: bool) -> None: ...


@dataclass
class OneMatrix:
    """All rows by one weight, [K, N]; `transposed`: [N, K]."""

    transposed: bool

    def y(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.linear(x, w if self.transposed else w.t(), b)

    def dx(self, dy: Tensor, w: Tensor) -> Tensor:
        return dy.mm((w if self.transposed else w.t()).conj())  # w itself, if it is real

    def add_dw(self, total: Tensor, x: Tensor, dy: Tensor, fresh: bool) -> None:
        x = x.conj()
        # [N, R] x [R, K], or [K, R] x [R, N]: the shape of the weight
        add_product(total, *((dy.t(), x) if self.transposed else (x.t(), dy)), fresh)

    def add_db(self, total: Tensor, dy: Tensor, fresh: bool) -> None:
        add_rows(total, dy, fresh)


ONE_MATRIX = {transposed: OneMatrix(transposed) for transposed in (False, True)}


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
    exchanged: bool  # then dw is computed, then added: the same bits as if computed at once
    dy: Any = None  # R N; before the backward None
    dw: Tensor | None = None  # if it was computed at once

    @property
    def trained(self) -> list[nn.Parameter]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def added(self, p: nn.Parameter, total: Tensor | None = None) -> Tensor:
        """The total of p's gradients with dw, or db where p is the bias, added in place. Without a
        total: new memory, with the strides of p, as a kernel that updates p may demand."""
        if p is self.weight and self.exchanged and total is not None:
            return total.add_(self.added(p))
        if p is self.weight and self.dw is not None:
            return self.dw
        fresh, total = total is None, torch.empty_like(p.detach()) if total is None else total
        if p is self.weight:
            self.product.add_dw(total, self.x, self.dy, fresh)
        else:
            self.product.add_db(total, self.dy, fresh)
        return total


class WeightsLater:
    """The gradients of one micro-batch in some layers, on their way to the totals over
    micro-batches.

    Inside `with later:` the products of this thread leave their weights' gradients for later: the
    first half of a backward appends to `products`. A parameter with several gradients in the
    micro-batch (from several products, or from a product and something else) has them added up in
    `sums` first. So each parameter has one sum per micro-batch, in the order of the backward,
    whenever the halves run.

    Args:
        parameters: of the layers; the keys are those that are trained.
        totals: over micro-batches.
        sums: of the micro-batch.
        shared: parameters that get gradients elsewhere, too; theirs are added up in `sums` as well.
        casts: weights in autocast's types, kept for one step, as autocast does.

    Attributes:
        leaves: what a graph of the layers may end in.
        at_once: whether the second half follows at once.
    """

    def __init__(
        self,
        parameters: Mapping[Any, None],
        totals: Gradients,
        sums: Gradients,
        shared: Collection[nn.Parameter],
        casts: dict[tuple[Tensor, torch.dtype], Tensor],
    ) -> None:
        self.leaves: dict[Tensor, None] = {**parameters}  # faster than by hashing each anew
        self.products: list[Operands] = []
        self.at_once = True
        self._parameters = parameters
        # By product: where dy passes; the weight as it was multiplied; the writes to x before.
        self._awaited: list[tuple[Operands, GradientEdge, Tensor, int]] = []
        self._in_backward = False
        self._totals, self._sums, self._shared, self._casts = totals, sums, shared, casts

    def __enter__(self) -> None:
        self._before, _thread.later = _thread.later, self

    def __exit__(self, *_: object) -> None:
        _thread.later = self._before

    def cast(self, parameter: Tensor) -> Tensor:
        key = parameter, torch.get_autocast_dtype(parameter.device.type)
        if key not in self._casts:
            self._casts[key] = narrowed(parameter.detach())
        return self._casts[key]

    def may_note(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether x may be kept, and its dy asked for: not where a forward runs again, nor in an
        autograd function, which differentiates it by itself. Nor for another layer's parameter,
        which `guarded` must find in the graph."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        in_function = not torch._C._is_fwd_grad_enabled()  # the only sign of it
        own = weight in self.leaves and (_if_trained(bias) is None or bias in self.leaves)
        return hooks is None and own and not (in_function or self._in_backward)

    def multiplied(
        self, product: OneMatrix, x: Tensor, w: Tensor, b: Tensor | None, weight: Any, bias: Any
    ) -> Tensor:
        """torch's own product x w + b, of whose backward `first_half` does the rest. `w` and `b`
        are the parameters `weight` and `bias`, perhaps cast."""
        if not x.requires_grad:  # y needs a graph; nobody asks for dx
            x = x.detach().requires_grad_()
            self.leaves[x] = None
        rows, w = x.flatten(0, -2), w.detach()
        w = w.t() if product.transposed else w
        y = rows.mm(w) if b is None else torch.addmm(b.detach(), rows, w)
        # Autograd has kept w itself: a second derivative will find that it requires a gradient.
        self.leaves[w.requires_grad_()] = None
        node: Any = y.grad_fn  # it has one, since x has
        operands = Operands(product, weight, _if_trained(bias), rows.detach(), exchanged=False)
        self._awaited.append((operands, GradientEdge(node, 0), w, rows._version))
        shape = *x.shape[:-1], y.size(1)
        # A node apart, for hooks: what is captured at `node` is before those of y. And a view only
        # where F.linear returns one: a write to a view drops the hooks that it had.
        is_view = b is not None and x.dim() > 2
        return y.view(shape) if is_view else torch.ops.aten._unsafe_view(y, shape)

    def first_half(
        self,
        graph: Graph,
        gradients: Sequence[Tensor | None],
        at_once: bool,
        retain_graph: bool = False,
    ) -> list[Tensor | None]:
        """Differentiates the layers; returns the gradients of the inputs. Those of parameters are
        added, but for the products', which wait for `add_products`.

        `at_once`: that follows now, so that it may run during an exchange.
        """
        self.at_once, self._in_backward = at_once, True
        asked = [*self._parameters, *(each for _, y, w, _ in self._awaited for each in (y, w))]
        with self:
            of_inputs, new = graph.differentiate(asked, gradients, retain_graph)
        for operands, y, w, version in reversed(self._awaited):
            if (dw := new.pop(w, None)) is not None:  # of a second derivative
                transposed = operands.product is ONE_MATRIX[True]
                add_gradients(self._sums, {operands.weight: dw.t() if transposed else dw})
            if (dy := new.pop(y, None)) is not None:
                if operands.x._version != version:
                    raise RuntimeError(
                        f"a {tuple(operands.x.shape)} tensor that the backward of a product needs "
                        "has been modified by an inplace operation: let the layer write to a copy"
                    )
                operands.dy = dy
                self.products.append(operands)
        if not retain_graph:
            self._awaited.clear()
        self._uses = Counter(p for product in self.products for p in product.trained)
        more = self._uses.keys() | {*self._shared}
        # dense: an embedding's may be sparse, and a product's, or another layer's, is not
        add_gradients(self._sums, {p: g.to_dense() for p, g in new.items() if p in more})
        add_gradients(self._totals, {p: g for p, g in new.items() if p not in more})
        return of_inputs

    def add_products(self) -> None:
        """The second half. Frees each product after use."""
        several = {p for p, n in self._uses.items() if n > 1} | self._sums.keys() | {*self._shared}
        self.products.reverse()  # pop takes the last: this keeps backward's order
        while self.products:
            product = self.products.pop()
            for p in product.trained:
                target = self._sums if p in several else self._totals
                total = target.get(p)
                new = product.added(p, total)  # in place, if there is a total
                if total is None:
                    target[p] = new


class _Thread(threading.local):
    """Per thread, like grad mode: where the weights' gradients are left; None: nowhere."""

    later: WeightsLater | None = None


_thread = _Thread()


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """x w + b, [..., K] to [..., N]. Inside `WeightsLater` the backward leaves the gradients of
    parameters for later. (Not if x is a single vector, the numbers are complex, the weight is no
    parameter of the layers, the bias is spread over several features, torch.func differentiates, or
    `may_note` says no.)

    Args:
        weight: [K, N]; `transposed`: [N, K].
    """
    return multiplied(ONE_MATRIX[transposed], x, weight, bias, None)


def multiplied(
    product: Product, x: Tensor, weight: Tensor, bias: Tensor | None, exchange: AroundProduct | None
) -> Tensor:
    """`linear` by any product.

    Args:
        exchange: with the ranks that have the other columns. Weight and bias are parameters then.
    """
    later = _later_of(x, weight, bias)
    whole = product if exchange is None and isinstance(product, OneMatrix) else None
    if whole and (later is None or not later.may_note(weight, bias)):
        return whole.y(x, weight, bias)
    w, b = weight, bias  # perhaps cast below; weight, bias: the parameters themselves
    if is_autocast(x):
        # Cast here: backward needs the cast operands too, and inside an autograd function
        # (no_grad) autocast would cast every weight anew for every micro-batch.
        cast = narrowed if later is None else later.cast
        x, w, b = narrowed(x), cast(weight), None if b is None else cast(b)
    if whole and later:
        return later.multiplied(whole, x, w, b, weight, bias)
    y: Tensor = _Multiplied.apply(x, weight, bias, w, b, product, exchange, later)
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
        _thread.later is not None
        and x.dim() > 1
        and isinstance(weight, nn.Parameter)
        and weight.requires_grad
        and not weight.is_complex()
        and (bias is None or _bias_may_wait(bias, weight, x))
        and torch.is_grad_enabled()
        and not torch._C._are_functorch_transforms_active()  # they differentiate it themselves
    )
    return _thread.later if may_wait else None


def _if_trained(p: Any) -> Any:
    return p if p is not None and p.requires_grad else None


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
        ctx.save_for_backward(x, w)  # of a scattered x this rank's rows
        ctx.notes = weight, _if_trained(bias), product, exchange, later
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
        if torch.is_grad_enabled():
            raise RuntimeError(
                "products that are cut over ranks, and experts, cannot be differentiated twice: no "
                "create_graph=True"
            )
        x = x if exchange is None else exchange.gather(x)
        rows = dy.flatten(0, -2)  # R N, any of which may be 0
        inputs = x.detach().flatten(0, -2)  # R K; not x itself, which keeps the graph
        operands = Operands(product, weight, bias, inputs, exchange is not None, rows)
        dx = None
        if ctx.needs_input_grad[0]:  # not if, e.g., x is the batch
            dx = product.dx(rows, w).view(x.shape)
        finish = exchange.start_sum(dx) if exchange is not None and dx is not None else lambda: dx
        at_once = later is None or (exchange is not None and later.at_once)
        if at_once and ctx.needs_input_grad[1]:  # not if it is frozen
            operands.dw = operands.added(weight)  # during the sum
        if later is not None:
            later.products.append(operands)
            return finish(), *(None,) * 7
        db = None if bias is None else operands.added(bias)
        return finish(), operands.dw, db, *(None,) * 5


def add_gradients(totals: Gradients, new: Gradients) -> None:
    """Adds the gradients to their totals, in one call for all.

    A first gradient is copied: totals are written to, and its memory may be another gradient's too.
    (Autograd hands the same tensor to both terms of a sum.) A total has its parameter's strides.
    """
    pairs: list[tuple[Tensor, Tensor]] = []  # a total, and what is added to it
    for p, gradient in new.items():
        total = totals.get(p)
        if total is None:
            dense = not gradient.is_sparse  # an embedding's may be
            totals[p] = torch.empty_like(p).copy_(gradient) if dense else gradient.clone()
            continue
        if total.is_sparse and not gradient.is_sparse:  # a table, this time used as a whole, too
            totals[p] = total = torch.zeros_like(p.detach()).add_(total)
        pairs.append((total, gradient))
    if pairs:
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
