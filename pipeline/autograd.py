"""A pipeline's forward as autograd sees it: one function of the input and the parameters.

The stages keep their own graphs (stage.py). The caller's graph has one node. Its inputs are the
input tensors and all parameters; its backward runs the clocks in reverse on the workers. So the
parameters' gradients come *through* autograd: `torch.autograd.grad` returns them, hooks see each
gradient once and complete, and a parameter on two stages gets the sum of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import microbatch
from .delivery import gradients_by_stage, hooks_held, trained_parameters
from .stage import Stage
from .streams import Streams

if TYPE_CHECKING:
    from .pipe import Pipe


def pipelined(pipe: Pipe, stages: Sequence[Stage], x: Any, sizes: Sequence[int]) -> Any:
    """Run ``x``, in micro-batches of ``sizes``, forward through the stages."""
    inputs = pytree.tree_leaves(x)
    wanted = _differentiable(inputs)  # positions of leaves that require grad
    parameters = trained_parameters(stages, pipe.replicas)
    if not torch.is_grad_enabled() or not (wanted or parameters):
        batches = microbatch.split(x, sizes)
        pipe.forward_all(batches)
        return microbatch.join(batches)
    with torch.no_grad():  # keep micro-batches out of the caller's graph: stages have their own
        batches = microbatch.split(pytree.tree_map_only(Tensor, Tensor.detach, x), sizes)
    for batch in batches:
        pieces = pytree.tree_leaves(batch)
        for k in wanted:
            pieces[k].requires_grad_()  # tells the first stage
    pipe.forward_all(batches)  # outputs replace the inputs
    with torch.no_grad():
        outputs, spec = pytree.tree_flatten(microbatch.join(batches))  # of the whole batch
    leaves = [pytree.tree_leaves(batch) for batch in batches]  # by micro-batch
    carried = _differentiable(leaves[0])  # positions of outputs with gradients
    lengths = {k: [len(row[k]) if row[k].dim() else 0 for row in leaves] for k in carried}
    results = [outputs[k].detach() for k in carried]
    call = _Call(pipe, stages, parameters, wanted, list(sizes), len(outputs), lengths, results)
    if carried:
        tensors = [inputs[k] for k in wanted]
        # the parameters are arguments, so that autograd asks for their gradients, too
        results = _Pipelined.apply(call, *tensors, *parameters)
        for k, result in zip(carried, results, strict=True):
            outputs[k] = result  # now with a grad_fn
    return pytree.tree_unflatten(outputs, spec)


@dataclass
class _Call:
    """What the backward of one forward needs. It is freed with the caller's graph, and frees the
    stages' graphs with it. Leaves of input and output are numbered as by pytree."""

    pipe: Pipe
    stages: Sequence[Stage]
    parameters: list[nn.Parameter]
    wanted: list[int]  # leaves of the input that want gradients
    sizes: list[int]  # per micro-batch, examples of the input
    num_outputs: int
    lengths: dict[int, list[int]]  # leaf of the output with gradients: rows per micro-batch
    results: list[Tensor]
    streams: Streams = field(default_factory=Streams)  # of the forward

    def split(self, gradients: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
        """Per micro-batch, the gradient of each leaf of its output."""
        pieces: list[list[Tensor | None]] = [[None] * self.num_outputs for _ in self.sizes]
        for (k, lengths), gradient in zip(self.lengths.items(), gradients, strict=True):
            if gradient is None:
                continue
            parts = gradient.split(lengths) if gradient.dim() else [gradient]
            for piece, part in zip(pieces, parts, strict=True):  # part: its rows
                piece[k] = part
        return pieces  # [micro-batch][leaf]

    def join(self, gradients: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """The gradients of the input's leaves in ``wanted``."""
        joined: list[Tensor | None] = []
        for k in self.wanted:
            like = next((row[k] for row in gradients if row[k] is not None), None)
            if like is None:  # no micro-batch has a gradient for it
                joined.append(None)
                continue
            parts = [row[k] for row in gradients]
            shapes = [(size, *like.shape[1:]) if like.dim() else () for size in self.sizes]
            full = [
                like.new_zeros(shape) if part is None else part  # this micro-batch has none
                for part, shape in zip(parts, shapes, strict=True)
            ]
            joined.append(torch.cat(full) if like.dim() else torch.stack(full).sum())
        return joined


class _Pipelined(torch.autograd.Function):
    """Autograd's node. The forward has run before the node is made."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)  # None instead of zeros
        results, call.results = call.results, []  # else a cycle: call, results, this node
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        if torch.is_grad_enabled():  # the second derivatives would be silently wrong
            raise RuntimeError("a pipeline cannot be differentiated twice: no create_graph=True")
        retain_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        with call.pipe._crew.alone(), call.streams.resume():
            for stage in call.stages:
                stage.take_gradients()  # drop what a failed backward left
            with hooks_held(call.parameters):
                pieces = call.split(gradients)
                call.pipe.backward_all(call.stages, pieces, retain_graph)  # pieces: now the inputs'
            own, sums = gradients_by_stage(call.stages, call.pipe.replicas)
            for gradients_of_stage in own:  # no parameter is in two of them
                sums.update(gradients_of_stage)
            of_inputs = call.join(pieces)
        return None, *of_inputs, *(sums.get(p) for p in call.parameters)  # None: for `call`


def _differentiable(leaves: Sequence[Any]) -> list[int]:
    return [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
