"""A model laid out over the ranks, as the training loop sees it.

Problem: the model may be whole on every rank, cut into shards, or cut into stages, and the loop
must not care. A program that needs one layout should not import the others.

Idea: a layout is a `LaidOutModel`. It runs a step's micro-batches, leaves the gradients of the
*global* batch in the parameters that this rank holds, and says which slices of the model they are.
Everything after that (clip, step, save, compare) is the same for all layouts.

    replicated.py   one process, or the whole model on every rank    Replicated
    sharded.py      shards of every layer (ZeRO 2 and 3)             Sharded
    stages.py       stages in processes                              Staged
    tensor.py       what these two do with a tensor axis             MeshLayout
    threads.py      stages in threads                StagesInThreads, BlocksInThreads

`part` of `parts` is the rank's place on the data-parallel axis: its part of each global batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from runtime.waits import set_timeouts

if TYPE_CHECKING:  # an interface brings in nothing of training
    from training.tasks.cache import Cache
    from training.tasks.task import Step, TrainingTask

OnWorkers = Callable[[Callable[[int], Any]], list[Any]]
"""Calls a function with each optimizer's index, e.g. on its stage's worker; returns the results."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A rectangle of the tensor `name`, whose whole shape is `shape`. It begins at `offsets`;
    `tensor` is its memory, to be saved or loaded into."""

    name: str
    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def whole_piece(name: str, tensor: Tensor) -> Piece:
    """A whole tensor as one piece."""
    return Piece(name, tensor, (0,) * tensor.dim(), tuple(tensor.shape))


def state_bytes(
    parameters: Iterable[Tensor], optimizers: Iterable[torch.optim.Optimizer] = ()
) -> dict[str, int]:
    """Bytes of `parameters`, `gradients` and `optimizer` state."""
    ps = list(parameters)
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return {
        "parameters": sum(p.nbytes for p in ps),
        "gradients": sum(p.grad.nbytes for p in ps if p.grad is not None),
        "optimizer": sum(v.nbytes for s in states for v in s.values() if isinstance(v, Tensor)),
    }


class LaidOutModel(ABC):
    """A model on the ranks of a run. All ranks call the same methods in the same order.

    Attributes:
        part, parts: this rank's part of each global batch.
        tensor_rank: its place on the tensor-parallel axis.
        description: how the model is laid out, in words.
        modules: of this rank's layers; `evaluating` switches their mode.
        module: holds this rank's parameters; None if there is no such single module.
        num_microbatches: per rank and step; None: as suits the device.
        schedule: of the stages, of which there may be one; None for whole or sharded models, whose
            ranks each write their results.
        ranks: the rank or device of each stage, if each has several stages; else None.
        optimizers: of what this rank holds; each parameter is in one of them.
        counted: the parameters whose gradients this rank adds to the global norm. Exactly one rank
            must add each parameter; None: this rank adds all it holds.
        average_gradients: the loop calls it with `module` after `backward`; None: nothing to do.
        run: calls a function for each optimizer, e.g. on its stage's worker; None: here.
        devices: that this rank computes on.
        cut: layers per stage, which a checkpoint remembers; None: nothing was measured.
        stage_sizes: layers, or blocks, of each stage, if there are several.
    """

    task: TrainingTask
    part = 0
    parts = 1
    tensor_rank = 0
    description = ""
    modules: Sequence[nn.Module]
    module: nn.Module | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    ranks: Sequence[int] | None = None
    devices: Sequence[torch.device]
    optimizers: Sequence[torch.optim.Optimizer]
    counted: Sequence[nn.Parameter] | None = None
    average_gradients: Callable[[nn.Module], None] | None = None
    run: OnWorkers | None = None
    cut: Sequence[int] | None = None
    stage_sizes: Sequence[int] = ()

    @abstractmethod
    def backward(self, step: Step) -> Tensor:
        """Forward and backward of this rank's micro-batches.

        Returns:
            This rank's part of the summed loss of the global batch; over all ranks they add up.
        """

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Puts this rank's layers into evaluation mode, and computes no gradients. Validation and
        generation run inside it, for as long as they take: to switch takes as long as a layer."""
        for module in self.modules:
            module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in self.modules:
                module.train()

    @abstractmethod
    def outputs(self, x: Any) -> Tensor | None:
        """The model's outputs for one micro-batch, while `evaluating`. `x` is None on a rank that
        has run out of data; the result is None on ranks that do not see the outputs."""

    def measure(self, x: Any, target: Any) -> Tensor | None:
        """The task's `measure` of the outputs; None on ranks that do not see them."""
        output = self.outputs(x)  # [N, V] at N targets, or [B, classes]
        if output is None:
            return None
        # Stages: the outputs are on the last one's device, the targets on the first one's. The host
        # waits only where it reads them.
        device = output.device
        to_outputs = partial(Tensor.to, device=device, non_blocking=device.type != "cpu")
        target = tree_map_only(Tensor, to_outputs, target)
        return self.task.measure(output, target)

    @abstractmethod
    def next_tokens(self, ids: Tensor, cache: Cache, num_tokens: int) -> Tensor:
        """The next token of each sentence; see `training.tasks.task.Decoder`."""

    def end(self, turn: Callable[[], None]) -> None:  # noqa: B027 (most layouts wait for nobody)
        """This rank has no sentences left to translate; see `training.tasks.task.Decoder`."""

    def held(self) -> Iterable[Tensor]:
        """The tensors in which this rank keeps parameters, or slices of them."""
        return self.whole_parameters().values()

    def pieces(self, p: Tensor, t: Tensor) -> list[Piece]:
        """Which slices of which parameters `t` holds, as views of it; `t` is shaped like `p`, one
        of `held`."""
        return [whole_piece(self._names[p], t)]

    @cached_property
    def _names(self) -> dict[Tensor, str]:
        return {p: name for name, p in self.whole_parameters().items()}

    def loaded(self) -> None:  # noqa: B027 (most layouts need do nothing)
        """Call it after new values were written into the `held` tensors."""

    def whole_parameters(self) -> dict[str, Tensor]:
        """The parameters that this rank holds whole, by their names in the model: all of `module`.
        Those that several ranks hold must stay the same on all of them. (In tensor parallelism also
        parts of parameters; their names say which.)"""
        return {} if self.module is None else dict(self.module.named_parameters())

    def check_replicas(self, when: str) -> None:  # noqa: B027 (one process has nothing to compare)
        """Compares what several ranks hold of `whole_parameters`; `when` is for the error, as "at
        the start". Raises RunError, on all ranks, if it differs."""

    def state_bytes(self) -> dict[str, int]:
        """Bytes of `parameters`, `gradients` and `optimizer` state that this rank holds."""
        return state_bytes(self.held(), self.optimizers)

    def set_timeouts(self, seconds: float) -> None:
        """From now on a rank waits so long for another."""
        set_timeouts(seconds)

    def close(self) -> None:  # noqa: B027 (most layouts have nothing to end)
        """Ends threads, removes hooks."""
