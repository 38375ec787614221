"""The layers in stages on several processes, for the training loop.

Tensor and context parallelism, `ddp --ep` and `fsdp --zero 1` run here, too, with one stage. All
losses are divided by the targets of the global batch, so all gradients add up, in this order:

    1. over replicas      buckets, each when backward has filled it; with ZeRO 1 in shards
    2. over stages        tied parameters: what step 1 has left on each of their ranks, in one
                          order on all, so copies get the same bits
    3. over tensor ranks  parameters that all of them hold whole: made equal on all

The positions of an expert come from all ranks that share experts, and so does its gradient. For
experts, step 1 is therefore over the ranks that have the same experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from data_parallel.buckets import GradientBuckets, SummedBucket, in_backward_order
from data_parallel.zero1 import ShardedOptimizer
from pipeline.microbatch import MicroBatches
from pipeline.processes.process import ProcessPipe
from pipeline.schedules.catalogue import ranks_of_stages
from runtime.communicator import Communicator
from runtime.mesh import Axis, Mesh
from runtime.recompute import mode_of
from training.launch.world import World
from training.options import PIPELINE_MICROBATCHES
from training.tasks.cache import Cache
from training.tasks.gpt2 import newest_tokens
from training.tasks.task import Step, TrainingTask

from .layout import Held, Setup, counts_here, parameters_of, state_bytes
from .measure import cut_in_words, stage_sizes
from .on_mesh import MeshLayout


class Staged(MeshLayout):
    """The layers in stages on the mesh's pipeline axis; micro-batches flow through them. Ranks of
    its data axis are replicas, whose gradients are combined."""

    def __init__(self, task: TrainingTask, world: World, setup: Setup, mesh: Mesh) -> None:
        super().__init__(task, world, setup, mesh)
        args, self._schedule = setup.args, setup.args.schedule
        self.results_per_rank = args.strategy in ("ddp", "fsdp")  # of one stage
        self.schedule = None if self.results_per_rank else self._schedule
        self.num_microbatches = self._number_of_microbatches()
        stages = mesh["pp"]
        ranks = ranks_of_stages(self._schedule, stages.size, args.chunks)  # by stage
        self.ranks = ranks if len(ranks) > stages.size else None  # only with chunks
        m = self.num_microbatches or PIPELINE_MICROBATCHES
        self.cut = stage_sizes(task, world, setup, len(ranks), m)
        one_at_a_time = len(ranks) == 1 or self.num_microbatches == 1
        self.pipe = ProcessPipe(  # allocates and fills this rank's stages alone
            nn.Sequential(*self.cut_task.layers), self.cut, world.device, stages.group,
            messages=mesh.messages, ranks=ranks, model=self.cut_task.model,
            initialize=self.cut_task.initialize, recorder=setup.timeline, timeout=args.timeout,
            recompute=mode_of(args.recompute, one_at_a_time),
        )  # fmt: skip
        self.modules = [self.pipe.module]
        if len(ranks) > 1:
            self.stage_sizes = self.cut
            self.description = cut_in_words(task, self.cut)
        if self.ranks:
            self.description += f", on the ranks {', '.join(map(str, ranks))}"
        self.held = self.replicated = self._whole_parameters()
        self.sharded: list[ShardedOptimizer] = []
        self._buckets: dict[nn.Parameter, GradientBuckets] = {}  # by parameter
        alone = self.data_ranks.size == 1
        for parameters, summing, sharing in () if alone else self._by_replicas():
            if args.zero == 1:  # each replica updates its part of this rank's parameters
                sharded = ShardedOptimizer(
                    parameters, setup.optimizer, Communicator(sharing.group), self._kind,
                    setup.timeline, Communicator(self.replicas_of_shards.group),
                )  # fmt: skip
                self.sharded.append(sharded)
                buckets = sharded.buckets
            else:
                communicator = Communicator(summing.group)
                groups = in_backward_order(parameters.values())
                summed = [SummedBucket(group, communicator) for group in groups]
                buckets = GradientBuckets(summed, setup.timeline)
            self._buckets |= dict.fromkeys(parameters.values(), buckets)
        if self.sharded:
            self.optimizers = [sharded.optimizer for sharded in self.sharded]
            self.held = self.held_in(x for sharded in self.sharded for x in sharded.slices)
        else:
            self.optimizers = [setup.optimizer(self.pipe.named_parameters().items())]

    def shared_axes(self, name: str) -> tuple[str, ...]:
        """If the parameter is tied, that of the stages, too."""
        return (*self._tied_axes(name), *super().shared_axes(name))

    def is_first(self, name: str) -> bool:
        """Whether this rank counts a parameter."""
        return self.pipe.users(name)[0] == self.pipe.rank and super().is_first(name)

    def _tied_axes(self, name: str) -> tuple[str, ...]:
        return ("pp",) if len(self.pipe.users(name)) > 1 else ()

    def _kind(self, name: str) -> tuple[bool, str | None]:
        """All ranks that hold a parameter must shard it alike: tensor ranks their whole parameters,
        stages their tied ones."""
        return name in self.cut_task.shards, name if self._tied_axes(name) else None

    def _number_of_microbatches(self) -> int | None:
        """As asked, or as suits the mesh; None: as suits the device."""
        if self.setup.args.strategy == "model":
            return 1
        # Where ranks meet inside a layer, each micro-batch costs the latency of its collectives.
        shared = self.mesh["tp"].size * self.mesh["cp"].size > 1
        default = PIPELINE_MICROBATCHES if self.mesh["pp"].size > 1 else 1 if shared else None
        return self.setup.args.num_microbatches or default

    def _whole_parameters(self) -> list[Held]:
        """The parameters of this rank's stages."""
        held, number = list[Held](), 0
        for name, p in self.pipe.named_parameters().items():
            axes, first = self.data_axes(name), self.is_first(name)
            counts = counts_here(first, number, self.mesh[axes].rank, self.mesh[axes].size)
            number += first
            held.append(Held.whole(name, p, self.replicas(*axes, *self.shared_axes(name)), counts))
        return self.cut_task.cut(held)

    def _by_replicas(self) -> list[tuple[dict[str, nn.Parameter], Axis, Axis]]:
        """This rank's parameters by name, the ranks that add up their gradients, and those of them
        that may share one copy in shards. Experts come separately, if ranks share them."""
        by_axes: dict[tuple[tuple[str, ...], ...], dict[str, nn.Parameter]] = {}
        for name, p in self.pipe.named_parameters().items():
            axes = self.data_axes(name), self.shard_axes(name)
            by_axes.setdefault(axes, {})[name] = p
        return [(ps, self.mesh[add], self.mesh[share]) for (add, share), ps in by_axes.items()]

    def backward(self, step: Step) -> Tensor:
        """The last stage has the loss of its replica; the first of its tensor ranks counts it."""
        loss = torch.zeros((), device=self.devices[0])  # of a replica without examples
        step = self.filled(step)
        if step.inputs:  # the same on all ranks of a replica: all run the pipe, or none
            inputs, targets = zip(*map(self.cut_task.input, step.inputs, step.targets), strict=True)
            with self.setup.autocast(self.devices[0]):
                loss = self.pipe.train_step(
                    MicroBatches(inputs), MicroBatches(targets), self.cut_task.loss,
                    self._schedule, scale=step.scale(), ready=self._ready,
                )  # fmt: skip
        for buckets in dict.fromkeys(self._buckets.values()):
            buckets.finish()  # every replica, with or without examples
        self.pipe.sum_tied({x.name: x.parameter for x in self.held if x.parameter is not None})
        self.cut_task.equalize(parameters_of(self.held, "tp"), self.data_ranks.size)
        # Undoes the scale: the summed loss of this replica.
        return loss.detach() * (step.divisor if self.mesh["tp"].rank == 0 else 0)

    def _ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients that this rank adds nothing more to may be summed over the replicas."""
        for p in parameters:
            if p in self._buckets:
                self._buckets[p].ready([p])

    def forward(self, x: Any, beside: Mapping[str, Any] | None = None) -> Tensor | None:
        """The last stage sees the outputs."""
        if x is None and self.mesh["ep"].size == 1:  # this replica has no batch left
            return None
        with self.setup.autocast(self.devices[0]):  # an empty batch, where others need its experts
            output = self.pipe.forward(self.no_sentences() if x is None else x, beside)
        return None if x is None else cast(Tensor | None, output)

    def next_tokens(self, ids: Tensor, cache: Cache, num_tokens: int) -> Tensor:
        """The last stage has the logits; each rank keeps the cache of its own layers and heads."""
        self.some_rank_goes_on(True)  # meets the call in `end` of ranks that have finished
        logits = self.forward(newest_tokens(ids), {"cache": cache})  # last stage: [B, rows]
        tokens = torch.empty(len(ids), dtype=torch.int64)  # [B]
        if logits is not None:
            tokens = self.cut_task.argmax(logits, num_tokens).cpu()
        with self.world.last.waiting():
            return self.pipe.from_last(tokens).to(self.devices[0])

    def loaded(self) -> None:
        """Sends the new values to all replicas."""
        for sharded in self.sharded:
            sharded.publish()

    def state_bytes(self) -> dict[str, int]:
        """The bytes that this rank holds."""
        held = state_bytes(self.pipe.parameters(), self.optimizers)
        if self.sharded:
            held["gradients"] = sum(
                bucket.flat.nbytes for sharded in self.sharded for bucket in sharded.buckets.buckets
            )
        return held

    def close(self) -> None:
        """Closes the pipe."""
        self.pipe.close()
