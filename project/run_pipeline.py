"""Trains GPT-2 to translate, its layers cut into stages on several devices, a thread for each.

Devices are GPUs, or slices of this process' CPU cores. In `model_parallel` mode one device
computes at a time; in `pipeline_parallel` mode micro-batches flow through all of them, forward
and backward. Both compute what one device computes.

    python project/run_pipeline.py --model_parallel_mode='model_parallel'
    python project/run_pipeline.py --model_parallel_mode='pipeline_parallel' --n_chunk 8
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from project.options import Count, Data, Files, Model, Stages, Training, begin, parse


@dataclass
class Threads:
    """devices"""

    model_parallel_mode: Literal["none", "model_parallel", "pipeline_parallel"] = "none"
    """none: one device; model_parallel: stages that compute one at a time; pipeline_parallel:
    stages that compute at the same time, on different micro-batches"""
    num_devices: Count | None = None
    """stages: GPUs, by default all; or slices of the CPU cores, by default 2"""
    pipeline: Literal["whole", "blocks"] = "whole"
    """whole: embedding and head belong to the first and last stage; blocks: the course's form, with
    both on the first device"""


@dataclass
class PipelineOptions(Training, Data, Model, Files, Threads, Stages):
    """Of run_pipeline.py."""


if __name__ == "__main__":
    begin(PipelineOptions, __doc__)

# The imports below take seconds: --help and mistyped options are answered by now.

import torch

from project.utils import announce, finish, plan_of, read_texts, run_program, text_task
from training.launch.errors import UserError, run_here, torchrun_world_size
from training.launch.world import World, choose_device, quiet_libraries
from training.layouts.threads import BlocksInThreads, StagesInThreads
from training.loop import run
from training.resume import find_resume
from training.rules import check_microbatches, check_model, check_recompute, settle_training
from training.stage_rules import check_stages, settle_chunks
from training.workdir import alone_in_workdir, claim_folders


def parse_pipeline(description: str | None, argv: Sequence[str] | None = None) -> Any:
    """The options, each with its value. Raises UserError if they do not fit together."""
    args: Any = parse(PipelineOptions, description, argv)
    if (started := torchrun_world_size() or 1) > 1:
        raise UserError(
            f"torchrun started {started} ranks: run_pipeline.py is one process; start it without "
            "torchrun, or take project/train.py pipeline, whose stages are ranks"
        )
    args.strategy, args.world_size = args.model_parallel_mode, 1
    _settle_stages(args)
    check_microbatches(args, 1)
    check_recompute(args, args.schedule == "sequential" or args.num_devices == 1)
    settle_training(args)  # the model and the learning rate
    check_model(args)
    check_stages(args, "num_devices", args.num_devices)
    claim_folders(args)  # last, since it makes folders
    return args


def _settle_stages(args: Any) -> None:
    """Settles the options of stages. Raises UserError for an option that the mode ignores."""
    mode, blocks = args.model_parallel_mode, args.pipeline == "blocks"
    where, whole = f"--model_parallel_mode {mode}", "--pipeline whole"
    flow = "--model_parallel_mode pipeline_parallel"
    fixed: dict[str, tuple[Any, str]] = {}  # option: its only value, and the mode that frees it
    if mode == "none":
        fixed |= {"num_devices": (1, flow), "balance": ("uniform", flow)}
    if mode != "pipeline_parallel":
        # One device computes at a time.
        fixed["schedule"] = "sequential", f"{flow} {whole}" if blocks else flow
    elif blocks:
        fixed["schedule"] = "gpipe", whole
    if "schedule" in fixed:
        fixed["chunks"] = 1, fixed["schedule"][1]
    if blocks and mode != "pipeline_parallel":
        fixed["num_microbatches"] = 1, whole  # the blocks get the whole batch
    on_gpu = choose_device(args.device, 0, 1).type == "cuda"
    defaults = {
        "num_devices": torch.cuda.device_count() if on_gpu else 2,
        "balance": "auto", "schedule": "1f1b", "num_microbatches": 4, "chunks": None,
    }  # fmt: skip
    for name, default in defaults.items():
        given = getattr(args, name)
        value, instead = fixed.get(name, (given or default, ""))  # if not fixed: as given
        if given not in (None, value):  # given, and the mode has another
            form = f"{where} --pipeline blocks" if blocks else where
            raise UserError(
                f"--{name} {given} {form}: it is {value} there; leave it out, or use {instead}"
            )
        setattr(args, name, value)
    settle_chunks(args)


def choose_devices(args: Any) -> list[torch.device]:
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


def run_pp(args: Any, devices: list[torch.device]) -> None:
    """Trains, evaluates after each epoch, writes the results."""
    # The devices cpu:0, cpu:1 are slices of the cores: tensors are on cpu, the first stage's.
    world = World(device=torch.device("cpu") if devices[0].type == "cpu" else devices[0])
    texts = read_texts(args)
    resume = find_resume(args, texts.fingerprints()["train"])
    task = text_task(args, world, texts, resume)
    plan = plan_of(args, world, workers="stage", schedule=args.schedule)
    model: BlocksInThreads | StagesInThreads
    if args.pipeline == "blocks":
        micro_batch = -(-args.batch_size // args.num_microbatches)  # examples, rounded up
        model = BlocksInThreads(
            task, world, plan, devices, args.balance,
            micro_batch if args.model_parallel_mode == "pipeline_parallel" else None,
        )  # fmt: skip
    else:
        model = StagesInThreads(
            task, world, plan, devices, args.schedule, args.num_microbatches, args.balance,
            resume.cut, args.chunks,
        )  # fmt: skip
    plan.timeline.about["ranks"] = model.ranks
    announce(world, args, model)
    try:
        results = run(world, args, task, model, plan, resume=resume)
        finish(world, results, args)
    finally:
        model.close()


def main() -> None:
    """The program."""
    args = parse_pipeline(__doc__)
    devices = choose_devices(args)
    quiet_libraries()
    with alone_in_workdir(args):
        run_here(run_pp, args, devices)


if __name__ == "__main__":
    run_program(main)
