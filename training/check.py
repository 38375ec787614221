"""Compares what a strategy trained with the same training on one process, parameter by parameter.

Problem: floating-point sums depend on their order, and every strategy has its own order, so two
correct runs differ. A guessed tolerance is either so wide that a wrong factor passes, or so narrow
that a correct run fails. The right one depends on the model, the steps and the optimizer.

Idea: measure the rounding error of this very training. One process trains twice on whole batches in
plain PyTorch: in float32 (a bf16 run's under autocast), and in float64. The distance of the two is
the rounding error, accumulated over all sums and steps. A different order of summation makes errors
of the same size; FACTOR times that is allowed. By chance a small parameter may be rounded much less
in one order than in the other, so each is allowed at least the rounding of the model's average
weight.

    distance   the 2-norm, over a parameter, of (strategy - plain)
    rounding   the 2-norm of (plain - float64), at least the model's RMS error * sqrt(elements)
    agrees     distance <= FACTOR * rounding, for every parameter

For a run in float64 the rounding is scaled by 2^-29, the ratio of the two machine epsilons. A
weight that training does not move has no rounding error and must match exactly. AdamW divides a
gradient by its own size and so hides a constant factor in all gradients; SGD reveals it.

What the options ask of an update is computed here anew (`plain_steps`), without the code that runs
use: a reference that shared it would share its mistakes. tests/equivalence trains with it, too.

The run's weights are those of its last checkpoint, so that saving is checked, too.

Cost: two more trainings on one process, one of them in float64: for a few steps, not for an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.checkpoint import newest, weights_of
from training.files import CHECKPOINTS, moving
from training.options import Options

from .launch.errors import RunError
from .layouts.layout import LaidOutModel
from .tasks.task import Step, whole_model

FACTOR = 16.0
ROUTED_APART = (
    "  experts are chosen by numbers that bf16 rounds, in each layout at different places: a\n"
    "  position may go to a different expert, and from there on the runs differ by more than\n"
    "  rounding. So this may be no mistake: --precision fp32 or fp64 tells"
)
Tensors = Mapping[str, Tensor]  # by name


@dataclass(frozen=True)
class Difference:
    """The difference between a tensor and its plain counterpart."""

    name: str
    largest: float  # absolute, over all elements
    distance: float
    rounding: float

    @property
    def times_rounding(self) -> float:
        """The distance in units of the rounding; infinite for NaN, or where an exact match is
        required and fails."""
        if self.distance == 0:
            return 0.0
        ratio = self.distance / self.rounding if self.rounding else math.inf
        return math.inf if math.isnan(ratio) else ratio


@dataclass(frozen=True)
class Verdict:
    """What was compared, and every difference, the worst first. `doubt`: what, other than a
    mistake, may have caused one."""

    what: str
    differences: list[Difference]
    missing: list[str]
    doubt: str = ""

    @property
    def worst(self) -> Difference:
        """The largest difference relative to rounding; a placeholder if nothing was compared."""
        return self.differences[0] if self.differences else Difference("nothing", 0.0, math.inf, 0)

    @property
    def agrees(self) -> bool:
        """Whether something was compared, nothing is missing, and rounding explains all
        differences."""
        return self.worst.times_rounding <= FACTOR and not self.missing

    def as_dict(self) -> dict[str, Any]:
        """For summary.json."""
        return {"agrees": self.agrees, "missing": self.missing, "worst": asdict(self.worst)}

    def say(self) -> str:
        """The verdict in words, with the worst differences beyond the limit."""
        largest = max(self.differences, key=lambda d: d.largest, default=self.worst)
        beyond = [d for d in self.differences[:5] if d.times_rounding > FACTOR]
        return "\n".join([
            f"{self.what}: {'agree' if self.agrees else 'DISAGREE'} with one process",
            f"  largest difference {largest.largest:.1e} ({largest.name})",
            f"  largest error relative to expected rounding: {self.worst.times_rounding:.1f}x "
            f"(limit {FACTOR:g}x, {self.worst.name})",
            *(f"  missing: {name}" for name in self.missing),
            *(f"  {d.name}: off by {d.largest:.1e}, {d.times_rounding:,.0f}x the expected rounding"
              for d in beyond),
            *([self.doubt] if self.doubt and not self.agrees else []),
        ])  # fmt: skip


def verdict_of(
    what: str, got: Tensors, plain: Tensors, exact: Tensors, dtype: torch.dtype
) -> Verdict:
    """Compares tensors by name.

    Args:
        got: the strategy's tensors.
        plain: one process' tensors, trained in float32.
        exact: one process' tensors, trained in float64.
        dtype: the type of the strategy's weights.
    """
    eps = torch.finfo(dtype).eps
    finer = eps / torch.finfo(torch.float32).eps  # float64: 2^-29
    errors = {name: plain[name].double() - exact[name] for name in plain}
    elements = sum(error.numel() for error in errors.values())
    # The error of an element.
    average = nn.utils.get_total_norm(list(errors.values())).item() / math.sqrt(max(1, elements))
    differences = []
    for name in plain.keys() & got.keys():
        reference = exact[name] if dtype == torch.float64 else plain[name].double()
        delta = got[name].to(reference) - reference
        own, rounding = errors[name].norm().item(), 0.0
        if own:  # otherwise training does not move it, and it must match exactly
            noise = finer * max(own, average * math.sqrt(reference.numel()))
            rounding = max(noise, eps * reference.norm().item())
        largest = delta.abs().max().item() if delta.numel() else 0.0
        differences.append(Difference(name, largest, delta.norm().item(), rounding))
    differences.sort(key=lambda d: d.times_rounding, reverse=True)
    return Verdict(what, differences, sorted(plain.keys() ^ got.keys()))


def plain_rate(args: Options, step: int, total: int) -> float:
    """The learning rate of step 0, 1, ... of `total`, as the options say."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / args.warmup_steps
    decay = total - args.warmup_steps
    if args.lr_scheduler == "wsd":
        decay = args.decay_steps or math.ceil(total / 5)
    left = min(1.0, (total - step) / decay)  # from 1 down to 0
    falling = {
        "constant": 1.0,
        "linear": left,
        "cosine": math.sin(math.pi / 2 * left) ** 2,
        "wsd": 1 - (1 - left) ** 0.5,
    }
    high = falling[args.lr_scheduler]
    return high * args.learning_rate + (1 - high) * args.min_lr


def plain_steps(
    args: Options, named: Iterable[tuple[str, nn.Parameter]], total: int, losses: Iterable[Tensor]
) -> Iterator[tuple[float, bool]]:
    """Plain training, as the options say. Yields the loss of each step, and whether weights are
    updated by it, once `p.grad` is there and before it is clipped.

    Args:
        args: the options that a person types.
        named: the parameters, by name.
        total: the number of steps after which a decaying rate would be 0.
        losses: the mean loss of each step, computed when it is asked for. A step that is not finite
            is left out, but counts as a step.
    """
    by_name = dict(named)
    biases = [by_name.pop(name) for name in [*by_name] if name.endswith("router.bias")]
    parameters = list(by_name.values())
    of_blocks = {n: p for n, p in by_name.items() if args.optimizer == "muon" and is_of_block(n)}
    means = {name: torch.zeros_like(p) for name, p in of_blocks.items()}
    others = {name: p for name, p in by_name.items() if name not in of_blocks}
    optimizer: torch.optim.Optimizer
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(parameters, momentum=args.momentum)
    else:
        vectors = [p for name, p in others.items() if p.dim() == 1 or name.endswith("bias")]
        matrices = [p for p in others.values() if all(p is not vector for vector in vectors)]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": args.weight_decay},
                {"params": vectors, "weight_decay": 0},
            ],
            betas=(float(args.betas.split(",")[0]), float(args.betas.split(",")[1])),
            eps=args.eps,
        )
    for step, loss in enumerate(losses):
        for p in [*parameters, *biases]:
            p.grad = None
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        updates = bool(loss.isfinite() and norm.isfinite())
        yield loss.item(), updates
        if updates:
            most = args.max_grad_norm or math.inf
            nn.utils.clip_grads_with_norm_([*parameters, *biases], most, norm)
            rate = plain_rate(args, step, total)
            for group in optimizer.param_groups:
                group["lr"] = rate * ((args.adamw_lr or args.learning_rate) / args.learning_rate)
            optimizer.step()
            for name, p in of_blocks.items():
                plain_muon(args, rate, name, p, means[name])
            for b in biases:  # by the sign; what is 0 up to rounding moves nothing
                assert b.grad is not None
                b.data -= args.balance_rate * b.grad / (b.grad.abs() + 1e-8)


def is_of_block(name: str) -> bool:
    """Whether a parameter is a matrix of a block, or several."""
    return ".h." in name and not any(word in name for word in ("bias", "ln_", "router"))


@torch.no_grad()
def plain_muon(args: Options, rate: float, name: str, p: nn.Parameter, mean: Tensor) -> None:
    """Muon's update of a parameter by its gradient, and of the mean of gradients. Where Muon
    multiplies matrices, this function changes their singular values."""
    if p.grad is None:
        return
    mean.mul_(args.momentum).add_(p.grad, alpha=1 - args.momentum)
    ahead = args.momentum * mean + (1 - args.momentum) * p.grad
    p.mul_(1 - rate * args.weight_decay)
    cut = (
        (lambda t: t.unbind(0))
        if p.dim() == 3
        else (lambda t: t.chunk(3 if "c_attn" in name else 1, 1))
    )
    for weight, matrix in zip(cut(p), cut(ahead), strict=True):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        values = values / values.norm().clamp(min=1e-7)
        for _ in range(5):
            values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
        weight.sub_(0.2 * max(matrix.shape) ** 0.5 * rate * (left * values) @ right)


class Plain:
    """The training of a laid-out model on one process. In float64 it is exact; in float32 it casts
    as the run does."""

    def __init__(self, run: LaidOutModel, dtype: torch.dtype) -> None:
        self.task, self.args, self.dtype = run.task, run.setup.args, dtype
        cast = partial(run.setup.autocast, run.devices[0])
        self.context = nullcontext if dtype == torch.float64 else cast
        self.model = whole_model(self.task, run.devices[0], dtype)
        self.layers = nn.Sequential(*self.task.layers(self.model))

    def train(self) -> None:
        """All steps of the run."""
        task, args, per_epoch = self.task, self.args, self.task.steps_per_epoch
        steps = (step for e in count() for step in islice(task.steps(e, 0, 1, 1), per_epoch))
        total = args.num_batches or args.n_epochs * per_epoch
        bits = torch.finfo(self.dtype).bits
        line = moving(islice(steps, total), f"One process, {bits} bits", total, "step")
        losses = map(self._mean_loss, line)
        for _ in plain_steps(args, self.model.named_parameters(), total, losses):
            pass

    def _mean_loss(self, step: Step) -> Tensor:
        """The mean loss of the whole batch, summed in fp32 at least; NaN without targets."""
        with self.context():
            output: Any = self._output(step.inputs[0])
            # Layers of experts add a loss.
            logits, added = (output, 0.0) if isinstance(output, Tensor) else output
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = F.cross_entropy(logits, step.targets[0], reduction="sum")
            return (loss + added) / step.count

    def _output(self, x: Any) -> Any:
        """[N, V] at the N targets of sequences, or [B, classes] of pictures."""
        return self.layers(x.to(self.dtype) if isinstance(x, Tensor) else x)

    def weights(self) -> dict[str, Tensor]:
        """The trained weights, by name."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def outputs(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The outputs for validation batches."""
        self.layers.eval()
        with self.context():
            return {name: self._output(x) for name, x in inputs.items()}


def outputs_on_main(model: LaidOutModel) -> dict[int, tuple[Any, Tensor]]:
    """On rank 0, an input of every part of the batch that has one, and its outputs; elsewhere
    nothing."""
    world, task = model.world, model.task
    size, m = model.dp_size, model.num_microbatches
    with model.evaluating():
        output = model.outputs(task.input_to_compare(model.dp_rank, size, m))
    seen = {} if output is None else {model.dp_rank: output.cpu()}  # one rank of each part sees it
    by_part = {part: output for outputs in world.gather(seen) for part, output in outputs.items()}
    if not world.is_main:
        return {}
    return {part: (task.input_to_compare(part, size, m), by_part[part]) for part in sorted(by_part)}


def check(model: LaidOutModel, outputs: Mapping[int, tuple[Any, Tensor]]) -> list[Verdict]:
    """Trains again on one process, on rank 0, and compares what --check_weights and --check_output
    ask for: the weights of the last checkpoint, and each part's `outputs`."""
    setup, args = model.setup, model.setup.args
    plain, exact = (Plain(model, dtype) for dtype in (torch.float32, torch.float64))
    plain.train()
    exact.train()
    compared: dict[str, tuple[Tensors, Tensors, Tensors]] = {}
    if args.check_weights:
        checkpoint, refused = newest(args.workdir / CHECKPOINTS)
        if refused:  # an older checkpoint has different weights
            raise RunError(f"--check_weights: {refused[0]}")
        got = weights_of(checkpoint) if checkpoint else {}
        compared["weights"] = got, plain.weights(), exact.weights()
    if args.check_output:
        several = len(outputs) > 1
        names = [f"outputs, part {part}" if several else "outputs" for part in outputs]
        inputs = {name: x for name, (x, _) in zip(names, outputs.values(), strict=True)}
        got = {name: output for name, (_, output) in zip(names, outputs.values(), strict=True)}
        compared["outputs"] = got, plain.outputs(inputs), exact.outputs(inputs)
    doubt = ROUTED_APART if args.experts and args.precision == "bf16" else ""
    verdicts = (verdict_of(what, *tensors, setup.dtype) for what, tensors in compared.items())
    return [replace(verdict, doubt=doubt) for verdict in verdicts]
