"""One stage: the forward and backward of its layers for one micro-batch at a time.

Problem. Autograd runs all CPU work of one graph on the thread that called ``backward``: one graph
through all stages would make a pipeline's backward sequential.

Idea. Each stage builds its own graph per micro-batch. ``forward(i, x)`` detaches x, runs the
layers, keeps x and the output y, and returns y detached. ``backward(i, dy)`` differentiates y by x
and by the parameters, frees the graph, and returns dx. The worker that ran the forward runs the
backward. (A GPU's backward runs on autograd's own thread of that GPU, unless the caller forbids it,
as workers do: see worker.py.)

    stage s-1 ──x──▸ [detach ─ layers ─ y] ──y detached──▸ stage s+1
    stage s-1 ◂─dx── [       grad        ] ◂─────dy─────── stage s+1

``backward_input(i, dy)`` and, later, ``backward_weight(i)`` do the same in two halves, see
runtime/linear.py.

Parameter gradients are summed here, in the order of the calls, not in ``.grad``. They reach
``.grad`` once (`step.hand_over`): all at the end of the step or, with ``deliver``, layer by layer
as the last micro-batch's backward passes. Transport and schedules are elsewhere.

With ``deliver`` there is a graph per layer instead of one per stage, joined like the stages. A
layer's parameter gradients are then added up and freed before the next layer's are made; in one
graph all of them live until its end and take as much memory as the stage's parameters. The bits are
the same.

``recompute`` makes a graph per segment instead, whose activations are dropped after forward and
computed again before backward: runtime/recompute.py.

Cost: the stage's activations of a micro-batch, from its forward to its backward (or second half).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from runtime.graph import Gradients, Graph, memory_of
from runtime.guards import Guard, refuse_hidden, refuse_shared_memory
from runtime.linear import WeightsLater, add, let_weights_wait
from runtime.randomness import OfProcess, OfThread, StepSeed
from runtime.recompute import EXCEPT_LAST, LAYERS, NEVER, segments


class _Part:
    """Layers that share a graph."""

    def __init__(self, layers: Sequence[nn.Module], first_layer: int) -> None:
        self.layers, self.first_layer = layers, first_layer
        trained = (p for layer in layers for p in layer.parameters() if p.requires_grad)
        self.parameters = list(dict.fromkeys(trained))


class _Graph(Graph):
    """One part of the stage. ``later``: the weights' gradients that `differentiate` left, see
    runtime/linear.py."""

    def __init__(self, memory: torch.device, part: _Part, later: WeightsLater) -> None:
        super().__init__(memory)
        self.part, self.later = part, later


@dataclass
class _Kept:
    """A micro-batch between its forward and the end of its backward."""

    graphs: list[_Graph] = field(default_factory=list)  # one per part
    sums: Gradients = field(default_factory=dict)  # of parameters that get more from it


class Stage:
    """The layers of one device during one step. Only one thread at a time may use it.

    Every step makes a new Stage, so a step that fails, or never runs its backward, leaves nothing
    behind. ``alive`` is the number of micro-batches whose activations are held. ``tail``, on the
    last stage the loss, is called with a micro-batch's number and its output; it runs after the
    layers, in the last layer's graph.

    Args:
        index: of the stage.
        device: may be logical, e.g. cpu:1.
        randomness: of the layers' draws; by default a thread's, with a seed of its own.
        first_layer: the number of layers on the stages before.
        recompute: a mode of runtime/recompute.py.
        num_microbatches: of the step; 0: unknown.
        deliver: called with the complete sums of each layer during the last backward.
        held_back: parameters whose sums are not delivered but stay until `take_gradients`.
    """

    def __init__(
        self,
        index: int,
        module: nn.Sequential,
        device: torch.device,
        randomness: OfThread | OfProcess | None = None,
        first_layer: int = 0,
        recompute: str = NEVER,
        num_microbatches: int = 0,
        deliver: Callable[[Gradients], None] | None = None,
        held_back: Collection[nn.Parameter] = (),
    ) -> None:
        self.index = index
        self.device = device
        self.memory = memory_of(device)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.tail: Callable[[int, Any], Tensor] | None = None
        self._num_microbatches = num_microbatches
        self._deliver, self._held_back = deliver, held_back
        self._ended = 0  # micro-batches whose backward is over
        self._totals: Gradients = {}
        self._kept: dict[int, _Kept] = {}
        self._randomness = randomness or OfThread(device, StepSeed())
        let_weights_wait(module)
        self._casts: dict[Tensor, Tensor] = {}  # of weights, under autocast
        self._recompute = recompute
        by_layer = deliver is not None and recompute == NEVER
        cut = segments(list(module), LAYERS if by_layer else recompute)  # per part, its layers
        firsts = accumulate(map(len, cut), initial=first_layer)  # counted in the whole model
        self._parts = [_Part(*part) for part in zip(cut, firsts, strict=False)]
        uses = Counter(p for part in self._parts for p in part.parameters)  # parts that use it
        self._shared = {p for p, n in uses.items() if n > 1}  # each has one sum per micro-batch

    @property
    def alive(self) -> int:
        return len(self._kept)

    def forward(self, i: int, value: Any) -> Any:
        """Run micro-batch i; return its output, detached, with the same ``requires_grad``.

        Without grad mode nothing is kept.
        """
        kept, guard = _Kept(), self._guard()  # one for all parts
        for part in self._parts:
            graph = _Graph(self.memory, part, WeightsLater(self._casts))
            is_first = self.index == 0 and not kept.graphs  # the batch is the caller's
            if is_first:
                leaves = (x for x in pytree.tree_leaves(value) if isinstance(x, Tensor))
                refuse_shared_memory([x for x in leaves if x.requires_grad], "the input")
            run = partial(self._layers, i, graph, guard)
            value = graph.record(value, run, is_first, self._checkpoints(i, part))
            kept.graphs.append(graph)  # value: detached, the next part's input
        if torch.is_grad_enabled():
            self._kept[i] = kept
        return value

    def checkpointed(self, i: int) -> bool:
        """Whether the backward of micro-batch i starts with a forward: `recompute`."""
        return self._with_graph(i).graphs[-1].checkpointed  # where backward starts

    def recompute(self, i: int) -> None:
        """Run the forward of micro-batch i, or of its last segment, again. Backward would do it
        too, but here the gradient need not have arrived yet."""
        self._run_again(i, self._with_graph(i).graphs[-1])

    def backward(
        self, i: int, gradients: Sequence[Tensor | None], retain_graph: bool = False
    ) -> list[Tensor | None]:
        """Run the backward of micro-batch i and free it; return the gradients of its input.

        ``gradients`` has one entry per leaf of the output, None for a leaf without one.
        """
        kept = self._with_graph(i)
        if not retain_graph:
            del self._kept[i]  # no longer alive, even if what follows raises
        kept.sums.clear()  # of a backward that failed
        for graph in reversed(kept.graphs):  # dx is the next part's dy
            gradients = self._differentiate(i, kept, graph, gradients, retain_graph)
            self._add_products(kept, graph)
            if not retain_graph:
                graph.release()
        self._end(kept)
        return list(gradients)

    def backward_input(self, i: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """`backward` without the weight gradients of matrix products, left to `backward_weight`."""
        kept = self._with_graph(i)
        for graph in reversed(kept.graphs):
            graph.later.at_once = False
            gradients = self._differentiate(i, kept, graph, gradients)
            graph.release()  # x and y; products keep what the second half needs
        return list(gradients)

    def backward_weight(self, i: int) -> None:
        """Compute what `backward_input` left; free the micro-batch."""
        kept = self._kept.pop(i)
        for graph in reversed(kept.graphs):  # in the order of the first half
            self._add_products(kept, graph)
        self._end(kept)

    def take_gradients(self) -> Gradients:
        """Return the sums so far, in the order of ``parameters``, and reset them."""
        totals, self._totals = self._totals, {}
        return {p: totals[p] for p in self.parameters if p in totals}

    def _add_products(self, kept: _Kept, graph: _Graph) -> None:
        """The second half of the backward of a part. In the last backward, deliver its gradients:
        those in the sums of the micro-batch are not yet complete, and stay."""
        graph.later.add_products(self._totals, kept.sums, self._shared)
        if self._deliver is not None and self._ended + 1 == self._num_microbatches:
            # incomplete, or held back by the pipe
            later = {*kept.sums, *self._shared, *self._held_back}
            whole = [p for p in graph.part.parameters if p in self._totals and p not in later]
            self._deliver({p: self._totals.pop(p) for p in whole})  # popped: its owner from now on

    def _end(self, kept: _Kept) -> None:
        add(self._totals, kept.sums)
        self._ended += 1

    def _checkpoints(self, i: int, part: _Part) -> bool:
        if self._recompute == EXCEPT_LAST:
            return i + 1 != self._num_microbatches  # unknown number (0): all
        if self._recompute == LAYERS and part is self._parts[-1]:
            return self.tail is None  # after the loss, its backward is next
        return self._recompute != NEVER

    def _run_again(self, i: int, graph: _Graph) -> None:
        """Run a part's forward again, if it was checkpointed."""
        graph.recompute(partial(self._layers, i, graph, self._guard()))

    def _guard(self) -> Guard:
        return Guard(runs_again=self._recompute != NEVER)

    def _layers(self, i: int, graph: _Graph, guard: Guard, value: Any) -> Any:
        part = graph.part
        guard.enter([*graph.inputs, *part.parameters])
        layers: list[Callable[[Any], Any]] = list(part.layers)
        if self.tail and part is self._parts[-1]:
            layers.append(partial(self.tail, i))
        name = ""
        for k, layer in enumerate(layers, part.first_layer):  # k: in the whole model; seeds draws
            is_tail = not isinstance(layer, nn.Module)
            name = "loss_fn" if is_tail else f"layer {k} ({type(layer).__name__})"
            value = guard.call(layer, value, name, self._modes(k, i, graph))
        refuse_hidden(value, f"{name} hands on")
        if torch.is_grad_enabled():
            refuse_shared_memory(value, name)
        graph.later.products.clear()  # from a layer that differentiates inside its forward
        return value

    @contextmanager
    def _modes(self, k: int, i: int, graph: _Graph) -> Iterator[None]:
        """Around a layer: random numbers of its own, and weights whose gradients may wait."""
        # if gradients are wanted, in whatever mode the layers are
        later = graph.later if torch.is_grad_enabled() else nullcontext()
        with later, self._randomness.of(k, i):
            yield

    def _with_graph(self, i: int) -> _Kept:
        if i not in self._kept:
            raise RuntimeError(
                f"micro-batch {i} holds no graph on stage {self.index}: a second backward needs "
                "backward(retain_graph=True) the first time"
            )
        return self._kept[i]

    def _differentiate(
        self,
        i: int,
        kept: _Kept,
        graph: _Graph,
        gradients: Sequence[Tensor | None],
        retain_graph: bool = False,
    ) -> list[Tensor | None]:
        """The first half of the backward of a part: the gradients of its input. Those of parameters
        are added to the totals, or to the sums of this micro-batch if it has more to add: one sum
        per micro-batch, as in autograd."""
        self._run_again(i, graph)
        with graph.later, self._randomness.in_backward():  # a checkpoint repeats a forward there
            result, new = graph.differentiate(graph.part.parameters, gradients, retain_graph)
        # these get more when the products are computed, or from another part
        later = {p for product in graph.later.products for p in product.trained}
        later |= self._shared
        # dense: an embedding's may be sparse, and a product's, or another part's, is not
        add(kept.sums, {p: g.to_dense() for p, g in new.items() if p in later})
        add(self._totals, {p: g for p, g in new.items() if p not in later})
        return result
