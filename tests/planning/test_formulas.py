"""The formulas against what the code really holds and sends. Their numbers: docs/mathematics.md, by
tests/test_mathematics.py. Those of schedules: tests/pipeline/schedules/test_schedule.py."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn

from benchmarks import formulas as cost
from benchmarks import mathematics_measured as measured
from benchmarks.formulas import FP32
from data_parallel.shards import Unit
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from tests.plain_gpt2 import build_model
from tests.ranks import Ranks
from training.tasks.gpt2 import gpt2_config

WIDTH = 64  # of a layer: 8 times as many parameters, and their biases


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


def measure(_rank: int, _world_size: int) -> dict[str, float]:
    with patch.object(measured, "WIDTH", WIDTH):
        found = measured._data_parallel_step() | measured._sharded_update_step()
        return found | measured._sharded_step(2) | measured._sharded_step(3)


def test_a_rank_holds_and_sends_what_the_formula_says(ranks: Ranks) -> None:
    """Some kilobytes more are headers, and what completes a cache line. Under ZeRO-3 the last layer
    is gathered once and not twice: it is still whole when its backward, which is the first, needs
    it."""
    layer = 8 * WIDTH**2 + 5 * WIDTH
    P = measured.LAYERS * layer
    for found in ranks.run(measure):
        for stage in range(4):
            sent = cost.zero_traffic(stage, P, 2, FP32)
            if stage == 3:
                sent -= cost.reduce_scatter_bytes(4 * layer, 2)
            assert sent <= found[f"sent {stage}"] < 1.01 * sent + 2e4
            held = cost.zero(stage, P, 2, FP32).total
            assert held <= found[f"held {stage}"] < 1.01 * held + 2e4


def test_the_boundary_carries_what_the_formula_says() -> None:
    """However many micro-batches there are, up and down, at each of two boundaries."""
    layers = [WithDevice(nn.Linear(16, 16), f"cpu:{i}") for i in range(3)]
    x, y = torch.randn(2, 8, 5, 16).unbind(0)
    with Pipe(nn.Sequential(*layers)) as pipe:
        for m in (1, 4):
            step = partial(pipe.train_step, x, y, measured._squares, num_microbatches=m)
            assert measured.boundary_traffic(step) == 2 * 2 * cost.boundary_bytes(8, 5, 16, 4)
