"""Trains GPT-2 to translate, its layers cut into stages on several devices, a thread for each.

Devices are GPUs, or slices of this process' CPU cores. In `model_parallel` mode one device
computes at a time; in `pipeline_parallel` mode micro-batches flow through all of them, forward
and backward. Both compute what one device computes.

    python project/run_pipeline.py --model_parallel_mode='model_parallel'
    python project/run_pipeline.py --model_parallel_mode='pipeline_parallel' --n_chunk 8
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    from project.options import PipelineOptions, begin

    begin(PipelineOptions, __doc__)

from typing import Any

import torch

from project.rules import choose_devices, parse_pipeline
from project.utils import finish, plan_of, read_texts, run_program
from training.errors import run_here
from training.launch import World, quiet_libraries
from training.loop import run
from training.saving import find_resume
from training.staged import BlocksInThreads, StagesInThreads
from training.translation import FILES, TranslationTask
from training.workdir import alone_in_workdir


def run_pp(args: Any, devices: list[torch.device]) -> None:
    """The program: trains, evaluates after each epoch, writes its results."""
    world = World(device=torch.device("cpu") if devices[0].type == "cpu" else devices[0])
    texts = read_texts(args)
    resume = find_resume(args, len(texts.splits["train"]), texts.fingerprint())
    task = TranslationTask(args, world, texts, resume.files(FILES))
    plan = plan_of(args, world, workers="stage", schedule=args.schedule)
    model: BlocksInThreads | StagesInThreads
    if args.pipeline == "blocks":
        micro_batch = -(-args.batch_size // args.num_microbatches)
        model = BlocksInThreads(
            task, world, plan, devices, args.balance,
            micro_batch if args.model_parallel_mode == "pipeline_parallel" else None,
        )  # fmt: skip
    else:
        model = StagesInThreads(
            task, world, plan, devices, args.schedule, args.num_microbatches, args.balance,
            resume.cut,
        )  # fmt: skip
    try:
        results = run(world, args, task, model, plan, resume=resume)
        finish(world, results, args, task, model)
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
