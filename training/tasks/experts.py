"""GPT-2 whose blocks have experts in the place of their MLPs.

    Sequences -> Embedding -> Attention -> RoutedFeedForward -> ... -> BalancedHead

The task makes the model and adds the balance loss (experts/routing.py) to its own. What the layers
need for it travels with the micro-batch, as `Sequences.balance`: so the balance loss passes stages,
shards and recomputation as activations do, and its gradient is scaled as the loss is. No
reported loss includes it: it adds a gradient to the loss, but no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from experts.layer import Experts
from experts.routing import Balance, balance_loss, excess, router_z_loss, tally
from runtime.communicator import Communicator
from training.launch.errors import counted

from .gpt2 import FeedForward, Head, Sequences, gpt2_layers
from .language import LanguageTask
from .sequences import SequenceTask
from .task import to_device
from .tokens import Encoded
from .translation import TranslationTask


class RoutedFeedForward(FeedForward):
    """The second half of a block, with experts.

    Args:
        balance, z: weights of the balance loss, unused with biases, and of the router's z-loss.

    Attributes:
        contexts: the ranks that have different positions of the same sequences.
    """

    mlp: Experts
    contexts: Communicator | None = None

    def __init__(self, name: str, block: Any, balance: float, z: float) -> None:
        super().__init__(name, block)
        self.balance, self.z = balance, z

    def forward(self, x: Sequences) -> Sequences:
        """The residual, and what the layers add to the loss, this one included."""
        y, choice = self.mlp(self.ln_2(x.hidden))
        hidden = x.hidden + self.drop(y, self.mlp.dropout.p, x)
        if x.balance is None:  # no training
            return x._replace(hidden=hidden)
        lengths, targets, total = x.balance
        positions = x.positions
        if positions is None:
            positions = torch.arange(hidden.size(1), device=hidden.device)
        real, bias = positions < lengths[:, None], self.mlp.router.bias
        chosen, probabilities = tally(choice, real)
        if bias is not None:
            total = total + (bias * excess(chosen, bias)).sum()
        else:
            if self.contexts is not None:  # each rank's probabilities give an addend of the loss
                chosen = self.contexts.all_reduce(chosen)
            of_sequences = balance_loss(chosen, probabilities, lengths, self.mlp.top_k)  # B
            total = total + self.balance * (of_sequences * targets).sum()
        if self.z:
            total = total + self.z * (router_z_loss(choice, real, lengths) * targets).sum()
        return x._replace(hidden=hidden, balance=Balance(lengths, targets, total))


class BalancedHead(nn.Module):
    """A head that returns, with its logits, what the layers add to the loss, summed over the target
    tokens."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Sequences) -> Tensor | tuple[Tensor, Tensor]:
        """The logits alone, where nothing is trained."""
        logits: Tensor = self.head(x)
        return logits if x.balance is None else (logits, x.balance.total)


class ExpertTask(SequenceTask):
    """What experts change in a task of sequences; the tasks are below."""

    def skeleton(self) -> Any:
        """The model with all its experts, on the meta device."""
        model, args = super().skeleton(), self.args
        for block in model.transformer.h:
            inner = args.shared_experts * block.mlp.c_fc.nf  # side by side they are one MLP
            with torch.device("meta"):
                shared = type(block.mlp)(inner, self.config) if inner else None
            by_bias = args.balance_by == "bias"
            block.mlp = Experts(block.mlp, cast(int, args.experts), args.top_k, shared, by_bias)
        return model

    def layers(self, model: Any) -> list[Any]:
        """GPT-2's layers, in which MLPs route positions to experts."""
        layers = gpt2_layers(model)
        for k, block in enumerate(model.transformer.h):
            weights = self.args.balance_coefficient, self.args.router_z
            layers[2 + 2 * k] = RoutedFeedForward(f"h.{k}", block, *weights)
        return [*layers[:-1], BalancedHead(cast(Head, layers[-1]))]

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """The summed loss over the target tokens; what layers add is in its gradient alone."""
        if isinstance(output, Tensor):
            return super().loss(output, target)
        logits, added = output
        return super().loss(logits, target) + (added - added.detach())

    def empty(self) -> tuple[Sequences, Tensor]:
        """A micro-batch of no sequences, and its labels, for a rank that has none left."""
        ids = torch.zeros(0, 1, dtype=torch.long)
        none = ids[:, 0]
        x = Sequences(ids, none, none, balance=Balance(none, none, torch.zeros(())))
        return to_device((x, none), self.device)

    def describe(self) -> str:
        """With the experts."""
        args, first, *more = self.args, *super().describe().splitlines()
        experts = (
            f"{counted(args.experts or 1, 'expert')} in each block, {args.top_k} for each position"
        )
        experts += f", and {args.shared_experts} for every one" * bool(args.shared_experts)
        experts += f", shared by {args.ep} ranks" * (args.ep > 1)
        return "\n".join([first, experts, *more])

    def _collate(self, num_microbatches: int | None, drop: int, mine: list[Any]) -> Any:
        """With the lengths of the sequences."""
        mine, parts = super()._collate(num_microbatches, drop, mine)
        cut = map(self._balance, self._cut(mine, num_microbatches))
        return mine, [
            (x._replace(balance=balance), labels)
            for balance, (x, labels) in zip(cut, parts, strict=True)
        ]

    def _balance(self, examples: Sequence[Encoded]) -> Balance:
        lengths = torch.tensor([len(example.ids) - 1 for example in examples])
        targets = torch.tensor([example.num_targets for example in examples])
        return to_device(Balance(lengths, targets, torch.zeros(())), self.device)


class TranslationWithExperts(ExpertTask, TranslationTask):
    """Pairs of sentences, learnt with experts."""


class LanguageWithExperts(ExpertTask, LanguageTask):
    """Plain text, learnt with experts."""
