"""A task whose layers are cut over the ranks of a mesh's tensor, context and expert axes.

Ranks of the tensor axis share every matrix. Three things change. The layers hold parts of the
model's matrices, so initial values, checkpoints and exports use `TensorShard`. The last layer
computes the loss, so the labels travel with the input, as `Sequences.labels`. A parameter that
every rank holds whole is counted once in norms; with sequence parallelism its gradient is summed
over the ranks.

Ranks of the expert axis share the experts of every layer (experts/): each holds some of them.
Ranks of the context axis take their positions of the same micro-batches (context.py).

On an axis with one rank nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_parallel.gradients import copy_back
from experts.layer import share_experts
from runtime.communicator import Communicator
from runtime.mesh import Mesh
from runtime.sums import add_up
from tensor_parallel.gpt2 import HeadAndLoss, TensorShard, VocabularyParallelHead, cut_matrices
from tensor_parallel.loss import argmax
from training.tasks.generation import greedy
from training.tasks.task import TrainingTask

from .context import attend_across, own_positions
from .layout import Held, Setup


class CutTask:
    """The layers of a task, as this rank of a mesh has them, with whole matrices: `TensorCutTask`
    is for several tensor ranks.

    Attributes:
        tensor_ranks, context_ranks, expert_ranks: those of the axes `tp`, `cp` and `ep`.
        model, layers: on the meta device, with this rank's shards.
        shards: by the name of a parameter, this rank's part of it; others it holds whole.
        experts: the names of parameters of experts; each of `expert_ranks` has different experts.
    """

    def __init__(self, task: TrainingTask, setup: Setup, mesh: Mesh) -> None:
        self.task = task
        self.tensor_ranks, self.context_ranks, self.expert_ranks = (
            Communicator(mesh[axis].group, recorder=setup.timeline, sums_travel_narrow=axis == "tp")
            for axis in ("tp", "cp", "ep")
        )
        self.model: Any = task.skeleton().to(setup.dtype)
        self.shards: dict[str, TensorShard] = {}
        if self.expert_ranks.size > 1:
            at, n = self.expert_ranks.rank, self.expert_ranks.size
            for name, shape in share_experts(self.model, self.expert_ranks).items():
                self.shards[name] = TensorShard(shape, 0, 1, at, n)
        self.experts = {*self.shards}
        self.layers = self._cut_layers(setup)
        if self.context_ranks.size > 1:
            attend_across(self.layers, self.context_ranks, setup.args.attention)

    def _cut_layers(self, setup: Setup) -> list[nn.Module]:  # noqa: ARG002
        return self.task.layers(self.model)

    def _sharers(self, training: bool) -> int:  # noqa: ARG002
        """How many ranks divide the positions of one rank of the context axis again."""
        return 1

    def initialize(self, name: str, p: Tensor) -> None:
        """Writes the initial values of this rank's part of a parameter."""
        if name in self.shards:
            whole = p.new_empty(self.shards[name].shape)  # the whole parameter, for a moment
            self.task.initialize(name, whole)
            p.copy_(self.shards[name].of(whole))
        else:
            self.task.initialize(name, p)

    def input(self, x: Any, target: Any, training: bool = True) -> tuple[Any, Any]:
        """This rank's part of a micro-batch whose loss is wanted: the input of the first layer, and
        the labels. Padding makes the positions a multiple of the ranks that share them."""
        if self.context_ranks.size > 1:
            x, target = own_positions(x, target, self.context_ranks, self._sharers(training))
        return self._with_labels(x, target, training), target

    def _with_labels(self, x: Any, target: Any, training: bool) -> Any:
        """The input with the labels, where the last layer needs them."""
        return x if training else self.task.to_measure(x, target)

    def loss(self, logits: Tensor, target: Any) -> Tensor:
        """The summed loss, from what the last layer returned."""
        return self.task.loss(logits, target)

    def measure(self, logits: Tensor, target: Any) -> Tensor | None:
        """The task's `measure`, from what the last layer returned in evaluation. None except on
        the first of the tensor ranks."""
        return self.task.measure(logits, target)

    def logits(self, own_logits: Tensor) -> Tensor | None:
        """All logits [N, V], for a comparison; None except on the first of the tensor ranks."""
        return own_logits

    def argmax(self, own_logits: Tensor, num_tokens: int) -> Tensor:
        """The most probable tokens, on every rank."""
        return greedy(own_logits, num_tokens)

    def cut(self, held: Iterable[Held]) -> list[Held]:
        """Rectangles of this rank's shards, as rectangles of the whole parameters."""
        rectangles = []
        for x in held:
            shard = self.shards.get(x.name)
            if shard is None:
                rectangles.append(x)
                continue
            for offsets, view in shard.rectangles(x.offsets, x.tensor):  # c_attn: of q, k and v
                rectangles.append(replace(x, tensor=view, offsets=offsets, shape=shard.shape))
        return rectangles

    def equalize(self, parameters: Iterable[nn.Parameter], replicas: int) -> None:
        """Makes gradients equal on all tensor ranks, if all hold a parameter whole. Here there is
        one rank."""


class TensorCutTask(CutTask):
    """With matrices that are cut over the tensor ranks. The last layer computes the loss, or the
    logits of this rank's rows of the head.

    Attributes:
        head: this rank's rows of the head.
        sequence_parallel: between the matrices each rank has some of the positions.
    """

    head: VocabularyParallelHead
    sequence_parallel: bool

    def _cut_layers(self, setup: Setup) -> list[nn.Module]:
        self.sequence_parallel = setup.args.sequence_parallel
        self.shards |= cut_matrices(self.model, self.tensor_ranks, self.sequence_parallel)
        layers: list[Any] = super()._cut_layers(setup)  # they hold the new modules
        for layer in layers[:-1]:  # tells them their heads and positions
            layer.shard = self.tensor_ranks.rank
            layer.sequence_parallel = self.sequence_parallel
        self.head = self.model.lm_head
        layers[-1] = HeadAndLoss(self.model.transformer.ln_f, self.head, self.sequence_parallel)
        return layers

    def _sharers(self, training: bool) -> int:
        return self.tensor_ranks.size if training and self.sequence_parallel else 1

    def _with_labels(self, x: Any, target: Any, training: bool) -> Any:
        length = x.hidden.size(1)
        if more := -length % self._sharers(training):
            numbers = x.targets + x.targets // length * more  # earlier rows are longer
            x = x._replace(hidden=F.pad(x.hidden, (0, more)), targets=numbers)
        return x._replace(labels=target)

    def loss(self, loss: Tensor, target: Any) -> Tensor:  # noqa: ARG002
        """The last layer has computed it."""
        return loss

    def measure(self, measures: Tensor, target: Any) -> Tensor | None:  # noqa: ARG002
        """The last layer has computed them, on every rank."""
        return measures if self.tensor_ranks.rank == 0 else None

    def logits(self, own_logits: Tensor) -> Tensor | None:
        """Joined from the ranks' parts."""
        logits = self.tensor_ranks.all_gather(own_logits, 1)  # [N, t rows]; the last may be surplus
        return logits[:, : self.head.vocabulary] if self.tensor_ranks.rank == 0 else None

    def argmax(self, own_logits: Tensor, num_tokens: int) -> Tensor:
        """From the ranks' parts of the logits."""
        return argmax(own_logits, num_tokens, self.tensor_ranks, self.head.first)

    @torch.no_grad()
    def equalize(self, parameters: Iterable[nn.Parameter], replicas: int) -> None:
        """Makes gradients equal on all tensor ranks, if all hold a parameter whole. Call it after
        `replicas` replicas have added up theirs.

        With sequence parallelism each rank has used the parameters on its own positions: their
        gradients are summed, in the order of the ranks. Otherwise all have the same gradients, but
        each was added up over replicas in a different group. With three or more replicas the order
        of addition decides the last bits, and NCCL chooses one for each group: all take the first
        rank's.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients and (self.sequence_parallel or replicas > 2):
            flat = torch.cat([g.flatten() for g in gradients])
            by_rank = self.tensor_ranks.all_gather(flat[None], 0)  # [t, elements]
            equal = add_up(by_rank.unbind()) if self.sequence_parallel else by_rank[0]
            copy_back(equal, gradients)  # in place: optimizers and buckets hold these tensors
