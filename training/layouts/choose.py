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

from runtime.axes import AXES
from runtime.mesh import make_mesh
from training.launch.world import World
from training.tasks.task import TrainingTask

from .layout import LaidOutModel, Setup
from .replicated import Replicated
from .sharded import Sharded
from .stages import Staged


def lay_out(task: TrainingTask, world: World, setup: Setup) -> LaidOutModel:
    """The task's model under the strategy of the options. All ranks call it together."""
    args = setup.args
    match args.strategy:
        case "single" | "ddp":
            return Replicated(task, world, setup)
        case "fsdp" | "pipeline" | "model" | "tensor" | "3d":
            ranks = {axis: getattr(args, axis) for axis in AXES}
            mesh = make_mesh(ranks, args.timeout)
            return (Sharded if args.zero in (2, 3) else Staged)(task, world, setup, mesh)
    raise ValueError(f"strategy {args.strategy}: no layout has this name")
