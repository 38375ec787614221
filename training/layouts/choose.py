"""Lays a model out on the ranks under any strategy, for train.py.

single     1 process                          Replicated     layouts/replicated.py
ddp        a whole model per rank             Replicated
fsdp       a shard of every layer per rank    Sharded        data_parallel/fsdp.py
  --zero 1 a whole model, a shard updated     Staged         data_parallel/zero1.py
pipeline   some of the layers per rank        Staged         pipeline/processes/process.py
model      the same, one micro-batch          Staged
tensor     a part of every matrix per rank    Staged         tensor_parallel/gpt2.py
3d         dp x pp x tp ranks                 Staged, or Sharded where --zero is 3
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.mesh import make_mesh
from training.launch.world import World
from training.options import Options
from training.tasks.task import TrainingTask

from .layout import LaidOutModel, Setup
from .replicated import Replicated
from .sharded import Sharded
from .stages import Staged


def lay_out(
    args: Options, task: TrainingTask, world: World, setup: Setup, cut: Sequence[int] | None = None
) -> LaidOutModel:
    """The task's model under `args.strategy`. All ranks call it together.

    Args:
        cut: the layers per stage of a checkpoint, which then need not be measured.
    """
    if args.strategy in ("single", "ddp"):
        return Replicated(task, world, setup)
    mesh = make_mesh(args.dp, args.pp, args.tp, args.timeout)  # all ranks make all groups
    if args.zero in (2, 3):
        return Sharded(task, world, setup, args.zero, mesh, args.sequence_parallel)
    schedule = None if args.strategy == "fsdp" else args.schedule  # fsdp: whole models
    num_microbatches = {"model": 1}.get(args.strategy, setup.num_microbatches)
    if args.pp > 1:
        num_microbatches = num_microbatches or 4
    elif args.tp > 1:  # each micro-batch costs the latency of its collectives
        num_microbatches = num_microbatches or 1
    return Staged(
        task, world, setup, mesh, args.sequence_parallel, schedule=schedule,
        num_microbatches=num_microbatches, balance=args.balance, cut=cut, chunks=args.chunks,
        timeout=args.timeout, shard_optimizer=args.zero == 1,
    )  # fmt: skip
