"""Trains GPT-2 to translate, its layers cut into stages, one thread per device.

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
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from project.command_line import begin, parse_options
from runtime.axes import sizes
from training.options import (
    Architecture,
    Count,
    Data,
    Files,
    Options,
    Stages,
    Threads,
    Training,
)  # fmt: skip


@dataclass
class PipelineOptions(Options):
    """The options of run_pipeline.py."""

    GROUPS = (Training, Data, Architecture, Files, Threads, Stages)
    num_microbatches: Count | None = 4


if __name__ == "__main__":
    typed = begin(PipelineOptions, __doc__)

# The imports below take seconds: --help and mistyped options are answered by now.

import torch

from project import rules, stage_rules
from project.utils import run_program, train_and_finish, translation
from training.launch.errors import torchrun_world_size
from training.launch.world import World, choose_device
from training.layouts.layout import Setup
from training.layouts.threads import BlocksInThreads, StagesInThreads
from training.rank import run_rank
from training.resume import as_it_was
from training.tasks.gpt2 import PRESETS
from training.tasks.task import TrainingTask
from training.workdir import alone_in_workdir

# What --model_parallel_mode may be: the options that a mode decides, and why.
THREAD_MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("there is one device, unless you choose a mode",
             {"num_devices": 1, "balance": "uniform", "schedule": "sequential", "chunks": 1}),
    "model_parallel": ("in mode model_parallel one stage computes at a time",
                       {"schedule": "sequential", "chunks": 1}),
    "pipeline_parallel": ("--pipeline blocks is the course's form", {}),
}  # fmt: skip


def parse_pipeline(description: str | None, argv: Sequence[str] | None = None) -> PipelineOptions:
    """The options, each with its value. Raises UserError if they do not fit together."""
    return settled_pipeline(parse_options(PipelineOptions, description, argv))


def settled_pipeline(given: PipelineOptions) -> PipelineOptions:
    """The same for options that are parsed."""
    # As a strategy is: another mode has another layout, and one that is not typed is kept.
    modes = [given.model_parallel_mode] if "model_parallel_mode" in given.typed else THREAD_MODES
    args = as_it_was(given, *modes)
    args = replace(args, strategy=args.model_parallel_mode, world_size=1, **sizes())
    rules.require(args, only_for_modes(args))
    args = rules.settled(stage_rules.settled_chunks(settled_stages(args)))
    rules.require(args, of_pipeline(args))
    return args


def decided(args: PipelineOptions) -> dict[str, Any]:
    """The options whose value the mode and the course's form decide."""
    _, values = THREAD_MODES[args.model_parallel_mode]
    if args.pipeline == "blocks":
        return {**values, "num_microbatches": 1} if values else {"schedule": "gpipe", "chunks": 1}
    return values


def only_for_modes(args: PipelineOptions) -> Iterator[rules.Rule]:
    """What a mode decides may be typed, but no other value."""
    started = torchrun_world_size() or 1
    yield (
        "model_parallel_mode", started == 1,
        f"torchrun started {started} ranks, and run_pipeline.py is one process",
        "start it without torchrun, or take project/train.py pipeline, whose stages are ranks",
    )  # fmt: skip
    why, others = THREAD_MODES[args.model_parallel_mode]
    whole = "" if others else " --pipeline whole"
    instead = f"leave it out, or use --model_parallel_mode pipeline_parallel{whole}"
    for name, value in decided(args).items():
        fits = name not in args.typed or getattr(args, name) == value
        yield name, fits, f"{why}, and it is {value}", instead


def settled_stages(args: PipelineOptions) -> PipelineOptions:
    """With the number of stages, and what the mode decides."""
    on_gpu = choose_device(args.device).type == "cuda"
    n = args.num_devices or (torch.cuda.device_count() if on_gpu else 2)
    return replace(args, **{"num_devices": n, **decided(args)})


def of_pipeline(args: PipelineOptions) -> Iterator[rules.Rule]:
    """The rules of a run whose options are settled."""
    n, gpus = args.num_devices, torch.cuda.device_count()
    on_cpu = choose_device(args.device).type == "cpu"
    yield (
        "num_devices device", on_cpu or n <= max(1, gpus), stage_rules.visible(gpus),
        f"--num_devices {max(1, gpus)}, or --device cpu, works",
    )  # fmt: skip
    one_at_a_time = args.schedule == "sequential" or n == 1
    yield from rules.rules(args, 1, one_at_a_time=one_at_a_time)
    yield from rules.of_model(args)
    blocks = args.n_layer or PRESETS[args.model]["n_layer"]
    yield from stage_rules.of_stages(args, "num_devices", n, blocks)


def choose_devices(args: Options) -> list[torch.device]:
    """The devices of the stages: GPUs, or slices of the CPU's cores, as cpu:1."""
    kind = choose_device(args.device).type
    return [torch.device(kind, index) for index in range(args.num_devices)]


def lay_out_in_threads(
    task: TrainingTask, world: World, setup: Setup
) -> BlocksInThreads | StagesInThreads:
    """The model in stages, one thread per device."""
    args, devices = setup.args, choose_devices(setup.args)
    if args.pipeline == "whole":
        return StagesInThreads(task, world, setup, devices)
    micro_batch = -(-args.batch_size // (args.num_microbatches or 1))  # examples, rounded up
    at_once = args.model_parallel_mode == "pipeline_parallel"
    return BlocksInThreads(task, world, setup, devices, micro_batch if at_once else None)


def run_pp(args: PipelineOptions) -> None:
    """Trains, evaluates after each epoch, writes the results."""
    first = choose_devices(args)[0]
    # The devices cpu:0, cpu:1 are slices of the cores: tensors are on cpu, the first stage's.
    world = World(device=torch.device("cpu") if first.type == "cpu" else first)
    run_rank(world, args, translation, lay_out_in_threads, train_and_finish)


def main(given: PipelineOptions) -> None:
    """The program."""
    args = settled_pipeline(given)
    with alone_in_workdir(args):
        run_pp(args)


if __name__ == "__main__":
    run_program(partial(main, typed))
