"""What stages hand to each other: shapes and types, found without computing.

Problem. A process that receives must know how much will come, and of what. Asking before every
tensor costs a round trip each time, and saying once how large things are fails where they change:
the last micro-batch is smaller, sentences have other lengths in every step.

Idea. Shapes are functions of the input's shape. Every rank has all layers, those of the others on
the meta device, where they take no memory, and runs them on fake tensors, which have a shape, a
type and a device but no contents: a dry forward. All ranks of a pipeline are given the same global
batch (the data loader is deterministic), so each finds out by itself what the others will send,
and nothing is said about it, ever. A rank but the first may also be given the batch on the meta
device: it only looks at its shape.

A dry forward is Python: some 20 ms per GPT-2 block, as long as a small micro-batch computes. So
what was found is kept by shape; and where only some sizes are new, the dry forward is run once with
small prime numbers in their place. A size of a message that is one of those primes *is* that size
of the input, one that is as before depends on none of them, and from then on shapes that differ in
these sizes alone need no dry forward. If a size is anything else (a convolution's), every shape is
run dry. What a stage really made is compared with what was found before it is sent.

Where the shape depends on contents (`Head` takes the positions that have a target) nothing can be
found, so only the last stage may have such a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from runtime.sharing import overlapping

from .stage import layer_name, refuse_hidden

_PRIMES = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47)  # below what a model allows for, mostly


@dataclass(frozen=True)
class TensorKind:
    """All that is known of a tensor that does not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Again:
    """The tensor that is the leaf at ``position`` too."""

    position: int


@dataclass(frozen=True)
class Message:
    """A value that passes from stage to stage: its leaves, a TensorKind for each tensor.

    ``shared``: the positions of those that lie in the memory of another.
    """

    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec
    shared: tuple[int, ...] = ()

    @property
    def tensors(self) -> list[TensorKind]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorKind)]

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes of all tensors."""
        return tuple(size for kind in self.tensors for size in kind.shape)

    def resized(self, sizes: Sequence[int]) -> Message:
        """The same with other sizes."""
        rest = iter(sizes)
        leaves = [
            TensorKind(tuple(next(rest) for _ in leaf.shape), leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, TensorKind)
            else leaf
            for leaf in self.leaves
        ]
        return Message(tuple(leaves), self.tree, self.shared)


def describe(value: Any) -> Message:
    """The message that ``value`` would be."""
    leaves, tree = pytree.tree_flatten(value)
    kinds = list(leaves)
    first: dict[int, int] = {}
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            position = first.setdefault(id(leaf), k)
            kind = TensorKind(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
            kinds[k] = kind if position == k else Again(position)
    return Message(tuple(kinds), tree, overlapping(leaves))


def assemble(message: Message, tensors: Iterable[Tensor]) -> Any:
    """The value that ``message`` describes, of its tensors, each given once."""
    rest = iter(tensors)
    leaves: list[Any] = []
    for leaf in message.leaves:
        if isinstance(leaf, TensorKind):
            leaf = next(rest)
        elif isinstance(leaf, Again):
            leaf = leaves[leaf.position]
        leaves.append(leaf)
    return pytree.tree_unflatten(leaves, message.tree)


def analyze_communication_with_partitions(
    partitions: Sequence[nn.Sequential], x: Any, device: torch.device
) -> list[Message]:
    """What each of the ``partitions`` hands on for the micro-batch ``x``, a value or a `Message`.

    Nothing is computed, drawn or allocated; modules and their buffers stay as they are. ``device``
    is what the layers shall take their tensors to be on, wherever they are.
    Raises ValueError where a layer's output has a shape that depends on more than shapes, and
    TypeError where a stage hands on what is no pytree.
    """
    message = x if isinstance(x, Message) else describe(x)
    found = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        value = _fake(message, device)
        ends = accumulate(len(partition) for partition in partitions)
        for s, (partition, end) in enumerate(zip(partitions, ends, strict=True)):
            for layer in partition:
                value = _dry(layer, value, device, s)
            refuse_hidden(value, layer_name(end - 1, partition[-1]))
            found.append(describe(value))
    return found


class Analysis:
    """The messages for any micro-batch; dry forwards only where they are needed.

    ``partitions`` are the stages up to the last that is of interest. Without ``generalize`` every
    new shape is run dry.
    """

    def __init__(
        self,
        partitions: Sequence[nn.Sequential],
        device: torch.device,
        generalize: bool = True,
    ) -> None:
        self.dry_forwards = 0
        self._partitions = list(partitions)
        self._device = device
        self._generalize = generalize
        self._known: dict[Any, dict[tuple[int, ...], list[Message]]] = {}  # by kind, by sizes
        self._rules: dict[Any, list[_Rule]] = {}

    def messages(self, x: Any) -> list[Message]:
        """What each partition hands on for the micro-batch x."""
        message = describe(x)
        sizes = message.sizes
        kind = (
            message.resized([0] * len(sizes)),
            tuple(p.requires_grad for part in self._partitions for p in part.parameters()),
            tuple(layer.training for part in self._partitions for layer in part.modules()),
            self._device.type,
            torch.is_autocast_enabled(self._device.type),
            torch.get_autocast_dtype(self._device.type),
        )
        try:
            known = self._known.setdefault(kind, {})
        except TypeError:  # what is no tensor in it has no hash
            return self._dry(message)
        if sizes not in known:
            rules = self._rules.setdefault(kind, [])
            by_rule = [rule for rule in rules if rule.covers(sizes)]
            if not by_rule and known and self._generalize:
                rule = self._rule(message, *next(iter(known.items())))
                rules += [rule] if rule else []
                by_rule += [rule] if rule else []
            known[sizes] = by_rule[0].apply(sizes) if by_rule else self._dry(message)
        return known[sizes]

    def _dry(self, message: Message) -> list[Message]:
        self.dry_forwards += 1
        return analyze_communication_with_partitions(self._partitions, message, self._device)

    def _rule(self, message: Message, base: tuple[int, ...], found: list[Message]) -> _Rule | None:
        """How messages depend on the sizes in which this input differs from an earlier one."""
        pairs = list(zip(base, message.sizes, strict=True))
        new = list(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))
        taken = {*base, *(size for message in found for size in message.sizes)}
        free = [p for p in _PRIMES if p not in taken]  # else a constant could pass for a size
        if len(new) > len(free):
            return None
        prime = dict(zip(new, free, strict=False))
        probe = [prime.get(pair, pair[0]) for pair in pairs]
        try:
            outcome = self._dry(message.resized(probe))
        except Exception:  # the model may not take such sizes
            return None
        symbols = {p: pairs.index(pair) for pair, p in prime.items()}
        templates = []
        for before, after in zip(found, outcome, strict=True):
            if len(before.sizes) != len(after.sizes):  # as a list of pieces
                return None
            template = []
            for old, size in zip(before.sizes, after.sizes, strict=True):
                if size in symbols and old == base[symbols[size]]:
                    template.append((symbols[size], 0))
                elif size == old:
                    template.append((-1, size))
                else:
                    return None
            templates.append(template)
        alike = [[k for k, pair in enumerate(pairs) if pair == one] for one in new]
        fixed = {k: a for k, (a, b) in enumerate(pairs) if a == b}
        return _Rule(fixed, alike, found, templates)


@dataclass(frozen=True)
class _Rule:
    """Sizes of messages as sizes of the input, for inputs that differ in some of theirs."""

    fixed: dict[int, int]  # positions among the input's sizes, and what must be there
    alike: list[list[int]]  # positions that must be equal
    messages: list[Message]
    templates: list[list[tuple[int, int]]]  # per message and size: (position, 0) or (-1, size)

    def covers(self, sizes: Sequence[int]) -> bool:
        return all(sizes[k] == size for k, size in self.fixed.items()) and all(
            len({sizes[k] for k in positions}) == 1 for positions in self.alike
        )

    def apply(self, sizes: Sequence[int]) -> list[Message]:
        return [
            message.resized([size if k < 0 else sizes[k] for k, size in template])
            for message, template in zip(self.messages, self.templates, strict=True)
        ]


def _fake(message: Message, device: torch.device) -> Any:
    made = (
        torch.empty(kind.shape, dtype=kind.dtype, device=device).requires_grad_(kind.requires_grad)
        for kind in message.tensors
    )
    return assemble(message, made)


def _dry(layer: nn.Module, value: Any, device: torch.device, s: int) -> Any:
    """The output of a layer for a fake input, its parameters replaced by fake ones."""
    own = dict(layer.named_parameters()) | dict(layer.named_buffers())
    fakes = {
        name: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device)
        .requires_grad_(t.requires_grad)
        for name, t in own.items()
    }  # fmt: skip
    try:
        return torch.func.functional_call(layer, fakes, (value,))
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise ValueError(
            f"a layer of stage {s} ({type(layer).__name__}) makes tensors whose shape depends on "
            f"their contents ({error}): only the last stage may, so cut the model before it"
        ) from error
