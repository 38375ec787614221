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

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from project.command_line import begin, parse_options
from runtime.axes import sizes
from training.options import (
    PIPELINE_MICROBATCHES,
    UNSET,
    Architecture,
    Count,
    Data,
    Files,
    Options,
    ScheduleName,
    Stages,
    Threads,
    Training,
)  # fmt: skip


@dataclass
class PipelineOptions(Options):
    """The options of run_pipeline.py."""

    GROUPS = (Training, Data, Architecture, Files, Threads, Stages)
    num_microbatches: Count | None = PIPELINE_MICROBATCHES
    schedule: ScheduleName = UNSET


if __name__ == "__main__":
    typed = begin(PipelineOptions, __doc__)

# The imports below take seconds: --help and mistyped options are answered by now.

import torch

from project import rules, stage_rules
from project.utils import run_program, train_and_finish, translation
from training.launch.errors import counted, torchrun_world_size
from training.launch.world import World, choose_device
from training.layouts.layout import Setup
from training.layouts.threads import BlocksInThreads, StagesInThreads
from training.rank import run_rank
from training.resume import as_it_was
from training.tasks.gpt2 import PRESETS
from training.tasks.task import TrainingTask
from training.workdir import alone_in_workdir

THREAD_MODES = ("none", "model_parallel", "pipeline_parallel")
PIPELINE_PARALLEL = "--model_parallel_mode pipeline_parallel"


def parse_pipeline(argv: Sequence[str]) -> PipelineOptions:
    """The options of a command line, each with its value."""
    return settled_pipeline(parse_options(PipelineOptions, None, argv))


def settled_pipeline(given: PipelineOptions) -> PipelineOptions:
    """The options, each with its value. Raises UserError if they do not fit together."""
    # A mode decides the layout, as a strategy does. If none is typed, a resumed run keeps its own.
    typed = "model_parallel_mode" in given.typed
    args = as_it_was(given, *([given.model_parallel_mode] if typed else THREAD_MODES))
    mode, gpus = args.model_parallel_mode, torch.cuda.device_count()
    most = gpus if choose_device(args.device).type == "cuda" else 2
    n = args.num_devices or (1 if mode == "none" else most)
    m = args.num_microbatches if "num_microbatches" in args.typed else None
    schedule = args.schedule or schedule_of(args)
    order = stage_rules.schedule_of_run(schedule, n, m, args.chunks or None)
    args = replace(args, strategy=mode, world_size=1, **sizes(), num_devices=n, **order)
    if args.pipeline == "blocks" and mode != "pipeline_parallel":
        args = replace(args, num_microbatches=1)
    args = rules.settled(args)
    rules.require(args, of_pipeline(args))
    return args


def schedule_of(args: PipelineOptions) -> str:
    """The schedule if none was typed: `sequential` for stages that compute one at a time, `gpipe`
    for the course's form, else `1f1b`."""
    if args.model_parallel_mode != "pipeline_parallel":
        return "sequential"
    return "gpipe" if args.pipeline == "blocks" else "1f1b"


def of_pipeline(args: PipelineOptions) -> Iterator[rules.Rule]:
    """The rules of a run whose options are settled."""
    n, gpus, started = args.num_devices, torch.cuda.device_count(), torchrun_world_size() or 1
    on_cpu, schedule = choose_device(args.device).type == "cpu", schedule_of(args)
    yield from [
        ("model_parallel_mode", started == 1,
         f"torchrun started {started} ranks, and run_pipeline.py is one process",
         "start it without torchrun, or take project/train.py pipeline, whose stages are ranks"),
        ("model_parallel_mode num_devices", args.model_parallel_mode != "none" or n == 1,
         "mode none uses one device", f"{PIPELINE_PARALLEL} works"),
        ("model_parallel_mode pipeline schedule", schedule in (args.schedule, "1f1b"),
         f"with the first two it is {schedule}", f"{PIPELINE_PARALLEL} --pipeline whole works"),
        ("num_devices device", on_cpu or n <= max(1, gpus), f"{counted(gpus, 'GPU')} can be seen",
         f"--num_devices {max(1, gpus)}, or --device cpu, works"),
    ]  # fmt: skip
    yield from rules.rules(args)
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
