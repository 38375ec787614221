"""A pipeline's forward as autograd sees it: one function of the micro-batches and the parameters.

The stages keep their own graphs (stage.py). The caller's graph has one node for all of them; around
it the batch is cut and joined as any tensor is, so autograd cuts and joins the gradients. The
node's backward runs the clocks in reverse on the workers. So the parameters' gradients come
*through* autograd: `torch.autograd.grad` returns them, hooks see each gradient once and complete,
and a parameter on two stages gets the sum of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from runtime.graph import Gradients, move

from . import microbatch
from .streams import Streams

Backward = Callable[[list[list[Tensor | None]], bool], Gradients]
"""Called with the outputs' gradients, by micro-batch and leaf, and whether graphs are kept. Puts
the inputs' gradients in their place, and returns the parameters'."""


def pipelined(
    x: Any,
    sizes: Sequence[int],
    parameters: Sequence[nn.Parameter],
    forward: Callable[[list[Any]], None],
    backward: Backward,
) -> Any:
    """Runs `x`, in micro-batches of `sizes`, through the stages. `forward` gets a list of all
    micro-batches, and replaces inputs by outputs."""
    batches = microbatch.split_batch(x, sizes)
    inputs = pytree.tree_leaves(batches)
    homes = [leaf.device if isinstance(leaf, Tensor) else None for leaf in inputs]
    batches = pytree.tree_map_only(  # out of the caller's graph: stages have their own
        Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), batches
    )
    forward(batches)
    outputs, spec = pytree.tree_flatten(batches)
    streams = Streams()  # of the forward

    def differentiate(gradients: Sequence[Tensor | None], retain_graph: bool) -> list[Any]:
        """The gradients of the inputs and of the parameters. Autograd's node holds this function,
        so the stages' graphs are freed with the caller's graph."""
        leaves = len(gradients) // len(sizes)  # of an output
        starts = range(0, len(gradients), leaves)
        pieces = [list(gradients[start : start + leaves]) for start in starts]
        with streams.resume():
            sums = backward(pieces, retain_graph)  # pieces: now the inputs'
            of_inputs = [  # a stage's is on the stage's device
                None if dx is None or home is None else move(dx, home)
                for dx, home in zip(chain.from_iterable(pieces), homes, strict=True)
            ]
        return [*of_inputs, *(sums.get(p) for p in parameters)]

    # the parameters are arguments, so that autograd asks for their gradients, too
    results = _Pipelined.apply(differentiate, outputs, *inputs, *parameters)
    return microbatch.join(pytree.tree_unflatten(results, spec))


class _Pipelined(torch.autograd.Function):
    """Autograd's node. The forward has run before the node is made."""

    @staticmethod
    def forward(ctx: Any, differentiate: Any, outputs: list[Any], *_: Any) -> tuple[Any, ...]:
        # without the outputs, which will refer to this node: no cycle
        ctx.differentiate = differentiate
        ctx.set_materialize_grads(False)  # None instead of zeros
        results = pytree.tree_map_only(Tensor, torch.detach, outputs)
        pairs = [(y, r) for y, r in zip(outputs, results, strict=True) if isinstance(y, Tensor)]
        ctx.mark_non_differentiable(*(r for y, r in pairs if not y.requires_grad))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the second derivatives would be silently wrong
            raise RuntimeError("a pipeline cannot be differentiated twice: no create_graph=True")
        retain_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        # None: for `differentiate` and `outputs`
        return None, None, *ctx.differentiate(gradients, retain_graph)
