"""What both pipes do in a step: the stages they make for it, and the data flow between these.

`Pipe` has all stages, each on its worker; `ProcessPipe` those of one rank. They differ in their
channels, in where random numbers come from, and in how gradients are brought to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.guards import refuse_hooks
from runtime.randomness import OfProcess, OfThread
from runtime.recorder import Recorder

from .executor import Channel, Dataflow, Losses, LossFunction
from .stage import Stage


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


def losses_of(
    stage: Stage, loss_fn: LossFunction, targets: Sequence[Any], scale: float | Tensor
) -> Losses:
    """The losses of a step, which the last ``stage`` computes after its layers."""
    losses = Losses(loss_fn, targets, scale, stage.memory)
    stage.tail = losses.of
    return losses
