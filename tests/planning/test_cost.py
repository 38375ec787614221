"""Costs, by numbers worked out by hand, and against what the code really holds and sends. Those of
schedules: tests/pipeline/test_schedule.py."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.mathematics_measured import boundary_traffic
from benchmarks.wire import bytes_sent
from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.gradients import GradientBuckets
from data_parallel.sharding import Unit
from pipeline.catalogue import find
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.schedule import bubble
from planning import cost
from planning.cost import FP32, MIXED, Link, State
from tests.ranks import Ranks
from training.model import build_model, gpt2_config


def test_bytes_held() -> None:
    """1000 parameters, 4 workers."""
    assert FP32.total == MIXED.total == 16
    assert [cost.zero(stage, 1000, 4, MIXED) for stage in range(4)] == [
        State(2000, 2000, 12000), State(2000, 2000, 3000), State(2000, 500, 3000),
        State(500, 500, 3000),
    ]  # fmt: skip
    assert cost.gathered(10, MIXED) == 60  # two layers of 20 bytes, one layer's gradients
    assert cost.gathered(10, FP32, layers=1) == 80
    assert cost.pipeline_state(1000, 4, FP32) == State(1000, 1000, 2000)
    assert cost.held_activations(240, "1f1b", 3, 8, 0) == 30  # 3 of 8 micro-batches, a third
    assert cost.boundary_bytes(2, 3, 5, 4) == 120


@pytest.mark.parametrize(("compute", "alignment"), [(None, 16), (torch.bfloat16, 32)])
def test_shards_are_as_long_as_the_formula_says(
    compute: torch.dtype | None, alignment: int
) -> None:
    for numel in (1, 10, 16, 17, 128, 129, 4000):
        for workers in (1, 2, 3, 8):
            unit = Unit(0, (0,), [("weight", nn.Parameter(torch.empty(numel)))], workers, compute)
            assert unit.shard_numel == cost.padded(numel, workers, alignment)


def test_seconds_and_bytes_sent() -> None:
    """1000 bytes over 4 workers at 100 bytes a second, half a second for each message."""
    link = Link(100, 0.5)
    assert cost.all_reduce_seconds(1000, 4, link) == 15 + 6 * 0.5
    assert cost.server_seconds(1000, 4, link) == 2 * (30 + 3 * 0.5)
    assert cost.all_reduce_seconds(1000, 1, link) == 0
    assert Link.gigabits(100, 1e-6) == Link(12.5e9, 1e-6)
    assert [cost.zero_traffic(stage, 500, 4) for stage in range(4)] == [1500, 1500, 1500, 2250]
    assert cost.pipeline_speedup(2, 4) == pytest.approx(1.6)


def test_bubbles() -> None:
    assert cost.pipeline_bubble(3, 4) == Fraction(2, 6)
    for n, m in [(1, 2), (2, 8), (3, 6), (6, 12)]:
        assert cost.pipeline_bubble(n, m, 6) == bubble(find("zbv")(n, m))
    for n, share in [(2, 0.5), (2, 0.1), (4, 0.1), (8, 0.05), (1, 0.1)]:
        m = cost.microbatches_for(n, share)
        assert cost.pipeline_bubble(n, m) <= share
        assert m == 1 or cost.pipeline_bubble(n, m - 1) > share


def test_parameters_of_gpt2() -> None:
    config = gpt2_config("gpt2-mini", 320, 32, n_layer=2, n_embd=32, n_head=2)
    model = build_model(config, 0)
    assert cost.gpt2_parameters(2, 32, 320, 32) == sum(p.numel() for p in model.parameters())


def _sent_by(step: Callable[[], Any]) -> int:
    dist.barrier()
    before = bytes_sent()
    step()
    dist.barrier()
    return bytes_sent() - before


NUMEL = 3 * 2**16
LAYERS = 4


def _sent_by_a_data_parallel_step(_rank: int, _world_size: int) -> int:
    model = nn.Linear(NUMEL // 512, 512, bias=False)
    buckets = GradientBuckets(model.parameters(), bucket_bytes=1 << 16, share_memory=False)

    def step() -> None:
        model(torch.ones(1, NUMEL // 512)).sum().backward()
        buckets.finish()

    return _sent_by(step)


def _sent_by_a_sharded_step(_rank: int, _world_size: int, zero: int, microbatches: int) -> int:
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(LAYERS)))
    fsdp = FullyShardedDataParallel(
        layers, lambda shards: torch.optim.SGD(shards, lr=0.1), zero=zero, share_memory=False
    )
    inputs = [torch.ones(1, 256)] * microbatches

    def step() -> None:
        fsdp.train_step(inputs, inputs, lambda y, _: y.sum())
        fsdp.optimizer_step()

    step()  # in which the ranks agree on what backward needs
    return _sent_by(step)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux counts the bytes")
def test_a_rank_sends_what_the_formula_says(ranks: Ranks, three_ranks: Ranks) -> None:
    """Some kilobytes more: headers, and the barriers around. Under ZeRO-3 the last layer is
    gathered once and not twice: it is still whole when its backward, which is the first, needs
    it."""
    layer, m = 256 * 256, 3
    for world in (ranks, three_ranks):
        expected = cost.all_reduce_bytes(4 * NUMEL, world.world_size)
        for sent in world.run(_sent_by_a_data_parallel_step):
            assert expected <= sent < 1.01 * expected + 2e4
    for zero in (1, 2, 3):
        expected = cost.zero_traffic(zero, LAYERS * layer, 2, FP32, m)
        if zero == 3:
            expected -= m * cost.reduce_scatter_bytes(4 * layer, 2)
        for sent in ranks.run(_sent_by_a_sharded_step, zero, m):
            assert expected <= sent < 1.01 * expected + 2e4


def test_the_boundary_carries_what_the_formula_says() -> None:
    """However many micro-batches there are, up and down, at each of two boundaries."""
    layers = [WithDevice(nn.Linear(16, 16), f"cpu:{i}") for i in range(3)]
    x, y = torch.randn(2, 8, 5, 16).unbind(0)
    for m in (1, 4):
        with Pipe(nn.Sequential(*layers)) as pipe:

            def step(m: int = m, pipe: Pipe = pipe) -> None:
                pipe.train_step(x, y, lambda a, b: (a - b).square().sum(), num_microbatches=m)

            assert boundary_traffic(step) == 2 * 2 * cost.boundary_bytes(8, 5, 16, 4)
