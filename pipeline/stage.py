"""One stage: the forward and backward of its layers for one micro-batch at a time.

Problem. Autograd runs all CPU work of one graph on the thread that called `backward`: one graph
through all stages would make a pipeline's backward sequential.

Idea. Each stage builds its own graph per micro-batch. `forward(i, x)` detaches x, runs the
layers, keeps x and the output y, and returns y detached. `backward(i, dy)` differentiates y by x
and by the parameters, frees the graph, and returns dx. The worker that ran the forward runs the
backward. (A GPU's backward runs on autograd's own thread of that GPU, unless the caller forbids it,
as workers do: see worker.py.)

    stage s-1 ──x──▸ [detach ─ layers ─ y] ──y detached──▸ stage s+1
    stage s-1 ◂─dx── [       grad        ] ◂─────dy─────── stage s+1

`backward_input(i, dy)` and, later, `backward_weight(i)` do the same in two halves, see
runtime/linear.py.

Products leave their weights' gradients for later only inside `linear.WeightsMayWait`. Whoever runs
the stages enters it, since stages of several threads may share layers.

Parameter gradients are summed here, in the order of the calls, not in `.grad`. They reach
`.grad` once (`step.hand_over`): all at the end of the step or, with `deliver`, layer by layer
as the last micro-batch's backward passes. Transport and schedules are elsewhere.

With `deliver` there is a graph per layer instead of one per stage, joined like the stages. A
layer's parameter gradients are then added up and freed before the next layer's are made; in one
graph all of them live until its end and take as much memory as the stage's parameters. The bits are
the same.

`recompute` makes a graph per segment instead, whose activations are dropped after forward and
computed again before backward: runtime/recompute.py.

Cost: the stage's activations of a micro-batch, from its forward to its backward (or second half).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from runtime.graph import Gradients, Graph, memory_of, modes
from runtime.guards import guarded
from runtime.linear import WeightsLater, add_gradients
from runtime.randomness import OfProcess, OfThread
from runtime.recompute import EXCEPT_LAST, LAYERS, NEVER, segments


class _Part:
    """Layers that share a graph. `first_layer`: the first one's number in the whole model."""

    def __init__(self, layers: Sequence[nn.Module], first_layer: int) -> None:
        self.first_layer, self.modules = first_layer, layers
        # By name, with the number in the whole model, which seeds a layer's draws.
        named = ((f"layer {k} ({type(m).__name__})", m) for k, m in enumerate(layers, first_layer))
        self.layers: dict[str, Callable[[Any], Any]] = dict(named)
        trained = (p for layer in layers for p in layer.parameters() if p.requires_grad)
        self.parameters = dict.fromkeys(trained)  # in their order, each once

    def state(self) -> list[int]:
        """What a second forward must find as the first did."""
        return [p._version for p in self.parameters] + modes(self.modules)


@dataclass
class _Kept:
    """A micro-batch between its forward and the end of its backward."""

    parts: list[tuple[_Part, Graph, WeightsLater]]
    sums: Gradients  # of parameters with several gradients


@dataclass(eq=False)
class Stage:
    """The layers of one device during one step. Only one thread at a time may use it.

    Every step makes a new Stage, so a step that fails, or never runs its backward, leaves nothing
    behind.

    Args:
        index: of the stage.
        module: its layers.
        device: may be logical, e.g. cpu:1.
        randomness: of the layers' draws; by default a thread's, with a fixed seed.
        first_layer: the number of layers on the stages before.
        recompute: a mode of runtime/recompute.py.
        num_microbatches: of the step; 0: unknown.
        deliver: called with the complete sums of each layer during the last backward.
        checked: whether what layers hand on is looked at (runtime/guards.py).

    Attributes:
        tail: on the last stage the loss: called with a micro-batch's number and its output, after
            the layers, in the last layer's graph.
        retain_graph: whether a backward keeps the graphs, for another.
        parameters: those that are trained.
    """

    index: int
    module: nn.Sequential
    device: torch.device
    randomness: OfThread | OfProcess | None = None
    first_layer: int = 0
    recompute: str = NEVER
    num_microbatches: int = 0
    deliver: Callable[[Gradients], None] | None = None
    checked: bool = True

    def __post_init__(self) -> None:
        self.memory = memory_of(self.device)
        self._draws = self.randomness or OfThread(self.device, 0)
        self.tail: Callable[[int, Any], Tensor] | None = None
        self.retain_graph = False
        self._ended = 0  # micro-batches whose backward is over
        self._totals: Gradients = {}
        self._kept: dict[int, _Kept] = {}
        self._casts: dict[tuple[Tensor, torch.dtype], Tensor] = {}  # of weights, under autocast
        by_layer = self.deliver is not None and self.recompute == NEVER
        cut = segments(list(self.module), LAYERS if by_layer else self.recompute)  # a part each
        firsts = accumulate(map(len, cut), initial=self.first_layer)
        self._parts = [_Part(*part) for part in zip(cut, firsts, strict=False)]
        uses = Counter(p for part in self._parts for p in part.parameters)  # parts that use it
        self.parameters = [*uses]
        self._shared = {p for p, n in uses.items() if n > 1}  # each has one sum per micro-batch

    def forward(self, i: int, value: Any) -> Any:
        """Runs micro-batch i; returns its output, detached, with the same `requires_grad`.

        Without grad mode nothing is kept.
        """
        kept = _Kept([], {})
        for part in self._parts:
            graph, later = Graph(self.memory, part.state), self._later(part, kept)
            is_first = self.index == 0 and not kept.parts  # the batch is the caller's
            run = partial(self._layers, i, part, later)
            value = graph.record(value, run, is_first, self._checkpoints(i, part))
            later = self._later(part, kept) if graph.checkpointed else later  # it will run again
            kept.parts.append((part, graph, later))  # value: detached, the next part's input
        if torch.is_grad_enabled():
            self._kept[i] = kept
        return value

    def checkpointed(self, i: int) -> bool:
        """Whether the backward of micro-batch i starts with a forward: `compute_again`."""
        return self._with_graph(i).parts[-1][1].checkpointed  # where backward starts

    def compute_again(self, i: int) -> None:
        """Runs the forward of micro-batch i, or of its last segment, again. Backward would do it
        too, but here the gradient need not have arrived yet."""
        part, graph, later = self._with_graph(i).parts[-1]
        graph.recompute(partial(self._layers, i, part, later))

    def backward(self, i: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Runs the backward of micro-batch i and frees it; returns the gradients of its input.

        `gradients` has one entry per leaf of the output, None for a leaf without one.
        """
        gradients = self.backward_input(i, gradients, at_once=True)
        self.backward_weight(i)
        return gradients

    def backward_input(
        self, i: int, gradients: Sequence[Tensor | None], at_once: bool = False
    ) -> list[Tensor | None]:
        """`backward` without the weight gradients of products, which `backward_weight` computes.

        `at_once`: they are computed part by part, before the gradients of the next part take
        memory.
        """
        kept = self._with_graph(i)
        del self._kept[i]  # if what follows raises, no second backward may go on from there
        for part, graph, later in reversed(kept.parts):  # dx is the next part's dy
            graph.recompute(partial(self._layers, i, part, later))  # if it was checkpointed
            # A checkpoint repeats a forward there, which must draw nothing new. Watching each call
            # of torch takes a third as long as the backward.
            with self._draws.in_backward() if self.checked else nullcontext():
                gradients = later.first_half(graph, gradients, at_once, self.retain_graph)
            if at_once:
                self._second_half(part, kept, later)
            if not self.retain_graph:
                graph.release()  # x and y; products keep what the second half needs
        self._kept[i] = kept
        return list(gradients)

    def backward_weight(self, i: int) -> None:
        """Computes what `backward_input` has left; frees the micro-batch."""
        kept = self._with_graph(i)
        for part, _, later in reversed(kept.parts):
            if not later.at_once:
                self._second_half(part, kept, later)
        add_gradients(self._totals, kept.sums)
        kept.sums.clear()
        self._ended += 1
        if not self.retain_graph:
            del self._kept[i]

    def take_gradients(self) -> Gradients:
        """Returns the sums so far, in the order of `parameters`, and resets them."""
        taken = {p: self._totals[p] for p in self.parameters if p in self._totals}
        self._totals.clear()
        return taken

    def _later(self, part: _Part, kept: _Kept) -> WeightsLater:
        return WeightsLater(part.parameters, self._totals, kept.sums, self._shared, self._casts)

    def _second_half(self, part: _Part, kept: _Kept, later: WeightsLater) -> None:
        """Computes the gradients that wait. In the last backward, delivers those of the part: those
        in the sums of the micro-batch are not yet complete, and stay."""
        later.add_products()
        if self.deliver is not None and self._ended + 1 == self.num_microbatches:
            stay = {*kept.sums, *self._shared}
            whole = [p for p in part.parameters if p in self._totals and p not in stay]
            self.deliver({p: self._totals.pop(p) for p in whole})  # popped: its owner from now on

    def _checkpoints(self, i: int, part: _Part) -> bool:
        if self.recompute == EXCEPT_LAST:
            return i + 1 != self.num_microbatches  # unknown number (0): all
        if self.recompute == LAYERS and part is self._parts[-1]:
            return self.tail is None  # after the loss, its backward is next
        return self.recompute != NEVER

    def _layers(self, i: int, part: _Part, later: WeightsLater, value: Any) -> Any:
        """Calls the layers of a part, and what follows them. Each draws random numbers of its own,
        and its weights' gradients may wait."""
        layers = part.layers
        if self.tail and part is self._parts[-1]:
            layers = layers | {"loss_fn": partial(self.tail, i)}
        runs_again = self.recompute != NEVER

        def run(k: int, layer: Any, value: Any) -> Any:
            with self._draws.of(part.first_layer + k, i, self.checked or runs_again):
                return layer(value)

        with later if torch.is_grad_enabled() else nullcontext():  # else there is no backward
            value = guarded(value, layers, later.leaves, runs_again, self.checked, run)
        later.products.clear()  # from a layer that differentiates inside its forward
        return value

    def _with_graph(self, i: int) -> _Kept:
        if i not in self._kept:
            raise RuntimeError(
                f"micro-batch {i} holds no graph on stage {self.index}: a second backward needs "
                "backward(retain_graph=True) the first time"
            )
        return self._kept[i]
