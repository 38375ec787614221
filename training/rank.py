"""The life of a rank, the same in every program: data, model, training.

    resume    -> task      -> compare      -> layout     -> work
    rank 0's     the data,    all ranks       the model,    the loop, outputs, curves, checks
    options      tokenized    have the same   laid out

A program passes functions that make the task and the layout and do the work. So it imports only
what it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from runtime.axes import axes_in_words, ranks_of
from training.files import show
from training.loop import run
from training.options import O, Options
from training.results import Results, options_of

from .launch.compare_ranks import check_same, compared_values
from .launch.errors import counted
from .launch.world import World
from .layouts.layout import LaidOutModel, Setup, setup_of
from .optimization import check_schedule, decay_steps_of, usual_warmup
from .resume import Resume, find_resume, started
from .tasks.task import TrainingTask


def run_rank(
    world: World,
    args: O,
    task_of: Callable[[O, World, Resume], TrainingTask],
    layout_of: Callable[[TrainingTask, World, Setup], LaidOutModel],
    work: Callable[[LaidOutModel, Resume], None],
) -> None:
    """One rank of a run. All ranks call it together.

    Args:
        task_of: reads the data, and makes the task.
        layout_of: lays the task's model out.
        work: what the program does with the layout, which is closed afterwards: see `trained`.

    Raises:
        UserError: the data cannot be read, are too few, or are not those of the resumed run.
        RunError: the ranks differ, or the work raises it.
    """
    # Hosts may have different folders: what rank 0 finds in its folder counts for all.
    resume, of_main = world.on_main(lambda: (find_resume(args), vars(args)))
    if args.resume:
        args = replace(args, **{name: of_main[name] for name in of_main.keys() - args.typed})
    with started(world, args):
        task = task_of(args, world, resume)
        if world.world_size > 1:  # all ranks go on, or none
            fingerprints = task.fingerprints()
            check_same(world, compared_values(options_of(args), fingerprints, task.model_content()))
        config = task.files["config.json"]
        world.on_main(lambda: resume.check_data_and_model(task.fingerprints(), config))
    if resume.checkpoint is None:  # else they are as in the saved run
        if args.warmup_steps is None:
            args = replace(args, warmup_steps=usual_warmup(args, task.steps_per_epoch))
        if args.lr_scheduler == "wsd":
            args = replace(args, decay_steps=decay_steps_of(args, task.steps_per_epoch))
    check_schedule(args, task.steps_per_epoch)
    model = layout_of(task, world, setup_of(args, world, resume.cut))
    try:
        work(model, resume)
    finally:
        model.close()


def trained(model: LaidOutModel, resume: Resume) -> Results:
    """Prints what will be trained, and trains it. All ranks call it together."""
    args, timeline = model.setup.args, model.setup.timeline
    m = args.num_microbatches or model.num_microbatches
    timeline.about |= {"schedule": model.schedule, "num_microbatches": m, "ranks": model.ranks}
    n, unit = (args.num_batches, "step") if args.num_batches else (args.n_epochs, "epoch")
    if model.world.is_main:
        layout = layout_in_words(args, model)
        show(f"{layout}, micro-batches: {m or 'automatic'}, {counted(n, unit)}")
    return run(model, resume)


def layout_in_words(args: Options, model: LaidOutModel) -> str:
    """The layout, for the first line of a run."""
    devices = args.num_devices or 0  # of stages in threads
    name = "one device" if devices and args.strategy == "none" else args.strategy
    unit = "stage" if devices and not model.ranks else "rank"
    words = [
        f"{name}: {counted(devices or args.world_size, unit)}",
        args.strategy == "3d" and axes_in_words(ranks_of(vars(args))),
        args.cp > 1 and f"attention by {args.attention}",
        args.sequence_parallel and "sequence parallel",
        args.zero and f"ZeRO stage {args.zero}",
        (devices or args.pp) > 1
        and f"schedule {model.schedule}".partition("\n")[0].replace("# ", ""),
        model.ranks and f"{args.chunks} chunks each, {len(model.ranks)} stages",
    ]
    return ", ".join(str(word) for word in words if word)
