"""A layer whose parameters are there only while it computes.

Problem: autograd keeps what backward will need, and that includes the layer's parameters. A graph
that holds them would keep the whole model in memory.

Idea: the layer's modules get leaves that are views of a gathered buffer, for the time of their
forward. Wherever autograd saves a tensor that lies in that buffer, a note is saved in its place:
which unit, where in it. In backward the note is looked up in the buffer in which the unit is
gathered then, which may be another. The leaves stay in the graph, but they own no memory.

The notes also tell which parameters backward will ask for: not those of an embedding, nor
biases. What it will not ask for need not be gathered again.

Each layer has a graph of its own (runtime/graph.py): backward differentiates one layer at a time,
freeing its activations as it goes. Between the passes the modules hold parameters without memory,
on the meta device.

That needs to see every tensor that is handed on: in tensors, tuples, lists, dicts, and whatever
else `torch.utils._pytree` knows. One that comes otherwise, in a plain dataclass or through an
attribute, would tie a layer's graph to another's, and its gradient would end there. So each graph
is searched for its leaves: an input or parameter of another layer's is an error.

Cost: about 2 us of Python per saved tensor, 5 us per parameter, and 1 us per node of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from data_parallel.sharding import Place, Unit
from runtime.graph import Graph
from runtime.sharing import Watch
from runtime.unseen import Strangers, tensors_in


class Gathered:
    """A unit, and where it is gathered at the moment."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.whole: Tensor | None = None  # flat

    def position_of(self, tensor: Tensor) -> int | None:
        """The element at which the tensor starts, if it lies in the unit."""
        if self.whole is None:
            return None
        distance = tensor.data_ptr() - self.whole.data_ptr()
        return distance // self.whole.itemsize if 0 <= distance < self.whole.nbytes else None


@dataclass
class _Note:
    """A saved part of a unit."""

    gathered: Gathered
    start: int
    size: torch.Size
    stride: tuple[int, ...]
    copy: Tensor | None  # where the unit will not be gathered in backward


class LayerGraph(Graph):
    """What the backward of a layer needs. ``leaves``: its parameters, by trainable unit."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.leaves: dict[int, list[nn.Parameter]] = {}


class ShardedLayer:
    """A layer and the units that its parameters lie in.

    Attributes:
        wanted: of which of them autograd has saved a part here, in any forward so far, by index.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        places: Sequence[Place],
        units: list[Gathered],
        device: torch.device,
    ) -> None:
        self.device = device
        self.name = f"layer {index} ({type(module).__name__})"
        self.module = module
        self.units = units
        self.wanted: set[int] = set()
        self._places = [(p.module, p.attribute, p.unit, p.entry) for p in places]
        self._resting = [p.module._parameters[p.attribute] for p in places]  # on the meta device

    def forward(self, value: Any, regathered: set[int] | None) -> tuple[Any, LayerGraph]:
        """Runs the layer on gathered parameters; the output, detached, and its graph.

        Args:
            regathered: the units that will be gathered for this layer's backward, by index; None
                is all.

        Raises:
            RuntimeError: the output depends on a tensor that requires a gradient and was not handed
                to the layer as one of the leaves of `value`.
            ValueError: the layer writes to one of two tensors that share memory, or hands on a
                parameter in what `pytree` does not know.
        """
        parameters = self._parameters()
        graph = LayerGraph(self.device)
        graph.leaves = {u: ps for u, ps in parameters.items() if ps[0].requires_grad}

        def run(entered: Any) -> Any:
            leaves, watch = pytree.tree_leaves(entered), Watch()
            watch.add(leaves[k] for k in graph.shared)
            self._put(parameters)
            try:
                pack = _pack(self.units, self.wanted, regathered)
                with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                    output = self.module(entered)
            finally:
                self._take_back()
            watch.check(self.name)
            results = pytree.tree_leaves(output)
            if torch.is_grad_enabled():
                trained = [p for ps in graph.leaves.values() for p in ps]
                Strangers([*graph.inputs, *trained]).refuse(results, self.name, entered)
            for y in results:
                if not isinstance(y, Tensor) and any(map(self._inside, tensors_in(y))):
                    raise ValueError(
                        f"{self.name} hands on a parameter inside {type(y).__name__}, and its "
                        "memory is about to be used again: return it in a tuple, list or dict, or "
                        "a copy"
                    )
            return pytree.tree_map_only(Tensor, self._own, output)

        return graph.record(value, run, is_first=False), graph

    def backward(
        self, graph: LayerGraph, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], dict[int, list[Tensor | None]]]:
        """The gradients of the input's leaves, and of the parameters of each trainable unit.

        `gradients` has one for every leaf of the output, or None.
        """
        flat = [p for leaves in graph.leaves.values() for p in leaves]
        of_inputs, found, _ = graph.differentiate(flat, gradients)
        return of_inputs, {u: [found.get(p) for p in ps] for u, ps in graph.leaves.items()}

    def _parameters(self) -> dict[int, list[nn.Parameter]]:
        """Leaves over the gathered units, by unit and entry."""
        found = {}
        for gathered in self.units:
            assert gathered.whole is not None, "the layer's parameters are not gathered"
            unit = gathered.unit
            found[unit.index] = [
                nn.Parameter(view, unit.trainable) for view in unit.views(gathered.whole)
            ]
        return found

    def _put(self, parameters: dict[int, list[nn.Parameter]]) -> None:
        for module, attribute, unit, entry in self._places:
            setattr(module, attribute, parameters[unit][entry])

    def _take_back(self) -> None:
        for (module, attribute, _, _), resting in zip(self._places, self._resting, strict=True):
            setattr(module, attribute, resting)

    def _own(self, output: Tensor) -> Tensor:
        """A layer that returns a parameter itself must hand on a copy: the buffer is reused."""
        return output.clone() if self._inside(output) else output

    def _inside(self, tensor: Tensor) -> bool:
        return any(gathered.position_of(tensor) is not None for gathered in self.units)


def _pack(units: list[Gathered], wanted: set[int], regathered: set[int] | None) -> Any:
    def pack(tensor: Tensor) -> Any:
        for gathered in units:
            start = gathered.position_of(tensor)
            if start is not None:
                wanted.add(gathered.unit.index)
                there = regathered is None or gathered.unit.index in regathered
                copy = None if there else tensor.clone()
                return _Note(gathered, start, tensor.shape, tensor.stride(), copy)
        return tensor, tensor._version

    return pack


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, _Note):
        if saved.copy is not None:
            return saved.copy
        whole = saved.gathered.whole
        assert whole is not None, "the layer's parameters are not gathered"
        start = whole.storage_offset() + saved.start
        return whole.as_strided(saved.size, saved.stride, start)
    tensor, version = saved
    if tensor._version != version:  # autograd leaves this check to the hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a {type(tensor).__name__} of shape {tuple(tensor.shape)}"
        )
    return tensor
