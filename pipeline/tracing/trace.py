"""Cuts any module into stages: traces its operators and cuts the list of them.

    stages = split(model, {"input_ids": ids, "use_cache": False}, at=["transformer.h.6"])
    pipe = ProcessPipe(stages, [1, 1], model=model)              # or, in threads:
    pipe = Pipe(nn.Sequential(*map(WithDevice, stages, ["cpu:0", "cpu:1"])))

Problem. A pipeline runs a list of layers, each a function of the previous output. Most models are
not written so: a shortcut skips layers, a mask made at the top is used in every block, `forward`
takes keywords and returns an object.

Idea. `torch.export` runs `forward` once, on tensors without values, and records every operator. The
list can be cut anywhere: values made before a cut and used after it are handed on as a tuple. A
value for a later stage passes through the stages in between; its gradient comes back the same way.

    operators   embed  mask  norm  attend  add  norm  mlp  add  head
    stages      ╰──────────── 0 ────────────╯  ╰──────── 1 ────────╯
                          hands on (sum, mask)

A stage holds the model's own parameters and buffers that its operators use, under their names. A
shared parameter is on every stage that uses it, and the pipe adds up its gradients.

Modes. Dropout and batch norm behave differently in evaluation, and a trace has one mode. So there
are two traces, and `stage.training` chooses one. In the trace of the module's own mode each
submodule keeps its mode, so that a frozen part stays as it is; in the other trace all submodules
have the other mode.

Sizes are symbols, not numbers: a trace of 2 x 8 tokens runs 3 x 5, and a batch of one example runs
the same operators as larger batches, unless one asks whether its size is 1, as a reshape of a
transposed tensor does: then it is refused. Assumptions (the branch taken at `if x.size(1) > 4`) are
checked for every input.

Cost: two traces, about a second each for a small GPT-2, once. A step costs as much as calling the
layers by hand; a value that passes through a stage is sent twice.

Reed et al., "torch.fx", MLSys 2022; pipelines cut from traces are PiPPy's idea. The front end of
torch.distributed.pipelining fixes the sizes and the mode, see docs/log.md.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.graph_module import _assign_attr
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from runtime.linear import linear

from .operators import Program, at_least_two


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(x, weight, bias, transposed=True)


def _addmm(bias: Tensor, x: Tensor, weight: Tensor, **scales: Any) -> Tensor:
    if scales or bias.dim() != 1:
        return torch.addmm(bias, x, weight, **scales)
    return linear(x, weight, bias)


_aten = torch.ops.aten
# What stages call instead of the operators, so that the gradients of weights may wait.
_CALLED: dict[Any, Any] = {_aten.linear.default: _linear, _aten.addmm.default: _addmm}


def split(module: nn.Module, example_inputs: Any, at: Sequence[str] = ()) -> nn.Sequential:
    """The stages of `module`, which share its parameters and buffers.

    Args:
        module: may be on the meta device, for a `ProcessPipe` with `initialize`.
        example_inputs: an input for the pipe, of any size: a tensor, a tuple of positional
            arguments, or a dict of keyword arguments. Values that are no tensors are fixed.
        at: names of submodules, in any order: a stage begins at the first call of each.

    Raises ValueError if there is no such submodule, or if the stages would not compute what
    `module` does: custom autograd functions, hooks on the backward, a buffer that is written to
    and used on several stages. Torch's own errors tell what else cannot be traced. What `forward`
    asks of its attributes that are no tensors, such as a counter, and whether gradients are
    enabled, is fixed as it is now.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    example = pytree.tree_map_only(  # of tensors, only shapes and types count
        Tensor, lambda t: at_least_two(t.detach().to(device)).clone(), example_inputs
    )  # a clone has memory of its own for every element: the first operator may write to it
    for name, m in module.named_modules():
        if m._backward_hooks or m._backward_pre_hooks:
            raise ValueError(f"{name} ({type(m).__name__}) has a hook on its backward: remove it")
    modes, mode = [(m, m.training) for m in module.modules()], module.training
    programs = {mode: Program(module, example, device)}
    try:
        programs[not mode] = Program(module.train(not mode), example, device)
    finally:
        for m, own in modes:  # one by one: submodules may be in other modes
            m.training = own
    codes = {mode: _codes(program, at) for mode, program in programs.items()}
    stages = range(len(at) + 1)
    return nn.Sequential(*(Traced({k: codes[k][s] for k in codes}) for s in stages)).train(mode)


class _Code(NamedTuple):
    """Some of a program's operators: `leave(run(stage, device, *enter(value)))`, where `stage`
    has the tensors, by their names."""

    enter: Callable[[Any], Sequence[Any]]
    run: Callable[..., Any]
    leave: Callable[[Any], Any]
    tensors: dict[str, Tensor]


class Traced(nn.Module):
    """Consecutive operators of a traced module: a layer like any other.

    It takes a tuple of values and returns one, but the first stage takes the module's input, and
    the last returns the module's output. A copy shares the code, and has tensors of its own.
    """

    def __init__(self, codes: dict[bool, _Code]) -> None:
        super().__init__()
        # by mode, training or not; without the tensors, which may be replaced, as in any module
        self._calls = {mode: (code.enter, code.run, code.leave) for mode, code in codes.items()}
        for code in codes.values():
            for name, tensor in code.tensors.items():
                _assign_attr(tensor, self, name)  # makes the modules on its way

    def forward(self, value: Any) -> Any:
        enter, run, leave = self._calls[self.training]
        values = enter(value)
        tensors = chain(values, self.parameters(), self.buffers())
        device = next((t.device for t in tensors if isinstance(t, Tensor)), None)
        return leave(run(self, device, *values))


def _code(program: Program, begin: int, end: int, first: bool) -> _Code:
    """The operators `begin` to `end`. The `first` stage has none if the second begins with the
    first operator."""
    last = end == len(program.nodes)
    takes = program.inputs if first else program.crossing(begin)  # what the stage before gives
    gives = program.output.args[0] if last else tuple(program.crossing(end))
    graph = fx.Graph()
    device = graph.placeholder("stage_device")  # generated code calls torch.device "device"
    # from the program's nodes to this graph's
    copies = {node: graph.placeholder(node.name) for node in takes}

    def copied(leaf: Any) -> Any:
        # Tensors made by `forward` are made on the stage's device, not the trace's.
        if isinstance(leaf, torch.device) and leaf == program.device:
            return device
        if leaf in program.tensors and leaf not in copies:
            copies[leaf] = graph.get_attr(program.tensors[leaf][0])
        return copies.get(leaf) if isinstance(leaf, fx.Node) else leaf

    for node in program.nodes[begin:end]:  # in order: arguments are copied before their users
        args, kwargs = map_aggregate((node.args, node.kwargs), copied)
        target = _CALLED.get(node.target, node.target)
        copies[node] = graph.create_node(node.op, target, args, kwargs, node.name)
    graph.output(map_aggregate(gives, copied))
    tensors = {name: t for node, (name, t) in program.tensors.items() if node in copies}
    run = type(fx.GraphModule(tensors, graph)).forward  # the generated code
    return _Code(program.enter if first else tuple, run, program.leave if last else tuple, tensors)


def _codes(program: Program, names: Sequence[str]) -> list[_Code]:
    """The code of all stages, in one mode."""
    for name in names:
        if name not in program.starts:
            # [2:]: after the wrapper and the whole module
            names_called = list(program.starts)[2:]
            known = ", ".join(get_close_matches(name, names_called, 3) or names_called[:8])
            raise ValueError(f"at={name}: forward calls no such submodule, but {known}, ...")
    begins = sorted([0, *(program.starts[name] for name in names)])  # by stage
    for buffer, uses in program.written().items():
        if len({bisect(begins, k) for k in uses}) > 1:  # by operator: its stage, from 1
            raise ValueError(
                f"at={list(names)}: the buffer {buffer} is written to and used on several "
                "stages, which would have different values of it; cut elsewhere"
            )
    positions = pairwise([*begins, len(program.nodes)])
    return [_code(program, *position, first=s == 0) for s, position in enumerate(positions)]
