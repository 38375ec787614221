"""GPT-2's layers, cut out of a trace of transformers' own model instead of written by hand.

`training.tasks.gpt2.gpt2_layers` rewrites GPT-2 by hand, as a list. Here the model of
`transformers` is traced as it is (pipeline/tracing/trace.py), and cut in the same places. Losses
and gradients are the same up to rounding, and either can resume the other's checkpoints.

Only the hand-written list can do two things. Its dropout hashes; dropout of transformers draws, so
a traced model has none. And it continues sentences with a cache of keys and values, whose sizes a
trace cannot know; there it replaces the traced layers, with their parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pipeline.tracing.trace import split
from training.tasks.cache import Prefix
from training.tasks.gpt2 import gpt2_layers, numbers_of_targets

if TYPE_CHECKING:  # see training/tasks/gpt2.py
    from transformers import GPT2LMHeadModel


class LogitsOfTargets(nn.Module):
    """Token ids [B, T] and targets [N] to the logits [N, V] at these positions."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model.transformer(input_ids=ids, use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, targets)  # whatever their number
        return self.model.lm_head(hidden)


def traced_layers(model: GPT2LMHeadModel) -> list[nn.Module]:
    """As many as `gpt2_layers` gives, with the same parameters each."""
    begins = [f"h.{k}{half}" for k in range(model.config.n_layer) for half in ("", ".ln_2")]
    at = [f"model.transformer.{name}" for name in (*begins, "ln_f")]
    example = torch.zeros(2, 2, dtype=torch.long), torch.arange(3)
    traced = split(LogitsOfTargets(model).train(model.training), example, at)
    first, *rest = zip(traced, gpt2_layers(model), strict=True)
    return [FirstTracedLayer(*first), *(TracedLayer(*pair) for pair in rest)]


class TracedLayer(nn.Module):
    """A traced layer. The hand-written one replaces it when sentences are continued, or when the
    input has no targets and all logits are wanted."""

    def __init__(self, traced: nn.Module, by_hand: nn.Module) -> None:
        super().__init__()
        self.traced = traced
        self._by_hand = [by_hand.eval()]  # in a list, since its parameters are the traced layer's
        names = {p: name for name, p in traced.named_parameters()}
        self._names = {name: names[p] for name, p in by_hand.named_parameters()}

    def forward(self, value: Any) -> Any:
        if is_by_hand(value):
            parameters: dict[str, Tensor] = {
                by_hand: self.traced.get_parameter(name) for by_hand, name in self._names.items()
            }
            return functional_call(self._by_hand[0], parameters, (value,))
        return self.traced(value)


class FirstTracedLayer(TracedLayer):
    """Takes (ids, targets, keys); keys are for dropout."""

    def forward(self, value: Any) -> Any:
        if not is_by_hand(value):
            ids, targets, *_ = value
            targets = numbers_of_targets(targets) if targets.dim() == 2 else targets
            # One position is a special case to transformers: a second one, which has no target.
            value = (F.pad(ids, (0, 1)), 2 * targets) if ids.size(1) == 1 else (ids, targets)
        return super().forward(value)


def is_by_hand(value: Any) -> bool:
    """Whether only the hand-written layers take such an input."""
    return isinstance(value, Tensor) or isinstance(value[-1], Prefix)
