"""A piece of a model's graph, cut off at both ends: its forward, and its backward by hand.

    x ──detach──▸ layers ──▸ y ──detach──▸        `record` runs this, and keeps x and y
    ◂── dx ────── grad of y by x and parameters ◂── dy        `differentiate`

Whoever records several pieces one after the other joins them: the y of one, detached, is the x of
the next, and the dx of one is the dy of the one before. So stages are joined, on threads or in
processes, and so are the layers of a stage, where each has a piece of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils import _pytree as pytree

from .zero_bubble import Gradients, Product


class Graph:
    """One piece, in ``memory``. ``products``: the weight gradients that `differentiate` has left to
    be computed, see zero_bubble.py."""

    def __init__(self, memory: torch.device) -> None:
        self.products: list[Product] = []
        self._memory = memory
        # Positions count the leaves of x and of y.
        self.inputs: list[Tensor] = []
        self._input_positions: list[int] = []
        self._num_inputs = 0
        self._outputs: list[Tensor] = []
        self._output_positions: list[int] = []

    def record(self, value: Any, run: Callable[[Any], Any], is_first: bool) -> Any:
        """``run(value)``, detached; ``requires_grad`` says which leaves are part of the graph.

        Where the graph is not the model's first, ``run`` may write to the tensors of ``value``:
        only it will read them. A tensor that is there twice stays one, and its gradient is that of
        its first place.
        """
        leaves, spec = pytree.tree_flatten(value)
        self._num_inputs = len(leaves)
        entered: dict[int, Tensor] = {}
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and id(leaf) not in entered:
                wanted = leaf.requires_grad and torch.is_grad_enabled()
                inner = move(leaf.detach(), self._memory)
                if wanted:
                    self.inputs.append(inner.requires_grad_())
                    self._input_positions.append(k)
                    inner = inner if is_first else _Alias.apply(inner)
                entered[id(leaf)] = inner
        leaves = [entered.get(id(leaf), leaf) for leaf in leaves]
        results, spec = pytree.tree_flatten(run(pytree.tree_unflatten(leaves, spec)))
        self.products.clear()  # of a layer that differentiates inside: not the model's gradients
        left: dict[int, Tensor] = {}
        for k, result in enumerate(results):
            if isinstance(result, Tensor):
                if result.requires_grad and torch.is_grad_enabled():
                    self._outputs.append(result)
                    self._output_positions.append(k)
                if id(result) not in left:
                    left[id(result)] = result.detach().requires_grad_(result.requires_grad)
        return pytree.tree_unflatten([left.get(id(leaf), leaf) for leaf in results], spec)

    def differentiate(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
        retain_graph: bool = False,
    ) -> tuple[list[Tensor | None], Gradients, list[Tensor | None]]:
        """From those of y the gradients of x; of the parameters; and what may share their memory.

        ``gradients`` has one entry per leaf of y, and the first result one per leaf of x: None
        where nothing depends on it.
        """
        pairs = []
        for output, position in zip(self._outputs, self._output_positions, strict=True):
            gradient = gradients[position]
            if gradient is not None:
                pairs.append((output, move(gradient, self._memory)))
        result: list[Tensor | None] = [None] * self._num_inputs
        if not pairs or not (self.inputs or parameters):
            return result, {}, []
        incoming = [dy for _, dy in pairs]
        # torch.autograd.grad itself, but for its checks: those leave a TorchFunctionMode behind.
        found = Variable._execution_engine.run_backward(
            tuple(y for y, _ in pairs),
            tuple(incoming),
            retain_graph,
            False,  # create_graph
            (*self.inputs, *parameters),
            allow_unreachable=True,
            accumulate_grad=False,
        )
        of_inputs: list[Tensor | None] = list(found[: len(self.inputs)])
        of_parameters = zip(parameters, found[len(self.inputs) :], strict=True)
        for position, dx in zip(self._input_positions, of_inputs, strict=True):
            result[position] = dx
        return result, {p: g for p, g in of_parameters if g is not None}, [*incoming, *of_inputs]

    def release(self) -> None:
        """Let go of x and y; of the products they hold their own."""
        self.inputs, self._outputs = [], []


def move(tensor: Tensor, memory: torch.device) -> Tensor:
    """To another memory. The CPU does not wait by itself for a copy that comes later."""
    return tensor.to(memory, non_blocking=memory.type == "cuda")


def add_to(
    sums: Gradients,
    found: Gradients,
    chosen: Collection[nn.Parameter | None],
    others: Sequence[Tensor | None],
) -> None:
    """Move the gradients of the chosen parameters from ``found`` to ``sums``; a first one is copied
    if it shares its memory with one of ``others``."""
    for p in [p for p in found if p in chosen]:
        gradient = found.pop(p)
        if p in sums:
            sums[p] = sums[p] + gradient
        else:
            shared = _storage(gradient) in {_storage(t) for t in others if t is not None}
            sums[p] = gradient.clone() if shared else gradient


def add_in_place(
    totals: dict[nn.Parameter, Tensor], new: Gradients, others: Sequence[Tensor | None]
) -> None:
    """Add the gradients to their totals, in one call for all.

    A first gradient becomes the total as it is, unless it shares its memory with another, be it
    one of ``others`` (autograd hands one tensor to both terms of a sum): that one is copied, for
    totals are written to.
    """
    seen = {_storage(t) for t in others if t is not None}
    sums, terms = [], []
    for p, gradient in new.items():
        if p in totals:
            sums.append(totals[p])
            terms.append(gradient)
            continue
        shared = _storage(gradient) in seen or not _owns_storage(gradient)
        seen.add(_storage(gradient))
        totals[p] = gradient.clone() if shared else gradient
    if sums:
        torch._foreach_add_(sums, terms)


class _Alias(torch.autograd.Function):
    """The same memory, but no leaf and no view: an in-place first layer is allowed."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _owns_storage(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided:
        return True
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
