"""Several stages per rank, run by threads and by processes: the bits of 1F1B, and what is held."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from pipeline import catalogue
from pipeline import schedule as sched
from pipeline.partition import place
from pipeline.pipe import Pipe
from pipeline.process import ProcessPipe
from tests.pipeline.pipeline_models import (
    assert_close,
    assert_same_bits,
    batch,
    gradients,
    square_error,
    take_gradients,
    tower,
)
from tests.ranks import Ranks

SIZES = {1: (6,), 2: (2, 4), 3: (1, 2, 3), 4: (1, 2, 1, 2), 6: (1,) * 6}
SEVERAL = [("interleaved", v) for v in (2, 3)] + [(name, 2) for name in catalogue.V_SHAPED]


def model() -> nn.Sequential:
    """A tower with dropout, and with a weight that its second layer and its last but one share."""
    layers = tower()
    layers[1] = nn.Dropout(0.3)
    layers[4] = nn.Linear(8, 8, dtype=torch.float64)
    layers[4].weight = layers[2].weight
    layers[5] = nn.Linear(8, 3, dtype=torch.float64)
    return layers


def cases(n: int) -> Iterator[tuple[str, int, int]]:
    """Schedule, chunks, micro-batches: fewer than ranks, a multiple of them, and neither."""
    for name, v in SEVERAL:
        if n * v in SIZES:
            yield from ((name, v, m) for m in (1, 3, 4))


def in_threads(n: int, name: str, v: int, m: int) -> tuple[dict[str, Any], list[int]]:
    """Loss and gradients, and what the workers held."""
    x, y = batch(9)
    ranks = catalogue.places(name, n, v)
    sizes = SIZES[n * v]
    same = model()
    placed, replicas = place(list(same), sizes, [f"cpu:{r}" for r in ranks])
    with Pipe(placed, replicas=replicas, sizes=sizes) as pipe:
        torch.manual_seed(5)
        loss = pipe.train_step(x, y, square_error, name, m, scale=0.125)
        return take_gradients(same) | {"loss": loss}, pipe.peak_alive


@cache
def one_f_one_b(num_stages: int, m: int) -> dict[str, Any]:
    """Of the same stages, each on a worker of its own."""
    return in_threads(num_stages, "1f1b", 1, m)[0]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_threads_give_the_bits_of_1f1b_and_hold_what_the_schedule_says(n: int) -> None:
    for name, v, m in cases(n):
        found, held = in_threads(n, name, v, m)
        assert_same_bits(found, one_f_one_b(n * v, m))
        assert held == sched.peak_alive(catalogue.find(name, v)(n, m)), (name, v, m)


def test_without_dropout_it_is_what_one_process_computes() -> None:
    x, y = batch(9)
    plain = model().eval()
    loss = square_error(plain(x), y)
    loss.backward()
    for name, v in SEVERAL:
        same = model().eval()
        ranks, sizes = catalogue.places(name, 2, v), SIZES[2 * v]
        placed, _ = place(list(same), sizes, [f"cpu:{r}" for r in ranks])
        with Pipe(placed, sizes=sizes) as pipe:
            found = pipe.train_step(x, y, square_error, name, 4)
            assert_close(gradients(same) | {"loss": found}, gradients(plain) | {"loss": loss})
            pipe.split_size = 2
            assert_close({"output": pipe(x)}, {"output": plain(x)})


def _on_ranks(rank: int, n: int, share_memory: bool) -> dict[Any, dict[str, Any]]:
    """By case, loss and gradients of this rank; and the output in evaluation."""
    x, y = batch(9)
    x = x if rank == 0 else x.to("meta")
    results: dict[Any, dict[str, Any]] = {}
    for name, v in SEVERAL if share_memory else SEVERAL[:1]:
        if n * v not in SIZES:
            continue
        ranks = catalogue.places(name, n, v)
        with ProcessPipe(
            model(), SIZES[n * v], ranks=ranks, share_memory=share_memory, timeout=20
        ) as pipe:
            for m in (1, 3, 4):
                pipe.module.zero_grad()
                torch.manual_seed(5)
                loss = pipe.train_step(x, y, square_error, name, m, scale=0.125)
                mine = pipe.named_parameters()
                results[name, v, m] = {key: p.grad for key, p in mine.items()} | {"loss": loss}
                schedule = catalogue.find(name, v)(n, m)
                assert pipe.peak_alive == sched.peak_alive(schedule)[rank], (name, v, m)
            mean, output = pipe.eval(batch(9)[0], y, square_error, num_microbatches=2)
            assert (output is not None) == (rank == ranks[-1])
            results[name, v, "eval"] = {"loss": mean}
    return results


def _check(per_rank: list[dict[Any, dict[str, Any]]], n: int) -> None:
    x, y = batch(9)
    loss = square_error(model().eval()(x), y).detach()
    for case in per_rank[0]:
        found: dict[str, Any] = {}
        for results in per_rank:
            for key, value in results[case].items():
                before = found.setdefault(key, value)
                assert torch.equal(before, value), (case, key)  # on all ranks that have it
        if case[2] == "eval":
            assert_close(found, {"loss": loss})
        else:
            expected = one_f_one_b(n * case[1], case[2])
            assert_same_bits({key: found[key] for key in expected}, expected)


@pytest.mark.parametrize("share_memory", [True, False])
def test_two_processes_give_the_same_bits(ranks: Ranks, share_memory: bool) -> None:
    _check(ranks.run(_on_ranks, share_memory), 2)


def test_three_processes_do_too(three_ranks: Ranks) -> None:
    _check(three_ranks.run(_on_ranks, True), 3)


def test_stages_of_one_rank_alone() -> None:
    """No process group, nothing is sent."""
    _check([_on_ranks(0, 1, True)], 1)


def test_a_schedule_that_is_not_that_of_the_pipe_is_refused() -> None:
    x, y = batch(4)
    with (
        ProcessPipe(model(), SIZES[2], ranks=[0, 0]) as pipe,
        pytest.raises(ValueError, match="1f1b, chunks 2: a rank has 1 stage there"),
    ):
        pipe.train_step(x, y, square_error, "1f1b", 2)
    with pytest.raises(ValueError, match="a stage is on one device"):
        Pipe(place(list(model()), (3, 3), ["cpu:0", "cpu:1"])[0], sizes=(2, 4))
