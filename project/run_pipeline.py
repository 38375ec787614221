"""Trains GPT-2 to translate, its layers cut into stages on several devices, a thread for each.

Devices are GPUs, or slices of this process' CPU cores. In `model_parallel` mode one device
computes at a time; in `pipeline_parallel` mode micro-batches flow through all of them, forward
and backward. Both compute what one device computes.

    python project/run_pipeline.py --model_parallel_mode='model_parallel'
    python project/run_pipeline.py --model_parallel_mode='pipeline_parallel' --n_chunk 8
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    import project.startup  # noqa: F401 (Ctrl-C ends what takes seconds from here on)

import torch
from torch import Tensor

from pipeline.microbatch import MicroBatches
from pipeline.model import cut_gpt2, loss_of_targets
from pipeline.partition import parse_balance
from pipeline.pipe import Pipe
from pipeline.schedule import SCHEDULES
from pipeline.worker import core_slices
from project.folders import alone_in_workdir, claim_folders
from project.options import (
    count,
    open_timeline,
    parser_for,
    run_program,
)
from project.progress import Progress, check_texts, find_resume
from project.rules import check_alone, check_batch, check_model, check_stages, settle_stages
from project.session import Session, open_session, read_texts
from project.utils import autocast, train
from training.cores import sharing
from training.data import Batch, Step
from training.ending import run_here
from training.launch import UserError, World, choose_device, quiet_libraries
from training.model import target_loss
from training.optimization import Optimizers
from training.seeds import stream
from training.timeline import OFF, Timeline

MODES = ("none", "model_parallel", "pipeline_parallel")


def choose_devices(args: argparse.Namespace) -> list[torch.device]:
    """The devices of the stages: --num_devices GPUs, or as many slices of the CPU's cores.

    Raises:
        UserError: there are not so many GPUs.
    """
    kind = choose_device(args.device, 0, 1).type
    n = args.num_devices
    if kind == "cuda" and n > torch.cuda.device_count():
        raise UserError(
            f"--num_devices {n}: {torch.cuda.device_count()} GPUs are visible; "
            f"--num_devices {torch.cuda.device_count()}, or --device cpu, works"
        )
    if kind == "mps" and n > 1:
        raise UserError(f"--num_devices {n} --device mps: there is one; --device cpu works")
    return [torch.device(kind, index) for index in range(n)]


class WholeModel:
    """The whole model in stages: the embedding on the first, the head and the loss on the last."""

    def __init__(
        self,
        session: Session,
        devices: list[torch.device],
        balance_on: Step,
        cut: list[int] | None = None,
        timeline: Timeline = OFF,
    ) -> None:
        args = session.args
        self.args = args
        self.schedule = args.schedule
        batch = balance_on.micro_batches[-1]  # of the longest sentences
        sample = (batch["input_ids"], batch["label_token_weights"])
        target = (batch["labels"], batch["label_token_weights"])
        session.model.to(session.world.device)  # layers are measured where the first stage is
        with autocast(session.world.device, args.precision):
            module, replicas, self.cut = cut_gpt2(
                session.model, devices, cut or args.balance, sample, target
            )
        self.pipe = Pipe(
            module, recorder=timeline if timeline.recording else None, replicas=replicas
        )
        self.layers = [len(list(partition.children())) for partition in self.pipe.partitions]
        # An AdamW per stage, which steps on the stage's worker; a tied weight is in the first's.
        adamws = [
            torch.optim.AdamW(parameters, lr=session.learning_rate, fused=True)
            for parameters in self.pipe.stage_parameters()
        ]
        for stage, adamw in enumerate(adamws):
            timeline.watch(adamw, stage)
        self.optimizer = Optimizers(
            adamws, session.recipe, session.world, run=self.pipe.run_on_stages
        )

    def backward(self, step: Step) -> Tensor:
        """Gradients of a step's loss; returns the summed loss."""
        x, y = MicroBatches(), MicroBatches()
        for batch in step.micro_batches:
            x.append((batch["input_ids"], batch["label_token_weights"]))
            y.append((batch["labels"], batch["label_token_weights"]))
        tokens = max(1, step.target_tokens)
        with autocast(y[0][0].device, self.args.precision):
            loss = self.pipe.train_step(x, y, loss_of_targets, self.schedule, scale=1 / tokens)
        return loss.detach() * tokens

    def loss(self, batch: Batch) -> Tensor:
        """The summed loss of a batch, without gradients."""
        weights = batch["label_token_weights"]
        return self.pipe.eval_step(
            (batch["input_ids"], weights), (batch["labels"], weights), loss_of_targets,
            num_microbatches=self.args.n_chunk,
        )  # fmt: skip

    def close(self) -> None:
        """Ends the worker threads."""
        self.pipe.close()


class BlocksOnly:
    """The course's form: the blocks in stages, embedding and head on the first device."""

    def __init__(
        self, session: Session, devices: list[torch.device], timeline: Timeline = OFF
    ) -> None:
        from pipeline.model_parallel import GPT2LMHeadModelParallel  # with transformers' models

        self.args = args = session.args
        model = GPT2LMHeadModelParallel(session.model.config)
        model.load_state_dict(session.model.state_dict())
        blocks = range(model.config.n_layer)
        sizes = parse_balance(args.balance, len(blocks), len(devices), lambda: [1.0] * len(blocks))
        cuts = [0, *accumulate(sizes)]
        model.parallelize(
            {str(d): list(blocks[a:b]) for d, (a, b) in zip(devices, pairwise(cuts), strict=True)}
        )
        if args.model_parallel_mode == "pipeline_parallel":
            model._prepare_pipeline_parallel(-(-args.batch_size // args.n_chunk))
        self.pipe = model.transformer.h_pp
        self.pipe.recorder = timeline if timeline.recording else None
        session.translator = session.model  # keys and values are cached by the plain model alone
        self.model = session.model = model
        self.cut = " | ".join(map(str, sizes)) + " blocks"
        self.layers = None  # nothing is measured: the options say it
        adamw = torch.optim.AdamW(model.parameters(), lr=session.learning_rate, fused=True)
        timeline.watch(adamw, 0)
        self.optimizer = Optimizers([adamw], session.recipe, session.world)

    def backward(self, step: Step) -> Tensor:
        """Gradients of a step's loss; returns the summed loss."""
        (batch,) = step.micro_batches
        with autocast(batch["labels"].device, self.args.precision):
            loss = target_loss(self.model, batch)
        (loss / max(1, step.target_tokens)).backward()
        return loss.detach()

    def loss(self, batch: Batch) -> Tensor:
        """The summed loss of a batch."""
        return target_loss(self.model, batch)

    def close(self) -> None:
        """Ends the worker threads."""
        self.model._finalize_pipeline_parallel()
        self.model.deparallelize()


def run_pp(args: argparse.Namespace, devices: list[torch.device]) -> None:
    """The program: trains, evaluates after each epoch, writes its results."""
    physical = torch.device("cpu") if devices[0].type == "cpu" else devices[0]
    resume = find_resume(args)
    texts = read_texts(args, 1)
    check_texts(texts, resume)
    session = open_session(args, World(device=physical), texts, resume.checkpoint)
    loader = session.loader(1, 0, args.n_chunk if args.pipeline == "whole" else 1)
    timeline = open_timeline(
        args, session.world, "stage", strategy=args.model_parallel_mode, schedule=args.schedule
    )
    strategy: WholeModel | BlocksOnly
    if args.pipeline == "whole":
        # Where the layers are to be cut again, a cut measured again could be another.
        cut = resume.cut if args.balance == "auto" else None
        cut = cut if cut and len(cut) == len(devices) else None
        strategy = WholeModel(session, devices, next(loader.steps(0)), cut, timeline)
    else:
        strategy = BlocksOnly(session, devices, timeline)
    try:
        refresh = evaluate_on_one_device(session, devices)
        session.say(f"{args.model_parallel_mode} on {', '.join(map(str, devices))}: {strategy.cut}")
        session.start(
            strategy.loss, resume.epoch, [*stages_sharing_cores(args, devices), *resume.notes]
        )
        torch.manual_seed(stream(args.seed, "dropout", 0, 0))
        progress = Progress(
            session, strategy.optimizer, len(loader), devices, resume, strategy.layers
        )
        for epoch in progress.epochs():
            totals = train(
                session.model, strategy.optimizer,
                timeline.over(loader.steps(epoch, progress.before.steps)),
                strategy.backward, f"Epoch {epoch}", n_steps=len(loader),
                before=progress.before, after_step=progress.after_step,
            )  # fmt: skip
            progress.end_epoch(totals)
            refresh()
            session.end_epoch(epoch, totals, strategy.loss, None)
            session.save_timeline(timeline, epoch)
        session.close()
    finally:
        strategy.close()


def stages_sharing_cores(args: argparse.Namespace, devices: list[torch.device]) -> list[str]:
    """See `training.cores.sharing`; stages of which one computes at a time may share them."""
    if args.model_parallel_mode != "pipeline_parallel" or devices[0].type != "cpu":
        return []
    return sharing([("", cores) for cores in core_slices(devices).values()], "stages")


def evaluate_on_one_device(session: Session, devices: list[torch.device]) -> Callable[[], None]:
    """Lets translations be generated by a plain model on one device. On CPU the whole model in
    stages is one; in other cases a copy follows the trained weights when the result is called."""
    trained = session.model
    if session.translator is None:
        if devices[0].type != "cuda" or len(devices) == 1:
            return lambda: None
        session.translator = copy.deepcopy(trained)
    session.translator.to(session.world.device)
    return lambda: session.translator.load_state_dict(trained.state_dict())


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options, with what is wrong with them said before anything is started."""
    parser = parser_for(__doc__)
    stages = parser.add_argument_group("pipeline")
    stages.add_argument(
        "--model_parallel_mode", choices=MODES, default="none",
        help="none: one device; model_parallel: stages, one computing at a time; "
        "pipeline_parallel: stages, micro-batches flowing through them",
    )  # fmt: skip
    stages.add_argument(
        "--num_devices", type=count,
        help="stages: GPUs, by default all, or slices of the CPU cores, by default 2; in mode none "
        "there is one",
    )  # fmt: skip
    stages.add_argument(
        "--n_chunk", type=count,
        help="micro-batches into which a batch is cut; by default 4. With --pipeline blocks those "
        "of a pipeline alone, all of the same size but the last: there may be fewer",
    )  # fmt: skip
    stages.add_argument(
        "--schedule", choices=[name for name in SCHEDULES if name != "sequential"],
        help="of pipeline_parallel: the order of forwards and backwards, by default 1f1b, which "
        "holds fewer activations than gpipe; zb cuts each backward in two, and idles least",
    )  # fmt: skip
    stages.add_argument(
        "--balance",
        help="blocks per stage: auto, the default, measures the layers and cuts between halves of "
        "blocks, uniform shares the blocks out, as auto does with --pipeline blocks, and 3,5 gives "
        "them",
    )  # fmt: skip
    stages.add_argument(
        "--pipeline", choices=("whole", "blocks"), default="whole",
        help="whole: embedding and head belong to the first and last stage; blocks: the course's "
        "form, in which they run alone on the first device while all others wait; its forwards "
        "and backwards are in GPipe's order",
    )  # fmt: skip
    args = parser.parse_args(argv)
    check_alone("run_pipeline.py", ", or take project/train.py pipeline, whose stages are ranks")
    args.world_size = 1
    settle_stages(args)
    check_batch(args)
    check_model(args)
    check_stages(args)
    claim_folders(args)
    return args


def main() -> None:
    """The program."""
    args = parse()
    devices = choose_devices(args)
    quiet_libraries()
    with alone_in_workdir(args):
        run_here(run_pp, args, devices)


if __name__ == "__main__":
    run_program(main)
