"""What both pipes do in a step: the stages they make for it, and the data flow between these.

`Pipe` has all stages, each on its worker; `ProcessPipe` those of one rank. They differ in their
channels, in where random numbers come from, and in how gradients are brought to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.graph import Gradients
from runtime.guards import refuse_hooks
from runtime.randomness import OfProcess, OfThread
from runtime.recorder import Recorder

from .executor import Channel, Dataflow, Losses, LossFunction
from .stage import Stage

Ready = Callable[[Iterable[nn.Parameter]], None]
"""Called with parameters whose ``.grad`` is whole: a step adds nothing more to it."""


SUMMED_BY_STAGES = (  # for `refuse_gradient_hooks`
    "would see a part for each micro-batch, since the stages of a pipeline add these up: change "
    "p.grad after the step"
)


def new_stages(
    parts: Sequence[nn.Sequential],
    devices: Mapping[int, torch.device],
    randomness: Callable[[torch.device], OfThread | OfProcess],
    uncalled: Iterable[tuple[str, nn.Module]],
    **how: Any,
) -> list[Stage]:
    """The stages of this process, for one step, in order.

    Args:
        parts: the layers of all stages, other processes', too, since the number of a layer in the
            whole model seeds its draws.
        devices: by stage of this process.
        uncalled: what holds the layers and is never called: see `refuse_hooks`.
        how: other arguments of `Stage`.
    """
    refuse_hooks(uncalled)
    stages, first_layer = [], 0
    for s, part in enumerate(parts):
        if s in devices:
            draws = randomness(devices[s])
            stages.append(Stage(s, part, devices[s], draws, first_layer, **how))
        first_layer += len(part)
    return stages


def new_dataflow(
    stages: Sequence[Stage],
    inputs: Iterable[Any],
    end: Losses | Channel,
    up: Mapping[int, Any],
    down: Mapping[int, Any],
    num_stages: int,
    recorder: Recorder | None,
) -> Dataflow:
    """A step that is ready to run: the inputs wait for stage 0, if it is here.

    Args:
        end: where the last stage's results go, if it is here.
        up, down: the other channels around the stages, see `Dataflow`.
    """
    flow = Dataflow(stages, {**up, num_stages: end}, {**down, num_stages: end}, recorder)
    for i, value in enumerate(inputs):
        flow.up[0].put(i, value)  # all at once: the channel holds them
    return flow


def hand_over(gradients: Gradients, ready: Ready = lambda _: None) -> None:
    """Adds a stage's sums to ``.grad``, as a backward would, and says that these are whole."""
    for p, gradient in gradients.items():
        if p.grad is None:
            p.grad = gradient
        elif p.grad.is_sparse:  # an embedding's; the new one may be dense
            p.grad = gradient + p.grad
        else:
            p.grad += gradient
    ready(gradients)


def losses_of(
    stage: Stage, loss_fn: LossFunction, targets: Sequence[Any], scale: float | Tensor
) -> Losses:
    """The losses of a step, which the last ``stage`` computes after its layers."""
    losses = Losses(loss_fn, targets, scale, stage.memory)
    stage.tail = losses.of
    return losses
