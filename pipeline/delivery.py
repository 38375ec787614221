"""Deliver the stages' summed gradients to the parameters, once per step, through autograd.

When: threads deliver at the end of the step; processes deliver layer by layer during the last
backward, so that data-parallel buckets (data_parallel/gradients.py) overlap with it.

Stages add gradients up by themselves (stage.py). Writing the sums to ``.grad`` directly would
bypass gradient hooks, such as one that starts an all-reduce. So an autograd function delivers the
sums; if ``.grad`` is still None, autograd takes the gradient without a copy.

A parameter on several stages (tied weights) gets one sum, in the order of the stages. If its stages
are on different GPUs, each has a copy; ``replicas`` maps a copy to the original parameter.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.graph import Gradients

from .stage import Stage

Replicas = Mapping[nn.Parameter, nn.Parameter]  # copy -> original


def trained_parameters(stages: Sequence[Stage], replicas: Replicas) -> list[nn.Parameter]:
    """All trained parameters, each once, in the order of the stages."""
    # a copy counts as its original
    every = (replicas.get(p, p) for stage in stages for p in stage.parameters)
    return list(dict.fromkeys(every))


def gradients_by_stage(stages: Sequence[Stage], replicas: Replicas) -> list[Gradients]:
    """Take the sums from the stages: per stage for its own parameters; the last for tied ones."""
    own: list[Gradients] = []
    for stage in stages:
        taken = ((replicas.get(p, p), gradient) for p, gradient in stage.take_gradients().items())
        own.append({p: gradient.to(p.device) for p, gradient in taken})  # from a copy's GPU
    stages_of = Counter(p for gradients in own for p in gradients)  # per original, its stages
    tied: Gradients = {}
    for gradients in own:  # in the order of the stages
        for p in [p for p in gradients if stages_of[p] > 1]:
            gradient = gradients.pop(p).to_dense()  # an embedding's may be sparse, a head's is not
            tied[p] = tied[p] + gradient if p in tied else gradient
    return [*own, tied]


def deliver(gradients: Gradients) -> None:
    """Add the gradients to ``.grad`` as a backward would; the dictionary is emptied."""
    if gradients:
        parameters = list(gradients)
        values = list(gradients.values())
        gradients.clear()  # else autograd would copy them
        with torch.enable_grad():
            token = _Deliver.apply(values, *parameters)
        del parameters
        token.backward()  # runs hooks, adds to .grad


@contextlib.contextmanager
def hooks_held(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Hide partial gradients from hooks: inside, `Tensor.register_hook` hooks do not run.

    `torch.autograd.grad` runs the hooks of its inputs, here once per micro-batch and stage. They
    are meant for the sum, and run when it is delivered.
    """
    hooked = [p._backward_hooks for p in parameters if p._backward_hooks]  # the live dictionaries
    saved = [dict(hooks) for hooks in hooked]
    try:
        for hooks in hooked:
            hooks.clear()
        yield
    finally:
        for hooks, entries in zip(hooked, saved, strict=True):
            hooks.update(entries)


class _Deliver(torch.autograd.Function):
    """A scalar that depends on the parameters with the given gradients."""

    @staticmethod
    def forward(ctx: Any, values: list[Tensor], *parameters: nn.Parameter) -> Tensor:
        ctx.values = values
        return torch.zeros((), device=parameters[0].device)  # real, where a parameter is complex

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        values = tuple(ctx.values)
        ctx.values.clear()  # autograd copies a gradient with other references
        return (None, *values)
