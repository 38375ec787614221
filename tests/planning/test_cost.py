"""Costs, by numbers worked out by hand, and against what the code really holds and sends."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.mathematics_measured import boundary_traffic
from benchmarks.wire import bytes_sent
from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.gradients import GradientBuckets
from data_parallel.sharding import Unit
from pipeline.catalogue import SCHEDULES
from pipeline.chunks import interleaved_1f1b
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.schedule import bubble, peak_alive
from planning import cost
from planning.cost import FP32, MIXED, SGD_FP32, Link, State
from tests.ranks import Ranks
from training.model import build_model, gpt2_config


def test_state() -> None:
    assert (FP32.total, MIXED.total, SGD_FP32.total) == (16, 16, 8)
    assert State(1, 2, 3) * 2 == State(2, 4, 6)


def test_zero() -> None:
    """1000 parameters, 4 workers."""
    assert [cost.zero(stage, 1000, 4, MIXED) for stage in range(4)] == [
        State(2000, 2000, 12000), State(2000, 2000, 3000), State(2000, 500, 3000),
        State(500, 500, 3000),
    ]  # fmt: skip
    assert cost.zero(0, 1000, 1) == cost.zero(3, 1000, 1)
    with pytest.raises(ValueError, match="ZeRO stage 4"):
        cost.zero(4, 1000, 4)
    assert cost.gathered(10, MIXED) == 60  # two layers of 20 bytes, one layer's gradients
    assert cost.gathered(10, FP32, layers=1) == 80
    assert [cost.padded(n, 4, alignment=1) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert cost.pipeline_state(1000, 4, FP32) == State(1000, 1000, 2000)


@pytest.mark.parametrize(("compute", "alignment"), [(None, 16), (torch.bfloat16, 32)])
@pytest.mark.parametrize("numel", [1, 10, 16, 17, 128, 129, 4000])
def test_shards_are_as_long_as_the_formula_says(
    numel: int, compute: torch.dtype | None, alignment: int
) -> None:
    for workers in (1, 2, 3, 8):
        unit = Unit(0, (0,), [("weight", nn.Parameter(torch.empty(numel)))], workers, compute)
        assert unit.shard_numel == cost.padded(numel, workers, alignment)


def test_rings() -> None:
    """1000 bytes over 4 workers at 100 bytes a second, half a second for each message."""
    link = Link(100, 0.5)
    assert cost.reduce_scatter_bytes(1000, 4) == 750
    assert cost.all_reduce_bytes(1000, 4) == 1500
    assert cost.all_reduce_seconds(1000, 4, link) == 15 + 6 * 0.5
    assert cost.server_seconds(1000, 4, link) == 2 * (30 + 3 * 0.5)
    assert cost.all_reduce_seconds(1000, 1, link) == 0
    assert Link.gigabits(100, 1e-6) == Link(12.5e9, 1e-6)
    assert [cost.zero_traffic(stage, 500, 4) for stage in range(4)] == [1500, 1500, 1500, 2250]
    in_three = [cost.zero_traffic(stage, 500, 4, FP32, microbatches=3) for stage in range(4)]
    assert in_three == [3000, 3000, 6000, 13500]
    with pytest.raises(ValueError, match="ZeRO stage -1"):
        cost.zero_traffic(-1, 500, 4)


def test_a_ring_step_by_step() -> None:
    """The bytes and the sum, by doing it: four workers, parts of 3 numbers."""
    w, part = 4, 3
    vectors = [[float(10 * r + i) for i in range(w * part)] for r in range(w)]
    held, sent = [list(vector) for vector in vectors], [0] * w
    for gather in (False, True):
        for step in range(w - 1):
            messages = []
            for r in range(w):
                chunk = (r - step + gather) % w
                places = range(chunk * part, (chunk + 1) * part)
                messages.append(((r + 1) % w, {i: held[r][i] for i in places}))
                sent[r] += 8 * part
            for receiver, message in messages:
                for i, value in message.items():
                    held[receiver][i] = value if gather else held[receiver][i] + value
    assert held == [[sum(v[i] for v in vectors) for i in range(w * part)]] * w
    assert sent == [cost.all_reduce_bytes(8 * w * part, w)] * w


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb", "sequential"])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 8), (3, 4), (4, 2), (5, 5)])
def test_closed_forms_are_the_schedules(name: str, n: int, m: int) -> None:
    schedule = SCHEDULES[name](n, m)
    assert [cost.held_microbatches(name, n, m, s) for s in range(n)] == peak_alive(schedule)
    if name in ("gpipe", "1f1b"):
        assert cost.pipeline_bubble(n, m) == bubble(schedule)
    if name == "zb" and m >= n:
        assert cost.zero_bubble_share(n, m) == bubble(schedule)


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 8), (3, 6), (4, 8), (6, 12)])
def test_closed_forms_of_several_chunks_are_the_schedules(n: int, m: int) -> None:
    for v in (2, 3):
        schedule = interleaved_1f1b(n, m, v)
        assert cost.held_chunks("interleaved", n, v) == max(peak_alive(schedule))
        assert cost.interleaved_bubble(n, m, v) == bubble(schedule)
    for name in ("zbv", "vhalf", "vmin"):
        assert cost.held_chunks(name, n) == max(peak_alive(SCHEDULES[name](n, m)))
    assert cost.v_shaped_bubble(n, m) == bubble(SCHEDULES["zbv"](n, m))
    with pytest.raises(ValueError, match="one of interleaved, zbv, vhalf, vmin"):
        cost.held_chunks("1f1b", n)


def test_pipelines() -> None:
    assert cost.pipeline_bubble(3, 4) == Fraction(2, 6)
    assert cost.pipeline_seconds(3, 4, 1.0, 2.5) == 21
    assert cost.pipeline_speedup(2, 4) == pytest.approx(1.6)
    assert cost.boundary_bytes(2, 3, 5, 4) == 120
    assert cost.held_activations(240, "1f1b", 3, 8, 0) == 30  # 3 of 8 micro-batches, a third
    assert cost.held_activations(240, "gpipe", 3, 8, 2) == 80
    with pytest.raises(ValueError, match="one of gpipe, 1f1b, zb, sequential"):
        cost.held_microbatches("interleaved", 2, 2, 0)


@pytest.mark.parametrize(("n", "x"), [(2, 0.5), (2, 0.1), (4, 0.1), (8, 0.05), (1, 0.1)])
def test_the_fewest_micro_batches(n: int, x: float) -> None:
    m = cost.microbatches_for(n, x)
    assert cost.pipeline_bubble(n, m) <= x
    assert m == 1 or cost.pipeline_bubble(n, m - 1) > x


def test_parameters_of_gpt2() -> None:
    config = gpt2_config("gpt2-mini", 320, 32, n_layer=2, n_embd=32, n_head=2)
    model = build_model(config, 0)
    assert cost.gpt2_parameters(2, 32, 320, 32) == sum(p.numel() for p in model.parameters())


NUMEL = 3 * 2**16


def _sent_by_an_all_reduce(_rank: int, _world_size: int) -> int:
    dist.barrier()
    before = bytes_sent()
    dist.all_reduce(torch.ones(NUMEL))
    dist.barrier()
    return bytes_sent() - before


def _sent_by_a_data_parallel_step(_rank: int, _world_size: int) -> int:
    model = nn.Linear(NUMEL // 512, 512, bias=False)
    buckets = GradientBuckets(model.parameters(), bucket_bytes=1 << 16, share_memory=False)
    dist.barrier()
    before = bytes_sent()
    model(torch.ones(1, NUMEL // 512)).sum().backward()
    buckets.finish()
    dist.barrier()
    return bytes_sent() - before


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux counts the bytes")
@pytest.mark.parametrize("exchange", [_sent_by_an_all_reduce, _sent_by_a_data_parallel_step])
def test_a_rank_sends_what_the_formula_says(
    ranks: Ranks, three_ranks: Ranks, exchange: Callable[[int, int], int]
) -> None:
    """Some kilobytes more: headers, and the barriers around."""
    for world in (ranks, three_ranks):
        expected = cost.all_reduce_bytes(4 * NUMEL, world.world_size)
        for sent in world.run(exchange):
            assert expected <= sent < expected + 2e4 + 0.01 * expected


def _sent_by_a_sharded_step(_rank: int, _world_size: int, zero: int, microbatches: int) -> int:
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(LAYERS)))
    fsdp = FullyShardedDataParallel(
        layers, lambda shards: torch.optim.SGD(shards, lr=0.1), zero=zero, share_memory=False
    )
    inputs = [torch.ones(1, 256)] * microbatches

    def step() -> None:
        fsdp.train_step(inputs, inputs, lambda y, _: y.sum(), num_microbatches=microbatches)
        fsdp.optimizer_step()

    step()  # in which the ranks agree on what backward needs
    dist.barrier()
    before = bytes_sent()
    step()
    dist.barrier()
    return bytes_sent() - before


LAYERS = 4


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux counts the bytes")
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_rank_sends_what_the_formula_says_for_each_micro_batch(ranks: Ranks, zero: int) -> None:
    """Under ZeRO-3 the last layer is gathered once and not twice: it is still whole when its
    backward, which is the first, needs it."""
    layer, microbatches = 256 * 256, 3
    expected = cost.zero_traffic(zero, LAYERS * layer, 2, FP32, microbatches)
    if zero == 3:
        expected -= microbatches * cost.reduce_scatter_bytes(4 * layer, 2)
    for sent in ranks.run(_sent_by_a_sharded_step, zero, microbatches):
        assert expected <= sent < expected + 2e4 + 0.01 * expected


def test_data_parallel_holds_what_the_formula_says() -> None:
    """AdamW also counts its steps, 4 bytes per parameter tensor."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    held = sum(2 * p.nbytes for p in model.parameters())
    held += sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    parameters = 65 * 64 + 65 * 8
    assert held == cost.zero(0, parameters, 2, FP32).total + 4 * 4


@pytest.mark.parametrize("m", [1, 2, 4])
def test_the_boundary_carries_what_the_formula_says(m: int) -> None:
    """However many micro-batches there are, up and down, at each of two boundaries."""
    layers = [WithDevice(nn.Linear(16, 16), f"cpu:{i}") for i in range(3)]
    x, y = torch.randn(2, 8, 5, 16).unbind(0)
    with Pipe(nn.Sequential(*layers)) as pipe:
        crossed = boundary_traffic(
            lambda: pipe.train_step(x, y, lambda a, b: (a - b).square().sum(), num_microbatches=m)
        )
    assert crossed == 2 * 2 * cost.boundary_bytes(8, 5, 16, 4)
