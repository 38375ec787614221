"""A pipeline's forward as autograd sees it: one function of the micro-batches and the parameters.

The stages keep their own graphs (stage.py). The caller's graph has one node for all of them; around
it the batch is cut and joined as any tensor is, so autograd cuts and joins the gradients. The
node's backward runs the clocks in reverse on the workers. So the parameters' gradients come
*through* autograd: `torch.autograd.grad` returns them, hooks see each gradient once and complete,
and a parameter on two stages gets the sum of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from runtime.graph import Gradients, move

from . import microbatch
from .streams import Streams

Forward = Callable[[list[Any]], None]
"""Of all micro-batches; outputs replace inputs."""
Backward = Callable[[list[list[Tensor | None]], bool], Gradients]
"""Of gradients by micro-batch and leaf, and whether graphs are kept. Those of the inputs replace
those of the outputs; returns those of the parameters."""


def pipelined(
    x: Any,
    sizes: Sequence[int],
    parameters: Sequence[nn.Parameter],
    forward: Forward,
    backward: Backward,
) -> Any:
    """Run ``x``, in micro-batches of ``sizes``, forward through the stages."""
    batches = microbatch.split_batch(x, sizes)
    inputs = [leaf for leaf in pytree.tree_leaves(batches) if _has_gradient(leaf)]
    if not torch.is_grad_enabled() or not (inputs or parameters):
        forward(batches)
        return microbatch.join(batches)
    batches = pytree.tree_map_only(  # out of the caller's graph: stages have their own
        Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), batches
    )
    call = _Call(backward, parameters, _marks(batches))
    forward(batches)  # outputs replace the inputs
    call.outputs = _marks(batches)
    outputs = [leaf.detach() for leaf in pytree.tree_leaves(batches) if _has_gradient(leaf)]
    if outputs:
        # the parameters are arguments, so that autograd asks for their gradients, too
        results = iter(_Pipelined.apply(call, outputs, *inputs, *parameters))
        batches = pytree.tree_map_only(
            Tensor, lambda t: next(results) if t.requires_grad else t, batches
        )
    return microbatch.join(batches)


Marks = list[list[torch.device | None]]  # per micro-batch and leaf: its device if it has a gradient


@dataclass
class _Call:
    """What the backward of one forward needs. It is freed with the caller's graph, and frees the
    stages' graphs with it."""

    run: Backward
    parameters: Sequence[nn.Parameter]
    inputs: Marks
    outputs: Marks = field(default_factory=list)
    streams: Streams = field(default_factory=Streams)  # of the forward


class _Pipelined(torch.autograd.Function):
    """Autograd's node. The forward has run before the node is made."""

    @staticmethod
    def forward(ctx: Any, call: _Call, outputs: list[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call  # without the outputs, which will refer to this node: no cycle
        ctx.set_materialize_grads(False)  # None instead of zeros
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        if torch.is_grad_enabled():  # the second derivatives would be silently wrong
            raise RuntimeError("a pipeline cannot be differentiated twice: no create_graph=True")
        retain_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        with call.streams.resume():
            given = iter(gradients)
            pieces = [[next(given) if mark else None for mark in row] for row in call.outputs]
            sums = call.run(pieces, retain_graph)  # pieces: now the inputs'
            of_inputs = [
                dx if dx is None else move(dx, home)  # a stage's is on the stage's device
                for row, marks in zip(pieces, call.inputs, strict=True)
                for dx, home in zip(row, marks, strict=True)
                if home is not None
            ]
        of_parameters = [sums.get(p) for p in call.parameters]
        return None, None, *of_inputs, *of_parameters  # None: for `call` and `outputs`


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _marks(batches: Sequence[Any]) -> Marks:
    return [
        [leaf.device if _has_gradient(leaf) else None for leaf in pytree.tree_leaves(batch)]
        for batch in batches
    ]
