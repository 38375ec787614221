"""The operators of a module in order, as recorded by `torch.export`.

`torch.export` runs `forward` once, in Python, on tensors with shapes but without values. The
trace holds for other sizes under conditions, which `Program.enter` checks: if `forward`
branches on `x.size(1) > 4`, inputs must take the same branch as the example. A branch on values
cannot be traced: torch's error names its line.

Not public: `_guards_fn`, which checks the conditions of torch.export;
`backed_size_oblivious`, without which torch assumes that a size that may be 1 never is; and
`_is_setup_context_defined`, which tells of a call of an autograd function; and `_InferenceMode`, of
a use of `inference_mode`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
import torch.fx.experimental._config as symbols
from torch import Tensor, fx, nn
from torch.export import Dim, export
from torch.utils import _pytree as pytree

from runtime.meta import names_of


class Program:
    """The operators of a module in one mode.

    Attributes:
        nodes: the operators, in order.
        inputs, output: the nodes before and after them.
        tensors: the parameters, buffers and constants they use, with their names.
        starts: for each submodule, by name, the number of operators before its first call.
        enter: takes the first stage's input, returns the values of `inputs`. Raises ValueError if
            its structure differs from the example's, or if its sizes, or values that are no
            tensors, would have taken a different way through `forward`; or if the input has None,
            or a tensor of booleans, where the example had something else, or the reverse.
        leave: takes the values of `output`, returns what `forward` returns.
    """

    def __init__(self, module: nn.Module, example: Any, device: torch.device) -> None:
        self.device = device
        traced = _export(module, example)
        names = names_of(module)
        mode = "training" if module.training else "evaluation"
        self.inputs: list[fx.Node] = []
        self.tensors: dict[fx.Node, tuple[str, Tensor]] = {}
        self.nodes: list[fx.Node] = []
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                self.inputs.append(node)
            elif node.op == "get_attr":
                tensor = attrgetter(node.target)(traced)
                # a constant that forward makes may differ in the other mode
                own = f"{node.target.removeprefix('module.')}_{mode}"
                self.tensors[node] = names.get(tensor, own), tensor  # one name, even if tied
            elif node.op == "call_function":
                self.nodes.append(node)
            elif node.op == "call_module":  # the check of the conditions, which is in `enter`
                traced.graph.erase_node(node)
        self.output = traced.graph.output_node()
        self.starts: dict[str, int] = {}
        for k, node in enumerate(self.nodes):
            # the modules around this operator, the outermost first
            for name, _ in node.meta.get("nn_module_stack", {}).values():
                self.starts.setdefault(name.removeprefix("module."), k)
        self.order = {node: k for k, node in enumerate([*self.nodes, self.output])}
        self.enter = _enter(example, traced._guards_fn)
        self.leave: Callable[[Any], Any] = traced._out_spec.unflatten

    def uses(self, node: fx.Node) -> list[int]:
        """The operators that use a value, by number; the output comes after the last."""
        return [self.order[user] for user in node.users]

    def crossing(self, position: int) -> list[fx.Node]:
        """The values handed on by a cut after the first `position` operators."""
        before = (*self.inputs, *self.nodes[:position])
        return [node for node in before if any(k >= position for k in self.uses(node))]

    def written(self) -> dict[str, list[int]]:
        """The buffers that operators write to, with the operators that use them, or views."""
        written: dict[fx.Node, None] = {}
        owners = {node: {node: None} for node in self.tensors}  # whose memory a value may share
        for node in self.nodes:
            for value, argument in _operands(node):
                of_value = owners.get(value, {})
                if argument is None or argument.alias_info is not None:
                    owners[node] = owners.get(node, {}) | of_value
                # Statistics of a batch norm are written without being declared so.
                if argument and (argument.is_write or argument.name.startswith("running_")):
                    written |= of_value
        found = {}
        for tensor in written:
            values = [value for value, of_value in owners.items() if tensor in of_value]
            found[self.tensors[tensor][0]] = [k for value in values for k in self.uses(value)]
        return found


def _operands(node: fx.Node) -> list[tuple[Any, Any]]:
    """What an operator takes, each with its argument in torch's schema; None: of Python's own
    functions, such as getitem."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return [(value, None) for value in node.all_input_nodes]
    arguments = node.target._schema.arguments
    given = dict(zip((a.name for a in arguments), node.args, strict=False)) | node.kwargs
    return [(value, a) for a in arguments for value in pytree.tree_leaves(given.get(a.name))]


def _kind(leaf: Any) -> str:
    """What of an input decides by which operators `forward` computes, though no condition of
    torch's checks it."""
    is_mask = isinstance(leaf, Tensor) and leaf.dtype == torch.bool
    return "None" if leaf is None else "a tensor of booleans" if is_mask else "a value"


def _enter(example: Any, check: Callable[..., object]) -> Callable[[Any], list[Any]]:
    leaves, spec = pytree.tree_flatten(example)
    kinds = [_kind(leaf) for leaf in leaves]

    def enter(value: Any) -> list[Any]:
        leaves = spec.flatten_up_to(value)  # the keys of a dict may be in a different order
        for leaf, kind in zip(leaves, kinds, strict=True):
            if _kind(leaf) != kind:
                raise ValueError(
                    f"an input has {_kind(leaf)} where the example had {kind}: trace an example "
                    "like it"
                )
        try:
            check(*leaves)
        except AssertionError as error:
            raise ValueError(
                f"an input would take a different way through forward than the example: {error}; "
                "trace an example like it, or give micro-batches of two examples or more"
            ) from None
        return leaves

    return enter  # a function is not copied with a stage


class _AnyInput(nn.Module):
    """Takes one argument, so that the whole input has one name in the trace."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: Any) -> Any:
        before = list(self.module.named_buffers())  # forward may write to them, not replace them
        if isinstance(value, dict):
            output = self.module(**value)
        else:
            output = self.module(*value) if isinstance(value, tuple) else self.module(value)
        for name, buffer in before:
            if self.module.get_buffer(name) is not buffer:
                raise ValueError(f"it replaces the buffer {name}: write to it, e.g. with copy_()")
        return output


def _lost(*_: Any) -> Any:
    raise ValueError(
        "a trace holds only what forward computes: the backward of a torch.autograd.Function, a "
        "hook on a tensor, or inference_mode (no_grad works) would be lost; cut the model by hand: "
        "nn.Sequential(*layers)"
    )


def _export(module: nn.Module, example: Any) -> Any:
    """A trace for any sizes."""
    sizes = pytree.tree_map(  # symbols, unless forward fixes them
        lambda t: dict.fromkeys(range(t.dim()), Dim.AUTO) if isinstance(t, Tensor) else None,
        example,
    )
    inference = torch._C._InferenceMode  # torch itself calls it with False, to leave the mode
    with (
        symbols.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
        # every `apply` calls this, even one that was taken from its class before
        patch.object(torch.autograd.function, "_is_setup_context_defined", _lost),
        patch.object(Tensor, "register_hook", _lost),
        patch.object(torch._C, "_InferenceMode", lambda on: _lost() if on else inference(on)),
    ):
        program = export(_AnyInput(module), (example,), dynamic_shapes=(sizes,), strict=False)
        return program.module()


def at_least_two(t: Tensor) -> Tensor:
    """Expands a batch of one example to two: to a trace, 1 is a special size."""
    return t.expand(2, *t.shape[1:]) if t.dim() and t.size(0) == 1 else t
