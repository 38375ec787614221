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

Gradients of the parameters are added up here, in the order of the calls, and not in ``.grad``: they
reach that once, by way of autograd (delivery.py), all at the end of the step; or, where somebody
waits for them (``deliver``), those of a layer as soon as the last micro-batch's backward has passed
it. Transport is not here, and neither is a schedule.

``by_layer`` makes a graph per layer instead of one per stage, joined as the stages are. Then the
gradients of a layer's parameters are added up and freed before the next layer's are made; in one
graph they all live until its end: as much memory as the stage's parameters. The bits are the same.

``recompute`` makes a graph per segment instead, whose activations are forgotten after forward and
made again before backward: runtime/recompute.py.

Cost: between forward and backward (its second half) of a micro-batch, its activations here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from runtime.graph import Gradients, Graph
from runtime.randomness import NoDraws, StageRandomness, StepSeed
from runtime.recompute import EXCEPT_LAST, LAYERS, NEVER, segments, unchanged
from runtime.sharing import Watch
from runtime.unseen import Strangers, hidden_type

from .zero_bubble import Product, WeightsLater, add_in_place, add_products, add_to


class _Part:
    """Layers that have a graph together."""

    def __init__(self, layers: Sequence[nn.Module], first_layer: int) -> None:
        self.layers, self.first_layer = layers, first_layer
        every = (p for layer in layers for p in layer.parameters() if p.requires_grad)
        self.parameters = list(dict.fromkeys(every))


class _Graph(Graph):
    """A piece of the stage. ``products``: the weight gradients that `differentiate` has left to be
    computed, see zero_bubble.py."""

    def __init__(self, memory: torch.device) -> None:
        super().__init__(memory)
        self.products: list[Product] = []


@dataclass
class _Kept:
    """A micro-batch between its forward and the end of its backward."""

    graphs: list[_Graph] = field(default_factory=list)  # one per part
    sums: Gradients = field(default_factory=dict)  # to which something is yet to be added
    halved: bool = False  # only the second half is to come
    tail: Callable[[Any], Any] | None = None


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
        by_layer: bool = False,
        recompute: str = NEVER,
    ) -> None:
        self.index = index
        self.module = module
        self.device = device  # may be logical, as cpu:1; tensors are moved to where they are
        self.memory = torch.device("cpu") if device.type == "cpu" else device
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.peak_alive = 0
        # Per micro-batch, leaves of its input that lay in one memory where they come from.
        self.shared_before: Mapping[int, Sequence[int]] = {}
        self.num_microbatches = 0  # of the step; 0: not known
        # Called with sums to which nothing will be added; those of ``held_back`` are left here.
        self.deliver: Callable[[Gradients], None] | None = None
        self.held_back: Collection[nn.Parameter] = ()
        self._ended = 0  # micro-batches whose backward is over
        self._totals: Gradients = {}
        self._kept: dict[int, _Kept] = {}
        self._seed = seed or StepSeed()
        self._randomness = StageRandomness(device)
        self._later = WeightsLater(self.parameters)
        self._looked = False  # for what its layers use in secret: the first micro-batch shows it
        self._recompute = recompute
        by_layer = by_layer and recompute == NEVER
        cut = segments(list(module), LAYERS if by_layer else recompute)
        firsts = accumulate(map(len, cut), initial=first_layer)
        self._parts = [_Part(*part) for part in zip(cut, firsts, strict=False)]
        uses = Counter(p for part in self._parts for p in part.parameters)
        self._shared = {p for p, n in uses.items() if n > 1}  # each has one sum per micro-batch

    @property
    def alive(self) -> int:
        return len(self._kept)

    @property
    def gradients(self) -> list[Tensor | None]:
        """The sums so far, in the order of ``parameters``."""
        return [self._totals.get(p) for p in self.parameters]

    def forward(self, i: int, value: Any, tail: Callable[[Any], Any] | None = None) -> Any:
        """Run micro-batch i; return its output, detached, ``requires_grad`` saying what it was.

        ``tail`` follows the layers and belongs to the last one's graph: the loss, on the last
        stage. Without grad mode nothing is kept.
        """
        kept, watch = _Kept(tail=tail), Watch()
        for part in self._parts:
            graph = _Graph(self.memory)
            is_first = self.index == 0 and not kept.graphs
            run = partial(self._layers, i, part, graph, watch, tail)
            value = graph.record(value, run, is_first, self._forgets(i, part, tail))
            kept.graphs.append(graph)
        self._looked = True
        if torch.is_grad_enabled():
            self._kept[i] = kept
            self.peak_alive = max(self.peak_alive, self.alive)
        return value

    def forgot(self, i: int) -> bool:
        """Whether the backward of micro-batch i starts with a forward: `recompute`."""
        return self._with_graph(i).graphs[-1].forgotten

    def recompute(self, i: int) -> None:
        """Run the forward of micro-batch i again, or of its last segment. Backward would do so
        itself; but this needs no gradient yet."""
        self._run_again(i, self._with_graph(i), len(self._parts) - 1)

    def backward(
        self, i: int, gradients: Sequence[Tensor | None], retain_graph: bool = False
    ) -> list[Tensor | None]:
        """Run the backward of micro-batch i and free it; return the gradients of its input.

        One gradient per leaf of the output, None for those nothing depends on.
        """
        kept = self._with_graph(i)
        if not retain_graph:
            del self._kept[i]
        graphs = list(kept.graphs) if retain_graph else kept.graphs
        sums: Gradients = {}
        for k, part in reversed(list(enumerate(self._parts))):
            self._run_again(i, kept, k)
            graph = graphs.pop()
            gradients = self._differentiate(graph, part, gradients, sums, retain_graph)
            add_products(graph.products, self._totals, sums, self._shared)
            self._hand_over(part, sums)
        add_in_place(self._totals, sums, gradients)
        self._ended += 1
        return list(gradients)

    def backward_input(self, i: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """`backward` without the weight gradients of matrix products; those stay to be computed."""
        kept = self._with_graph(i)
        for k, part in reversed(list(enumerate(self._parts))):
            self._run_again(i, kept, k)
            graph = kept.graphs[k]
            gradients = self._differentiate(graph, part, gradients, kept.sums)
            graph.release()
        kept.halved = True
        return list(gradients)

    def backward_weight(self, i: int) -> None:
        """What `backward_input` left; frees the micro-batch."""
        if i not in self._kept or not self._kept[i].halved:
            raise RuntimeError(
                f"micro-batch {i} has no weight gradients to come on stage {self.index}: "
                "call backward_input first, and this once"
            )
        kept = self._kept.pop(i)
        for part in reversed(self._parts):
            products = kept.graphs.pop().products
            add_products(products, self._totals, kept.sums, self._shared)
            self._hand_over(part, kept.sums)
        add_in_place(self._totals, kept.sums, [])
        self._ended += 1

    def take_gradients(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """The sums over all micro-batches so far; they are handed over and start anew."""
        pairs = list(zip(self.parameters, self.gradients, strict=True))
        self._totals = {}
        return pairs

    def _hand_over(self, part: _Part, sums: Gradients) -> None:
        """In the last backward: delivers the gradients of a part. Those in ``sums`` are not yet
        whole, and stay."""
        if self.deliver is None or self._ended + 1 != self.num_microbatches:
            return
        kept = {*sums, *self._shared, *self.held_back}
        whole = [p for p in part.parameters if p in self._totals and p not in kept]
        self.deliver({p: self._totals.pop(p) for p in whole})

    def _forgets(self, i: int, part: _Part, tail: Callable[[Any], Any] | None) -> bool:
        if self._recompute == EXCEPT_LAST:
            return i + 1 != self.num_microbatches
        if self._recompute == LAYERS and part is self._parts[-1]:
            return tail is None  # with the loss, its backward is next
        return self._recompute != NEVER

    def _run_again(self, i: int, kept: _Kept, part: int) -> None:
        """A part's forward, if it was forgotten."""
        graph = kept.graphs[part]
        graph.recompute(partial(self._layers, i, self._parts[part], graph, Watch(), kept.tail))

    def _layers(
        self,
        i: int,
        part: _Part,
        graph: _Graph,
        watch: Watch,
        tail: Callable[[Any], Any] | None,
        value: Any,
    ) -> Any:
        leaves, training = pytree.tree_leaves(value), torch.is_grad_enabled()
        shared = self.shared_before.get(i, ()) if part is self._parts[0] else ()
        watch.add(leaves[k] for k in (*graph.shared, *shared))
        strangers = Strangers([*graph.inputs, *part.parameters])
        layers: list[Callable[[Any], Any]] = list(part.layers)
        if tail and part is self._parts[-1]:
            layers.append(tail)
        name = ""
        for k, layer in enumerate(layers, part.first_layer):
            name = layer_name(k, layer)
            with ExitStack() as around:
                if training:
                    around.enter_context(self._later.into(graph.products))
                if training and not self._looked and self._recompute != NEVER:
                    around.enter_context(unchanged(layer, name))
                around.enter_context(self._randomness.of(self._seed, k, i))
                value = layer(value)
            watch.check(name)
            if not self._looked and training:
                strangers.refuse(value, name)
        refuse_hidden(value, name)
        graph.products.clear()  # of a layer that differentiates inside: not the model's gradients
        return value

    def _with_graph(self, i: int) -> _Kept:
        if i not in self._kept or self._kept[i].halved:
            raise RuntimeError(
                f"micro-batch {i} holds no graph on stage {self.index}: a second backward needs "
                "backward(retain_graph=True) the first time"
            )
        return self._kept[i]

    def _differentiate(
        self,
        graph: _Graph,
        part: _Part,
        gradients: Sequence[Tensor | None],
        sums: Gradients,
        retain_graph: bool = False,
    ) -> list[Tensor | None]:
        """The gradients of the input. Those of the parameters are added to the totals, or to
        ``sums`` where this micro-batch has more to add: one sum per micro-batch, as autograd's."""
        with (
            self._later.into(graph.products),  # for a forward that checkpointing repeats
            NoDraws(),
        ):
            result, found, others = graph.differentiate(part.parameters, gradients, retain_graph)
        late = {p for product in graph.products for p in (product.weight, product.bias)}
        add_to(sums, found, {*late, *self._shared}, others)
        held = [*others, *sums.values(), *(product.dy for product in graph.products)]
        add_in_place(self._totals, found, held)
        return result


def layer_name(k: int, layer: Callable[[Any], Any]) -> str:
    """For messages: layer ``k`` of the model, counted from 0."""
    return f"layer {k} ({type(layer).__name__})" if isinstance(layer, nn.Module) else "loss_fn"


def refuse_hidden(value: Any, name: str) -> None:
    """TypeError if what the layer ``name`` hands on has tensors that nobody sees."""
    if (kind := hidden_type(value)) is not None:
        raise TypeError(
            f"{name} hands on a {kind} with tensors inside, which the pipeline cannot see, move or "
            "differentiate: return tensors, or tuples, lists and dicts of them"
        )
