"""docs/mathematics.md: every number in it is what the expression beside it gives; what ranks send
and hold is what the formulas say. Those of schedules: tests/pipeline/schedules/test_schedule.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from data_parallel.shards import Unit
from experts.layer import Experts
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from tests.mathematics import counted
from tests.mathematics import formulas as cost
from tests.mathematics.formulas import FP32
from tests.pipeline.pipeline_models import square_error
from tests.plain_gpt2 import build_model
from tests.ranks import Ranks
from training.tasks.gpt2 import gpt2_config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mathematics.md"
WIDTH = 64  # of a layer: 8 times as many parameters, and their biases
UNITS = {
    "": 1.0, "GB": 1e9, "MB": 1e6, "s": 1.0, "ms": 1e-3, "%": 1.0, "x": 1.0, "billion": 1e9
}  # fmt: skip
NUMBER = re.compile(r"\*\*([\d.,]+)(?: (GB|MB|s|ms|%|x|billion))?\*\*")
PAIR = re.compile(NUMBER.pattern + r"[^*`]*?`([^`]+)`", re.DOTALL)
WITH_UNIT = re.compile(r"[\d.,]+ (?:GB|MB|s|ms|%|x|billion)\b")


def test_every_number_is_what_its_expression_gives() -> None:
    """To the digits that are written. The page's block of Python defines what expressions use."""
    text = PAGE.read_text("utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    pairs = PAIR.findall(prose)
    numbers = [f"{digits} {unit}" for digits, unit in NUMBER.findall(prose)]
    assert len(numbers) > 40
    assert numbers == [f"{digits} {unit}" for digits, unit, _ in pairs]  # each has its expression
    for digits, unit, expression in pairs:
        value = float(eval(expression, names)) / UNITS[unit]
        decimals = len(digits.partition(".")[2])
        assert f"{value:,.{decimals}f}" == digits, expression
    plain = re.sub(r"`[^`]*`", "", NUMBER.sub("", prose))
    assert WITH_UNIT.findall(plain) == ["1 GB"]  # which says what a GB is: no other is left


@pytest.mark.parametrize(("compute", "alignment"), [(None, 16), (torch.bfloat16, 32)])
def test_shards_are_as_long_as_the_formula_says(
    compute: torch.dtype | None, alignment: int
) -> None:
    for numel in (1, 10, 16, 17, 128, 129, 4000):
        for workers in (1, 2, 3, 8):
            unit = Unit(0, (0,), [("weight", nn.Parameter(torch.empty(numel)))], workers, compute)
            assert unit.shard_numel == cost.padded(numel, workers, alignment)


def test_parameters_of_gpt2() -> None:
    config = gpt2_config("gpt2-mini", 320, 32, n_layer=2, n_embd=32, n_head=2)
    model = build_model(config, 0)
    assert cost.gpt2_parameters(2, 32, 320, 32) == sum(p.numel() for p in model.parameters())
    for block in model.transformer.h:
        block.mlp = Experts(block.mlp, 4, 2)
    with_experts = sum(p.numel() for p in model.parameters())
    assert cost.expert_gpt2_parameters(2, 32, 320, 32, experts=4) == with_experts


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_and_sends_what_the_formula_says(
    world_of: Callable[[int], Ranks], size: int
) -> None:
    """Some kilobytes more are headers, and what completes a cache line. Under ZeRO two ranks share
    a copy: of four they send between the copies half of what plain data parallelism would. Under
    ZeRO-3 the last layer is gathered once and not twice: it is still whole when its backward, which
    is the first, needs it."""
    layer = 8 * WIDTH**2 + 5 * WIDTH
    P = counted.LAYERS * layer
    between = cost.zero_traffic(0, P, size // 2, FP32) / 2
    for found in world_of(size).run(counted.steps, WIDTH):
        for zero in range(4):
            sent = cost.zero_traffic(zero, P, 2, FP32) + between
            if zero == 0:
                sent = cost.zero_traffic(0, P, size, FP32)
            if zero == 3:
                sent -= cost.reduce_scatter_bytes(4 * layer, 2)
            assert sent <= found[f"sent {zero}"] < 1.01 * sent + 2e4
            held = cost.zero(zero, P, 2, FP32).total
            assert held <= found[f"held {zero}"] < 1.01 * held + 2e4


def test_rows_travel_to_experts_as_the_formula_says(ranks: Ranks) -> None:
    """Some kilobytes more are headers, and the counts of rows."""
    sent = cost.expert_traffic(512, WIDTH, 2, 2, element=4)
    for found in ranks.run(counted.expert_layer, 512, WIDTH):
        assert sent <= found < 1.01 * sent + 2e4


def test_the_boundary_carries_what_the_formula_says() -> None:
    """However many micro-batches there are, up and down, at each of two boundaries."""
    layers = [WithDevice(nn.Linear(16, 16), f"cpu:{i}") for i in range(3)]
    x, y = torch.randn(2, 8, 5, 16).unbind(0)
    with Pipe(nn.Sequential(*layers)) as pipe:
        for m in (1, 4):
            step = partial(pipe.train_step, x, y, square_error, num_microbatches=m)
            assert counted.boundary_traffic(step) == 2 * 2 * cost.boundary_bytes(8, 5, 16, 4)
