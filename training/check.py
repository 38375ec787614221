"""Is what a strategy trained what one process trains? Compared by parameter name.

Problem: floating-point sums depend on their order, and every strategy has an order of its own, so
two right runs differ. A tolerance that is guessed is either so wide that a wrong factor passes, or
so narrow that a right run fails; and the right one depends on the model, on the steps made, and on
the optimizer: AdamW turns the rounding of a gradient that is nearly zero into a step of full size.

Idea: measure what rounding makes of this very training. One process, plain PyTorch, whole batches,
no micro-batches, does it twice: as asked, and in float64. The distance of the two is the rounding
of the one, accumulated over all sums and steps. Another order of summation makes errors of the
same kind and size; FACTOR times as many are allowed.

    distance   the 2-norm, over a parameter, of (strategy - plain)
    rounding   the 2-norm of (plain - float64), at least one rounding of every weight
    agrees     distance <= FACTOR * rounding, for every parameter

In float64 itself the rounding is that of float32 times 2^-29, the quotient of the two's precisions.
A weight that the training did not move must be as it was: then there is nothing to round.

AdamW divides a gradient by its own size, and so hides a wrong factor in all of them; SGD does not.

Cost: the training over again, in float64 and on one process: for a few steps, not for an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from training.launch import World, gather_over_ranks
from training.layout import LaidOutModel, Plan
from training.loop import num_steps, recipe_of
from training.optimization import Recipe
from training.task import Step, Task, materialize

FACTOR = 16.0
EPS32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from the plain one's."""

    name: str
    largest: float  # of all elements, absolutely
    distance: float
    rounding: float

    @property
    def agrees(self) -> bool:
        """Whether rounding explains it."""
        return self.distance <= FACTOR * self.rounding  # never where it is NaN

    @property
    def times_rounding(self) -> float:
        """The distance in units of the rounding; 0 where there is none."""
        return self.distance / self.rounding if self.rounding else 0.0


@dataclass(frozen=True)
class Verdict:
    """What was compared, and every difference, the worst first."""

    what: str
    differences: list[Difference]
    missing: list[str]

    @property
    def agrees(self) -> bool:
        """Whether something was compared, nothing is missing, and rounding explains all
        differences."""
        return (
            bool(self.differences) and not self.missing and all(d.agrees for d in self.differences)
        )

    def as_dict(self) -> dict[str, Any]:
        """For summary.json."""
        return {"agrees": self.agrees, "missing": self.missing, "worst": asdict(self.worst)}

    @property
    def worst(self) -> Difference:
        """The one that rounding explains least; of nothing, none."""
        return self.differences[0] if self.differences else Difference("nothing", 0.0, 0.0, 0.0)

    def say(self) -> str:
        """For a person: the verdict, and the differences that matter to it."""
        largest = max(self.differences, key=lambda d: d.largest, default=self.worst)
        wrong = [d for d in self.differences if not d.agrees]
        lines = [
            f"{self.what}: {'agree' if self.agrees else 'DISAGREE'} with one process",
            f"  largest difference {largest.largest:.1e} ({largest.name})",
            f"  largest error relative to expected rounding: {self.worst.times_rounding:.1f}x "
            f"(limit {FACTOR:g}x, {self.worst.name})",
        ]
        lines += [f"  missing: {', '.join(self.missing)}"] if self.missing else []
        lines += [
            f"  {d.name}: off by {d.largest:.1e}, {d.times_rounding:,.0f}x the expected rounding"
            for d in wrong[:5]
        ]
        lines += [f"  and {len(wrong) - 5} more"] if len(wrong) > 5 else []
        return "\n".join(lines)


def compare(
    what: str,
    got: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> Verdict:
    """Compares tensors by name.

    Args:
        got: what the strategy made.
        plain: one process' at the precision of `got`; in float64 at float32's.
        exact: one process' in float64.
        dtype: the type of the weights.
    """
    finer = torch.finfo(dtype).eps / EPS32
    differences = []
    for name in plain.keys() & got.keys():
        reference = exact[name] if dtype == torch.float64 else plain[name].double()
        delta = got[name].double().to(reference.device) - reference
        noise = finer * (plain[name].double() - exact[name]).norm().item()
        moved = 1.0 if noise else 0.0
        rounding = max(noise, moved * torch.finfo(dtype).eps * reference.norm().item())
        largest = delta.abs().max().item() if delta.numel() else 0.0
        differences.append(Difference(name, largest, delta.norm().item(), rounding))
    missing = sorted(plain.keys() ^ got.keys())
    return Verdict(what, sorted(differences, key=_badness, reverse=True), missing)


def _badness(d: Difference) -> float:
    ratio = (
        d.distance / d.rounding if d.rounding else float("inf") * d.distance if d.distance else 0.0
    )
    return float("inf") if ratio != ratio else ratio


class PlainRuns:
    """The training once more, on one process: in the precision asked for, and in float64.

    Args:
        steps: gives the global batches, one micro-batch each.
        compute_dtype: the type to which the layout casts weights; None: that is left to autocast.
    """

    def __init__(
        self,
        task: Task,
        device: torch.device,
        steps: Callable[[], Iterable[Step]],
        recipe: Recipe,
        plan: Plan,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.task, self.device, self.steps = task, device, steps
        self.recipe, self.make_optimizer = recipe, plan.make_optimizer
        self.context = partial(plan.autocast, device) if compute_dtype is None else nullcontext
        self.compute_dtype = compute_dtype
        self.plain = self._train(torch.float32, self.context, compute_dtype)
        self.exact = self._train(torch.float64, nullcontext)

    def _train(
        self,
        dtype: torch.dtype,
        context: Callable[[], AbstractContextManager[Any]],
        compute_dtype: torch.dtype | None = None,
    ) -> nn.Module:
        model = materialize(self.task, self.device, dtype)
        optimizer = self.make_optimizer(model.parameters())
        most = self.recipe.max_grad_norm
        for k, step in enumerate(self.steps()):
            if step.count == 0:
                continue
            optimizer.zero_grad()
            with context():
                (x,), (target,) = step.inputs, step.targets
                loss = plain_loss(plain_output(model, x, compute_dtype), target)
            (loss / step.count).backward()
            if most is not None:
                nn.utils.clip_grad_norm_(model.parameters(), most)
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.learning_rate_at(k)
            optimizer.step()
        return model.eval()

    def weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """By name, in the precision asked for and in float64."""
        plain, exact = (
            {name: p.detach() for name, p in model.named_parameters()}
            for model in (self.plain, self.exact)
        )
        return plain, exact

    @torch.no_grad()
    def outputs(self, batches: Sequence[tuple[Any, Any]]) -> tuple[list[Tensor], list[Tensor]]:
        """Of each test batch, at its target positions."""
        with self.context():
            plain = [
                _at_targets(plain_output(self.plain, x, self.compute_dtype), y) for x, y in batches
            ]
        return plain, [_at_targets(plain_output(self.exact, x), y) for x, y in batches]


def plain_output(model: nn.Module, x: Any, compute_dtype: torch.dtype | None = None) -> Tensor:
    """All outputs of a whole model: logits of pictures [B, classes] or of positions [B, T, V].
    With a `compute_dtype` they are those of its weights cast to that."""
    call: Callable[..., Any] = model if compute_dtype is None else _cast(model, compute_dtype)
    if isinstance(x, tuple):  # (ids, weights): the weights only say which logits are wanted
        return call(input_ids=x[0], use_cache=False).logits
    return call(x.to(compute_dtype or next(model.parameters()).dtype))


def _cast(model: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    """The model with its weights cast; the gradients are those of the weights themselves."""
    weights = {name: p.to(dtype) for name, p in model.named_parameters()}

    def call(*args: Any, **kwargs: Any) -> Any:
        return functional_call(model, weights, args, kwargs)

    return call


def plain_loss(output: Tensor, target: Any) -> Tensor:
    """The summed cross-entropy, computed at every position and weighted; in fp32 at least."""
    output = output.to(torch.promote_types(output.dtype, torch.float32))
    if not isinstance(target, tuple):
        return F.cross_entropy(output, target, reduction="sum")
    ids, weights = target
    losses = F.cross_entropy(output.flatten(0, 1), ids.flatten(), reduction="none")
    return (losses * weights.flatten()).sum()


def _at_targets(output: Tensor, target: Any) -> Tensor:
    return output[target[1] != 0] if isinstance(target, tuple) else output


def outputs_on_main(world: World, task: Task, model: LaidOutModel) -> list[Tensor]:
    """The outputs for a batch of validation data of each part, on rank 0; nothing elsewhere."""
    batches = task.validation_batches(model.part, model.parts)
    output = model.outputs(batches[0][0] if batches else None)
    mine = None if output is None else (model.part, output.cpu())
    found = sorted((f for f in gather_over_ranks(mine, world) if f), key=lambda f: f[0])
    return [output for _, output in found] if world.is_main else []


def check(
    world: World,
    args: Any,
    task: Task,
    plan: Plan,
    model: LaidOutModel,
    weights: dict[str, Tensor],
    outputs: list[Tensor],
) -> list[Verdict]:
    """Trains again without the layout, as --check_weights and --check_output ask, and compares."""
    if not (args.check_weights or args.check_output):
        return []

    def steps() -> Iterable[Step]:
        epochs = (task.steps(epoch, 0, 1, 1) for epoch in count())
        return islice(chain.from_iterable(epochs), num_steps(args, task))

    runs = PlainRuns(task, world.device, steps, recipe_of(args, task), plan, model.compute_dtype)
    verdicts = []
    if args.check_weights:
        verdicts.append(compare("weights", weights, *runs.weights(), plan.dtype))
    if args.check_output:
        parts = len(outputs)
        batches = [task.validation_batches(part, parts)[0] for part in range(parts)]
        names = [f"outputs, part {i}" if parts > 1 else "outputs" for i in range(parts)]
        got, plain, exact = (
            dict(zip(names, found, strict=True)) for found in (outputs, *runs.outputs(batches))
        )
        verdicts.append(compare("outputs", got, plain, exact, plan.dtype))
    return verdicts
