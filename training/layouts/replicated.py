"""The whole model on every rank: one process, or data parallelism.

Each rank computes the gradients of its part of the global batch; then they are averaged over the
ranks. --gradient_sync says how (data_parallel/gradients.py): an all-reduce per parameter, one for
all of them, or in buckets, each as soon as it is full, while backward still runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from data_parallel.gradients import (
    DistributedDataParallel,
    average_gradients,
    average_gradients_flat,
)
from runtime.communicator import Communicator
from training.launch.world import World
from training.tasks.cache import Cache
from training.tasks.generation import greedy
from training.tasks.gpt2 import newest_tokens
from training.tasks.task import Step, TrainingTask, whole_model

from .layout import Held, LaidOutModel, Setup, counts_here


class Recomputed(nn.Sequential):
    """Layers in `number` segments. All but the last keep only their input and are recomputed in
    backward; see runtime/recompute.py. No layer may change its buffers or its input."""

    def __init__(self, layers: Sequence[nn.Module], number: int) -> None:
        super().__init__(*layers)
        self.number = number

    def forward(self, value: Any) -> Any:
        """The output of the last layer."""
        if not torch.is_grad_enabled():
            return super().forward(value)
        return checkpoint_sequential(self, self.number, value, use_reentrant=False)


class Replicated(LaidOutModel):
    """See `LaidOutModel`."""

    module: nn.Module
    results_per_rank = True

    def __init__(self, task: TrainingTask, world: World, setup: Setup) -> None:
        args = setup.args
        self.task, self.setup, self.devices = task, setup, [world.device]
        self.world, self.dp_rank, self.dp_size = world, world.rank, world.world_size
        self.num_microbatches = args.num_microbatches
        self.module = whole_model(task, world.device, setup.dtype)  # the same on all ranks
        self.modules = layers = task.layers(self.module)  # they share the module's parameters
        self._loss = task.loss
        if args.compile:  # layer by layer: equal layers are compiled once, hooks run as ever
            self._loss = torch.compile(task.loss)
            for layer in layers:
                layer.compile()
        self.net: nn.Module = nn.Sequential(*layers)
        segments = {"always": len(layers), "sqrt": round(math.sqrt(len(layers)))}
        if args.recompute in segments:  # not except_last: the one that is held is the last
            self.net = Recomputed(layers, segments[args.recompute])
        parameters = list(self.module.named_parameters())
        self.optimizers = [setup.optimizer(parameters)]
        replicas = ("dp",) if self.dp_size > 1 else ()
        self.held = [
            Held.whole(name, p, replicas, counts_here(True, i, self.dp_rank, self.dp_size))
            for i, (name, p) in enumerate(parameters)
        ]
        self._ddp: DistributedDataParallel | None = None
        if world.world_size > 1 and args.gradient_sync == "overlap":
            mib = args.bucket_mb  # None: as large as suits the device
            size = max(1, int(min(mib, 2**30) * 2**20)) if mib is not None else None
            # Sends rank 0's weights to all, and hooks each parameter.
            self.net = self._ddp = DistributedDataParallel(
                self.net, bucket_bytes=size, recorder=setup.timeline,
                comm_dtype=torch.bfloat16 if args.comm_dtype == "bf16" else None,
            )  # fmt: skip

    @property
    def layer_ranks(self) -> Communicator | None:
        """All ranks."""
        return Communicator(dist.group.WORLD) if self.dp_size > 1 else None

    def average_gradients(self, module: nn.Module | None) -> None:
        """Over the ranks. The loop passes the module (the course's contract)."""
        assert module is not None
        if self._ddp is not None:  # the buckets have its parameters
            self._ddp.average_gradients()
        elif self.dp_size > 1:  # an exchange only after backward
            with self.setup.timeline.span("all_reduce"):
                if self.setup.args.gradient_sync == "flat":
                    average_gradients_flat(module)
                else:
                    average_gradients(module)

    def backward(self, step: Step) -> Tensor:
        """The micro-batches one after the other; the loop averages their gradients over ranks."""
        scale = step.scale(averaging=self.dp_size)
        last, timeline = len(step.inputs) - 1, self.setup.timeline
        total = torch.zeros((), dtype=self.setup.dtype, device=self.devices[0])  # without the scale
        for i, (x, target) in enumerate(zip(step.inputs, step.targets, strict=True)):
            # Only the backward of the last micro-batch starts the exchange.
            with nullcontext() if i == last or not self._ddp else self._ddp.no_sync():
                with self.setup.autocast(self.devices[0]), timeline.span("F", microbatch=i):
                    loss = self._loss(self.net(x), target)  # summed over its targets
                with timeline.span("B", microbatch=i):
                    (loss * scale).backward()  # adds to the gradients so far
            total += loss.detach()
        return total

    def outputs(self, x: Any) -> Tensor | None:
        """Every rank sees its own outputs."""
        if x is None:
            return None
        compiled = self.setup.args.compile
        # Evaluation has different shapes, and each would be compiled.
        eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
        with self.setup.autocast(self.devices[0]), eager:
            output: Tensor = self.net(x)  # [N, V] at N targets, or [B, classes]
        return output

    def next_tokens(self, ids: Tensor, cache: Cache, num_tokens: int) -> Tensor:
        """Every rank computes those of its own sentences."""
        logits = self.outputs(newest_tokens(ids, cache))  # [B, V], of the newest position
        assert logits is not None
        return greedy(logits, num_tokens)
