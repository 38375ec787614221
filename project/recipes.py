"""What the options of project/train.py ask for, in objects."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count, islice

import torch
from torch import nn

from project.options import open_timeline
from project.strategy import Plan
from project.task import VGG, Step, Task
from project.utils import autocast
from training.launch import World
from training.optimization import Recipe

OPTIMIZERS = ("sgd", "adamw")
SGD_FACTOR = 30  # its steps are gradients, which are small; AdamW's are of the size of the rate


def learning_rate(args: argparse.Namespace) -> float:
    """--learning_rate, or what suits the model and the optimizer."""
    chosen = {VGG: 3e-4, "gpt2-mini": 1e-3}.get(args.model, 1e-4)
    return args.learning_rate or chosen * (SGD_FACTOR if args.optimizer == "sgd" else 1)


def make_optimizer(
    args: argparse.Namespace, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """What --optimizer names."""
    if args.optimizer == "sgd":
        return torch.optim.SGD(parameters, learning_rate(args), momentum=args.momentum)
    ps = list(parameters)
    return torch.optim.AdamW(ps, learning_rate(args), fused=ps[0].device.type != "mps")


def num_steps(args: argparse.Namespace, task: Task) -> int:
    """Steps of the run."""
    return args.num_batches or args.n_epochs * task.steps_per_epoch


def all_steps(
    args: argparse.Namespace,
    task: Task,
    part: int = 0,
    parts: int = 1,
    cut: int | None = 1,
    start: int = 0,
) -> Iterator[Step]:
    """The steps of the run from step `start` on, epoch after epoch."""
    first, skipped = divmod(start, task.steps_per_epoch)
    epochs = (
        task.steps(epoch, part, parts, cut, skipped if epoch == first else 0)
        for epoch in count(first)
    )
    return islice((step for epoch in epochs for step in epoch), num_steps(args, task) - start)


def recipe_of(args: argparse.Namespace, task: Task) -> Recipe:
    """How weights are updated."""
    return Recipe(
        learning_rate=learning_rate(args),
        steps_per_epoch=num_steps(args, task),
        lr_scheduler=args.lr_scheduler,
        warmup_steps=args.warmup_steps,
        max_grad_norm=args.max_grad_norm,
        on_nan=args.on_nan,
    )


def plan_of(args: argparse.Namespace, world: World, task: Task) -> Plan:
    """What a strategy needs to know."""
    return Plan(
        make_optimizer=partial(make_optimizer, args),
        autocast=partial(autocast, world.device, "bf16" if args.precision == "bf16" else "fp32"),
        compute_dtype=torch.bfloat16 if args.precision == "bf16" else None,
        dtype=task.dtype,
        num_microbatches=args.num_microbatches,
        schedule=args.schedule,
        balance=args.balance,
        zero=args.zero,
        timeout=args.timeout,
        timeline=open_timeline(args, world, strategy=args.strategy),
    )
