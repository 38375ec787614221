"""The whole model on every rank: --compile."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.equivalence.problems import Sentences
from training.launch.world import World
from training.layouts.layout import Setup
from training.layouts.replicated import Replicated
from training.options import Options


def test_compiled_layers_train_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and loss are traced and run as they were traced: Inductor's own code, which rounds
    otherwise, takes minutes to make here. Micro-batches have several shapes; dropout is on."""
    traced: list[str] = []
    compile_function, compile_module = torch.compile, nn.Module.compile

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        traced.append(graph.code)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(compile_function, backend=backend))
    monkeypatch.setattr(nn.Module, "compile", lambda m: compile_module(m, backend=backend))
    task = Sentences(11, dropout=0.1, n_layer=1).task(World(), torch.float32)
    adamw = partial(torch.optim.AdamW, lr=1e-3)

    def trained(compiled: bool) -> list[Tensor]:
        setup = Setup(Options(num_microbatches=2, compile=compiled), adamw)
        model = Replicated(task, World(), setup)
        (step, _) = task.steps(0, 0, 1, 2)
        model.backward(step)
        found = [p.grad for p in model.module.parameters()]
        before = len(traced)
        with model.evaluating():
            output = model.outputs(step.inputs[0])
        assert len(traced) == before, "evaluation is not compiled"
        return [*(g for g in found if g is not None), *([] if output is None else [output])]

    eager = trained(False)
    assert not traced
    compiled = trained(True)
    assert len(eager) == len(compiled) > 10
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
    assert sum("scaled_dot_product" in code or "softmax" in code for code in traced) > 0
    assert sum("cross_entropy" in code for code in traced) > 0
