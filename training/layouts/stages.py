"""The layers in stages on several processes, for the training loop.

Tensor parallelism and `fsdp --zero 1` run here, too, with one stage. A step is, in this
order: the schedule's actions, which end with the sum of tied gradients over stages; the average
over replicas; the sum over tensor ranks of what each has whole; with ZeRO 1, in the place of the
average, the reduction to shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from data_parallel.gradients import GradientBuckets
from data_parallel.zero1 import ShardedOptimizer
from pipeline.microbatch import MicroBatches
from pipeline.processes.process import ProcessPipe
from pipeline.schedules.catalogue import ranks_of_stages
from runtime.communicator import Communicator
from runtime.mesh import Mesh
from runtime.recompute import mode_of
from training.launch.world import World
from training.tasks.cache import Cache
from training.tasks.gpt2 import newest_tokens
from training.tasks.task import Step, TrainingTask

from .layout import Piece, state_bytes, whole_piece
from .measure import cut_in_words, stage_sizes
from .setup import Setup
from .tensor import MeshLayout


class Staged(MeshLayout):
    """The layers in stages on the mesh's pipeline axis; micro-batches flow through them. Ranks of
    its data axis are replicas, whose gradients are combined."""

    def __init__(self, task: TrainingTask, world: World, setup: Setup, mesh: Mesh) -> None:
        super().__init__(task, world, setup, mesh)
        args, schedule = setup.args, setup.args.schedule or "1f1b"
        # fsdp has whole models, of one stage: each replica writes its results.
        self.schedule = None if args.strategy == "fsdp" else schedule
        self.num_microbatches = self._number_of_microbatches()
        ranks = ranks_of_stages(schedule, mesh.pipeline.size, args.chunks)  # by stage
        self.ranks = ranks if len(ranks) > mesh.pipeline.size else None  # only with chunks
        self.cut = stage_sizes(task, world, setup, len(ranks), self.num_microbatches or 4)
        one_at_a_time = len(ranks) == 1 or self.num_microbatches == 1
        self.pipe = ProcessPipe(  # allocates and fills this rank's stages alone
            nn.Sequential(*self.cut_task.layers), self.cut, world.device, mesh.pipeline.group,
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
        mine = self.pipe.named_parameters()  # of this rank's stages; the parts of cut ones
        self._names = {p: name for name, p in mine.items()}
        self.on_all = [p for name, p in mine.items() if name not in self.cut_task.parts]
        # What ranks of several groups of replicas hold: by name, what stages share; and what tensor
        # ranks have whole. ZeRO 1 holds shards of it.
        self._tied = {name: p for name, p in mine.items() if len(self.pipe.users(name)) > 1}
        self._whole = self.on_all
        self.sharded: ShardedOptimizer | None = None
        self.buckets: GradientBuckets | None = None
        if args.zero == 1 and self.parts > 1:
            self._shard_optimizer(mine, Communicator(mesh.data.group, recorder=setup.timeline))
        else:
            self._whole_optimizer(mine)

    def _number_of_microbatches(self) -> int | None:
        """As asked, or as suits the mesh; None: the device."""
        if self.setup.args.strategy == "model":
            return 1
        # Between matrices each micro-batch costs the latency of its collectives.
        usual = 4 if self.mesh.pipeline.size > 1 else 1 if self.mesh.tensor.size > 1 else None
        return self.setup.args.num_microbatches or usual

    def _whole_optimizer(self, mine: dict[str, nn.Parameter]) -> None:
        """Each replica updates all of this rank's parameters."""
        if self.parts > 1:
            # In buckets of their own, since the rank of the other stage must get the same bits.
            self.buckets = GradientBuckets(
                mine.values(), self.mesh.data.group, recorder=self.setup.timeline,
                apart=self._tied.values(),
            )  # fmt: skip
        self.optimizers = [self.setup.optimizer(mine.values())]
        owned = self.pipe.owned_parameters().keys()
        counts = [p for name, p in mine.items() if name in owned and self.cut_task.counted(name)]
        # Every replica has the whole gradient: each counts a part of it in the norm.
        self.counted = counts[self.part :: self.parts]

    def _shard_optimizer(self, mine: dict[str, nn.Parameter], replicas: Communicator) -> None:
        """ZeRO 1: each replica updates its part of this rank's parameters."""

        def kind(name: str) -> tuple[bool, str | None]:
            # All ranks that hold a parameter must shard it alike: tensor ranks their whole
            # parameters, stages their tied ones.
            tied = name if name in self._tied else None
            return name in self.cut_task.parts, tied

        owned = self.pipe.owned_parameters().keys()
        self.sharded = ShardedOptimizer(mine, self.setup.optimizer, replicas, kind)
        self.optimizers = [self.sharded.optimizer]
        shards = self.sharded.shards.items()
        self._tied = {tied: p for (_, tied), p in shards if tied is not None}
        self._whole = [p for (cut, _), p in shards if not cut]
        self.counted = [  # shards; of tied and of whole parameters on one rank only
            p
            for (cut, tied), p in shards
            if (tied is None or tied in owned) and (cut or self.tensor_rank == 0)
        ]

    def backward(self, step: Step) -> Tensor:
        """All ranks of a replica get its loss; the first counts it."""
        # The buckets hold the mean of the replicas' gradients; see `Replicated.backward`.
        count = max(1, step.count) / (self.parts if self.buckets else 1)
        loss = torch.zeros((), device=self.devices[0])  # of a replica without examples
        if step.inputs:  # the same on all ranks of a replica: all run the pipe, or none
            inputs = map(self.cut_task.input, step.inputs, step.targets)
            with self.setup.autocast(self.devices[0]):
                loss = self.pipe.train_step(
                    MicroBatches(inputs), MicroBatches(step.targets), self.cut_task.loss,
                    self.schedule or "1f1b", scale=1 / count,
                )  # fmt: skip
        if self.buckets is not None:
            self.buckets.finish()  # every replica, with or without examples
        self.cut_task.sum_gradients(self.on_all)  # before `reduce`, which takes p.grad away
        if self.sharded is not None:
            self.sharded.reduce()  # sums over the replicas, into the shards' gradients
        if self.parts > 2:
            self._copy_gradients()
        first = self.mesh.pipeline.rank == self.mesh.tensor.rank == 0  # one rank counts per replica
        # `count` undoes the scale: the summed loss of this replica.
        return loss.detach() * (count if first else 0)

    def _copy_gradients(self) -> None:
        """The same bits for all ranks that hold a parameter.

        Ranks of several stages, or of the tensor axis, are in several groups of replicas, and each
        adds up its copy of the gradient. Of three or more replicas the order of the addition
        decides the last bits. NCCL chooses an order for each group. Ranks of one machine add in
        another order than those of several.
        """
        self.cut_task.copy_gradients(self._whole)
        self.pipe.copy_tied({name: p.grad for name, p in self._tied.items()})

    def forward(self, x: Any, beside: Mapping[str, Any] | None = None) -> Tensor | None:
        """The last stage sees the outputs."""
        if x is None:  # this replica has no batch left
            return None
        with self.setup.autocast(self.devices[0]):
            return cast(Tensor | None, self.pipe.forward(x, beside))

    def next_tokens(self, ids: Tensor, cache: Cache, num_tokens: int) -> Tensor:
        """The last stage has the logits; each rank keeps the cache of its own layers and heads."""
        logits = self.forward(newest_tokens(ids), {"cache": cache})  # last stage: [B, rows]
        tokens = None if logits is None else self.cut_task.argmax(logits, num_tokens)
        return self.pipe.from_last(tokens)  # [B], on every stage

    def held(self) -> Iterable[Tensor]:
        """The parameters of this rank's stages, or shards of them."""
        if self.sharded is None:
            return self.pipe.parameters()
        return self.sharded.shards.values()

    def pieces(self, p: Tensor, t: Tensor) -> list[Piece]:
        """The slices of whole parameters that `t` has."""
        if self.sharded is None:
            return self.cut_task.pieces([whole_piece(self._names[p], t)])
        return self.flat_pieces(self.sharded.pieces(p, t))

    def loaded(self) -> None:
        """Sends the new values to all replicas."""
        if self.sharded is not None:
            self.sharded.publish()

    def whole_parameters(self) -> dict[str, Tensor]:
        """Those of this rank's stages; a tied one has a copy on every rank that uses it."""
        return self.cut_task.names(self.pipe.named_parameters())

    def state_bytes(self) -> dict[str, int]:
        """The bytes that this rank holds."""
        held = state_bytes(self.pipe.parameters(), self.optimizers)
        if self.sharded is not None:
            gradients = (p.grad for p in self.sharded.shards.values())
            held["gradients"] += sum(g.nbytes for g in gradients if g is not None)
        return held

    def close(self) -> None:
        """Closes the buckets and the pipe."""
        if self.buckets is not None:
            self.buckets.close()
        self.pipe.close()
