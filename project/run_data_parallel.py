"""Trains GPT-2 to translate, on several processes with data parallelism.

Every process holds the whole model and a part of each batch; gradients are averaged over the
processes while they are computed. The losses are those of one process with the whole batch.

    python project/run_data_parallel.py --world_size 2 --batch_size 128 --n_epochs 10
    torchrun --nproc-per-node 2 project/run_data_parallel.py
    python project/run_data_parallel.py --pytest True --n_epochs 1      then: pytest -k a4_1_2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    import project.startup  # noqa: F401 (Ctrl-C ends what takes seconds from here on)

import torch
from torch import Tensor, nn

from data_parallel.gradients import (
    GRADIENT_SYNCS,
    GradientBuckets,
    average_gradients,
    average_gradients_flat,
)
from project.folders import alone_in_workdir, claim_folders
from project.options import (
    boolean,
    count,
    launch_settings,
    open_timeline,
    parser_for,
    port,
    positive,
    run_program,
    seconds,
)
from project.progress import NO_RESUME, Progress, Resume, check_texts, find_resume
from project.rules import check_batch, check_model, check_parts, check_ranks
from project.session import open_session, read_texts
from project.utils import autocast, save_grad_weights, train
from training.agreement import check_replicas, check_same, run_things
from training.data import Step
from training.launch import UserError, World, launch, on_main, setup, torchrun_world_size
from training.model import target_loss
from training.optimization import Optimizers, Recipe
from training.seeds import stream
from training.text import Texts
from training.timeline import OFF, Timeline

BUCKET_MB = 4.0

__all__ = ["average_gradients", "main", "run_dp", "setup"]


def make_gradient_sync(
    args: argparse.Namespace, model: nn.Module, timeline: Timeline = OFF
) -> tuple[Callable[[nn.Module], None], Callable[[], AbstractContextManager[None]]]:
    """The function that makes the gradients those of all ranks, and the context in which
    backward only accumulates."""
    if args.gradient_sync == "overlap":
        buckets = GradientBuckets(
            model,
            bucket_bytes=max(1, int(min(args.bucket_mb, 2**30) * 2**20)),
            comm_dtype=torch.bfloat16 if args.comm_dtype == "bf16" else None,
            recorder=timeline if timeline.recording else None,
        )
        return lambda _: buckets.finish(), buckets.no_sync
    by_hand = average_gradients if args.gradient_sync == "per_parameter" else average_gradients_flat
    return timeline.span("all_reduce")(by_hand), nullcontext


def make_backward(
    args: argparse.Namespace,
    world: World,
    model: nn.Module,
    no_sync: Callable[[], AbstractContextManager[None]],
    timeline: Timeline = OFF,
) -> Callable[[Step], Tensor]:
    """The function that computes a rank's gradients of a step.

    Gradients are averaged over the ranks, so each rank's summed loss is divided by the *mean*
    number of target tokens per rank, which all know, and not by its own: the average then is the
    gradient of the mean over all target tokens of the global batch.
    """

    def backward(step: Step) -> Tensor:
        losses = []
        scale = world.world_size / max(1, step.target_tokens)
        for i, batch in enumerate(step.micro_batches):
            last = i == len(step.micro_batches) - 1
            with nullcontext() if last else no_sync():
                with autocast(world.device, args.precision), timeline.span("F", microbatch=i):
                    loss = target_loss(model, batch)
                with timeline.span("B", microbatch=i):
                    (loss * scale).backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum() if losses else torch.zeros(())

    return backward


def make_optimizer(model: nn.Module, recipe: Recipe, world: World) -> Optimizers:
    """AdamW. All ranks have the whole gradient when it steps: each counts a part of its norm."""
    parameters = list(model.parameters())
    adamw = torch.optim.AdamW(parameters, lr=recipe.learning_rate, fused=world.device.type != "mps")
    counted = parameters[world.rank :: world.world_size]
    return Optimizers([adamw], recipe, world, counted=counted)


def run_dp(
    world: World, args: argparse.Namespace, texts: Texts, resume: Resume = NO_RESUME
) -> None:
    """One rank of the program: trains, evaluates after each epoch, writes its results."""
    check_same(world, run_things(vars(args), texts.fingerprints(), resume.checkpoint))
    session = open_session(args, world, texts, resume.checkpoint)
    model = session.model.to(world.device)
    loss_fn = partial(target_loss, model)
    if not args.pytest:
        session.start(loss_fn, resume.epoch, resume.notes)
    torch.manual_seed(stream(args.seed, "dropout", world.rank, 0))  # each rank draws its own
    timeline = open_timeline(args, world, strategy="ddp")
    average_gradients_fn, no_sync = make_gradient_sync(args, model, timeline)
    backward_fn = make_backward(args, world, model, no_sync, timeline)
    optimizer = make_optimizer(model, session.recipe, world)
    timeline.watch(optimizer.optimizers[0])
    loader = session.loader(world.world_size, world.rank, args.accumulation_steps)
    progress = Progress(session, optimizer, len(loader), [world.device], resume)
    replicas = dict(model.named_parameters())
    check_replicas(world, replicas, "at the start")
    for epoch in progress.epochs():
        totals = train(
            model, optimizer, timeline.over(loader.steps(epoch, progress.before.steps)),
            backward_fn, f"Epoch {epoch}", world.rank, average_gradients_fn, len(loader),
            progress.before, progress.after_step,
        )  # fmt: skip
        check_replicas(world, replicas, f"in epoch {epoch}")
        if args.pytest:
            print(f"rank {world.rank} wrote {save_grad_weights(model, world.rank)}", flush=True)
            return
        progress.end_epoch(totals)
        session.end_epoch(epoch, totals, loss_fn, world.rank)
        session.save_timeline(timeline, epoch)
    on_main(world, session.close)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options, with what is wrong with them said before anything is started."""
    parser = parser_for(__doc__)
    ranks = parser.add_argument_group("data parallelism")
    ranks.add_argument(
        "--world_size", type=count, default=torchrun_world_size() or 2,
        help="processes; torchrun decides where it starts them",
    )  # fmt: skip
    ranks.add_argument(
        "--gradient_sync", choices=GRADIENT_SYNCS, default="overlap",
        help="per_parameter: an all-reduce for each, after backward; flat: one for all; overlap: "
        "buckets, each as soon as it is full, while backward runs",
    )  # fmt: skip
    ranks.add_argument(
        "--bucket_mb", type=positive,
        help=f"size of a bucket of --gradient_sync overlap, in MiB; by default {BUCKET_MB:g}",
    )  # fmt: skip
    ranks.add_argument(
        "--comm_dtype", choices=("fp32", "bf16"), default="fp32",
        help="the type in which the buckets travel",
    )  # fmt: skip
    ranks.add_argument(
        "--accumulation_steps", type=count,
        help="micro-batches into which each rank cuts its share of a batch, to need less memory; "
        "by default one, and on a CPU as few as keep sentences of like lengths together",
    )  # fmt: skip
    ranks.add_argument(
        "--cores_per_rank", type=count,
        help="CPU cores of a rank; by default all cores are shared out",
    )  # fmt: skip
    ranks.add_argument(
        "--master_port", type=port,
        help="port on 127.0.0.1 where the ranks meet, 0 for any; by default 11868, or a free one",
    )  # fmt: skip
    ranks.add_argument(
        "--timeout", type=seconds, default=300.0,
        help="seconds after which a rank that does not answer ends the run",
    )  # fmt: skip
    ranks.add_argument(
        "--pytest", type=boolean, default=False,
        help="True: an epoch without evaluation, then each rank writes its gradients to "
        "tests/model{rank}_gradients.pth",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.comm_dtype != "fp32" and args.gradient_sync != "overlap":
        raise UserError(
            f"--comm_dtype {args.comm_dtype} --gradient_sync {args.gradient_sync}: only the "
            "buckets of --gradient_sync overlap travel in another type"
        )
    if args.bucket_mb is not None and args.gradient_sync != "overlap":
        raise UserError(
            f"--bucket_mb {args.bucket_mb:g} --gradient_sync {args.gradient_sync}: only "
            "--gradient_sync overlap has buckets"
        )
    args.bucket_mb = args.bucket_mb or BUCKET_MB
    check_ranks(args, "world_size", "cores_per_rank")
    check_batch(args)
    check_parts(args, "accumulation_steps", "world_size")
    check_model(args)
    claim_folders(args)
    return args


def main() -> None:
    """The program."""
    args = parse()
    with alone_in_workdir(args):
        resume = find_resume(args)
        texts = read_texts(args, args.world_size)
        check_texts(texts, resume)
        launch(run_dp, launch_settings(args), args, texts, resume)


if __name__ == "__main__":
    run_program(main)
