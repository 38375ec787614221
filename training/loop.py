"""The training loop: the only one, for every model and every layout.

    for every epoch:
        for every step:         each rank has its part of the global batch, in micro-batches
            backward            forward and backward of the micro-batches    layout.py
            average_gradients   over the ranks that hold the same weights    replicated.py
            optimizer.step      check, clip, schedule, update                optimization.py
            save, and measure the validation loss, now and then              resume.py
        compare the replicas; validate, score, write the results             results.py

The loss of a step is the mean over all target tokens of the global batch. The loop knows no layout:
a `LaidOutModel` runs the micro-batches and leaves the gradients of the global batch in its rank's
parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from itertools import islice

import torch
from torch import nn

from runtime.cores import quota_note
from runtime.waits import set_timeouts
from training.files import moving
from training.optimization import ADVICE, Counts, GlobalOptimizer, Recipe
from training.options import Options
from training.results import NOTHING_YET, Results, Totals
from training.tasks.task import stream
from training.timeline import profiled

from .launch.errors import RunError
from .launch.signals import NOTICES_GIVEN, Ended, notice_raises, notice_sets_flag
from .launch.world import World
from .layouts.layout import LaidOutModel
from .resume import NO_RESUME, Resume, Saving
from .tasks.task import Score, Step, TrainingTask


def train(
    model: LaidOutModel,
    optimizer: GlobalOptimizer,
    steps: Iterable[Step],
    desc: str,
    rank: int = 0,
    average_gradients_fn: Callable[[nn.Module | None], None] | None = None,
    n_steps: int | None = None,
    before: Totals = NOTHING_YET,
    before_step: Callable[[], None] = lambda: None,
    after_step: Callable[[Totals, float], None] = lambda *_: None,
) -> Totals:
    """Trains an epoch, or the rest of one. Afterwards p.grad still holds the last step's gradients.

    Args:
        average_gradients_fn: called after backward; averages gradients over the ranks.
        before: totals of this epoch's steps that an earlier run has done; `steps` are the rest.
        before_step: called before each step, e.g. to seed it.
        after_step: called with the totals so far and the step's seconds, e.g. to save; its own time
            is not counted.

    Raises:
        RunError: a loss or gradient is not finite; see `GlobalOptimizer.step`.
    """
    totals, remaining = before, iter(steps)
    with moving(None, desc, n_steps, "step", shown=rank == 0, done=before.steps) as bar:
        start = time.perf_counter()  # waiting for the next batch counts, too
        step = next(remaining, None)
        while step is not None:
            before_step()
            optimizer.zero_grad()  # backward adds to what it finds
            loss = model.backward(step)  # a scalar, this rank's part of the sum
            following = next(remaining, None)  # while a GPU computes what the host has launched
            if average_gradients_fn is not None:
                average_gradients_fn(model.module)
            # All ranks meet here: they decide alike whether to update, from the same numbers.
            counts = Counts(step.positions, step.tokens, bool(NOTICES_GIVEN))
            remark = optimizer.step(loss, step.count, counts)
            if remark is not None and rank == 0:
                bar.write(remark)
            seconds = time.perf_counter() - start  # a GPU may still compute the update
            skipped = math.isnan(optimizer.loss)
            loss_sum, count = (0.0, 0) if skipped else (optimizer.loss_sum, step.count)
            totals = totals.plus(
                Totals(loss_sum, count, step.positions, step.tokens, seconds, skipped, steps=1)
            )
            bar.set_postfix_str(
                f"loss {optimizer.loss_sum / step.divisor:.3f}, "
                f"{totals.positions / totals.seconds:,.0f} positions/s",
                refresh=False,
            )
            bar.update()
            after_step(totals, seconds)
            start, step = time.perf_counter(), following
    return totals


def seed_step(model: LaidOutModel, seed: int, number: int) -> None:
    """Seeds torch's generators by the number of the step in the run. So dropout that draws from
    them (that of transformers, in --pipeline blocks) has different masks on every part and shard,
    and a resumed run has the same masks again."""
    torch.manual_seed(stream(seed, "dropout", model.dp_rank, model.mask_rank, number))


def evaluate_loss(world: World, task: TrainingTask, model: LaidOutModel) -> tuple[float, float]:
    """The mean loss over all targets of the validation data, and the accuracy from 0 to 1; the same
    on all ranks. Call it while the model is `evaluating`."""
    totals = torch.zeros(3, dtype=torch.float64)  # loss, right answers, answers
    m = model.evaluated_microbatches
    number, batches = task.validation_batches(model.dp_rank, model.dp_size, m)
    most = max(world.gather(number))
    for _ in moving(range(most), "Validating", most, "batch", shown=world.is_main):
        # A rank that has no batch left still takes part in collectives.
        measures = model.measure(*next(batches, (None, None)))
        if measures is not None:  # None: no batch left, or another rank sees the outputs
            totals += measures
    world.sum(totals)  # each batch was measured on one rank
    loss, right, answers = totals.tolist()
    return loss / max(1.0, answers), right / max(1.0, answers)


def step_timeout(args: Options, world: World, seconds: float) -> float:
    """Seconds that a rank waits for the others in a step, if the one before took `seconds`."""
    if args.step_timeout is not None:
        return args.step_timeout
    if args.compile or world.device.type != "cpu":  # the step may compile again
        return args.timeout
    return min(args.timeout, max(60.0, 10 * seconds))


def run(model: LaidOutModel, resume: Resume = NO_RESUME) -> Results:
    """Trains from scratch or from a checkpoint; evaluates after every epoch."""
    world, task, setup = model.world, model.task, model.setup
    args, timeline, note = setup.args, setup.timeline, setup.timeline.last.note
    recipe = Recipe(args, task.steps_per_epoch)
    total, per_epoch = recipe.num_steps, recipe.steps_per_epoch
    # With `total`, never within an epoch.
    every = total if args.benchmark_only else args.eval_every or total
    optimizer = model.global_optimizer(recipe)
    results = Results(args, model)
    saving = Saving(args, model, optimizer)
    before = saving.restore(resume)
    model.check_replicas("at the start")  # after weights were loaded
    done = optimizer.steps  # those of the run that is resumed
    quota = quota_note() if world.device.type == "cpu" else []
    results.begin([*setup.notes(world.device), *quota, *resume.notes], done)

    def before_step() -> None:
        timeline.begin_step()
        timeline.last.step = optimizer.steps + 1
        seed_step(model, args.seed, optimizer.steps)

    def after_step(totals: Totals, seconds: float) -> None:
        """Raises Ended if a rank was given notice."""
        set_timeouts(step_timeout(args, world, seconds))
        results.add_step(epoch, optimizer, seconds)
        asked = optimizer.counts.notices > 0  # on some rank
        # After `add_step`: metrics.jsonl must have every step that a checkpoint has.
        saving.after_step(epoch, totals, asked)
        if asked:
            saving.saver.wait()
            world.gather(None)  # waits for all: a rank that ends also ends the others
            raise Ended
        if timeline.recording and timeline.complete:
            timeline.save(args.workdir)  # at once: the run may be interrupted later
        timeline.end_step()
        if optimizer.steps % every == 0:
            validate_within(totals.steps)
        note("next batch")

    def validate_within(steps: int) -> None:
        """Validates within an epoch, after `steps` of its steps, but not at its end. A notice
        to end waits for the next step. If this step saves a checkpoint, it was saved before: a run
        resumed there validates, too."""
        if 0 < steps < length:
            set_timeouts(args.timeout)  # until after the next step
            with model.evaluating():
                loss, _ = _validate(results, f"after step {optimizer.steps}")
            results.add_validation(epoch, optimizer.steps, loss)

    with (
        notice_sets_flag(),
        saving.before_the_end(),
        profiled(timeline, args.profile, args.workdir),
    ):
        if args.num_batches is None and done == 0 and not args.benchmark_only:
            results.say_start(*_evaluate(results, "before the first step"))
        # An epoch's last checkpoint precedes its evaluation: a run resumed there evaluates again.
        for epoch in range(max(0, done - 1) // per_epoch, -(-total // per_epoch)):
            length = min(per_epoch, total - epoch * per_epoch)  # the last one may be cut short
            if optimizer.steps % every == 0:
                validate_within(before.steps)
            steps = task.steps(
                epoch, model.dp_rank, model.dp_size, model.num_microbatches, before.steps
            )
            totals = train(
                model, optimizer, islice(steps, length - before.steps), f"Epoch {epoch + 1}",
                world.rank, model.average_gradients, length, before, before_step, after_step,
            )  # fmt: skip
            before = NOTHING_YET  # only the first epoch was begun by an earlier run
            set_timeouts(args.timeout)
            saving.save(epoch, totals)  # before the evaluation, which can be repeated
            note("comparison of replicas")
            model.check_replicas(f"in epoch {epoch + 1}")
            loss, score = math.nan, Score()
            if not args.benchmark_only:
                scored = total >= per_epoch or not task.needs_an_epoch
                loss, score = _evaluate(results, f"after epoch {epoch + 1}", scored)
            results.end_epoch(epoch, optimizer.steps, totals, loss, score)
    saving.prune()  # waits for what is written in the background
    if not timeline.complete:  # the run was shorter
        timeline.save(args.workdir)
    results.summarize()
    return results


def _evaluate(results: Results, when: str, score: bool = True) -> tuple[float, Score]:
    """The validation loss and the score."""
    world, task, model = results.world, results.task, results.model
    with model.evaluating(), notice_raises():
        loss, accuracy = _validate(results, when)
        return loss, task.score(world, model, loss, accuracy) if score else Score()


def _validate(results: Results, when: str) -> tuple[float, float]:
    """The validation loss and the accuracy, see `evaluate_loss`. Raises RunError, on all ranks, if
    the loss is not finite, unless --on_nan skip."""
    results.world.last.note("evaluation")
    loss, accuracy = evaluate_loss(results.world, results.task, results.model)
    if not math.isfinite(loss):
        said = f"{when}: the validation loss is {loss}"
        if results.args.on_nan == "stop":
            raise RunError(f"{said}; {ADVICE}, or --on_nan skip")
        results.say(f"{said}; the run goes on")
    return loss, accuracy
