"""What every strategy does, so that the program that trains need know none of them.

A strategy holds a model, or its part of one, with an optimizer for what it holds. It is given its
part of each global batch, in micro-batches, leaves the gradients of the mean loss of the *global*
batch in its parameters, computes outputs and continues sentences where these are, and can hand the
whole weights to rank 0. How the weights are then updated is the same for all:
training/optimization.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from project.task import Step
from training.generation import Prefix, likeliest, newest_alone
from training.pieces import Piece
from training.timeline import OFF, Timeline


@dataclass(frozen=True)
class Plan:
    """What the options ask of a strategy."""

    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    autocast: Callable[[], AbstractContextManager[Any]]
    compute_dtype: torch.dtype | None = None  # what autocast stands for, where it does not suit
    dtype: torch.dtype = torch.float32
    num_microbatches: int | None = None
    schedule: str = "1f1b"
    balance: str = "auto"
    zero: int = 3
    timeout: float = 300.0  # seconds that a rank may be silent
    timeline: Timeline = OFF

    @property
    def recorder(self) -> Timeline | None:
        """Who is told what happened when, if anybody."""
        return self.timeline if self.timeline.recording else None


class Strategy(ABC):
    """A way to train a task's model on the ranks of a run. All ranks call the same methods.

    Attributes:
        part, parts: which part of each global batch this rank is given.
        layout: how the model lies on the ranks, for a person.
        replicated: whether all ranks hold the same tensors, each of them whole.
        num_microbatches: into how many it is cut; None: as suits the device.
        schedule: the order in which stages work on them, by its name; None: there are no stages.
        compute_dtype: the type to which it casts weights for a forward; None: autocast does that.
        optimizers: of the parameters that this rank holds; each is in one of them.
        counted: the parameters whose gradients this rank adds to the norm of the whole gradient,
            each of which one rank must add; None: all of its own.
    """

    part = 0
    parts = 1
    layout = ""
    replicated = False
    num_microbatches: int | None = None
    schedule: str | None = None
    compute_dtype: torch.dtype | None = None
    optimizers: list[torch.optim.Optimizer]
    counted: list[nn.Parameter] | None = None

    @abstractmethod
    def backward(self, step: Step) -> Tensor:
        """Leaves the gradients of the mean loss of the global batch in the parameters that this
        rank holds; returns this rank's part of the summed loss."""

    @abstractmethod
    def outputs(self, x: Any) -> Tensor | None:
        """The model's outputs for `x`, which is this rank's part of a batch, or None where it has
        none; None on ranks that do not get to see them."""

    def next_tokens(self, ids: Tensor, prefix: Prefix, num_tokens: int) -> Tensor:
        """See `training.generation.Decoder`: the model is one of text."""
        logits = self.outputs((ids, newest_alone(ids), prefix))
        assert logits is not None
        return likeliest(logits, num_tokens)

    def end(self) -> None:  # noqa: B027 (most wait for nobody)
        """See `training.generation.Decoder`."""

    @abstractmethod
    def whole_weights(self) -> dict[str, Tensor]:
        """On rank 0 every parameter by its name in the whole model, in the CPU's memory, gathered
        one at a time; on others nothing."""

    @abstractmethod
    def held(self) -> Iterable[Tensor]:
        """The tensors in which this rank keeps parameters, or parts of them."""

    @abstractmethod
    def pieces(self, p: Tensor, t: Tensor) -> list[Piece]:
        """What `t`, a tensor like `p`, which is one of `held`, has of which parameters."""

    def loaded(self) -> None:  # noqa: B027 (most need do nothing)
        """Somebody has written to the tensors that are `held`."""

    def copies(self) -> Mapping[str, Tensor]:
        """The whole parameters, by name, of which another rank may hold a copy."""
        return {}

    @abstractmethod
    def state_bytes(self) -> dict[str, int]:
        """Bytes of `parameters`, `gradients` and `optimizer` state that this rank holds."""

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """Ends what was started for it."""
