"""The training loop: the only one, for every model and every layout.

    for every epoch:
        for every step:         each rank has its part of the global batch, in micro-batches
            backward            forward and backward of the micro-batches    layout.py
            average_gradients   over the ranks that hold the same weights    replicated.py
            optimizer.step      check, clip, schedule, update                optimization.py
            save, now and then                                               resume.py
        compare the replicas; validate, score, write the results             results.py

The loss of a step is the mean over all target tokens of the global batch. The loop knows no layout:
a `LaidOutModel` runs the micro-batches and leaves the gradients of the global batch in its rank's
parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch import nn

from training.metrics import Metrics, Tracker
from training.optimization import ADVICE, Optimizers, Recipe
from training.options import Options
from training.progress import moving
from training.results import NOTHING_YET, Results, Totals
from training.seeds import stream
from training.timeline import Timeline

from .launch import notice
from .launch.errors import RunError
from .launch.world import World
from .layouts.layout import LaidOutModel
from .layouts.setup import Setup
from .resume import NO_RESUME, Resume, Saving
from .tasks.task import Score, Step, TrainingTask


def train(
    model: LaidOutModel,
    optimizer: Optimizers,
    steps: Iterable[Step],
    desc: str,
    rank: int = 0,
    average_gradients_fn: Callable[[nn.Module], None] | None = None,
    n_steps: int | None = None,
    before: Totals = NOTHING_YET,
    after_step: Callable[[Totals, float], None] = lambda *_: None,
    prepare: Callable[[], None] = lambda: None,
) -> Totals:
    """Trains an epoch, or the rest of one. Afterwards p.grad still holds the last step's gradients.

    Args:
        average_gradients_fn: called after backward; averages gradients over the ranks.
        before: totals of this epoch's steps that an earlier run has done; `steps` are the rest.
        after_step: called with the totals so far and the step's seconds, e.g. to save; its own time
            is not counted.
        prepare: called while a GPU still computes, to make the next batch; see `Ahead`.

    Raises:
        RunError: a loss or gradient is not finite; see `Optimizers.step`.
    """
    totals = before
    bar = moving(steps, desc, n_steps, "step", shown=rank == 0, done=before.steps)
    start = time.perf_counter()  # waiting for the next batch counts, too
    for step in bar:
        optimizer.zero_grad()  # backward adds to what it finds
        loss = model.backward(step)  # a scalar, this rank's part of the sum
        prepare()
        if average_gradients_fn is not None:  # other layouts combine theirs in backward
            average_gradients_fn(cast(nn.Module, model.module))
        # All ranks meet here: they decide alike whether to update, from the same numbers.
        remark = optimizer.step(loss, step.count, (step.positions, step.tokens, notice.given()))
        if remark is not None and rank == 0:
            bar.write(remark)
        seconds = time.perf_counter() - start  # a GPU may still compute the update
        totals = _add(totals, step, optimizer.loss_sum, seconds, math.isnan(optimizer.loss))
        bar.set_postfix_str(
            f"loss {optimizer.loss_sum / max(1, step.count):.3f}, "
            f"{totals.positions / totals.seconds:,.0f} tokens/s",
            refresh=False,
        )
        after_step(totals, seconds)
        start = time.perf_counter()
    return totals


def _add(totals: Totals, step: Step, loss_sum: float, seconds: float, skipped: bool) -> Totals:
    """The totals after one more step."""
    return Totals(
        loss_sum=totals.loss_sum + (0.0 if skipped else loss_sum),
        count=totals.count + (0 if skipped else step.count),
        positions=totals.positions + step.positions,
        tokens=totals.tokens + step.tokens,
        seconds=totals.seconds + seconds,
        skipped=totals.skipped + skipped,
        steps=totals.steps + 1,
    )


class Ahead(Iterator[Step]):
    """Steps, of which the next can be made ahead of its turn: while a GPU computes the one before,
    which the host has only launched."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._steps = iter(steps)
        self._made: list[Step] = []  # one at most

    def prepare(self) -> None:
        """Makes the next step, if there is one and it is not made."""
        if not self._made:
            self._made += islice(self._steps, 1)

    def __next__(self) -> Step:
        self.prepare()
        if not self._made:
            raise StopIteration
        return self._made.pop()


def seeded(steps: Iterable[Step], model: LaidOutModel, seed: int, done: int) -> Iterator[Step]:
    """The same steps, of which `done` precede the first. Before each torch's generators are seeded
    by its number. So dropout that draws (of transformers, in --pipeline blocks) has other masks on
    every part and shard, and the same ones in a resumed run."""
    for number, step in enumerate(steps, done):
        torch.manual_seed(stream(seed, "dropout", model.dp_rank, model.tp_rank, number))
        yield step


def evaluate_loss(world: World, task: TrainingTask, model: LaidOutModel) -> tuple[float, float]:
    """The mean loss over all targets of the validation data, and the accuracy from 0 to 1; the same
    on all ranks. Call it while the model is `evaluating`."""
    totals = torch.zeros(3, dtype=torch.float64)  # loss, right answers, answers
    batches: list[Any] = task.validation_batches(model.dp_rank, model.dp_size)  # this part's
    # A rank that has no batch left still takes part in collectives.
    batches += [(None, None)] * (max(world.gather(len(batches))) - len(batches))
    for x, target in moving(batches, "Validating", len(batches), "batch", shown=world.is_main):
        notice.end_if_given()
        found = model.measure(x, target)
        if found is not None:  # None: no batch left, or another rank sees the outputs
            totals += found
    world.sum(totals)  # each batch was measured on one rank
    loss, right, answers = totals.tolist()
    return loss / max(1.0, answers), right / max(1.0, answers)


def step_timeout(args: Options, world: World, seconds: float) -> float:
    """Seconds that a rank waits for another in a step that follows one of so many seconds."""
    if args.step_timeout is not None:
        return args.step_timeout
    if args.compile or world.device.type != "cpu":  # which may compile again
        return args.timeout
    return min(args.timeout, max(60.0, 10 * seconds))


def run(
    world: World,
    task: TrainingTask,
    model: LaidOutModel,
    setup: Setup,
    resume: Resume = NO_RESUME,
    trackers: Sequence[Tracker] = (),
) -> Results:
    """Trains from scratch or from a checkpoint; evaluates after every epoch."""
    args = setup.args
    recipe = Recipe(args, task.steps_per_epoch)
    total, per_epoch = recipe.num_steps, recipe.steps_per_epoch
    optimizer = Optimizers(model.optimizers, recipe, world, counted=model.counted, run=model.run)
    results = Results(world, args, task, model)
    saving = Saving(world, args, task, model, optimizer)
    before = saving.restore(resume)
    model.check_replicas("at the start")  # after weights were loaded
    done = optimizer.steps  # by the run that is resumed
    # An epoch's last checkpoint precedes its evaluation, so a resumed run evaluates it again.
    first = max(0, done - 1) // per_epoch
    results.begin([*setup.notes(world.device), *resume.notes], resumed=done > 0)
    # After `begin`, which has moved old files away.
    metrics = Metrics(world, args, model, done, trackers)
    setup.timeline.last.step = done + 1
    epochs = _Epochs(setup.timeline, optimizer, results, saving, metrics)
    with notice.heeded(args.on_signal), saving.before_the_end():
        if args.num_batches is None and done == 0 and not args.benchmark_only:
            setup.timeline.last.note("evaluation")
            results.say_start(*_evaluate(results, "before the first step"))
        for epoch in range(first, -(-total // per_epoch)):  # the last one may be cut short
            length = min(per_epoch, total - epoch * per_epoch)  # steps of this epoch
            epochs.run(epoch, length, before)
            before = NOTHING_YET  # only the first epoch was begun by an earlier run
    saving.prune()  # waits for what is written in the background
    if not setup.timeline.complete:  # the run was shorter
        setup.timeline.save(args.workdir)
    results.summarize()
    return results


@dataclass(frozen=True)
class _Epochs:
    """The epochs of a run, and what they leave behind. All ranks call the methods together."""

    timeline: Timeline
    optimizer: Optimizers
    results: Results
    saving: Saving
    metrics: Metrics

    def run(self, epoch: int, length: int, before: Totals) -> None:
        """Trains an epoch of so many steps, of which those in `before` are done; then saves,
        compares the replicas, and evaluates."""
        world, args = self.results.world, self.results.args
        task, model, note = self.results.task, self.results.model, self.timeline.last.note
        steps = task.steps(
            epoch, model.dp_rank, model.dp_size, model.num_microbatches, before.steps
        )
        ahead = Ahead(islice(steps, length - before.steps))  # none if all are done
        steps = self.timeline.over(seeded(ahead, model, args.seed, self.optimizer.steps))
        totals = train(
            model, self.optimizer, steps, f"Epoch {epoch + 1}", world.rank,
            model.average_gradients, n_steps=length, before=before,
            after_step=self._after_step, prepare=ahead.prepare,
        )  # fmt: skip
        model.set_timeouts(args.timeout)
        note("checkpoint")
        self.saving.save(epoch, totals)  # before the evaluation, which can be repeated
        note("comparison of replicas")
        model.check_replicas(f"in epoch {epoch + 1}")
        note("evaluation")
        # BLEU is meaningless before one epoch.
        few = task.score_name == "BLEU" and (args.num_batches or math.inf) < task.steps_per_epoch
        loss, score = math.nan, Score()
        if not args.benchmark_only:
            loss, score = _evaluate(self.results, f"after epoch {epoch + 1}", score=not few)
        result = self.results.end_epoch(epoch, totals, loss, score)
        self.metrics.add_evaluation(self.optimizer.steps, epoch, result)

    def _after_step(self, totals: Totals, seconds: float) -> None:
        """Raises Ended if a rank was given notice."""
        world, args, model = self.results.world, self.results.args, self.results.model
        model.set_timeouts(step_timeout(args, world, seconds))
        epoch = (self.optimizer.steps - 1) // self.results.task.steps_per_epoch
        self.metrics.add_step(epoch, self.optimizer, seconds)
        asked = self.optimizer.counts[2] > 0  # on some rank
        # After the metrics: metrics.jsonl has what a checkpoint has done.
        self.saving.after_step(epoch, totals, asked)
        if asked:
            self.saving.saver.wait()
            world.gather(None)  # a rank that ends, ends the others
            raise notice.Ended
        if self.timeline.recording and self.timeline.complete:
            self.timeline.save(args.workdir)  # at once: the run may be interrupted later
        self.timeline.last.note("next batch")
        self.timeline.last.step = self.optimizer.steps + 1


def _evaluate(results: Results, when: str, score: bool = True) -> tuple[float, Score]:
    """The validation loss and the score. RunError, on all ranks, if the loss is not finite, unless
    --on_nan skip."""
    world, task, model = results.world, results.task, results.model
    with model.evaluating(), notice.ends_waits():
        loss, accuracy = evaluate_loss(world, task, model)
        if not math.isfinite(loss):
            said = f"{when}: the validation loss is {loss}"
            if results.args.on_nan == "stop":
                raise RunError(f"{said}; {ADVICE}")
            results.say(f"{said}; the run goes on")
        return loss, task.score(world, model, loss, accuracy) if score else Score()
