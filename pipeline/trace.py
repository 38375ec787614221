"""Cuts any module into stages: its operators are traced, and dealt out in their order.

    stages = split(model, {"input_ids": ids, "use_cache": False}, at=["transformer.h.6"])
    pipe = ProcessPipe(stages, [1, 1], model=model)              # or, in threads:
    pipe = Pipe(nn.Sequential(*map(WithDevice, stages, ["cpu:0", "cpu:1"])))

Problem. A pipeline runs a list of layers, each a function of the one before it. Most models are not
written so: a shortcut jumps over layers, a mask made at the top is used in every block, `forward`
takes keywords and returns an object.

Idea. `torch.export` runs `forward` once, on tensors without values, and notes every operator. Any
place in that list is a cut: what operators before it make and operators behind it use is handed on
as a tuple. What only a later stage uses goes through the stages between; its gradient comes back
the same way.

    operators   embed  mask  norm  attend  add  norm  mlp  add  head
    stages      ╰──────────── 0 ────────────╯  ╰──────── 1 ────────╯
                          hands on (sum, mask)

A stage holds the very parameters and buffers that its operators use, by their names in the model.
A shared parameter is on every stage that uses it, and the pipe adds its gradients up.

Modes. Dropout and batch norm compute something else in evaluation, and a trace is of one mode. So
there are two, and ``stage.training`` says which of them runs: all of a stage is in one mode.

Sizes. They are symbols, not numbers: a trace of 2 x 8 tokens runs 3 x 5. What the trace does assume
(``if x.size(1) > 4`` went one way) is checked for every input. A batch of one example runs the
operators that larger ones do.

With ``stages=n`` the model is cut where one activation crosses, such that the costliest stage has
the fewest floating-point operations. They are counted, not measured: every process must find the
same cut.

Cost: two traces, about a second each for a small GPT-2, once. A step costs what the layers cost
called by hand; what passes through a stage is sent twice.

Reed et al., "torch.fx", MLSys 2022; the idea of a pipeline of it is PiPPy's. The front end of
torch.distributed.pipelining fixes the sizes and the mode, see docs/log.md.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from .operators import Program, at_least_two
from .partition import balance

_aten = torch.ops.aten
# A stage replaces these, by the names under which Python code calls them: see zero_bubble.py and
# runtime/randomness.py.
_CALLED: dict[Any, Callable[..., Any]] = {
    _aten.linear.default: F.linear,
    _aten.addmm.default: torch.addmm,
    _aten.mm.default: torch.mm,
    _aten.dropout.default: F.dropout,
    _aten.scaled_dot_product_attention.default: F.scaled_dot_product_attention,
}


Place = dict[bool, int]  # by mode, training or not: how many operators come before


def split(
    module: nn.Module,
    example_inputs: Any,
    at: Sequence[str] | None = None,
    stages: int | None = None,
) -> nn.Sequential:
    """The stages of ``module``, which share its parameters and buffers.

    Args:
        module: it may be on the meta device, for a `ProcessPipe` that is given ``initialize``.
        example_inputs: what the pipe will be given, of any size: a tensor, a tuple of positional
            arguments, or a dict of keyword arguments. What is no tensor must stay as it is here.
        at: names of submodules: a stage begins where each of them is first called.
        stages: how many, instead of ``at``.

    Raises ValueError where there is no such cut, and where ``module`` cannot be traced: with the
    line of its code, and what to do.
    """
    if (at is None) == (stages is None):
        raise ValueError(f"at={at}, stages={stages}: give one of the two, as stages=2")
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    example = pytree.tree_map_only(
        Tensor, lambda t: at_least_two(t.detach().to(device)), example_inputs
    )
    modes = [(m, m.training) for m in module.modules()]
    try:
        programs = {mode: Program(module.train(mode), example, device) for mode in (True, False)}
    finally:
        for m, mode in modes:
            m.training = mode
    names = at if stages is None else _balanced(programs, example, stages)
    return _cut(programs, names or ()).train(module.training)


class Traced(nn.Module):
    """Consecutive operators of a traced module: a layer like any other.

    It takes a tuple of values and returns one; only the first takes what the module does, and the
    last returns what the module does.
    """

    def __init__(self, programs: dict[bool, Program], begin: Place, end: Place) -> None:
        super().__init__()
        self._code = {mode: _Code(p, begin[mode], end[mode]) for mode, p in programs.items()}
        self._tensors = {
            mode: [self._adopt(*programs[mode].tensors[node]) for node in code.tensors]
            for mode, code in self._code.items()
        }

    def forward(self, value: Any) -> Any:
        code = self._code[self.training]
        values = code.enter(value)
        tensors = [getattr(owner, key) for owner, key in self._tensors[self.training]]
        device = next((t.device for t in (*values, *tensors) if isinstance(t, Tensor)), None)
        return code.leave(code.run(device, *tensors, *values))

    def _adopt(self, name: str, tensor: Tensor) -> tuple[nn.Module, str]:
        """Registers a tensor under its dotted name. Returns where it is, and its key there: like
        any module's it may be replaced."""
        owner: nn.Module = self
        *path, key = name.split(".")
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(key, tensor)
        else:
            owner.register_buffer(key, tensor)
        return owner, key


class _Code:
    """Some of a program's operators, as a function of (device, tensors, values)."""

    def __init__(self, program: Program, begin: int, end: int) -> None:
        nodes = program.nodes[begin:end]
        first, last = begin == 0, end == len(program.nodes)
        takes = program.inputs if first else program.crossing(begin)
        gives = program.output.args[0] if last else tuple(program.crossing(end))
        used = {node for n in (*nodes, *[program.output] * last) for node in n.all_input_nodes}
        self.tensors = [node for node in program.tensors if node in used]
        self.enter: Callable[[Any], list[Any]] = program.check_inputs if first else list
        spec = program.exported.call_spec.out_spec
        self.leave: Callable[[Any], Any] = spec.unflatten if last else tuple
        graph = fx.Graph()
        device = graph.placeholder("stage_device")  # generated code calls torch.device "device"
        copies = {node: graph.placeholder(node.name) for node in (*self.tensors, *takes)}

        def copied(leaf: Any) -> Any:
            # A tensor that `forward` makes is made where the stage is, not where the trace was.
            on_device = isinstance(leaf, torch.device) and leaf == program.device
            return device if on_device else copies.get(leaf) if isinstance(leaf, fx.Node) else leaf

        for node in nodes:
            args, kwargs = map_aggregate((node.args, node.kwargs), copied)
            target = _CALLED.get(node.target, node.target)
            copies[node] = graph.create_node(node.op, target, args, kwargs, node.name)
        graph.output(map_aggregate(gives, copied))
        self.run = fx.GraphModule(program.exported.graph_module, graph)

    def __deepcopy__(self, _: object) -> _Code:
        return self  # copies of a layer share what never changes


def _cut(programs: dict[bool, Program], names: Sequence[str]) -> nn.Sequential:
    """The layers that begin with the calls of these submodules."""
    places: list[Place] = [dict.fromkeys(programs, 0)]
    for name in names:
        for program in programs.values():
            if name not in program.starts:
                known = ", ".join(list(program.starts)[2:10])
                raise ValueError(f"at={name}: forward calls no such submodule, but {known}, ...")
        place = {mode: program.starts[name] for mode, program in programs.items()}
        if any(place[mode] <= places[-1][mode] for mode in programs):
            raise ValueError(
                f"at={list(names)}: nothing is left to compute before {name}; name the submodules "
                "in the order in which forward calls them, and not the first of all"
            )
        places.append(place)
    for mode, program in programs.items():
        begins = [place[mode] for place in places]
        for buffer, uses in program.written().items():
            if len({bisect(begins, k) for k in uses}) > 1:
                raise ValueError(
                    f"at={list(names)}: the buffer {buffer} is written to and used on several "
                    "stages, which would have different values of it; cut elsewhere"
                )
    places.append({mode: len(program.nodes) for mode, program in programs.items()})
    return nn.Sequential(*(Traced(programs, a, b) for a, b in pairwise(places)))


def _balanced(programs: dict[bool, Program], example: Any, num_stages: int) -> list[str]:
    """The submodules with which the stages after the first begin."""
    program = programs[True]
    differentiable = program.differentiable()
    narrow: dict[int, str] = {}
    anywhere: dict[int, str] = {}
    for name, place in sorted(program.starts.items(), key=lambda item: item[1]):
        if place > 0 and name in programs[False].starts:
            anywhere.setdefault(place, name)
            if len(differentiable.intersection(program.crossing(place))) == 1:
                narrow.setdefault(place, name)
    names = list((narrow if len(narrow) + 1 >= num_stages else anywhere).values())
    costs, value = [], example
    with torch.no_grad():
        for layer in _cut(programs, names).eval():
            with FlopCounterMode(display=False) as counter:
                value = layer(value)
            costs.append(1.0 + counter.get_total_flops())
    ends = accumulate(balance(costs, num_stages)[:-1])
    return [names[end - 1] for end in ends]
