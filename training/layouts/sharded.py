"""A shard of every layer on each rank (ZeRO 2 and 3), for the training loop."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.shards import Traits
from runtime.axes import SHARD_AXES
from runtime.communicator import Communicator
from runtime.mesh import Mesh
from runtime.meta import names_of
from runtime.recompute import NEVER
from training.launch.world import World
from training.optimization import GlobalOptimizer
from training.tasks.cache import Cache
from training.tasks.gpt2 import newest_tokens
from training.tasks.task import Step, TrainingTask

from .layout import Setup, parameters_of
from .on_mesh import MeshLayout


class Sharded(MeshLayout):
    """Parameters, gradients and optimizer state in shards over the mesh's axes `shards`, `ep` and
    `cp`. Ranks along `dp` hold the same shards."""

    def __init__(self, task: TrainingTask, world: World, setup: Setup, mesh: Mesh) -> None:
        super().__init__(task, world, setup, mesh)
        args, cut_task = setup.args, self.cut_task
        # They gather, or share experts.
        self.forward_ranks = Communicator(self.data_ranks.group, recorder=setup.timeline)
        self.results_per_rank = self.dp_size == world.world_size  # each has a part of the batch
        self.num_microbatches = args.num_microbatches
        # Autocast would keep a whole copy of every matrix until its backward.
        compute_dtype = torch.bfloat16 if args.precision == "bf16" else None
        self.modules = cut_task.layers
        self.fsdp = FullyShardedDataParallel(  # allocates and fills this rank's shards
            cut_task.layers, setup.make_optimizer,
            names=names_of(cut_task.model), init=cut_task.initialize, zero=args.zero or 3,
            compute_dtype=compute_dtype, device=world.device, group=mesh[SHARD_AXES].group,
            replicas=self.replicas_of_shards.group,
            recorder=setup.timeline, recompute=args.recompute != NEVER,
            traits=lambda name: Traits(
                mesh[self.shard_axes(name)].group,
                exact=".router." in name,  # probabilities are float32
                kind=name in cut_task.shards,  # cut parameters and whole ones apart
            ),
        )  # fmt: skip
        self.optimizers = [self.fsdp.optimizer]
        self.kind_of_optimizer = partial(OptimizerOfShards, self.fsdp)
        layers = range(len(cut_task.layers))
        local = {x.name: x for k in layers for x in self.fsdp.get_local_info(k)}  # tied ones once
        self.held = self.held_in(local.values())

    def backward(self, step: Step) -> Tensor:
        """Runs all micro-batches, and meanwhile starts to sum their gradients over ranks."""
        self.fsdp.zero_grad()  # what a step that was left out has not used
        step = self.filled(step)
        parts = [*map(self.cut_task.input, step.inputs, step.targets)]  # if none: it still gathers
        inputs, targets = [x for x, _ in parts], [target for _, target in parts]
        loss = self.fsdp.train_step(inputs, targets, self.cut_task.loss, step.scale())
        self.fsdp.finish_gradients()  # waits for the last layers' sums over the data axis
        # then over the tensor axis: flat shards that its other ranks have, too
        self.cut_task.equalize(parameters_of(self.held, "tp"), self.data_ranks.size)
        # All ranks of the tensor axis have the same loss.
        return loss * (step.divisor if self.mesh["tp"].rank == 0 else 0)

    def forward(self, x: Any) -> Tensor | None:
        """Gathers layers, so all ranks must call it."""
        empty = self.no_sentences() if x is None and self.mesh["ep"].size > 1 else None
        output = cast(Tensor | None, self.fsdp.forward(empty if x is None else x))
        return None if x is None else output

    def next_tokens(self, ids: Tensor, cache: Cache, num_tokens: int) -> Tensor:
        """All ranks gather layers together, even if only one needs them: the others `end`."""
        self.some_rank_goes_on(True)  # meets the call in `end` of ranks that have finished
        output = self.forward(newest_tokens(ids, cache))  # [B, rows], of this rank's tokens
        assert output is not None
        return self.cut_task.argmax(output, num_tokens)

    def loaded(self) -> None:
        """The next forward gathers the new values."""
        self.fsdp.parameters_changed()

    def state_bytes(self) -> dict[str, int]:
        """The bytes of the shards."""
        return self.fsdp.held_bytes()


class OptimizerOfShards(GlobalOptimizer):
    """Its steps are collective: other ranks read these shards."""

    def __init__(self, fsdp: FullyShardedDataParallel, *given: Any) -> None:
        super().__init__(*given)  # what every kind is given
        self._fsdp = fsdp

    def _step(self, _: torch.optim.Optimizer) -> None:
        self._fsdp.optimizer_step()
