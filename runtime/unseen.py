"""Finds what a strategy that calls a model's layers one by one would miss.

Pieces of a model are joined by what their layers return: pytree finds the tensors, which are
detached and handed on, and their gradients come back. These would be lost silently:

- the gradients of tensors inside an object that pytree does not know: `hidden_type`;
- the gradients of tensors that a layer takes from an attribute of another layer or from a closure:
  `Strangers`;
- hooks on a module whose children are called instead of it: `refuse_hooks`;
- hooks on the gradient of a parameter that no rank has whole: `refuse_gradient_hooks`;
- the gradient of what is given and not trained: `refuse_gradient`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
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
_WITHOUT = (str, bytes, int, float, complex, type, FunctionType, ModuleType, nn.Module, type(None))


def hidden_type(value: Any) -> str | None:
    """The name of the first type in ``value`` that holds tensors but is unknown to pytree."""
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, Tensor) and next(tensors_in(leaf), None) is not None:
            return type(leaf).__name__
    return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in containers and attributes, at any depth, except inside modules."""
    waiting: list[Any] = [value]
    seen: dict[int, Any] = {}
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            yield one
        elif not isinstance(one, _WITHOUT) and id(one) not in seen:
            seen[id(one)] = one  # kept alive, so that its id stays unique
            waiting += gc.get_referents(one)  # items, values, and attributes, in slots too


class Strangers:
    """Finds the leaves of a graph other than the ``known`` ones, its inputs and parameters.

    Cost: about 0.4 us per operator of the graph.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {id(t) for t in known}
        self._seen: set[Node] = set()  # over all calls: a value's graph contains those before it

    def refuse(self, value: Any, who: str, given: Any = None) -> None:
        """RuntimeError if ``value``, which ``who`` computed from ``given``, depends on an unknown
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
                kind = hidden_type(given)
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


def refuse_gradient(value: Any, what: str, instead: str) -> None:
    """RuntimeError if a tensor in ``value`` requires a gradient, which nobody would bring back."""
    if any(t.requires_grad for t in tensors_in(value)):
        raise RuntimeError(
            f"{what} requires grad, and its gradient would be lost: {instead}; or detach() it, if "
            "no gradient is wanted"
        )


def refuse_gradient_hooks(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """ValueError if one of the named parameters has a hook on its gradient."""
    for name, p in parameters:
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise ValueError(
                f"the parameter {name} has a hook on its gradient, which would never run: each "
                "rank has the sum of a part of the gradient, and none has it whole. Change the "
                "grad of the shards between finish_gradients() and optimizer_step(), or use "
                "DistributedDataParallel"
            )


def written_by_torch(module: Any) -> bool:
    """Whether all code that the module runs is torch's own: its submodules', and no hook."""
    return isinstance(module, nn.Module) and all(
        type(m).__module__.startswith("torch.nn.modules.")
        and not (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks)
        for m in module.modules()
    )


def refuse_hooks(uncalled: Iterable[tuple[str, nn.Module]]) -> None:
    """ValueError if one of the named modules, which are never called, has a hook on its call.

    Hooks with which transformers records hidden states are allowed: they are idle otherwise.
    """
    for name, module in uncalled:
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        hooks = [hook for kind in kinds for hook in getattr(module, kind).values()]
        if any(getattr(hook, "__module__", None) != _RECORDING for hook in hooks):
            raise ValueError(
                f"{name} ({type(module).__name__}) has a hook that would never run: a pipeline "
                "calls the layers, and not what holds them. Register it on a layer: the first or "
                "the last of them"
            )
