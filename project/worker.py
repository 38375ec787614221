"""One rank of project/train.py: trains, measures, compares, writes what it has found.

It knows the task and the strategy by what all tasks and all strategies do, and none by its name.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from project.check import PlainRuns, Verdict, compare
from project.strategies import STRATEGIES
from project.strategy import Plan, Strategy
from project.tasks import VGG, Data, Step, Task, make_task
from project.utils import autocast, sum_over_ranks
from training.launch import RunError, World
from training.memory import peak_bytes
from training.optimization import Optimizers, Recipe
from training.record import write_json

OPTIMIZERS = ("sgd", "adamw")
SUMMARY = "summary.json"
LINES = 10  # of the table that is printed while training
SGD_FACTOR = 30  # its steps are gradients, which are small; AdamW's are of the size of the rate


@dataclass
class Log:
    """What one rank saw of the training, step by step."""

    losses: list[float] = field(default_factory=list)  # summed, of this rank's part
    counts: list[int] = field(default_factory=list)  # what each step's loss is the mean over
    seconds: list[float] = field(default_factory=list)
    examples: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def mean_losses(self, device: torch.device, since: int = 0) -> list[float]:
        """The global batches' mean losses; all ranks call it together."""
        sums = sum_over_ranks(self.losses[since:], device)
        return [s / max(1, n) for s, n in zip(sums, self.counts[since:], strict=True)]


def learning_rate(args: argparse.Namespace) -> float:
    """--learning_rate, or what suits the model and the optimizer."""
    chosen = {VGG: 3e-4, "gpt2-mini": 1e-3}.get(args.model, 1e-4)
    return args.learning_rate or chosen * (SGD_FACTOR if args.optimizer == "sgd" else 1)


def make_optimizer(
    args: argparse.Namespace, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """What --optimizer names."""
    if args.optimizer == "sgd":
        return torch.optim.SGD(parameters, learning_rate(args), momentum=args.momentum)
    ps = list(parameters)
    return torch.optim.AdamW(ps, learning_rate(args), fused=ps[0].device.type != "mps")


def num_steps(args: argparse.Namespace, task: Task) -> int:
    """Steps of the run."""
    return args.num_batches or args.n_epochs * task.steps_per_epoch


def all_steps(
    args: argparse.Namespace, task: Task, part: int = 0, parts: int = 1, cut: int | None = 1
) -> Iterator[Step]:
    """The steps of the run, epoch after epoch."""
    epochs = (task.steps(epoch, part, parts, cut) for epoch in count())
    return islice((step for epoch in epochs for step in epoch), num_steps(args, task))


def recipe_of(args: argparse.Namespace, task: Task) -> Recipe:
    """How the options say that weights are updated."""
    return Recipe(
        learning_rate=learning_rate(args),
        steps_per_epoch=num_steps(args, task),
        lr_scheduler=args.lr_scheduler,
        warmup_steps=args.warmup_steps,
        max_grad_norm=args.max_grad_norm,
        on_nan=args.on_nan,
    )


def run_worker(world: World, args: argparse.Namespace, data: Data) -> None:
    """The whole run. Raises RunError where it does not compute what one process computes."""
    if world.is_main:
        (args.workdir / SUMMARY).unlink(missing_ok=True)
    task = make_task(args, world, data)
    plan = Plan(
        make_optimizer=partial(make_optimizer, args),
        autocast=partial(autocast, world.device, args.precision),
        dtype=task.dtype,
        num_microbatches=args.num_microbatches,
        schedule=args.schedule,
        balance=args.balance,
        zero=args.zero,
    )
    torch.manual_seed(args.seed * 100_003 + world.rank)  # dropout differs between the ranks
    strategy = STRATEGIES[args.strategy](task, world, plan)
    say(world, describe(args, world, task))
    try:
        log = train(world, args, task, strategy)
        loss, accuracy = evaluate(world, task, strategy)
        say(world, f"test: loss {loss:.3f}, {accuracy:.1%} of all {task.answers} right")
        summary = summarize(world, args, strategy, log)
        summary |= {"test_loss": loss, "test_accuracy": accuracy}
        weights, batches = strategy.whole_weights(), None
        differing = strategy.differing()
        if args.check_output:
            batches = outputs_on_main(world, task, strategy)
        if not world.is_main:
            return
        if last_words := task.last_words(weights):
            say(world, last_words)
        verdicts = check(world, args, task, plan, weights, batches)
    finally:
        strategy.close()
    summary["checks"] = {verdict.what: verdict.as_dict() for verdict in verdicts}
    write_json(args.workdir / SUMMARY, summary)
    say(world, f"Results are in {args.workdir}/.")
    wrong = [v.what for v in verdicts if not v.agrees]
    if differing:
        raise RunError(f"{args.strategy}: copies of {', '.join(differing[:3])} have come apart")
    if wrong:
        raise RunError(f"{args.strategy}: {' and '.join(wrong)} are not those of one process")


def say(world: World, text: str) -> None:
    """Prints, on rank 0 alone."""
    if world.is_main:
        print(text, flush=True)


def describe(args: argparse.Namespace, world: World, task: Task) -> str:
    """What is trained, on what, and how, in two lines."""
    parameters = sum(p.numel() for p in task.skeleton().parameters())
    workers = f"{world.world_size} worker{'s' * (world.world_size > 1)}"
    return (
        f"{args.strategy}, {workers}: {args.model}, {parameters / 1e6:.1f} M parameters; "
        f"{num_steps(args, task)} steps of {args.batch_size}, {args.optimizer} at "
        f"{learning_rate(args):g}, {args.precision}, {world.device.type}\n{task.describe()}"
    )


def train(world: World, args: argparse.Namespace, task: Task, strategy: Strategy) -> Log:
    """Makes the steps, and prints a line now and then."""
    optimizer = Optimizers(
        strategy.optimizers, recipe_of(args, task), world, counted=strategy.counted
    )
    total, log = num_steps(args, task), Log()
    steps = all_steps(args, task, strategy.part, strategy.parts, strategy.num_microbatches)
    every, said = -(-total // LINES), 0
    say(world, f"\n{'step':>8}   {'loss':>7}   {'time':>6}   {task.unit + '/s':>12}")
    start = time.perf_counter()
    bar = tqdm(steps, "Training", total, disable=None if world.is_main else True, leave=False)
    for k, step in enumerate(bar, 1):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = strategy.backward(step)
        left_out = optimizer.step(loss, step.count)
        log.losses.append(loss.item())
        log.counts.append(step.count)
        log.examples.append(step.examples)
        log.positions.append(step.positions)
        log.seconds.append(time.perf_counter() - begin)
        if left_out and world.is_main:
            bar.write(left_out)
        if k % every == 0 or k == total:
            mean = statistics.fmean(log.mean_losses(world.device, said))
            speed = args.batch_size * (k - said) / sum(log.seconds[said:])
            if world.is_main:
                elapsed = time.perf_counter() - start
                bar.write(f"{k:>8}   {mean:>7.3f}   {elapsed:>5.0f}s   {speed:>12,.1f}")
            said = k
    return log


def evaluate(world: World, task: Task, strategy: Strategy) -> tuple[float, float]:
    """Mean loss and share of right answers over the test data."""
    totals = torch.zeros(3, dtype=torch.float64)
    batches = task.test_batches(strategy.part, strategy.parts)
    most = torch.tensor(len(batches), device=world.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)  # where a rank has none left, it still takes part
    batches += [(None, None)] * (int(most) - len(batches))
    bar = tqdm(batches, "Testing", disable=None if world.is_main else True, leave=False)
    for x, target in bar:
        output = strategy.outputs(x)
        if output is not None:
            totals += task.score(output, target)
    loss, right, answers = sum_over_ranks(totals.tolist(), world.device)
    return loss / max(1.0, answers), right / max(1.0, answers)


def summarize(
    world: World, args: argparse.Namespace, strategy: Strategy, log: Log
) -> dict[str, Any]:
    """What figures are drawn from. Speeds are those after the first step, which is slower; bytes
    are of each rank."""
    later = slice(1, None) if len(log.seconds) > 1 else slice(None)
    seconds = sum(log.seconds[later])
    share = world.world_size / strategy.parts  # ranks that compute the same examples
    examples, positions = (
        value / share
        for value in sum_over_ranks(
            [sum(log.examples[later]), sum(log.positions[later])], world.device
        )
    )
    memory: list[tuple[int, int]] = [(0, 0)] * world.world_size
    mine = (peak_bytes(world.device), strategy.state_bytes())
    dist.all_gather_object(memory, mine)
    return {
        "strategy": args.strategy,
        "num_workers": world.world_size,
        "model": args.model,
        "schedule": args.schedule if args.strategy == "pipeline" else None,
        "num_microbatches": strategy.num_microbatches,
        "batch_size": args.batch_size,
        "step_seconds": log.seconds,
        "examples_per_sec": examples / seconds,
        "positions_per_sec": positions / seconds,
        "peak_rss_bytes": [peak for peak, _ in memory],
        "state_bytes": [state for _, state in memory],
        "loss": log.mean_losses(world.device),
    }


def outputs_on_main(world: World, task: Task, strategy: Strategy) -> list[Tensor]:
    """The outputs for a batch of test data of each part, on rank 0; nothing on other ranks."""
    x, _ = task.test_batches(strategy.part, strategy.parts)[0]
    output = strategy.outputs(x)
    mine = None if output is None else (strategy.part, output.cpu())
    found: list[Any] = [None] * world.world_size
    dist.gather_object(mine, found if world.is_main else None)
    return [output for _, output in sorted((f for f in found if f), key=lambda f: f[0])]


def check(
    world: World,
    args: argparse.Namespace,
    task: Task,
    plan: Plan,
    weights: dict[str, Tensor],
    outputs: list[Tensor] | None,
) -> list[Verdict]:
    """Trains once more without the strategy, and says how that compares."""
    if not (args.check_weights or args.check_output):
        return []
    say(world, "\nThe same training on one process, in plain PyTorch, and in float64 ...")
    runs = PlainRuns(
        task, world.device, partial(all_steps, args, task), recipe_of(args, task),
        plan.make_optimizer, plan.autocast,
    )  # fmt: skip
    verdicts = []
    if args.check_weights:
        verdicts.append(compare("weights", weights, *runs.weights(), plan.dtype))
    if args.check_output and outputs is not None:
        parts = len(outputs)
        batches = [task.test_batches(part, parts)[0] for part in range(parts)]
        got, plain, exact = (
            {
                f"outputs, part {i}" if parts > 1 else "outputs": tensor
                for i, tensor in enumerate(ts)
            }
            for ts in (outputs, *runs.outputs(batches))
        )
        verdicts.append(compare("outputs", got, plain, exact, plan.dtype))
    for verdict in verdicts:
        say(world, verdict.say())
    return verdicts
