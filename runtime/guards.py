"""Refuses models that would go wrong silently in a strategy that calls their layers one by one.

Pieces of a model are joined by what their layers return: pytree finds the tensors, which are
detached and handed on, and their gradients come back. Refused are

- a tensor that is neither in a layer's input nor one of its parameters: from an attribute of
  another layer, from a closure, from an object that pytree does not know. Its gradient is lost;
- tensors that share memory and leave a piece together. Each is detached by itself, and autograd
  forgets that one is a view of the other: after a write to one the other's gradient would be wrong.
  Between processes each is a copy, and even the values would differ;
- a change of a buffer, where the layer will run again for its backward, or is on several ranks;
- a forward of what holds the layers, hooks on modules that are never called, hooks on gradients
  that come in parts, and an input, or a scale of the loss, that requires a gradient.

Cost: about 0.4 us per operator of the graph; a copy of the buffers, if layers run again.

When. What layers hand on and write to (`guarded`) is looked at in checked steps: the first two of a
pipe or of a sharded model, and every 16th (`is_checked`). So a layer that goes wrong later is found
at most 16 steps after that. Hooks, inputs and scales are looked at in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

_LEAF = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]  # the node of a leaf
_RUNS_AGAIN = (
    "computed again for its backward, it would do so twice. Take a layer without such state, e.g. "
    "group norm, or --recompute never"
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_checked(step: int) -> bool:
    """Whether `guarded` looks in a step, counted from 0."""
    return step < 2 or step % 16 == 0


def guarded(
    value: Any,
    layers: Mapping[str, Callable[[Any], Any]],
    leaves: Container[Tensor],
    runs_again: bool,
    checked: bool = True,
    run: Callable[[int, Any, Any], Any] = lambda _, layer, value: layer(value),
) -> Any:
    """Runs the layers of a piece, one after the other; returns what the last hands on.

    Args:
        layers: by the name that an error message uses.
        leaves: the trained parameters of all layers, and what was made of them for one product.
        runs_again: whether the layers will run again, for their backward.
        checked: whether this pass is looked at; False only runs them.
        run: calls a layer, the k-th of them, with a value.

    Raises RuntimeError or ValueError for what the head of this file names.
    """
    if not (checked and torch.is_grad_enabled()):
        for k, layer in enumerate(layers.values()):
            value = run(k, layer, value)
        return value
    name, foreign = "", ForeignLeaves(value, leaves)
    for k, (name, layer) in enumerate(layers.items()):
        watched = {layer: name} if runs_again and isinstance(layer, nn.Module) else {}
        with buffers_unchanged(watched, _RUNS_AGAIN):
            value = run(k, layer, value)
        foreign.refuse(value, name)
    refuse_to_detach(value, name)
    return value


class ForeignLeaves:
    """Looks in a piece's graph for leaves that belong to neither its inputs nor its parameters.

    Args:
        inputs: what the first layer gets. What lies before it is not looked at.
        known: the only leaves that the graph may have; may grow between two calls of `refuse`.
    """

    def __init__(self, inputs: Any, known: Container[Tensor]) -> None:
        self._known = known
        # Over all calls: a value's graph contains those of the layers before it.
        self._seen = {get_gradient_edge(t).node for t in tensors_of(inputs) if t.requires_grad}

    def refuse(self, value: Any, who: str) -> None:
        """RuntimeError if `value`, which `who` has computed, depends on an unknown leaf.

        A leaf that the layer itself creates counts too: it looks the same as the caller's.
        """
        nodes = [get_gradient_edge(t).node for t in tensors_of(value) if t.requires_grad]
        while nodes:  # from the value towards the leaves
            node: Any = nodes.pop()
            if node in self._seen:
                continue
            self._seen.add(node)
            if type(node) is _LEAF and node.variable not in self._known:
                raise RuntimeError(
                    f"{who} uses a tensor that requires grad and is neither part of its input nor "
                    "one of its parameters: its gradient would be lost. Let the layers before hand "
                    "it on, in tuples, lists, dicts or what is registered with "
                    "torch.utils._pytree; or make it a parameter of the layer"
                )
            nodes += [above for above, _ in node.next_functions if above is not None]


@contextmanager
def buffers_unchanged(layers: Mapping[nn.Module, str], why: str) -> Iterator[None]:
    """ValueError if one of the layers writes to a buffer inside.

    Args:
        layers: with the names that the message uses.
        why: the end of the message: why the write is wrong, and what to take instead.
    """
    before = {(layer, key): b.clone() for layer in layers for key, b in layer.named_buffers()}
    yield
    for layer, name in layers.items():
        for key, b in layer.named_buffers():
            # Compare values: batch norm's kernel does not count its writes in _version.
            was = before.get((layer, key))
            if was is None or not torch.equal(was.nan_to_num(), b.nan_to_num()):
                raise ValueError(
                    f"{name} changes its buffer {key} in forward, as batch norm changes its "
                    f"averages; {why}"
                )


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors that pytree finds."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def refuse_to_detach(value: Any, who: str) -> None:
    """ValueError if `value`, which `who` hands on, has tensors that share memory. TypeError if one
    is not dense and requires a gradient."""
    tensors = tensors_of(value)
    for t in tensors:
        if t.requires_grad:
            refuse_other_layouts(t, who)
    if any(pairs_in_one_memory(tensors)):
        raise ValueError(
            f"{who} hands on tensors that share memory, such as a tensor and a view of it: a write "
            "to one would make the other's gradient wrong. Let it hand on a copy, e.g. "
            "(h, h[..., :1].clone())"
        )


def refuse_to_separate(names: Mapping[Tensor, str], why: str) -> None:
    """ValueError if a parameter shares memory with another, or with a buffer.

    Args:
        names: of all parameters and buffers.
        why: what would take them apart, such as "each would be sharded by itself".
    """
    for pair in pairs_in_one_memory(names):
        if any(isinstance(t, nn.Parameter) for t in pair):
            raise ValueError(
                f"{' and '.join(names[t] for t in pair)} share memory, and {why}: let the modules "
                "have one Parameter, as in head.weight = embedding.weight"
            )


def refuse_other_layouts(tensor: Tensor, who: str) -> None:
    """TypeError if a tensor is sparse, nested, quantized, or in a library's own layout."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise TypeError(
            f"{who} hands on a tensor that is not dense ({tensor.layout}, {tensor.dtype}): let it "
            "hand on x.to_dense(), or x.dequantize() if it is quantized"
        )


def pairs_in_one_memory(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of the tensors that have memory in common. The same tensor twice does not count. A
    tensor's memory reaches from its first element to its last, including the elements its strides
    skip."""
    places: list[tuple[Any, ...]] = []  # storage, first byte, last byte, a number, the tensor
    for t in {id(t): t for t in tensors}.values():
        if t.layout == torch.strided and not t.is_nested and t.numel():
            last = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
            ends = (t.itemsize * (t.storage_offset() + offset) for offset in (0, last))
            places.append((t.untyped_storage()._cdata, *ends, len(places), t))
    for (storage, _, end, _, t), (another, begin, _, _, other) in pairwise(sorted(places)):
        if storage == another and begin <= end:
            yield t, other


def refuse_gradient(value: Any, what: str, instead: str) -> None:
    """RuntimeError if a tensor in `value` requires a gradient, which nobody would bring back."""
    if any(t.requires_grad for t in tensors_of(value)):
        raise RuntimeError(
            f"{what} requires grad, and its gradient would be lost: {instead}; or detach() it, if "
            "no gradient is wanted"
        )


def refuse_gradient_hooks(
    parameters: Iterable[tuple[str, Tensor]], why: str, also_after: bool = True
) -> None:
    """ValueError if one of the named parameters has a hook on its gradient.

    Args:
        why: the end of the message, such as "would never run", and what to do.
        also_after: refuse also hooks that run after the gradient has been added to `.grad`.
    """
    for name, p in parameters:
        if p._backward_hooks or (also_after and p._post_accumulate_grad_hooks):
            raise ValueError(f"the parameter {name} has a hook on its gradient, which {why}")


def refuse_own_forward(layers: Any) -> None:
    """TypeError unless `layers` is called as a plain nn.Sequential is: only its layers will be."""
    if getattr(type(layers), "forward", None) is not nn.Sequential.forward:
        raise TypeError(
            f"a {type(layers).__name__} in place of layers: those of an nn.Sequential are called, "
            "and no forward around them, e.g. nn.Sequential(first, second); pipeline.tracing cuts "
            "other modules"
        )


def refuse_hooks(uncalled: Iterable[nn.Module]) -> None:
    """ValueError if one of the modules, which are never called, has a hook on its call."""
    for module in uncalled:
        if any(getattr(module, kind) for kind in _HOOKS):
            raise ValueError(
                f"a {type(module).__name__} has a hook that would never run: the layers are "
                "called, and not what holds them. Register it on a layer: the first or the last of "
                "them"
            )
