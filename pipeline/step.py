"""What a step of both pipes has besides actions: new stages, the loss, the way into `.grad`.

`Pipe` has all stages, each on its worker; `ProcessPipe` those of one rank. They differ in their
channels, and in where random numbers come from.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from runtime.graph import Gradients, move
from runtime.guards import is_checked, refuse_hooks
from runtime.randomness import OfProcess, OfThread, step_seed

from .executor import LocalChannel
from .stage import Stage

LossFunction = Callable[[Any, Any], Tensor]
Ready = Callable[[Iterable[nn.Parameter]], None]
"""Called with parameters to whose `.grad` this rank adds nothing more in a step."""

SUMMED_BY_STAGES = (  # for `refuse_gradient_hooks`
    "would see a part for each micro-batch, since the stages of a pipeline add these up: change "
    "p.grad after the step"
)

CHANGED_APART = (  # for `buffers_unchanged`
    "processes would each have their own, and threads write in any order. Take a module for each "
    "stage, or one without such state, e.g. group norm"
)


def new_stages(
    parts: Sequence[nn.Sequential],
    devices: Mapping[int, torch.device],
    randomness: Callable[[torch.device, int], OfThread | OfProcess],
    uncalled: Iterable[nn.Module],
    step: int,
    **how: Any,
) -> list[Stage]:
    """The stages of this process, for one step, in order.

    Args:
        parts: the layers of all stages, other processes', too, since the number of a layer in the
            whole model seeds its draws.
        devices: by stage of this process.
        uncalled: what holds the layers and is never called: see `refuse_hooks`.
        step: how many there were before: decides whether it is checked (runtime/guards.py).
        how: other arguments of `Stage`.
    """
    refuse_hooks(uncalled)
    if step == 0 and torch.is_grad_enabled() and how.get("num_microbatches", 0) > 1:
        _warn_of_batch_norm(parts)
    stages, first_layer, seed, checked = [], 0, step_seed(), is_checked(step)
    for s, part in enumerate(parts):
        if s in devices:
            draws = randomness(devices[s], seed)
            stages.append(Stage(s, part, devices[s], draws, first_layer, checked=checked, **how))
        first_layer += len(part)
    return stages


def on_several(parts: Sequence[nn.Module], places: Sequence[int]) -> dict[nn.Module, str]:
    """The modules that parts of several `places` (ranks, or workers) have, with a name each."""
    pairs = zip(parts, places, strict=True)
    uses = dict.fromkeys((m, place) for part, place in pairs for m in part.modules())
    numbers = Counter(m for m, _ in uses)  # of places
    return {m: f"a {type(m).__name__} on several stages" for m, n in numbers.items() if n > 1}


def _warn_of_batch_norm(parts: Iterable[nn.Module]) -> None:
    """Warns of batch norm, whose results depend on the number of micro-batches."""
    for m in (m for part in parts for m in part.modules()):
        if isinstance(m, _BatchNorm) and m.training:
            warnings.warn(
                f"{type(m).__name__} in training takes the statistics of a micro-batch, and not of "
                "the batch: take nn.GroupNorm, or one micro-batch, to match one process",
                stacklevel=4,
            )
            return


class Losses(LocalChannel):
    """The far end of both channels: the losses arrive here, and their gradients leave.

    The loss of micro-batch i is `loss_fn(output, targets[i])`, a scalar; the batch's loss is
    `scale` times their sum. The last `stage` computes it after its layers.
    """

    def __init__(
        self, stage: Stage, loss_fn: LossFunction, targets: Sequence[Any], scale: float | Tensor
    ) -> None:
        super().__init__()
        if isinstance(scale, Tensor) and scale.numel() != 1:
            raise ValueError(
                f"scale has {scale.numel()} numbers: one is for all micro-batches, e.g. "
                "1 / tokens; let loss_fn multiply by others"
            )
        # The targets are the caller's, perhaps not on the device of the outputs. All are moved
        # before anything is launched that a copy could wait for.
        to_outputs = partial(pytree.tree_map_only, Tensor, lambda t: move(t, stage.memory))
        self._loss_fn, self._targets = loss_fn, [to_outputs(target) for target in targets]
        self._scale = to_outputs(scale)
        self._losses: dict[int, Tensor] = {}
        stage.tail = self.of

    def of(self, i: int, output: Any) -> Tensor:
        """The `Stage.tail` of the last stage."""
        loss = self._loss_fn(output, self._targets[i])
        is_tensor = isinstance(loss, Tensor)
        if not is_tensor or loss.dim() > 0 or loss.is_complex():
            what = f"{tuple(loss.shape)} {loss.dtype}" if is_tensor else type(loss).__name__
            raise ValueError(
                f"loss_fn returned {what}: a tensor of one real number, the sum over its "
                "micro-batch, is needed, e.g. cross_entropy(output, target, reduction='sum')"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise RuntimeError(
                "the loss does not depend on anything that requires grad: every parameter is "
                "frozen, or a layer or loss_fn detaches its output, as "
                "checkpoint(use_reentrant=True) does if its input requires no grad. To compute "
                "only the loss, call loss_fn(pipe(x), target)"
            )
        return loss

    def put(self, i: int, loss: Tensor) -> None:
        self._losses[i] = loss

    def get(self, i: int) -> list[Tensor | None]:
        """The gradient with which the last stage's backward starts: of scale times the loss."""
        return [torch.ones_like(self._losses[i]) * self._scale]

    def total(self) -> Tensor:
        """`scale` times the losses, added in the order of the micro-batches."""
        losses = [loss.detach() for _, loss in sorted(self._losses.items())]
        return torch.stack(losses).sum() * self._scale


def hand_over(gradients: Gradients) -> None:
    """Adds the stages' sums to `.grad`, as a backward would."""
    for p, gradient in gradients.items():
        if p.grad is None:
            if not gradient.is_sparse and gradient.stride() != p.stride():
                # As autograd makes it: fused optimizers take both by address.
                gradient = torch.empty_like(p).copy_(gradient)
            p.grad = gradient
        elif p.grad.is_sparse:  # an embedding's; the new one may be dense
            p.grad = gradient + p.grad
        else:
            p.grad += gradient
