"""One rank of project/train.py: trains, measures, compares, writes what it has found.

It knows the task and the strategy by what all tasks and all strategies do, and none by its name.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from project.check import PlainRuns, Verdict, compare
from project.checkpoints import Checkpoints
from project.log import Log
from project.progress import NO_RESUME, Resume
from project.recipes import all_steps, learning_rate, num_steps, plan_of, recipe_of
from project.runs import SUMMARY
from project.strategies import STRATEGIES
from project.strategy import Plan, Strategy
from project.task import Data, Task
from project.tasks import make_task
from project.utils import precision_notes, sum_over_ranks
from training.agreement import check_replicas, check_same, run_things
from training.cores import core_notes
from training.launch import RunError, World, on_main
from training.memory import peak_bytes
from training.optimization import Optimizers
from training.record import write_json, writing
from training.seeds import stream
from training.timeline import TRACE

LINES = 10  # of the table that is printed while training


def run_worker(
    world: World, args: argparse.Namespace, data: Data, resume: Resume = NO_RESUME
) -> None:
    """The whole run. Raises RunError where it does not compute what one process computes."""
    saved = resume.checkpoint
    check_same(world, run_things(vars(args), data.fingerprints(), saved))
    if world.is_main:
        stale = (SUMMARY, "timeline_rank*.json", TRACE, "*.json.part")  # of an earlier run
        for path in (path for name in stale for path in args.workdir.glob(name)):
            with writing(path):
                path.unlink(missing_ok=True)
    task = make_task(args, world, data, saved)
    plan = plan_of(args, world, task)
    strategy = STRATEGIES[args.strategy](task, world, plan)
    plan.timeline.about |= {
        "schedule": strategy.schedule, "num_microbatches": strategy.num_microbatches
    }  # fmt: skip
    # Dropout differs between ranks that have different examples, and only between those.
    torch.manual_seed(stream(args.seed, "dropout", strategy.part, 0))
    notes = [] if args.precision == "fp64" else precision_notes(world.device, args.precision)
    notes += [*core_notes(world), *resume.notes]
    say(world, "\n".join([describe(args, world, task, strategy), *notes]))
    try:
        log = train(world, args, task, strategy, plan, resume)
        if args.timeline:
            plan.timeline.save(args.workdir)
        summary = summarize(world, args, strategy, log)
        summary |= evaluate(world, task, strategy)
        if world.is_main:
            write_json(args.workdir / SUMMARY, summary | {"checks": {}})  # whatever comes now
        if shown := task.show(strategy, strategy.part, strategy.parts):
            say(world, shown)
        outputs = outputs_on_main(world, task, strategy) if args.check_output else []
        # The whole model, which no rank may have room for, is brought together only to be used.
        wanted = args.check_weights or args.export is not None
        weights = strategy.whole_weights() if wanted else {}
    finally:
        strategy.close()

    def conclude() -> None:
        if args.export is not None:
            say(world, task.export(args.export, weights))
        verdicts = check(world, args, task, plan, strategy.compute_dtype, weights, outputs)
        checks = {verdict.what: verdict.as_dict() for verdict in verdicts}
        write_json(args.workdir / SUMMARY, summary | {"checks": checks})
        say(world, f"Results are in {args.workdir}/.")
        wrong = [f"{v.what} are not those of one process" for v in verdicts if not v.agrees]
        if wrong:
            raise RunError(f"{args.strategy}: {'; '.join(wrong)}")

    on_main(world, conclude)


def say(world: World, text: str) -> None:
    """Prints, on rank 0 alone."""
    if world.is_main:
        print(text, flush=True)


def describe(args: argparse.Namespace, world: World, task: Task, strategy: Strategy) -> str:
    """What is trained, on what, and how, in two lines."""
    parameters = sum(p.numel() for p in task.skeleton().parameters())
    workers = f"{world.world_size} worker{'s' * (world.world_size > 1)}"
    return (
        f"{args.strategy}, {workers}{strategy.layout}: {args.model}, {parameters / 1e6:.1f} M "
        f"parameters; {num_steps(args, task)} steps of {args.batch_size}, {args.optimizer} at "
        f"{learning_rate(args):g}, {args.precision}, {world.device.type}\n{task.describe()}"
    )


def train(
    world: World,
    args: argparse.Namespace,
    task: Task,
    strategy: Strategy,
    plan: Plan,
    resume: Resume,
) -> Log:
    """Makes the steps, saves now and then, and prints a line now and then."""
    optimizer = Optimizers(
        strategy.optimizers, recipe_of(args, task), world, counted=strategy.counted
    )
    total, log = num_steps(args, task), Log()
    checkpoints = Checkpoints(world, args, task, strategy, optimizer, resume)
    checkpoints.restore(resume, log)
    check_replicas(world, strategy.copies(), "at the start")
    table = Table(world, args, task, total, optimizer.steps)
    steps = all_steps(
        args, task, strategy.part, strategy.parts, strategy.num_microbatches, optimizer.steps
    )
    bar = tqdm(
        steps, "Training", total, initial=optimizer.steps, leave=False,
        disable=None if world.is_main else True,
    )  # fmt: skip
    for step in plan.timeline.over(bar):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = strategy.backward(step)
        left_out = optimizer.step(loss, step.count)
        log.add(step, loss.item(), time.perf_counter() - begin, left_out is not None)
        if left_out and world.is_main:
            bar.write(left_out)
        if optimizer.steps == total or optimizer.steps % task.steps_per_epoch == 0:
            check_replicas(world, strategy.copies(), f"after step {optimizer.steps}")
        table.after_step(optimizer.steps, log, bar)
        checkpoints.after_step(log, total)
    return log


class Table:
    """A line for every tenth of the run."""

    def __init__(
        self, world: World, args: argparse.Namespace, task: Task, total: int, done: int
    ) -> None:
        self.world, self.args, self.total = world, args, total
        self.every, self.first, self.said = -(-total // LINES), done, done
        self.start = time.perf_counter()
        say(world, f"\n{'step':>8}   {'loss':>7}   {'time':>6}   {task.unit + '/s':>12}")

    def after_step(self, k: int, log: Log, bar: Any) -> None:
        """All ranks call it together: the losses are those of all."""
        if k % self.every and k < self.total:
            return
        since = self.said - self.first
        losses = log.mean_losses(self.world.device, since)
        speed = self.args.batch_size * len(losses) / sum(log.seconds[since:])
        if self.world.is_main:
            elapsed = time.perf_counter() - self.start
            taken = [loss for loss in losses if not math.isnan(loss)]
            mean = fmean(taken) if taken else math.nan
            bar.write(f"{k:>8}   {mean:>7.3f}   {elapsed:>5.0f}s   {speed:>12,.1f}")
        self.said = k


def evaluate(world: World, task: Task, strategy: Strategy) -> dict[str, float]:
    """Mean loss and share of right answers over the test data."""
    totals = torch.zeros(3, dtype=torch.float64)
    batches = task.test_batches(strategy.part, strategy.parts)
    most = torch.tensor(len(batches), device=world.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)  # where a rank has none left, it still takes part
    batches += [(None, None)] * (int(most) - len(batches))
    bar = tqdm(batches, "Testing", leave=False, disable=None if world.is_main else True)
    for x, target in bar:
        output = strategy.outputs(x)
        if output is not None:
            totals += task.score(output, target)
    loss_sum, right, answers = sum_over_ranks(totals.tolist(), world.device)
    loss, accuracy = loss_sum / max(1.0, answers), right / max(1.0, answers)
    say(world, f"test: loss {loss:.3f}, {accuracy:.1%} of all {task.answers} right")
    return {"test_loss": loss, "test_accuracy": accuracy}


def summarize(
    world: World, args: argparse.Namespace, strategy: Strategy, log: Log
) -> dict[str, Any]:
    """What figures are drawn from; bytes are of each rank."""
    memory: list[Any] = [None] * world.world_size
    dist.all_gather_object(memory, (peak_bytes(world.device), strategy.state_bytes()))
    steps = log.whole(world.device)
    return {
        "strategy": args.strategy,
        "num_workers": world.world_size,
        "model": args.model,
        "vgg_width": args.vgg_width,
        "precision": args.precision,
        "schedule": strategy.schedule,
        "num_microbatches": strategy.num_microbatches,
        "batch_size": args.batch_size,
        "layout": strategy.layout,
        "step_seconds": steps["time"],
        **log.speeds(world.device, world.world_size / strategy.parts),
        "peak_rss_bytes": [peak for peak, _ in memory],
        "state_bytes": {kind: [state[kind] for _, state in memory] for kind in memory[0][1]},
        "loss": steps["loss"],
    }


def outputs_on_main(world: World, task: Task, strategy: Strategy) -> list[Tensor]:
    """The outputs for a batch of test data of each part, on rank 0; nothing on other ranks."""
    batches = task.test_batches(strategy.part, strategy.parts)
    output = strategy.outputs(batches[0][0] if batches else None)
    mine = None if output is None else (strategy.part, output.cpu())
    found: list[Any] = [None] * world.world_size
    dist.gather_object(mine, found if world.is_main else None)
    return [output for _, output in sorted((f for f in found if f), key=lambda f: f[0])]


def check(
    world: World,
    args: argparse.Namespace,
    task: Task,
    plan: Plan,
    compute_dtype: torch.dtype | None,
    weights: dict[str, Tensor],
    outputs: list[Tensor],
) -> list[Verdict]:
    """Trains once more without the strategy, and says how that compares."""
    if not (args.check_weights or args.check_output):
        return []
    say(world, "\nThe same training on one process, in plain PyTorch, and in float64 ...")
    runs = PlainRuns(
        task, world.device, partial(all_steps, args, task), recipe_of(args, task),
        plan.make_optimizer, plan.autocast, compute_dtype,
    )  # fmt: skip
    verdicts = []
    if args.check_weights:
        verdicts.append(compare("weights", weights, *runs.weights(), plan.dtype))
    if args.check_output:
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
