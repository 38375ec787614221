"""Tensors that a stage cannot see, and whose gradients would be lost without a word.

Stages are joined by what their layers return: its tensors are found by pytree, detached, handed on,
and their gradients come back. Two kinds of tensors pass by: those inside an object that pytree does
not know (`hidden_type`), and those that a layer takes from elsewhere in Python, an attribute of
another layer or a closure (`Strangers`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

_WITHOUT = (str, bytes, int, float, complex, type, FunctionType, ModuleType, nn.Module, type(None))


def hidden_type(value: Any) -> str | None:
    """The name of the first type in ``value`` that holds tensors and is no pytree."""
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, Tensor) and next(tensors_in(leaf), None) is not None:
            return type(leaf).__name__
    return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in containers and attributes, however deep, but for those of modules."""
    waiting: list[Any] = [value]
    seen: dict[int, Any] = {}
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            yield one
        elif not isinstance(one, _WITHOUT) and id(one) not in seen:
            seen[id(one)] = one  # kept, so that no other gets its id
            waiting += getattr(one, "__dict__", {}).values()
            for kind in type(one).__mro__:
                slots = kind.__dict__.get("__slots__", ())
                for name in (slots,) if isinstance(slots, str) else slots:
                    waiting.append(getattr(one, name, None))
            if isinstance(one, Mapping):
                waiting += one.values()
            elif isinstance(one, (list, tuple, set, frozenset, deque)):
                waiting += one


class Strangers:
    """Finds what a graph reaches beside its ``inputs`` and ``parameters``.

    Cost: about 1 us per operator of the graph.
    """

    def __init__(self, inputs: Iterable[Tensor], parameters: Collection[Tensor]) -> None:
        self._own = {id(t) for t in (*inputs, *parameters)}
        self._seen: set[Node] = set()

    def reached_by(self, value: Any) -> bool:
        """Whether ``value`` depends on one, by operators that no earlier call has looked at.

        A leaf that a layer makes for itself counts, too: it cannot be told from the caller's.
        """
        nodes = [t.grad_fn for t in tensors_in(value) if t.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if node in self._seen:
                continue
            self._seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in self._own:
                return True
            nodes += [above for above, _ in node.next_functions if above is not None]
        return False
