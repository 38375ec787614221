"""A layer whose parameters exist only while it computes.

Problem: autograd saves what backward will need, including the layer's parameters. A graph that
holds them would keep the whole model in memory.

Idea: during its forward the layer's modules get parameters that are views of a gathered buffer.
When autograd saves a tensor in that buffer, a note is saved instead: the unit, and the position in
it. Backward looks the note up in the buffer that holds the gathered unit then, which may be a
different one. The parameters stay in the graph, but they own no memory.

Backward does not need an embedding's weights: a unit with nothing else is not gathered for it.

Each layer has its own graph (runtime/graph.py): backward differentiates one layer at a time and
frees its activations. A tensor that reaches another layer by a way other than the layers' outputs,
such as an attribute, would lose its gradient: each graph is searched for such foreign leaves.

Cost: about 2 us of Python per saved tensor, 1 us per parameter, and, in a step that is checked (the
first two, and every 16th), 1 us per node of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from runtime.graph import Graph, modes
from runtime.guards import guarded, refuse_gradient_hooks

from .shards import Place, ShardedUnit

NO_HOOKS = (
    "would never run: each rank has the sum of a part of the gradient, and none has it whole. "
    "Change the grad of the shards between finish_gradients() and optimizer_step(), or use "
    "DistributedDataParallel"
)


class _Note(NamedTuple):
    """A saved view of a unit: all that tells it from other views of the same memory."""

    unit: ShardedUnit
    start: int  # elements of its type from the start of the gathered unit
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype  # not the unit's: view_as_complex
    conjugate: bool  # read as its complex conjugate
    negative: bool  # read with the other sign: the imaginary part of a conjugate


class SameDraws:
    """Inside the first `with draws.entered():` torch draws as usual; later ones draw the same
    again, and restore the generators at the end. Not for threads, which share the CPU generator."""

    def __init__(self, device: torch.device) -> None:
        self._gpus = [device] if device.type == "cuda" else []
        self._states: list[Tensor] = []  # of the generators at the first entry, the CPU's first

    @contextmanager
    def entered(self) -> Iterator[None]:
        if not self._states:
            self._states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._gpus)]
            yield
            return
        with torch.random.fork_rng(self._gpus):
            torch.set_rng_state(self._states[0])
            for gpu, state in zip(self._gpus, self._states[1:], strict=True):
                torch.cuda.set_rng_state(state, gpu)
            yield


class LayerGraph(Graph):
    """The graph of one layer. `leaves`: its parameters, by trainable unit."""

    def __init__(self, device: torch.device, layer: nn.Module) -> None:
        super().__init__(device, lambda: modes([layer]))
        self.leaves: dict[int, list[nn.Parameter]] = {}
        self.draws = SameDraws(device)


@dataclass(eq=False)
class GatheredLayer:
    """A layer and the units of its parameters.

    Args:
        recomputes: free what backward needs and compute it again, if backward gathers all units.

    Attributes:
        units: its own, of `all_units`.
        regathered: the units needed by its backward.
    """

    index: int
    module: nn.Module
    places: Sequence[Place]
    all_units: Sequence[ShardedUnit]
    recomputes: bool
    device: torch.device

    def __post_init__(self) -> None:
        self.name = f"layer {self.index} ({type(self.module).__name__})"
        self.units = [u for u in self.all_units if self.index in u.unit.layers]
        needed = {p.unit for p in self.places if not isinstance(p.module, nn.Embedding)}
        self.regathered = [u for u in self.units if u.unit.index in needed]
        self.checkpoint = self.recomputes and self.regathered == self.units
        self._empty = {u.unit.index: u.empty for u in self.units}
        self._put(self._empty)

    def forward(self, value: Any, checked: bool = True) -> tuple[Any, LayerGraph]:
        """Runs the layer on gathered parameters; returns the detached output and its graph. A graph
        that is `checkpointed` must be given to `recompute` before `backward`, with the units
        gathered. A pass that is not `checked` may miss some of these errors.

        Raises:
            RuntimeError: the output depends on a tensor that requires a gradient and is not a leaf
                of `value`.
            ValueError: the layer writes to a parameter, or returns tensors that share memory;
                or a parameter has a hook on its gradient, or was frozen, unfrozen, replaced or
                written to meanwhile.
        """
        for module, attribute, index, entry in self.places:
            unit, p = self.all_units[index].unit, self._empty[index][entry]
            name = unit.entries[entry].name
            if checked:
                refuse_gradient_hooks([(name, p)], NO_HOOKS)
            is_there = module._parameters.get(attribute) is p
            now = is_there, p._version, p.dtype, p.requires_grad
            if now != (True, 0, unit.dtype, unit.trainable):
                raise ValueError(
                    f"{name} was replaced, written to, cast, frozen or unfrozen after it was "
                    "sharded: write to the shards (`get_local_info`) and call "
                    "parameters_changed(), or shard the layers anew"
                )
        graph = LayerGraph(self.device, self.module)
        checkpoint = self.checkpoint and torch.is_grad_enabled()
        run = partial(self._run, graph, checkpoint, checked)
        return graph.record(value, run, copy=False, checkpoint=checkpoint), graph

    def recompute(self, graph: LayerGraph) -> None:
        """Runs a checkpointed forward again."""
        graph.recompute(partial(self._run, graph, True, False))

    def _run(self, graph: LayerGraph, checkpoint: bool, checked: bool, entered: Any) -> Any:
        parameters = {u.unit.index: u.parameters() for u in self.units}
        graph.leaves = {u: ps for u, ps in parameters.items() if ps[0].requires_grad}
        trained = {p for ps in graph.leaves.values() for p in ps}
        before, layers = self._writes(), {self.name: self.module}
        again = graph.draws.entered() if checkpoint else nullcontext()  # `recompute` draws the same
        notes = saved_tensors_hooks(self._pack, _unpack)  # not views
        self._put(parameters)
        try:
            with again, notes:
                output = guarded(entered, layers, trained, checkpoint, checked)
        finally:
            self._put(self._empty)  # after an error too
        if self._writes() != before:
            raise ValueError(
                f"{self.name} writes to its parameters in forward. They are copies here, and the "
                "write is lost: let it compute with a new tensor, or write to the shards and call "
                "parameters_changed()"
            )
        return pytree.tree_map_only(Tensor, self._own, output)

    def backward(
        self, graph: LayerGraph, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], dict[int, list[Tensor | None]]]:
        """The gradients of the input's leaves, and of the parameters of each trainable unit; all
        dense.

        `gradients` has one entry per leaf of the output, which may be None.
        """
        flat = [p for leaves in graph.leaves.values() for p in leaves]  # all trainable units'
        # A checkpoint inside may run its part of the forward again.
        self._put(self._empty | {u.unit.index: u.parameters() for u in self.regathered})
        try:
            of_inputs, of_parameters = graph.differentiate(flat, gradients)
        finally:
            self._put(self._empty)
        dense = {p: g.to_dense() if g.is_sparse else g for p, g in of_parameters.items()}
        return of_inputs, {u: [dense.get(p) for p in ps] for u, ps in graph.leaves.items()}

    def _put(self, parameters: Mapping[int, Sequence[nn.Parameter]]) -> None:
        for module, attribute, unit, entry in self.places:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[attribute] = parameters[unit][entry]  # 40 times as fast
            else:  # it may keep them elsewhere, too
                setattr(module, attribute, parameters[unit][entry])

    def _writes(self) -> list[int]:
        """The number of writes to each unit, or to a parameter in it, which is a view."""
        return [u.whole._version for u in self.units if u.whole is not None]

    def _own(self, output: Tensor) -> Tensor:
        """A copy if the layer returns one of its parameters, because the buffer is reused."""
        return output if self._unit_of(output) is None else output.clone()

    def _unit_of(self, tensor: Tensor) -> ShardedUnit | None:
        """The gathered unit that a tensor is a part of. (A sparse one has no address; nor has an
        empty one, and writes to that change nothing.)"""
        address = tensor.data_ptr() if tensor.layout is torch.strided else 0
        for u in self.units:
            if address in u.addresses:
                return u
        return None

    def _pack(self, tensor: Tensor) -> Any:
        u = self._unit_of(tensor)
        if u is None:
            return tensor, tensor._version if tensor.numel() else None
        if u not in self.regathered:  # an embedding used as a matrix after all
            return tensor.clone(), None
        start = (tensor.data_ptr() - u.addresses.start) // tensor.itemsize
        kind = tensor.dtype, tensor.is_conj(), tensor.is_neg()
        return _Note(u, start, tensor.shape, tensor.stride(), *kind)  # keeps no memory


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, _Note):
        whole = saved.unit.whole
        assert whole is not None, "the layer's parameters are not gathered"
        if whole.dtype != saved.dtype:
            whole = whole.view(saved.dtype)
        view = whole.as_strided(saved.size, saved.stride, whole.storage_offset() + saved.start)
        view = view.conj() if saved.conjugate else view
        return torch._neg_view(view) if saved.negative else view
    tensor, version = saved
    if version not in (None, tensor._version):  # autograd leaves this check to the hooks
        raise RuntimeError(
            f"a {tuple(tensor.shape)} tensor that backward needs has been modified in place"
        )
    return tensor
