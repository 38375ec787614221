"""A piece of a model's graph, detached at both ends: its forward, and an explicit backward.

    x ──detach──▸ layers ──▸ y ──detach──▸        `record` runs this, and keeps x and y
    ◂── dx ────── grad of y by x and parameters ◂── dy        `differentiate`

Pieces recorded one after the other are joined by their caller: the y of one, detached, is the x of
the next, and the dx of one is the dy of the piece before. This joins the stages of a pipeline (in
threads or processes), the layers of a stage, and sharded layers, whose parameters exist only while
the layer computes.

A graph to be recomputed keeps only x: see recompute.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils import _pytree as pytree

from runtime.guards import tensors_of
from runtime.recompute import Autocast

Gradients = dict[nn.Parameter, Tensor]


class Graph:
    """One piece, with its tensors on the device `memory`. `state`: what a second forward must find
    as the first did, besides x."""

    def __init__(self, memory: torch.device, state: Callable[[], list[int]] = list) -> None:
        self._memory, self._state = memory, state
        self._checkpoint: tuple[Any, list[int], Autocast] | None = None  # x as given
        # By position among the leaves of x and of y: those with a gradient.
        self._x: dict[int, Tensor] = {}
        self._y: dict[int, Tensor] = {}
        self._num_inputs = 0

    @property
    def checkpointed(self) -> bool:
        """Whether `recompute` must run before `differentiate`."""
        return self._checkpoint is not None

    def record(
        self, value: Any, run: Callable[[Any], Any], copy: bool, checkpoint: bool = False
    ) -> Any:
        """`run(value)`, detached; `requires_grad` marks the leaves that are part of the graph.

        `run` may write to the tensors of `value`, if nobody else reads them. If somebody does, let
        it work on a `copy`: a batch belongs to the caller, and its micro-batches share memory.
        A tensor that appears twice stays one tensor, and its gradient is found at its first
        position.

        `checkpoint` frees what backward needs; `recompute`, with the same `run`, makes it
        again.
        """
        training = torch.is_grad_enabled()
        leaves, spec = pytree.tree_flatten(value)
        self._num_inputs = len(leaves)
        entered: dict[int, Tensor] = {}  # by id of the leaf: twice in x, once in the graph
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and id(leaf) not in entered:
                inner = move(leaf.detach(), self._memory, training and (copy or checkpoint))
                if training and leaf.requires_grad:
                    self._x[k] = inner.requires_grad_()  # the leaf that gets dx
                    inner = Alias.apply(inner)  # what the layers get
                entered[id(leaf)] = inner  # on x's own memory, unless copied or moved
        leaves = [entered.get(id(leaf), leaf) for leaf in leaves]
        results, spec = pytree.tree_flatten(run(pytree.tree_unflatten(leaves, spec)))
        left: dict[int, Tensor] = {}  # by id of the result, too
        for k, result in enumerate(results):
            if isinstance(result, Tensor):
                if training and result.requires_grad:
                    self._y[k] = result
                if id(result) not in left:
                    left[id(result)] = result.detach().requires_grad_(result.requires_grad)
        if training and checkpoint:
            self.release()  # frees y, and with it all that autograd keeps
            self._checkpoint = value, versions(value) + self._state(), Autocast()
        return pytree.tree_unflatten([left.get(id(leaf), leaf) for leaf in results], spec)

    def recompute(self, run: Callable[[Any], Any]) -> None:
        """Rebuilds a checkpointed graph. `run` must compute the same bits again.

        Raises RuntimeError if x has been written to in between, or the state is another.
        """
        if self._checkpoint is None:
            return
        value, before, autocast = self._checkpoint
        if versions(value) + self._state() != before:
            raise RuntimeError(
                "the input, a parameter or the mode (train, eval) was changed between forward and "
                "backward, which computes the forward again: change it after backward, hand over a "
                "copy of the input, or use recompute='never'"
            )
        with torch.enable_grad(), autocast.entered():
            self.record(value, run, copy=True)  # for the graph alone: y is known
        self._checkpoint = None

    def differentiate(
        self,
        parameters: Sequence[Any],
        gradients: Sequence[Tensor | None],
        retain_graph: bool = False,
    ) -> tuple[list[Tensor | None], dict[Any, Tensor]]:
        """The gradients of x and of the parameters, or of other leaves or edges of the graph. They
        may share memory, with each other and with `gradients`.

        `gradients` has one entry per leaf of y, and the first result one per leaf of x: None
        for a leaf without a gradient.
        """
        of_outputs = {k: gradients[k] for k in self._y}
        incoming = {k: move(dy, self._memory) for k, dy in of_outputs.items() if dy is not None}
        result: list[Tensor | None] = [None] * self._num_inputs  # by leaf of x
        if not incoming or not (self._x or parameters):
            return result, {}
        # torch.autograd.grad without its checks: they would switch a TorchFunctionMode off.
        computed = Variable._execution_engine.run_backward(
            tuple(self._y[k] for k in incoming),
            tuple(incoming.values()),
            retain_graph,
            False,  # create_graph
            (*self._x.values(), *parameters),  # what to differentiate by: x first
            allow_unreachable=True,
            accumulate_grad=False,
        )
        for k, dx in zip(self._x, computed, strict=False):
            result[k] = dx
        of_parameters = zip(parameters, computed[len(self._x) :], strict=True)
        return result, {p: g for p, g in of_parameters if g is not None}

    def release(self) -> None:
        """Lets go of x and y. Weight products still to be computed keep their own operands."""
        self._x, self._y = {}, {}


def versions(value: Any) -> list[int]:
    """The number of writes to each tensor; inference tensors do not count theirs."""
    return [0 if x.is_inference() else x._version for x in tensors_of(value)]


def modes(modules: Iterable[nn.Module]) -> list[int]:
    """Whether they and all below are in training."""
    return [m.training for module in modules for m in module.modules()]


def memory_of(device: torch.device) -> torch.device:
    """Where the tensors of a worker's device are: cpu for cpu:1, and cuda:k for cuda."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


def move(tensor: Tensor, memory: torch.device, copy: bool = False) -> Tensor:
    """Moves a tensor to a device. A copy to a GPU is asynchronous: the CPU does not wait for it."""
    return tensor.to(memory, non_blocking=memory.type != "cpu", copy=copy)


class Alias(torch.autograd.Function):
    """The same memory, but neither leaf nor view, so that who gets it may work in place."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient
