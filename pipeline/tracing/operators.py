"""The operators of a module in order, as recorded by `torch.export`.

`torch.export` runs ``forward`` once, in Python, on tensors with shapes but without values. The
trace holds for other sizes under conditions, which `Program.enter` checks: if ``forward``
branches on ``x.size(1) > 4``, inputs must take the same branch as the example. A branch on values
cannot be traced; the error names its line.

Not public: ``_guards_fn``, which checks the conditions of torch.export;
``backed_size_oblivious``, without which torch assumes that a size that may be 1 never is; and
``_is_setup_context_defined``, which tells of a call of an autograd function.
"""

from __future__ import annotations

import contextlib
import io
import traceback
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.fx.experimental._config as symbols
from torch import Tensor, fx, nn
from torch.export import Dim, export
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from runtime.meta import names_of


class Program:
    """The operators of a module in one mode.

    Attributes:
        nodes: the operators, in order.
        inputs, output: the nodes before and after them.
        tensors: the parameters, buffers and constants they use, with their names.
        starts: for each submodule, by name, the number of operators before its first call.
        enter: of the first stage's input, the values of ``inputs``.
        leave: of the values of ``output``, what forward returns.
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
                # a constant made by forward may be another one in the other mode
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
        self.enter = _checked(pytree.tree_structure(example), traced._guards_fn)
        self.leave: Callable[[Any], Any] = traced._out_spec.unflatten

    def uses(self, node: fx.Node) -> list[int]:
        """The operators that use a value, by number; the output comes after the last."""
        return [self.order[user] for user in node.users]

    def crossing(self, position: int) -> list[fx.Node]:
        """The values handed on by a cut after the first ``position`` operators."""
        before = (*self.inputs, *self.nodes[:position])
        return [node for node in before if any(k >= position for k in self.uses(node))]

    def written(self) -> dict[str, list[int]]:
        """The buffers that operators write to, with the operators that use them."""
        nodes = set[fx.Node]()
        for node in self.nodes:
            if isinstance(node.target, torch._ops.OpOverload):  # not Python's own, as getitem
                arguments = node.target._schema.arguments
                for value, argument in zip(node.args, arguments, strict=False):
                    # Statistics of a batch norm are written without being declared so.
                    if argument.is_write or argument.name.startswith("running_"):
                        nodes.update(node for node in self.tensors if node is value)
        return {self.tensors[node][0]: self.uses(node) for node in nodes}


def _checked(spec: pytree.TreeSpec, holds: Callable[..., object]) -> Callable[[Any], Sequence[Any]]:
    """A function that flattens an input; ValueError unless it is like the example, and ``holds``,
    the conditions of torch.export, says nothing against its sizes and other values."""

    def enter(value: Any) -> Sequence[Any]:
        try:
            leaves = spec.flatten_up_to(value)  # the keys of a dict may be in another order
            holds(*leaves)
        except (ValueError, AssertionError) as error:
            sizes = pytree.tree_map_only(Tensor, lambda t: tuple(t.shape), value)
            raise ValueError(
                f"the trace does not hold for an input like {sizes} ({error}): give "
                "example_inputs like it"
            ) from None
        return leaves

    return enter


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
                raise ValueError(f"it sets the buffer {name} anew: write to it, as with copy_()")
        return output


@contextlib.contextmanager
def _only_operators() -> Iterator[None]:
    """Inside, what a trace would lose raises ValueError: a backward that is code, and hooks."""

    def refuse(what: str) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            raise ValueError(f"{what} would be lost: a trace holds only what forward computes")

        return call

    hook = refuse("a hook on a tensor")
    with (
        # which every `apply` calls, also one that was taken from its class before
        patch.object(
            torch.autograd.function, "_is_setup_context_defined",
            refuse("the backward of a torch.autograd.Function"),
        ),
        patch.object(Tensor, "register_hook", hook),
        patch.object(Tensor, "register_post_accumulate_grad_hook", hook),
    ):  # fmt: skip
        yield


def _export(module: nn.Module, example: Any) -> Any:
    """A trace for any sizes; ValueError names the line of user code that prevents it."""
    sizes = pytree.tree_map(  # symbols, unless forward fixes them
        lambda t: dict.fromkeys(range(t.dim()), Dim.AUTO) if isinstance(t, Tensor) else None,
        example,
    )
    try:
        with (
            symbols.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
            contextlib.redirect_stderr(io.StringIO()),  # torch prints the graph of a failure there
            _only_operators(),
        ):
            program = export(_AnyInput(module), (example,), dynamic_shapes=(sizes,), strict=False)
            return program.module()
    except Exception as error:
        raise ValueError(_why(error, module)) from error


def _why(error: Exception, module: nn.Module) -> str:
    """The message: where the trace fails, why, and what to do."""
    outside = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_file()
        and not Path(frame.filename).is_relative_to(Path(torch.__file__).parent)
        and frame.filename != __file__
    ]
    where, line = type(module).__name__, ""
    if outside:  # [-1]: the innermost
        where, line = f"{outside[-1].filename}:{outside[-1].lineno}", f"`{outside[-1].line}` "
    first = next(iter(str(error).strip().splitlines()), repr(error))
    said = f"cannot be traced ({first}): change it"
    if isinstance(error, GuardOnDataDependentSymNode):
        said = (
            "asks for the values of a tensor, and a trace has none. Keep it a tensor, as "
            "torch.where(condition, a, b) does instead of an if"
        )
    return f"{where}: {line}{said}; or cut the model by hand: nn.Sequential(*layers)"


def at_least_two(t: Tensor) -> Tensor:
    """Expands a batch of one example to two: to a trace, 1 is a special size."""
    return t.expand(2, *t.shape[1:]) if t.dim() and t.size(0) == 1 else t
