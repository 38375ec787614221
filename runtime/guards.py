"""Refuses what a strategy that calls a model's layers one by one would get wrong in silence.

Pieces of a model are joined by what their layers return: pytree finds the tensors, which are
detached and handed on, and their gradients come back. A `Guard` calls the layers of a piece, and
refuses after each call

- a tensor taken from an attribute of another layer or from a closure, whose gradient is lost;
- tensors inside an object that pytree does not know, if it leaves the piece;
- tensors that share memory and leave the piece side by side. Each is detached by itself, and
  autograd forgets that one is a view of the other: after a write to one the other's gradient would
  be wrong. Between processes each is a copy, and even the values would differ;
- a change of a buffer, where the layer will run again for its backward.

Other functions refuse, before any layer runs, hooks on modules that are never called, and gradients
of what is given and not trained.

Cost of a guard: about 0.4 us per operator of the graph; a copy of the buffers, if it runs again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

# The nodes of a leaf and of a checkpoint with reentry.
_LEAF, _REENTRANT = torch._C._functions.AccumulateGrad, CheckpointFunction._backward_cls  # type: ignore[attr-defined]
_RECORDING = "transformers.utils.output_capturing"
_SEARCHED, _ITEMS = 1000, 100  # objects in one that pytree does not know; of each its first items
_WITHOUT = (str, bytes, int, float, complex, type, FunctionType, ModuleType, nn.Module, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Guard:
    """Calls the layers of a model's pieces, for one micro-batch.

    Args:
        runs_again: the layers run a second time for their backward.
    """

    def __init__(self, runs_again: bool = False) -> None:
        self._runs_again = runs_again
        self._known: dict[int, Tensor] = {}  # by id
        self._seen: set[Node] = set()  # over all calls: a value's graph contains those before it

    def enter(self, known: Iterable[Tensor]) -> None:
        """Begin a piece. ``known``: its inputs and parameters, the only leaves that its graph may
        have."""
        self._known, self._seen = {id(t): t for t in known}, set()

    def call(
        self,
        layer: Callable[[Any], Any],
        value: Any,
        name: str,
        around: AbstractContextManager[object],
    ) -> Any:
        """``layer(value)``, inside ``around``; ``name`` is the layer's in what is raised.

        Raises:
            RuntimeError: the result depends on an unknown leaf, or on a checkpoint with reentry.
            ValueError: it wrote to a buffer, if it runs again.
        """
        training = torch.is_grad_enabled()
        watches = training and self._runs_again
        before = {key: b.clone() for key, b in _buffers(layer)} if watches else {}
        with around:
            result = layer(value)
        for key, b in _buffers(layer) if watches else ():
            # Compare values: batch norm's kernel does not count its writes in _version.
            if key not in before or not torch.equal(before[key].nan_to_num(), b.nan_to_num()):
                raise ValueError(
                    f"{name} changes its buffer {key} in forward, as batch norm does its running "
                    "averages; computed again for its backward, it would do so twice. Take a layer "
                    "without such state, as group norm, or --recompute never"
                )
        if training:
            self.check_no_foreign_leaves(result, name, value)
        return result

    def check_no_foreign_leaves(self, value: Any, who: str, source: Any = None) -> None:
        """RuntimeError if ``value``, which ``who`` computed from ``source``, depends on an unknown
        leaf, or on a checkpoint with reentry. Operators seen by an earlier call are skipped.

        A leaf that the layer itself creates counts too: it looks the same as the caller's.
        """
        seen = self._seen
        nodes = [get_gradient_edge(t).node for t in tensors_in(value) if t.requires_grad]
        while nodes:  # from the value towards the leaves
            node: Any = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            if type(node) is _LEAF and id(node.variable) not in self._known:
                kind = hidden_type(source)
                inside = f" inside {kind}" if kind else ""
                raise RuntimeError(
                    f"{who} uses a tensor{inside} that requires grad and is neither part of its "
                    "input nor one of its parameters: its gradient would be lost. Let the layers "
                    "before hand it on, e.g. return (output, tensor), in tuples, lists, dicts or "
                    "what is registered with torch.utils._pytree; or make it a parameter of the "
                    "layer"
                )
            if type(node) is _REENTRANT:
                raise RuntimeError(
                    f"{who} uses checkpoint(use_reentrant=True), whose backward works only in one "
                    "graph of the whole model: take use_reentrant=False"
                )
            nodes += [above for above, _ in node.next_functions if above is not None]


def _buffers(layer: Any) -> list[tuple[str, Tensor]]:
    return list(layer.named_buffers()) if isinstance(layer, nn.Module) else []


def refuse_shared_memory(value: Any, who: str) -> None:
    """ValueError if two tensors in ``value``, which ``who`` hands on, have memory in common. The
    same tensor twice does not count. A tensor's memory reaches from its first element to its last,
    including the elements its strides skip."""
    tensors = {id(leaf): leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)}
    places: list[tuple[Any, Any, Any]] = []  # storage, first byte, end
    for t in tensors.values():
        if t.layout == torch.strided and t.numel():
            begin = t.storage_offset() * t.itemsize
            steps = zip(t.shape, t.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in steps)  # in elements
            places.append((t.untyped_storage()._cdata, begin, begin + (last + 1) * t.itemsize))
    places.sort()
    for (storage, _, end), (another, begin, _) in pairwise(places):
        if storage == another and begin < end:
            raise ValueError(
                f"{who} hands on tensors that share memory, such as a tensor and a view of it: a "
                "write to one would make the other's gradient wrong. Let it hand on a copy, e.g. "
                "(h, h[..., :1].clone())"
            )


def hidden_type(value: Any) -> str | None:
    """The name of the first type in ``value`` that holds tensors but is unknown to pytree.

    A search ends after `_SEARCHED` objects. A tensor beyond them whose gradient would be lost is
    refused where it is used, as a foreign leaf."""
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, Tensor) and next(tensors_in(leaf), None) is not None:
            return type(leaf).__name__
    return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors that pytree finds in ``value``, and those in attributes and items of the first
    `_SEARCHED` objects of each of its other leaves, the nearest first, of each of these the first
    `_ITEMS`; none inside modules."""
    for leaf in pytree.tree_leaves(value):
        waiting: list[Any] = [leaf]
        seen: set[int] = set()
        for one in waiting:  # grows, up to the limit
            if isinstance(one, Tensor):
                yield one
            elif not isinstance(one, _WITHOUT) and id(one) not in seen:
                seen.add(id(one))  # all stay alive, so that ids are unique
                # items, values, and attributes, in slots too
                waiting += gc.get_referents(one)[: min(_ITEMS, _SEARCHED - len(waiting))]


def refuse_hidden(value: Any, has: str) -> None:
    """TypeError if ``value`` hides tensors from pytree. ``has``: as "the batch holds"."""
    if (kind := hidden_type(value)) is not None:
        raise TypeError(
            f"{has} a {kind} with tensors inside, which the pipeline cannot see, cut, move or "
            "differentiate: give tensors, or tuples, lists and dicts of them"
        )


def refuse_gradient(value: Any, what: str, instead: str) -> None:
    """RuntimeError if a tensor in ``value`` requires a gradient, which nobody would bring back."""
    if any(t.requires_grad for t in tensors_in(value)):
        raise RuntimeError(
            f"{what} requires grad, and its gradient would be lost: {instead}; or detach() it, if "
            "no gradient is wanted"
        )


def refuse_gradient_hooks(
    parameters: Iterable[tuple[str, Tensor]], why: str, also_after: bool = True
) -> None:
    """ValueError if one of the named parameters has a hook on its gradient.

    Args:
        why: as "which would never run", and what to do.
        also_after: those that run after it has been added to ``.grad``, too.
    """
    for name, p in parameters:
        if p._backward_hooks or (also_after and p._post_accumulate_grad_hooks):
            raise ValueError(f"the parameter {name} has a hook on its gradient, which {why}")


def refuse_hooks(uncalled: Iterable[tuple[str, nn.Module]]) -> None:
    """ValueError if one of the named modules, which are never called, has a hook on its call.

    Hooks with which transformers records hidden states are allowed: they are idle otherwise.
    """
    for name, module in uncalled:
        hooks = [hook for kind in _HOOKS for hook in getattr(module, kind).values()]
        if any(getattr(hook, "__module__", None) != _RECORDING for hook in hooks):
            raise ValueError(
                f"{name} ({type(module).__name__}) has a hook that would never run: a pipeline "
                "calls the layers, and not what holds them. Register it on a layer: the first or "
                "the last of them"
            )
