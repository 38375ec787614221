"""Trains GPT-2 to translate, its layers cut into stages on several devices, a thread for each.

Devices are GPUs, or slices of this process' CPU cores. In `model_parallel` mode one device
computes at a time; in `pipeline_parallel` mode micro-batches flow through all of them, forward
and backward. Both compute what one device computes.

    python project/run_pipeline.py --model_parallel_mode='model_parallel'
    python project/run_pipeline.py --model_parallel_mode='pipeline_parallel' --n_chunk 8
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from project.parser import begin, parse_options
from training.options import Architecture, Data, Files, Options, Stages, Threads, Training


@dataclass
class PipelineOptions(Options):
    """Of run_pipeline.py."""

    GROUPS = (Training, Data, Architecture, Files, Threads, Stages)


if __name__ == "__main__":
    begin(PipelineOptions, __doc__)

# The imports below take seconds: --help and mistyped options are answered by now.

import torch

from project import rules, stage_rules
from project.utils import announce, finish, read_texts, run_program, setup_of, text_task
from training.launch.errors import UserError, torchrun_world_size
from training.launch.world import World, choose_device, quiet_libraries
from training.layouts.threads import BlocksInThreads, StagesInThreads
from training.loop import run
from training.resume import find_resume
from training.workdir import alone_in_workdir, claim_folders


def parse_pipeline(description: str | None, argv: Sequence[str] | None = None) -> PipelineOptions:
    """The options, each with its value. Raises UserError if they do not fit together."""
    given, typed = parse_options(PipelineOptions, description, argv)
    if (started := torchrun_world_size() or 1) > 1:
        raise UserError(
            f"torchrun started {started} ranks: run_pipeline.py is one process; start it without "
            "torchrun, or take project/train.py pipeline, whose stages are ranks"
        )
    args = rules.resumed(given, typed)
    args = replace(args, strategy=args.model_parallel_mode, world_size=1, dp=1, pp=1, tp=1)
    rules.require(args, only_for_modes(args, typed))
    args = rules.settled(stage_rules.settled_chunks(settled_stages(args)))
    one_at_a_time = args.schedule == "sequential" or args.num_devices == 1
    rules.require(args, rules.rules(args, 1))
    rules.require(args, rules.of_recompute(args, one_at_a_time))
    rules.require(args, rules.of_model(args))
    rules.require(args, stage_rules.of_stages(args, "num_devices", args.num_devices))
    claim_folders(args)  # last, since it makes folders
    return args


def only_for_modes(args: PipelineOptions, typed: set[str]) -> Iterator[rules.Row]:
    """The options of stages that only some modes have. What a mode does anyway may be typed."""
    mode, blocks = args.model_parallel_mode, args.pipeline == "blocks"
    flow = mode == "pipeline_parallel"
    use = "leave it out, or use --model_parallel_mode pipeline_parallel"
    whole = "leave it out, or use --pipeline whole"
    for name, has, who, decides, instead in (
        ("num_devices", mode != "none" or args.num_devices == 1, "a mode with stages", "", use),
        ("balance", mode != "none" or args.balance == "uniform", "a mode with stages", "", use),
        ("schedule", flow, "--model_parallel_mode pipeline_parallel", "", use),
        ("chunks", flow or args.chunks == 1, "--model_parallel_mode pipeline_parallel", "", use),
        ("schedule", not blocks or args.schedule == "gpipe", "--pipeline whole", " pipeline",
         whole),
        ("chunks", not blocks or args.chunks == 1, "--pipeline whole", " pipeline", whole),
        ("num_microbatches", flow or not blocks or args.num_microbatches == 1,
         "--pipeline whole", " pipeline", whole),
    ):  # fmt: skip
        where = f"model_parallel_mode{decides}"
        yield from rules.only(args, typed, name, has, who, where, instead)


def settled_stages(args: PipelineOptions) -> PipelineOptions:
    """With the number of stages, their schedule and their micro-batches."""
    mode, blocks = args.model_parallel_mode, args.pipeline == "blocks"
    on_gpu = choose_device(args.device, 0, 1).type == "cuda"
    devices = args.num_devices or (torch.cuda.device_count() if on_gpu else 2)
    schedule = args.schedule or ("gpipe" if blocks else "1f1b")
    num_microbatches = args.num_microbatches or 4
    if mode != "pipeline_parallel":  # one device computes at a time
        schedule, num_microbatches = "sequential", 1 if blocks else num_microbatches
    balance = args.balance or "auto"
    if mode == "none":
        devices, balance = 1, "uniform"
    return replace(
        args, num_devices=devices, balance=balance, schedule=schedule,
        num_microbatches=num_microbatches,
    )  # fmt: skip


def choose_devices(args: PipelineOptions) -> list[torch.device]:
    """The devices of the stages: GPUs, or slices of the CPU's cores. Raises UserError if there are
    too few GPUs."""
    kind, n = choose_device(args.device, 0, 1).type, args.num_devices
    gpus = torch.cuda.device_count() if kind == "cuda" else 1
    if kind != "cpu" and n > gpus:
        raise UserError(
            f"--num_devices {n} --device {kind}: {gpus} GPU{'s are' if gpus > 1 else ' is'} "
            f"visible; --num_devices {gpus}, or --device cpu, works"
        )
    return [torch.device(kind, index) for index in range(n)]  # cpu:1 is a slice of the cores


def run_pp(args: PipelineOptions, devices: list[torch.device]) -> None:
    """Trains, evaluates after each epoch, writes the results."""
    # The devices cpu:0, cpu:1 are slices of the cores: tensors are on cpu, the first stage's.
    world = World(device=torch.device("cpu") if devices[0].type == "cpu" else devices[0])
    texts = read_texts(args)
    resume = find_resume(args, texts.fingerprints()["train"])
    task = text_task(args, world, texts, resume)
    setup = setup_of(args, world, workers="stage", schedule=args.schedule)
    model: BlocksInThreads | StagesInThreads
    if args.pipeline == "blocks":
        micro_batch = -(-args.batch_size // (args.num_microbatches or 1))  # examples, rounded up
        model = BlocksInThreads(
            task, world, setup, devices, args.balance,
            micro_batch if args.model_parallel_mode == "pipeline_parallel" else None,
        )  # fmt: skip
    else:
        model = StagesInThreads(
            task, world, setup, devices, args.schedule, args.num_microbatches or 1, args.balance,
            resume.cut, args.chunks,
        )  # fmt: skip
    setup.timeline.about["ranks"] = model.ranks
    announce(world, args, model)
    try:
        results = run(world, args, task, model, setup, resume=resume)
        finish(world, results, args)
    finally:
        model.close()


def main() -> None:
    """The program."""
    args = parse_pipeline(__doc__)
    devices = choose_devices(args)
    quiet_libraries()
    with alone_in_workdir(args):
        run_pp(args, devices)


if __name__ == "__main__":
    run_program(main)
