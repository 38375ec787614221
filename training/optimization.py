"""From gradients to new weights, the same under every strategy: check, clip, schedule, step.

Problem. Backward leaves the gradient of one model in pieces: a copy on each rank, a shard, a part
on each stage. The update must still clip by the *global* norm, and skip a step, or end the run, on
all ranks alike if something is not finite.

Idea. One all-reduce sums what every process knows: the squared norm of its part of the gradient,
each element counted by one process, and its loss, in a slot of its own. All processes get the same
bits, so all decide alike. An infinite or NaN element makes the norm infinite or NaN.

Cost: one pass over the gradient and an all-reduce of W + 4 numbers; a second pass to clip. For
gpt2-mini on two ranks with a core each 2 ms, 0.2% of a step, and 1 ms for clipping.

Matrices decay; biases, norms and other vectors do not. A matrix that shrinks changes its direction
sooner, while the scale of a norm would leave 1 for no reason. What a rank holds of a parameter has
the parameter's name, and so its group, however the parameter is cut.

Papers: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013 (clipping);
Goyal et al., "Accurate, large minibatch SGD", 2017 (warm-up); Loshchilov and Hutter, "SGDR", 2017
(cosine), and "Decoupled weight decay regularization", 2019 (AdamW); Hu et al., "MiniCPM", 2024
(warm-up, stable, decay); Hägele et al., "Scaling laws and compute-optimal training beyond fixed
training durations", 2024 (its decay by the root).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from training.options import Options

from .launch.errors import RunError, UserError, counted, works
from .launch.world import World
from .muon import Muon, is_matrix_of_block
from .tasks.task import to_device

WARMUP = 20  # steps, by default
MOST_IN_A_ROW = 20  # skipped steps: the weights do not change meanwhile, so they are bad
ADVICE = "try a lower --learning_rate, more --warmup_steps or --max_grad_norm 1"


class Counts(NamedTuple):
    """What a process has done in a step, or all processes together."""

    positions: float = 0
    tokens: float = 0
    notices: float = 0  # processes that were asked to end


NO_COUNTS = Counts()


@dataclass(frozen=True)
class Recipe:
    """How weights are updated, as the options say."""

    args: Options
    steps_per_epoch: int

    @property
    def num_steps(self) -> int:
        """The steps of the whole run."""
        return self.args.num_batches or self.args.n_epochs * self.steps_per_epoch

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, ...: a linear warm-up, whose last step has the peak rate;
        then constant, or a decay that would reach the lowest rate at the step after the last.
        (wsd is constant before it decays.)"""
        args, warmup = self.args, self.args.warmup_steps or 0
        if step < warmup:
            return args.learning_rate * (step + 1) / warmup
        first = warmup  # step of the decay
        if args.lr_scheduler == "wsd":
            first = self.num_steps - decay_steps_of(args, self.steps_per_epoch)
        done = max(0.0, (step - first) / max(1, self.num_steps - first))
        falling = {
            "constant": 1.0,
            "linear": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "wsd": 1 - math.sqrt(done),
        }
        high = falling[args.lr_scheduler]
        return args.learning_rate * high + args.min_lr * (1 - high)


def clip_factor(norm: float, max_norm: float | None) -> float:
    """The factor that clips a gradient of this norm, as in `torch.nn.utils.clip_grad_norm_`."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


class GlobalOptimizer:
    """The optimizers of all processes, one or several in each, acting as one.

    Args:
        optimizers: each parameter of this process is in one of them.
        world: who this process is.
        counted: the parameters whose gradients this process adds to the norm, by default all. A
            gradient that several processes hold must be counted by one of them.

    `steps` is the number of the next step, from 0 over all epochs; `counts` are the last step's,
    summed over all processes.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        recipe: Recipe,
        world: World | None = None,
        counted: Collection[nn.Parameter] | None = None,
    ) -> None:
        self.optimizers = list(optimizers)
        self.recipe = recipe
        self.steps = 0
        self.in_a_row = 0  # how many of the last steps, without a gap, were not finite
        self.loss_sum = self.loss = math.nan  # of the last step, over all ranks; loss: the mean
        self.norm = self.rate = math.nan  # of its gradient; the learning rate
        self.counts = NO_COUNTS
        self._world = world or World()
        self._owned = [[p for g in o.param_groups for p in g["params"]] for o in self.optimizers]
        # In the order of `ours`, however an optimizer groups them.
        ours = [p for ps in self._owned for p in ps] if counted is None else counted
        self._counted = [[p for p in ours if p in owned] for owned in map(set, self._owned)]

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self, loss: Tensor, target_tokens: int, counts: Counts = NO_COUNTS) -> str | None:
        """Updates the weights, or skips the step; all processes call it.

        Args:
            loss: this process' part of the summed loss.
            target_tokens: of the global batch; with 0 there is no mean loss, and the step is
                skipped.
            counts: what this process has done.

        Returns:
            None, or why the step was skipped.

        Raises:
            RunError: on all processes, if a loss or the gradient is not finite and --on_nan is
                stop, or if too many steps in a row were skipped. The weights are unchanged.
        """
        self.rate = self.recipe.learning_rate_at(self.steps)  # skipped steps have one, too
        facts = self._facts(loss, counts)
        launched = target_tokens > 0 and facts.device.type != "cpu" and self._launch_update(facts)
        square, *others = facts.tolist()  # the only place where a step waits for its GPU
        losses = others[: self._world.world_size]
        self.counts = Counts(*others[self._world.world_size :])
        self.norm, self.loss_sum, self.loss = math.sqrt(square), sum(losses), math.nan
        if not target_tokens or not all(map(math.isfinite, (square, *losses))):
            return self._left_out(losses)  # all ranks take this branch, or none
        self.in_a_row, self.steps = 0, self.steps + 1
        self.loss = self.loss_sum / target_tokens
        if not launched:
            self._update(clip_factor(self.norm, self.recipe.args.max_grad_norm))
        return None

    def _facts(self, loss: Tensor, counts: Counts) -> Tensor:
        """The squared norm of the gradient, the loss of each rank, and the summed counts, in
        float64: the same on all ranks. Waits for no GPU."""
        rank, world_size = self._world.rank, self._world.world_size
        device = self._world.device
        to_facts = partial(torch.Tensor.to, device=device, non_blocking=device.type != "cpu")
        norms = [to_facts(vector).double() for vector in self._norms()]
        # [squared norm | a loss per rank | counts]: each rank fills in its own; the sum has all.
        facts = to_device(
            torch.tensor([0.0] * (1 + world_size) + list(counts), dtype=torch.float64), device
        )
        if norms:
            # In the order of the parameters: the sum does not depend on where stages are cut.
            facts[0] = torch.cat(norms).square().cumsum(0)[-1]
        facts[1 + rank] = to_facts(loss)  # in its slot: an error names the rank
        self._world.sum(facts)
        return facts

    def _launch_update(self, facts: Tensor) -> bool:
        """On a GPU, launches the update before the host has seen the facts, so that the GPU need
        not wait for the host: torch's fused optimizers leave everything as it is if their
        `found_inf` is 1. Returns whether the update was launched."""
        # Not SGD: if its first step is left out, its momentum has no value.
        fused = all(
            isinstance(o, torch.optim.AdamW) and o.defaults["fused"] for o in self.optimizers
        )
        devices = {p.device for owned in self._owned for p in owned}
        if not fused or devices != {facts.device}:
            return False
        # Four kernels: infinity and NaN times 0 are NaN, which is not 0.
        not_finite = facts[: 1 + self._world.world_size].sum().mul(0).ne(0).float()
        # As in `clip_factor`; torch's `grad_scale` is fp32 only.
        most = self.recipe.args.max_grad_norm
        factor = 1.0 if most is None else (most / (facts[0].sqrt() + 1e-6)).clamp(max=1)
        for optimizer in self.optimizers:
            optimizer.found_inf = not_finite  # type: ignore[attr-defined]
        self._update(factor)
        for optimizer in self.optimizers:
            del optimizer.found_inf  # type: ignore[attr-defined]
        return True

    def _norms(self) -> list[Tensor]:
        """The norms of the gradients that this process counts, in the order of its optimizers."""
        return [norms for i in range(len(self.optimizers)) for norms in self._norms_of(i)]

    def _norms_of(self, i: int) -> list[Tensor]:
        """Those of one optimizer's parameters, a vector per device and type. Waits for no GPU."""
        alike: dict[Any, list[Tensor]] = {}
        for gradient in _gradients(self._counted[i]):
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        return [torch.stack(torch._foreach_norm(group)) for group in alike.values()]

    def _update(self, factor: float | Tensor) -> None:
        """Clips by a factor, which is a number or still being computed on the GPU, and updates."""
        for i in range(len(self.optimizers)):
            self._update_by(i, factor)

    def _update_by(self, i: int, factor: float | Tensor) -> None:
        """Clips and updates the parameters of one optimizer."""
        optimizer = self.optimizers[i]
        gradients = _gradients(self._owned[i])  # including those that other ranks count
        if gradients and isinstance(factor, Tensor):
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        elif gradients and factor < 1:
            torch._foreach_mul_(gradients, factor)
        for group in optimizer.param_groups:
            # A group may have its own rate, or a multiple of the run's; see `make_optimizer`.
            group["lr"] = group.get("rate", self.rate * group.get("times", 1.0))
        self._step(optimizer)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's own step. (Sharded layouts do more here.)"""
        optimizer.step()

    def _left_out(self, losses: list[float]) -> str:
        """Counts a step whose loss or gradient is not finite, or that has no target. Returns why it
        is skipped. Raises RunError, see `step`."""
        epoch, step = divmod(self.steps, self.recipe.steps_per_epoch)
        where = f"epoch {epoch + 1}, step {step + 1} of {self.recipe.steps_per_epoch}"
        wrong = self._wrong(losses)
        if wrong and self.recipe.args.on_nan == "stop":
            raise RunError(f"{where}: {wrong}; {ADVICE}, or --on_nan skip")
        self.in_a_row = self.in_a_row + 1 if wrong else 0  # a batch without targets resets it
        if self.in_a_row == MOST_IN_A_ROW:
            raise RunError(f"{where}: {wrong}, as were {MOST_IN_A_ROW - 1} before it; {ADVICE}")
        self.steps += 1
        return f"{where}: {wrong or 'the batch has no target token'}; the step was skipped"

    def _wrong(self, losses: list[float]) -> str | None:
        """What is not finite, in words."""
        for rank, loss in enumerate(losses):
            if not math.isfinite(loss):
                return f"the loss{f' of rank {rank}' if len(losses) > 1 else ''} is {loss}"
        if not math.isfinite(self.norm):
            return f"the norm of the gradient is {self.norm}, though the loss is finite"
        return None


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def decays(name: str) -> bool:
    """Whether weight decay applies: to a matrix, or several; not to a bias or a norm's scale."""
    return name.endswith("weight") and ".ln_" not in name


def is_bias_of_router(name: str) -> bool:
    """Whether a parameter is moved by how busy experts were (experts/routing.py)."""
    return name.endswith(".router.bias")


def make_optimizer(
    args: Options, parameters: Iterable[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """The optimizer that --optimizer names, of parameters, which come with their names."""
    named = list(parameters)  # an iterator would be used up
    if args.optimizer == "sgd":
        return torch.optim.SGD([p for _, p in named], args.learning_rate, momentum=args.momentum)
    biases = [p for name, p in named if is_bias_of_router(name)]
    named = [(name, p) for name, p in named if not is_bias_of_router(name)]
    of_muon = args.optimizer == "muon"
    matrices = [p for name, p in named if of_muon and is_matrix_of_block(name)]
    others = [(name, p) for name, p in named if not (of_muon and is_matrix_of_block(name))]
    beta1, beta2 = map(float, args.betas.split(","))
    adamw: dict[str, Any] = {"betas": (beta1, beta2), "eps": args.eps}
    if of_muon and args.adamw_lr is not None:
        adamw["times"] = args.adamw_lr / args.learning_rate
    decay = args.weight_decay
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in others if decays(name)], "weight_decay": decay, **adamw},
        {"params": [p for name, p in others if not decays(name)], "weight_decay": 0.0, **adamw},
    ]
    if biases:  # without averages AdamW moves by the sign of the gradient, if it is not 0
        by_sign = {"betas": (0.0, 0.0), "eps": 1e-8, "weight_decay": 0.0}
        groups.append({"params": biases, "rate": args.balance_rate, **by_sign})
    if of_muon:
        dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}.get(args.precision, torch.float32)
        return Muon(matrices, groups, args.learning_rate, decay, args.momentum, dtype)
    return torch.optim.AdamW(groups, args.learning_rate, fused=True)


def usual_warmup(args: Options, steps_per_epoch: int) -> int:
    """The default steps of warm-up, at most half of a run. AdamW's first updates are as large as
    its last ones, and the gradients that follow them are large (docs/log.md)."""
    return min(WARMUP, Recipe(args, steps_per_epoch).num_steps // 2)


def decay_steps_of(args: Options, steps_per_epoch: int) -> int:
    """The last steps of `wsd`, in which it decays: as asked, or a fifth of the run."""
    return args.decay_steps or -(-Recipe(args, steps_per_epoch).num_steps // 5)


def check_schedule(args: Options, steps_per_epoch: int) -> None:
    """Raises UserError if the warm-up does not end before the run, or before the decay of `wsd`
    begins."""
    steps = Recipe(args, steps_per_epoch).num_steps
    if args.warmup_steps and args.warmup_steps >= steps:
        raise UserError(
            f"--warmup_steps {args.warmup_steps}: the run has {counted(steps, 'step')}, and the "
            f"warm-up must end before the last; {works('--warmup_steps', steps - 1, least=0)}"
        )
    most, decay_steps = steps - args.warmup_steps, decay_steps_of(args, steps_per_epoch)
    if args.lr_scheduler == "wsd" and decay_steps > most:
        raise UserError(
            f"--decay_steps {decay_steps}: the run has {counted(steps, 'step')}, and after the "
            f"warm-up {most}; {works('--decay_steps', most)}"
        )
