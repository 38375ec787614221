"""A task's layers, cut over the ranks that share them: what tensor parallelism changes in a layout.

Three things change. The layers hold parts of the model's matrices, so initial values, checkpoints
and exports use `Part`. The head is fused with the loss and needs the labels, so a micro-batch has
them too, as `Sequences.labels`. A parameter that every rank holds whole is counted once in
norms; with sequence parallelism its gradient is summed over the ranks.

With one rank nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.mesh import Axis
from runtime.ranks import Ranks
from runtime.recorder import Recorder
from tensor_parallel.gpt2 import HeadAndLoss, Part, VocabularyParallelHead, cut_matrices
from tensor_parallel.loss import argmax
from training.layouts.layout import Piece
from training.tasks.generation import greedy
from training.tasks.task import TrainingTask


class CutTask:
    """The layers of a task that the ranks of `axis` share.

    Args:
        sequence_parallel: between the matrices each rank has a part of the positions.

    Attributes:
        model, layers: on the meta device, with this rank's parts.
    """

    def __init__(
        self,
        task: TrainingTask,
        axis: Axis,
        dtype: torch.dtype,
        sequence_parallel: bool,
        recorder: Recorder,
    ) -> None:
        self.task = task
        self.ranks = Ranks(axis.group, recorder=recorder)
        self.sequence_parallel = sequence_parallel and axis.size > 1
        skeleton: Any = task.skeleton().to(dtype)
        self.model = skeleton
        self.parts: Mapping[str, Part] = {}
        if axis.size == 1:
            self.layers = task.layers(self.model)
            return
        self.parts = cut_matrices(self.model, self.ranks, sequence_parallel)  # by name
        self.layers = task.layers(self.model)  # after `cut_matrices`: they hold its new modules
        for layer in self.layers[:-1]:  # tells them their heads and positions
            layer.shard, layer.sequence_parallel = axis.rank, sequence_parallel  # type: ignore[assignment]
        self.head: VocabularyParallelHead = skeleton.lm_head
        norm = skeleton.transformer.ln_f
        self.layers[-1] = HeadAndLoss(norm, self.head, sequence_parallel)

    def initialize(self, name: str, p: Tensor) -> None:
        """Writes the initial values of this rank's part of a parameter."""
        if name in self.parts:
            every = p.new_empty(self.parts[name].shape)  # the whole parameter, for a moment
            self.task.initialize(name, every)
            p.copy_(self.parts[name].of(every))
        else:
            self.task.initialize(name, p)

    def input(self, x: Any, target: Any, training: bool = True) -> Any:
        """The input of the first layer for a micro-batch whose loss is wanted."""
        if not self.parts:
            return x
        length = x.hidden.size(1)
        # Padding makes the sequence a multiple of the number of ranks.
        more = -length % self.ranks.size if training and self.sequence_parallel else 0
        if more:
            numbers = x.targets + x.targets // length * more  # earlier rows are longer
            x = x._replace(hidden=F.pad(x.hidden, (0, more)), targets=numbers)
        return x._replace(labels=target)

    def loss(self, output: Tensor, target: Any) -> Tensor:
        """The summed loss, from the output of the last layer."""
        return output if self.parts else self.task.loss(output, target)  # HeadAndLoss has it

    def measure(self, output: Tensor, target: Any) -> Tensor | None:
        """The task's `measure`, from the output of the last layer in evaluation; on rank 0 only."""
        if not self.parts:
            return self.task.measure(output, target)
        return output if self.ranks.rank == 0 else None

    def logits(self, output: Tensor) -> Tensor | None:
        """All logits [N, V], joined from the ranks' parts, for a comparison; None but on rank 0."""
        if not self.parts:
            return output
        every = self.ranks.all_gather(output, 1)  # [N, t rows]; the last ones may be surplus
        return every[:, : self.head.vocabulary] if self.ranks.rank == 0 else None

    def argmax(self, output: Tensor, num_tokens: int) -> Tensor:
        """The most probable tokens, on every rank, from the ranks' parts of the logits."""
        if not self.parts:
            return greedy(output, num_tokens)
        return argmax(output, num_tokens, self.ranks, self.head.first)

    def counted(self, name: str) -> bool:
        """Whether this rank counts a parameter: one that all have is counted by the first."""
        return name in self.parts or self.ranks.rank == 0

    def pieces(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The same slices, as slices of the whole parameters."""
        found = []
        for piece in pieces:
            part = self.parts.get(piece.name)
            if part is None:
                found.append(piece)
                continue
            for at, view in part.rectangles(piece.offsets, piece.tensor):  # c_attn: of q, k and v
                found.append(replace(piece, tensor=view, offsets=at, shape=part.shape))
        return found

    def names(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters under names that say which part of one this rank has."""
        rank, size = self.ranks.rank + 1, self.ranks.size
        return {
            f"{name} (part {rank} of {size})" if name in self.parts else name: p
            for name, p in parameters.items()
        }

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums gradients over the ranks, with sequence parallelism alone: there each rank has used
        these whole parameters on its own positions."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not self.sequence_parallel or not gradients:
            return
        total = self.ranks.all_reduce(torch.cat([g.flatten() for g in gradients]))
        for g, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
            g.copy_(part.view_as(g))  # in place: optimizers and buckets hold this tensor
