"""The course's function `train`, an epoch; and what a plan has to say. (Its other functions:
test_losses.py, test_a4_1_2.py.)"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from project.utils import train
from training.layout import Plan
from training.optimization import Optimizers, Recipe
from training.results import Totals
from training.task import Step


def test_an_epoch_averages_after_backward_and_adds_to_what_was_done() -> None:
    """Gradients are those of one step, averaged before the optimizer uses them; those of the last
    step stay. What happens after a step, as saving, is not training time."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    order: list[Any] = []

    def backward(step: Step) -> Tensor:
        order.append(module.weight.grad)
        module.weight.grad = torch.tensor([[float(step.count)]])
        return torch.tensor(10.0 * step.count)

    def average(given: nn.Module | None) -> None:
        assert given is module and module.weight.grad is not None
        module.weight.grad *= 10
        order.append("average")

    def after(totals: Totals, _: float) -> None:
        order.append(totals.steps)
        time.sleep(0.05)

    optimizer = Optimizers([torch.optim.SGD(module.parameters(), lr=1)], Recipe(1.0, 9, 9))
    model: Any = SimpleNamespace(module=module, backward=backward)
    steps = [Step([], [], count, 7, 5) for count in (1, 2)]
    start = time.perf_counter()
    totals = train(
        model, optimizer, steps, "", 1, average, None, Totals(1.0, 2, 4, 5, 6.0, 7, 8), after
    )
    elapsed = time.perf_counter() - start
    assert order == [None, "average", 9, None, "average", 10]
    assert module.weight.item() == -(1 * 10 + 2 * 10)
    assert module.weight.grad is not None and module.weight.grad.item() == 20
    assert totals == Totals(31.0, 2 + 3, 4 + 14, 5 + 10, totals.seconds, 7, 10)
    assert 6.0 < totals.seconds < 6.0 + elapsed - 2 * 0.05


def test_a_cpu_without_bf16_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bf16, fp32 = (Plan(torch.optim.SGD, precision) for precision in ("bf16", "fp32"))
    x86 = {"architecture": "x86_64", "amx_bf16": False}
    for capabilities, notes in (
        (x86 | {"avx512_bf16": False}, 1), (x86 | {"avx512_bf16": True}, 0),
        ({"architecture": "aarch64"}, 0), ({}, 0),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cpu, "get_capabilities", capabilities.copy, raising=False)
        assert len(bf16.notes(torch.device("cpu"))) == notes
        assert fp32.notes(torch.device("cpu")) == bf16.notes(torch.device("cuda")) == []
