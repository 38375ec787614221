"""What a training run computed, step by step, and how far two runs are apart.

Gradients are compared at every step and by parameter name, relative to the largest of the
parameter's: the sum of all would let errors cancel, and one scale for all parameters would hide the
small ones. Names count: a gradient that is missing, or is there under another name, is infinitely
far off, and so is one that is not a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

Tensors = dict[str, Tensor]
KINDS = ("loss", "gradient", "weight")


@dataclass
class Trajectory:
    """A run of so many steps: the loss of each global batch before its step, in nats per target
    token; the gradients that the optimizer was given; the weights before and after all steps."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    initial: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class Difference:
    """The largest difference of a kind, relative, and where it is."""

    value: float = 0.0
    where: str = ""


NONE = Difference()


def named_gradients(model: nn.Module) -> Tensors:
    """Copies of all gradients, by parameter name; a parameter without one is not in it."""
    named = model.named_parameters()
    return {name: p.grad.detach().cpu().clone() for name, p in named if p.grad is not None}


def named_weights(model: nn.Module) -> Tensors:
    """Copies of all parameters, by name; one that is tied has one name."""
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def compare(found: Trajectory, wanted: Trajectory) -> dict[str, Difference]:
    """The largest difference of loss, gradient and weight; a trajectory as long as wanted."""
    gradients = [
        tensor_difference(mine, theirs, f", step {k}")
        for k, (mine, theirs) in enumerate(zip(found.gradients, wanted.gradients, strict=True), 1)
    ]
    losses = [
        Difference(_relative(abs(mine - theirs), abs(theirs)), f"step {k}")
        for k, (mine, theirs) in enumerate(zip(found.losses, wanted.losses, strict=True), 1)
    ]
    return {
        "loss": largest(losses),
        "gradient": largest(gradients),
        "weight": tensor_difference(found.weights, wanted.weights),
    }


def tensor_difference(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], when: str = ""
) -> Difference:
    """The largest difference of tensors of the same name."""
    differences = []
    for name in dict.fromkeys([*wanted, *found]):
        if name not in found or name not in wanted:
            missing = "found" if name in wanted else "expected"
            differences.append(Difference(math.inf, f"{name} (not {missing}){when}"))
            continue
        mine, theirs = found[name].double(), wanted[name].double()
        if mine.shape != theirs.shape:
            differences.append(Difference(math.inf, f"{name} (shape {tuple(mine.shape)}){when}"))
            continue
        distance, scale = (mine - theirs).abs().max().item(), theirs.abs().max().item()
        differences.append(Difference(_relative(distance, scale), name + when))
    return largest(differences)


def largest(differences: Iterable[Difference]) -> Difference:
    """The first of the largest ones."""
    return max(differences, key=lambda difference: difference.value, default=NONE)


def _relative(distance: float, scale: float) -> float:
    """What is not a number compares as infinite: max() would pass over NaN."""
    if distance == 0:
        return 0.0
    value = distance / scale if scale > 0 else math.inf
    return math.inf if math.isnan(value) else value
