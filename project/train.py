"""Trains VGG16 or GPT-2 under any strategy, on processes that exchange tensors.

    single     one process
    ddp        the whole model on every rank, a part of each batch on each
    fsdp       a shard of every layer on each rank, a part of each batch on each
    pipeline   some of the layers on each rank, micro-batches flowing through them
    model      the same with one micro-batch: one rank computes at a time

    python project/train.py ddp --num_workers 2 --num_batches 2 --learning_rate 1e-3 \\
        --batch_size 32 --check_weights --check_output
    torchrun --nproc-per-node 2 project/train.py ddp --model gpt2-mini

Dropout is off by default: every strategy draws other masks, and nothing could be compared. A rank
has one core unless --cores_per_rank says otherwise, so that the throughput of one, two and four
ranks can be compared.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    from project.options import TrainOptions, begin

    begin(TrainOptions, __doc__)

from typing import Any

from project.rules import VGG, check_warmup, parse_train
from project.utils import finish, launch_settings, plan_of, read_texts, run_program
from training.check import check, outputs_on_main
from training.launch import RunError, UserError, World, launch, on_main
from training.loop import run
from training.parallel import lay_out
from training.pictures import PictureSets, load_pictures
from training.replicated import Replicated
from training.results import SUMMARY, write_json
from training.saving import NO_RESUME, Resume, find_resume
from training.task import Task
from training.text import Texts
from training.translation import FILES, TranslationTask
from training.vgg import PictureTask
from training.workdir import alone_in_workdir


def run_rank(
    world: World, args: Any, data: Texts | PictureSets, resume: Resume = NO_RESUME
) -> None:
    """One rank of the program. Raises RunError where it does not compute what one process does."""
    task: Task
    resume = resume.of_main(world)
    if isinstance(data, PictureSets):
        task = PictureTask(args, world, data)
    else:
        task = TranslationTask(args, world, data, resume.files(FILES) if world.is_main else None)
    plan = plan_of(args, world)
    model = lay_out(args, task, world, plan, resume.cut)
    plan.timeline.about |= {
        "schedule": model.schedule, "num_microbatches": model.num_microbatches
    }  # fmt: skip
    average = model.average_gradients if isinstance(model, Replicated) else None
    try:
        results = run(world, args, task, model, plan, average, resume)
        outputs = outputs_on_main(world, task, model) if args.check_output else []
        weights = dict(model.weights()) if args.check_weights else {}
        finish(world, results, args, task, model)
    finally:
        model.close()

    def conclude() -> None:
        if args.check_weights or args.check_output:
            results.say("\nThe same training on one process, in plain PyTorch, and in float64 ...")
        verdicts = check(world, args, task, plan, model, weights, outputs)
        checks = {verdict.what: verdict.as_dict() for verdict in verdicts}
        write_json(args.workdir / SUMMARY, results.summary | {"checks": checks})
        for verdict in verdicts:
            results.say(verdict.say())
        wrong = [f"{v.what} are not those of one process" for v in verdicts if not v.agrees]
        if wrong:
            raise RunError(f"{args.strategy}: {'; '.join(wrong)}")

    on_main(world, conclude)


def read_data(args: Any) -> Texts | PictureSets:
    """Pictures or sentence pairs, whichever the model wants. Raises UserError where there are none,
    or fewer than ranks."""
    if args.model != VGG:
        return read_texts(args)
    pictures = load_pictures(args.dataset, args.n_train, args.n_validation, seed=1234)
    fewest = min(len(pictures.train), len(pictures.test))
    if args.strategy in ("ddp", "fsdp") and fewest < args.world_size:
        raise UserError(
            f"--world_size {args.world_size} --dataset {args.dataset}: it has {fewest} pictures, "
            f"and each rank needs one; --world_size {fewest} or less works"
        )
    check_warmup(args, len(pictures.train))
    return pictures


def main() -> None:
    """The program."""
    args = parse_train(__doc__)
    with alone_in_workdir(args):
        data = read_data(args)
        size = len(data.train if isinstance(data, PictureSets) else data.splits["train"])
        resume = find_resume(args, size, data.fingerprint())
        launch(run_rank, launch_settings(args), args, data, resume)


if __name__ == "__main__":
    run_program(main)
