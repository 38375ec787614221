"""What a strategy that calls the layers of a model one by one would not see.

Pieces of a model are joined by what their layers return: its tensors are found by pytree, detached,
handed on, and their gradients come back. Without a word would be lost

- the gradients of tensors inside an object that pytree does not know: `hidden_type`;
- those of tensors that a layer takes from elsewhere in Python, an attribute of another layer or a
  closure: `Strangers`;
- hooks on a module whose children are called instead: `refuse_hooks`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils import _pytree as pytree

_RECORDING = "transformers.utils.output_capturing"
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
    """Finds what a graph reaches beside what is ``known``: its inputs and parameters.

    Cost: about 1 us per operator of the graph.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {id(t) for t in known}
        self._seen: set[Node] = set()

    def refuse(self, value: Any, who: str, given: Any = None) -> None:
        """RuntimeError if ``value``, which ``who`` computed from what it was ``given``, depends on
        one, by operators that no earlier call has looked at.

        A leaf that a layer makes for itself counts, too: it cannot be told from the caller's.
        """
        nodes = [get_gradient_edge(t).node for t in tensors_in(value) if t.requires_grad]
        while nodes:
            node = nodes.pop()
            if node in self._seen:
                continue
            self._seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in self._known:
                kind = hidden_type(given)
                inside = f" inside {kind}" if kind else ""
                raise RuntimeError(
                    f"{who} uses a tensor{inside} that requires grad and is neither part of its "
                    "input nor one of its parameters: its gradient would be lost. Let the layers "
                    "before hand it on, e.g. return (output, tensor), in tuples, lists, dicts or "
                    "what is registered with torch.utils._pytree; or make it a parameter of the "
                    "layer"
                )
            nodes += [above for above, _ in node.next_functions if above is not None]


def refuse_hooks(uncalled: Iterable[tuple[str, nn.Module]]) -> None:
    """ValueError if one of the named modules, which nobody calls, has a hook on its call.

    Not those with which transformers records hidden states, and which are idle otherwise.
    """
    for name, module in uncalled:
        hooks = [
            *module._forward_hooks.values(),
            *module._forward_pre_hooks.values(),
            *module._backward_hooks.values(),
            *module._backward_pre_hooks.values(),
        ]
        if any(getattr(hook, "__module__", None) != _RECORDING for hook in hooks):
            raise ValueError(
                f"{name} ({type(module).__name__}) has a hook that would never run: a pipeline "
                "calls the layers, and not what holds them. Register it on a layer: the first or "
                "the last of them"
            )
