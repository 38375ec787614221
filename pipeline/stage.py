"""One stage: the forward and backward of its layers for one micro-batch at a time.

Problem. Autograd runs all CPU work of one graph on the thread that called ``backward``: a graph
through all stages would make the backward of a pipeline sequential.

Idea. Each stage builds a graph of its own per micro-batch. ``forward(i, x)`` detaches x, runs the
layers and keeps x and the output y; what it hands on is y detached. ``backward(i, dy)``
differentiates y by x and by the parameters, frees what was kept, and hands back dx. Whoever calls
does the work: the worker that ran the forward runs the backward.

    stage s-1 ──x──▸ [detach ─ layers ─ y] ──y detached──▸ stage s+1
    stage s-1 ◂─dx── [       grad        ] ◂─────dy─────── stage s+1

``backward_input(i, dy)`` and, later, ``backward_weight(i)`` are the same in two halves, see
zero_bubble.py.

Gradients of the parameters are added up in ``self.gradients``, in the order of the calls, and not
in ``.grad``: `torch.autograd.grad(loss, parameters)`, hooks and tied parameters need them to reach
``.grad`` once, by way of autograd.

Transport (queues, send/recv) is not here, and neither is a schedule.
Cost: between forward and backward (its second half) of a micro-batch, its activations here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils import _pytree as pytree

from .randomness import NoDraws, StageRandomness, StepSeed
from .zero_bubble import Product, WeightsLater, weight_gradients


@dataclass
class _Kept:
    """What the backward of one micro-batch needs. Positions count the leaves of x and of y."""

    inputs: list[Tensor]
    input_positions: list[int]
    num_inputs: int
    outputs: list[Tensor]
    output_positions: list[int]
    products: list[Product] = field(default_factory=list)  # weight gradients that are to come
    parts: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # of those, from elsewhere
    halved: bool = False  # only the second half is to come


class Stage:
    """The layers of one device during one step. Only one thread at a time may use it.

    A new Stage is made for every step, so a step that fails, or whose backward is never asked
    for, leaves nothing behind. ``alive`` is the number of micro-batches whose activations are
    held, ``peak_alive`` the most that ever were.
    """

    def __init__(
        self,
        index: int,
        module: nn.Sequential,
        device: torch.device,
        seed: StepSeed | None = None,
        first_layer: int = 0,
    ) -> None:
        self.index = index
        self.module = module
        self.device = device  # may be logical, as cpu:1; tensors are moved to where they are
        self.memory = torch.device("cpu") if device.type == "cpu" else device
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.gradients: list[Tensor | None] = [None] * len(self.parameters)
        self.peak_alive = 0
        self._kept: dict[int, _Kept] = {}
        self._seed = seed or StepSeed()
        self._randomness = StageRandomness(device)
        self._later = WeightsLater(self.parameters)
        self._first_layer = first_layer
        self._draws = any(_may_draw(layer) for layer in module.modules())

    @property
    def alive(self) -> int:
        return len(self._kept)

    def forward(
        self,
        i: int,
        value: Any,
        tail: Callable[[Any], Any] | None = None,
        halves: bool = False,
    ) -> Any:
        """Run micro-batch i; return its output, detached, ``requires_grad`` saying what it was.

        ``tail`` follows the layers and belongs to the same graph: the loss, on the last stage.
        ``halves`` says that backward will come in two. Without grad mode nothing is kept.
        """
        leaves, spec = pytree.tree_flatten(value)
        positions = []
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                wanted = leaf.requires_grad and torch.is_grad_enabled()
                leaf = self._move(leaf.detach())
                leaves[k] = leaf.requires_grad_() if wanted else leaf
                positions += [k] if wanted else []
        inputs = [leaves[k] for k in positions]
        if self.index > 0:  # layers may write to what only they will read, but not to a leaf
            for k in positions:
                leaves[k] = _Alias.apply(leaves[k])
        output = pytree.tree_unflatten(leaves, spec)
        products: list[Product] = []
        with self._later.into(products) if halves else nullcontext():
            output = self._layers(i, output, [*self.module, *([tail] if tail else [])])
        results, spec = pytree.tree_flatten(output)
        of_graph = [k for k, r in enumerate(results) if isinstance(r, Tensor) and r.requires_grad]
        if torch.is_grad_enabled():
            outputs = [results[k] for k in of_graph]
            self._kept[i] = _Kept(inputs, positions, len(leaves), outputs, of_graph, products)
            self.peak_alive = max(self.peak_alive, self.alive)
        for k, result in enumerate(results):
            if isinstance(result, Tensor):
                results[k] = result.detach().requires_grad_(k in of_graph)
        return pytree.tree_unflatten(results, spec)

    def backward(
        self, i: int, gradients: Sequence[Tensor | None], retain_graph: bool = False
    ) -> list[Tensor | None]:
        """Run the backward of micro-batch i and free it; return the gradients of its input.

        One gradient per leaf of the output, None for those nothing depends on.
        """
        kept = self._graph_of(i)
        if not retain_graph:
            del self._kept[i]
        result, found, others = self._differentiate(kept, gradients, retain_graph)
        self._add(found, others)
        return result

    def backward_input(self, i: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """`backward` without the weight gradients of matrix products; those stay to be computed.

        The micro-batch's forward must have been told of the ``halves``.
        """
        kept = self._graph_of(i)
        result, found, others = self._differentiate(kept, gradients)
        kept.inputs, kept.outputs, kept.halved = [], [], True
        late = {p for product in kept.products for p in (product.weight, product.bias)}
        for k, (p, gradient) in enumerate(zip(self.parameters, found, strict=False)):
            if gradient is not None and p in late:  # one sum per micro-batch, as autograd's
                kept.parts[p], found[k] = gradient, None
        self._add(found, [*others, *(product.dy for product in kept.products)])
        return result

    def backward_weight(self, i: int) -> None:
        """What `backward_input` left; frees the micro-batch."""
        if i not in self._kept or not self._kept[i].halved:
            raise RuntimeError(
                f"micro-batch {i} has no weight gradients to come on stage {self.index}: "
                "call backward_input first, and this once"
            )
        kept = self._kept.pop(i)
        found = weight_gradients(kept.products)
        for p, part in kept.parts.items():
            found[p] = found[p] + part
        self._add([found.get(p) for p in self.parameters], [])

    def take_gradients(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """The sums over all micro-batches so far; they are handed over and start anew."""
        pairs = list(zip(self.parameters, self.gradients, strict=True))
        self.gradients = [None] * len(self.parameters)
        return pairs

    def _move(self, tensor: Tensor) -> Tensor:
        """To this stage's memory. The CPU does not wait by itself for a copy that comes later."""
        return tensor.to(self.memory, non_blocking=self.memory.type == "cuda")

    def _layers(self, i: int, value: Any, layers: Sequence[Callable[[Any], Any]]) -> Any:
        for k, layer in enumerate(layers, self._first_layer):
            with self._randomness.of(self._seed, k, i) if self._draws else nullcontext():
                value = layer(value)
        return value

    def _graph_of(self, i: int) -> _Kept:
        if i not in self._kept or self._kept[i].halved:
            raise RuntimeError(
                f"micro-batch {i} holds no graph on stage {self.index}: a second backward needs "
                "backward(retain_graph=True) the first time"
            )
        return self._kept[i]

    def _differentiate(
        self, kept: _Kept, gradients: Sequence[Tensor | None], retain_graph: bool = False
    ) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
        """The gradients of the input's leaves; of the parameters; what may share their memory."""
        pairs = []
        for output, position in zip(kept.outputs, kept.output_positions, strict=True):
            gradient = gradients[position]
            if gradient is not None:
                pairs.append((output, self._move(gradient)))
        result: list[Tensor | None] = [None] * kept.num_inputs
        if not pairs or not (kept.inputs or self.parameters):
            return result, [], []
        incoming = [dy for _, dy in pairs]
        with NoDraws() if self._draws else nullcontext():
            # torch.autograd.grad itself, but for its checks: those leave the mode behind.
            found = Variable._execution_engine.run_backward(
                tuple(y for y, _ in pairs),
                tuple(incoming),
                retain_graph,
                False,  # create_graph
                (*kept.inputs, *self.parameters),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        of_inputs: list[Tensor | None] = list(found[: len(kept.inputs)])
        of_parameters: list[Tensor | None] = list(found[len(kept.inputs) :])
        for position, dx in zip(kept.input_positions, of_inputs, strict=True):
            result[position] = dx
        return result, of_parameters, [*incoming, *of_inputs]

    def _add(self, new: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> None:
        """Sum in place, in one call for all parameters.

        A first gradient is kept as it is, unless it shares its memory with another (autograd
        hands one tensor to both terms of a sum): that one is copied, being written to later.
        """
        seen = {_storage(t) for t in others if t is not None}
        sums, terms = [], []
        for k, gradient in enumerate(new):
            if gradient is None:
                continue
            total = self.gradients[k]
            if total is not None:
                sums.append(total)
                terms.append(gradient)
                continue
            shared = _storage(gradient) in seen or not _owns_storage(gradient)
            seen.add(_storage(gradient))
            self.gradients[k] = gradient.clone() if shared else gradient
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


def _may_draw(layer: nn.Module) -> bool:
    """Whether it trains. Wrappers do not count: the user's eval() may not reach them."""
    return layer.training and type(layer) is not nn.Sequential and not hasattr(layer, "is_wrapper")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _owns_storage(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided:
        return True
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
