"""What a training run computed, step by step, and how far two runs are apart.

Gradients are compared at every step and by parameter name, relative to the largest of the
parameter's: the sum of all would let errors cancel, and one scale for all parameters would hide the
small ones. A rank need not hold all parameters, but one that nobody should have is infinitely far
off, and so is what is not a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

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


def copies(named: Iterable[tuple[str, Tensor | None]]) -> Tensors:
    """Copies in the CPU's memory of the tensors that are there."""
    return {name: t.detach().cpu().clone() for name, t in named if t is not None}


def compare(found: Trajectory, wanted: Trajectory) -> dict[str, Difference]:
    """The largest difference of loss, gradient and weight of two equally long trajectories, of the
    parameters that are in `found`."""
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


def held(found: Trajectory) -> set[str]:
    """The parameters of which there is a gradient at every step, and a weight."""
    return set(found.weights).intersection(*found.gradients)


def tensor_difference(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], when: str = ""
) -> Difference:
    """The largest difference of tensors of the same name."""
    differences = []
    for name, tensor in found.items():
        if name not in wanted or tensor.shape != wanted[name].shape:
            shape = tuple(tensor.shape)
            differences.append(Difference(math.inf, f"{name} of shape {shape}, not expected{when}"))
            continue
        mine, theirs = tensor.double(), wanted[name].double()
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
