"""The layers in stages on several processes, for the training loop.

Tensor and context parallelism, `ddp --ep` and `fsdp --zero 1` run here, too, with one stage. A step
is, in this order: the schedule's actions, which end with the sum of tied gradients over stages; the
average over replicas; the sum over tensor ranks of what each has whole; with ZeRO 1, in the place
of the average, the reduction to shards. Replicas of an expert are fewer than those of other
parameters, where ranks share experts: those that have the same one. Its gradient is a sum over the
ranks that share it already, since positions of all of them came to it. So the mean over its
replicas is divided by the number of those ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from data_parallel.gradients import GradientBuckets
from data_parallel.zero1 import ShardedOptimizer
from pipeline.microbatch import MicroBatches
from pipeline.processes.process import ProcessPipe
from pipeline.schedules.catalogue import ranks_of_stages
from runtime.communicator import Communicator
from runtime.mesh import Axis, Mesh
from runtime.recompute import mode_of
from training.launch.world import World
from training.tasks.cache import Cache
from training.tasks.gpt2 import newest_tokens
from training.tasks.task import Step, TrainingTask

from .layout import Held, Setup, parameters_of, state_bytes
from .measure import cut_in_words, stage_sizes
from .tensor import MeshLayout


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
        self.cut = stage_sizes(task, world, setup, len(ranks), self.num_microbatches or 4)
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
        self.held = self._parameters = self._whole_parameters()
        self.sharded: list[ShardedOptimizer] = []
        self.buckets: list[GradientBuckets] = []
        self._buckets_of: dict[nn.Parameter, GradientBuckets] = {}
        if self.replica.size > 1 and args.zero == 1:
            self._shard_optimizers()
            return
        for parameters, replica in self._by_replica() if self.replica.size > 1 else ():
            # In buckets of their own, since the rank of the other stage must get the same bits.
            tied = parameters_of(self.held, "pp")
            buckets = GradientBuckets(
                parameters.values(), replica.group, recorder=setup.timeline, apart=tied
            )
            self.buckets.append(buckets)
            self._buckets_of.update(dict.fromkeys(parameters.values(), buckets))
        self.optimizers = [setup.optimizer(self.pipe.parameters())]

    def _number_of_microbatches(self) -> int | None:
        """As asked, or as suits the mesh; None: the device."""
        if self.setup.args.strategy == "model":
            return 1
        # Where ranks meet inside a layer, each micro-batch costs the latency of its collectives.
        shared = self.mesh["tp"].size * self.mesh["cp"].size > 1
        usual = 4 if self.mesh["pp"].size > 1 else 1 if shared else None
        return self.setup.args.num_microbatches or usual

    def _whole_parameters(self) -> list[Held]:
        """The parameters of this rank's stages. Each replica of the data axis has the whole
        gradient when it steps, and counts a part of them in the norm."""
        owned, held, number = self.pipe.owned_parameters(), list[Held](), 0
        for name, p in self.pipe.named_parameters().items():
            first = name in owned and self.cut_task.counted(name)  # of the other axes' ranks
            replica = self.mesh[self.data_axes(name)]
            counts = first and number % replica.size == replica.rank
            number += first
            held.append(Held.whole(name, p, self._replicas(name, *self.data_axes(name)), counts))
        return self.cut_task.cut(held)

    def _replicas(self, name: str, *axes: str) -> tuple[str, ...]:
        """Axes along which ranks hold the same: `axes`, that of the stages if the parameter is
        tied, and that of the matrices if it is not cut."""
        stages = ("pp",) if len(self.pipe.users(name)) > 1 else ()
        return self.replicas(*axes, *stages, *self.cut_task.shared_axes(name))

    def _by_replica(self) -> list[tuple[dict[str, nn.Parameter], Axis]]:
        """This rank's parameters by name, and the ranks that average their gradients: those of
        experts, if ranks share them, apart from the others."""
        by_axes: dict[tuple[str, ...], dict[str, nn.Parameter]] = {}
        for name, p in self.pipe.named_parameters().items():
            by_axes.setdefault(self.data_axes(name), {})[name] = p
        return [(parameters, self.mesh[axes]) for axes, parameters in by_axes.items()]

    def _shard_optimizers(self) -> None:
        """ZeRO 1: each replica updates its part of this rank's parameters."""

        def kind(name: str) -> tuple[bool, str | None]:
            # All ranks that hold a parameter must shard it alike: tensor ranks their whole
            # parameters, stages their tied ones.
            tied = name if len(self.pipe.users(name)) > 1 else None
            return name in self.cut_task.shards, tied

        for parameters, replica in self._by_replica():
            ranks = Communicator(replica.group, recorder=self.setup.timeline)
            self.sharded.append(ShardedOptimizer(parameters, self.setup.optimizer, ranks, kind))
        self.optimizers = [sharded.optimizer for sharded in self.sharded]
        owned, held = self.pipe.owned_parameters(), list[Held]()
        for unit, shard in chain.from_iterable(sharded.units() for sharded in self.sharded):
            name = unit.entries[0].name
            counts = name in owned and self.cut_task.counted(name)
            held += self.held_in(unit, shard, self._replicas(name), counts)
        self.held = held

    def backward(self, step: Step) -> Tensor:
        """The last stage has the loss of its replica; the first of its tensor ranks counts it."""
        # The buckets hold the mean of the replicas' gradients; see `Replicated.backward`.
        count = max(1, step.count) / (self.replica.size if self.buckets else 1)
        loss = torch.zeros((), device=self.devices[0])  # of a replica without examples
        step = self.filled(step)
        if step.inputs:  # the same on all ranks of a replica: all run the pipe, or none
            inputs, targets = zip(*map(self.cut_task.input, step.inputs, step.targets), strict=True)
            with self.setup.autocast(self.devices[0]):
                loss = self.pipe.train_step(
                    MicroBatches(inputs), MicroBatches(targets), self.cut_task.loss,
                    self._schedule, scale=1 / count, ready=self._ready,
                )  # fmt: skip
        for buckets in self.buckets:
            buckets.finish()  # every replica, with or without examples
        if self.buckets:  # see the head of this file
            for name, p in self.pipe.named_parameters().items():
                if name in self.cut_task.experts and p.grad is not None:
                    p.grad /= self.sharing.size
        self.cut_task.sum_gradients(
            parameters_of(self._parameters, "tp")
        )  # before `reduce`, which takes p.grad away
        for sharded in self.sharded:
            sharded.reduce()  # sums over the replicas, into the shards' gradients
        if self.replica.size > 2:
            self._copy_gradients()
        # `count` undoes the scale: the summed loss of this replica.
        return loss.detach() * (count if self.mesh["tp"].rank == 0 else 0)

    def _ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients that are whole may be averaged."""
        for p in parameters:
            if p in self._buckets_of:
                self._buckets_of[p].ready([p])

    def _copy_gradients(self) -> None:
        """The same bits for all ranks that hold a parameter.

        Ranks of several stages, or of the tensor axis, are in several groups of replicas, and each
        adds up its copy of the gradient. Of three or more replicas the order of the addition
        decides the last bits. NCCL chooses an order for each group. Ranks of one machine add in
        another order than those of several.
        """
        self.cut_task.copy_gradients(parameters_of(self.held, "tp"))
        tied = {x.name: x.parameter for x in self.held if "pp" in x.replicas}
        self.pipe.copy_tied({name: None if p is None else p.grad for name, p in tied.items()})

    def forward(self, x: Any, beside: Mapping[str, Any] | None = None) -> Tensor | None:
        """The last stage sees the outputs."""
        if x is None and self.sharing.size == 1:  # this replica has no batch left
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
        return self.pipe.from_last(tokens).to(self.devices[0])

    @property
    def replicated(self) -> Sequence[Held]:
        """Whole parameters, also where this rank updates shards of them."""
        return self._parameters

    def loaded(self) -> None:
        """Sends the new values to all replicas."""
        for sharded in self.sharded:
            sharded.publish()

    def state_bytes(self) -> dict[str, int]:
        """The bytes that this rank holds."""
        held = state_bytes(self.pipe.parameters(), self.optimizers)
        if self.sharded:
            held["gradients"] += state_bytes(parameters_of(self.held))["gradients"]
        return held

    def close(self) -> None:
        """Closes the pipe."""
        self.pipe.close()
