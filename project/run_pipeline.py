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
from training.launch.errors import torchrun_world_size
from training.launch.world import World, choose_device
from training.layouts.threads import BlocksInThreads, StagesInThreads
from training.loop import run
from training.resume import find_resume
from training.workdir import alone_in_workdir, claim_folders


def parse_pipeline(description: str | None, argv: Sequence[str] | None = None) -> PipelineOptions:
    """The options, each with its value. Raises UserError if they do not fit together."""
    given, typed = parse_options(PipelineOptions, description, argv)
    args = rules.resumed(given, typed)
    args = replace(args, strategy=args.model_parallel_mode, world_size=1, dp=1, pp=1, tp=1)
    rules.require(args, only_for_modes(args, typed))
    args = rules.settled(stage_rules.settled_chunks(settled_stages(args)))
    rules.require(args, of_pipeline(args))
    claim_folders(args)  # last, since it makes folders
    return args


def only_for_modes(args: PipelineOptions, typed: set[str]) -> Iterator[rules.Row]:
    """The options of stages that only some modes have. What a mode does anyway may be typed."""
    started = torchrun_world_size() or 1
    yield (
        "model_parallel_mode", started == 1,
        f"torchrun started {started} ranks, and run_pipeline.py is one process",
        "start it without torchrun, or take project/train.py pipeline, whose stages are ranks",
    )  # fmt: skip
    stages, blocks = args.model_parallel_mode != "none", args.pipeline == "blocks"
    flow, m = args.model_parallel_mode == "pipeline_parallel", args.num_microbatches
    pipelined = "--model_parallel_mode pipeline_parallel"
    for name, has, who in (
        ("num_devices", stages or args.num_devices == 1, pipelined),
        ("balance", stages or args.balance == "uniform", pipelined),
        ("schedule", flow, pipelined),
        ("chunks", flow or args.chunks == 1, pipelined),
        ("schedule", not blocks or args.schedule == "gpipe", "--pipeline whole"),
        ("chunks", not blocks or args.chunks == 1, "--pipeline whole"),
        ("num_microbatches", flow or not blocks or m == 1, "--pipeline whole"),
    ):
        yield from rules.only(args, typed, name, has, who, f"leave it out, or use {who}")


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


def of_pipeline(args: PipelineOptions) -> Iterator[rules.Row]:
    """The rules of a run whose options are settled."""
    kind, n = choose_device(args.device, 0, 1).type, args.num_devices
    most = torch.cuda.device_count() if kind == "cuda" else 1
    yield (
        "num_devices device", kind == "cpu" or n <= most,
        rules.visible(most),
        f"--num_devices {most}, or --device cpu, works",
    )  # fmt: skip
    one_at_a_time = args.schedule == "sequential" or n == 1
    yield from rules.rules(args, 1)
    yield from rules.of_recompute(args, one_at_a_time)
    yield from rules.of_model(args)
    yield from stage_rules.of_stages(args, "num_devices", n)


def choose_devices(args: PipelineOptions) -> list[torch.device]:
    """The devices of the stages: GPUs, or slices of the CPU's cores, as cpu:1."""
    kind = choose_device(args.device, 0, 1).type
    return [torch.device(kind, index) for index in range(args.num_devices)]


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
    with alone_in_workdir(args):
        run_pp(args, choose_devices(args))


if __name__ == "__main__":
    run_program(main)
