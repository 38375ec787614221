"""Deliver the stages' summed gradients to the parameters, once per step, through autograd.

When: threads deliver at the end of the step; processes deliver layer by layer during the last
backward, so that data-parallel buckets (data_parallel/gradients.py) overlap with it.

Stages add gradients up by themselves (stage.py). Writing the sums to ``.grad`` directly would
bypass gradient hooks, such as one that starts an all-reduce. So an autograd function delivers the
sums; if ``.grad`` is still None, autograd takes the gradient without a copy.

A parameter on several stages (tied weights) gets one sum, in the order of the stages: see
replicas.py for stages of one process, processes/neighbours.py for ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.graph import Gradients


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
