"""A Pipe computes what its Sequential computes: outputs, gradients by name, whatever the cut."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.partition import WithDevice
from pipeline.pipe import Pipe, _clock_cycles
from tests.pipeline.pipeline_models import (
    DEVICES,
    Call,
    assert_close,
    batch,
    cut,
    gradients,
    pipe_threads,
    square_error,
    tower,
)  # fmt: skip


@pytest.mark.a4_2_2
@pytest.mark.a5_2_2
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("batch_size", [1, 16, 32, 64])
@pytest.mark.parametrize("split_size", [1, 2, 4, 8, 16])
def test_forward_of_the_course(batch_size: int, split_size: int, devices: tuple[str, str]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 5), nn.Sigmoid())
    x = torch.randn(batch_size, 3)
    expected = model(x)
    with Pipe(cut(model, (2, 2), devices), split_size=split_size) as pipe:
        torch.testing.assert_close(pipe(x).cpu(), expected)


@pytest.mark.a4_2_2
@pytest.mark.a5_2_2
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("split_size", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize("sizes", [(2, 4), (5, 1)])
def test_gradients_are_those_of_the_sequential(
    split_size: int, sizes: tuple[int, int], devices: tuple[str, str]
) -> None:
    x, y = batch(8)
    plain, same = tower(), tower()
    plain_x, pipe_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    square_error(plain(plain_x), y).backward()
    with Pipe(cut(same, sizes, devices), split_size=split_size) as pipe:
        output = pipe(pipe_x)
        square_error(output, y.to(output.device)).backward()
    assert_close(gradients(same) | {"x": pipe_x.grad}, gradients(plain) | {"x": plain_x.grad})


@pytest.mark.parametrize("sizes", [(6,), (2, 2, 2), (1, 1, 1, 1, 1, 1)])
def test_one_partition_and_more_devices_than_cores(sizes: tuple[int, ...]) -> None:
    x, y = batch(7)
    plain, same = tower(), tower()
    square_error(plain(x), y).backward()
    devices = [f"cpu:{s}" for s in range(len(sizes))]
    with Pipe(cut(same, sizes, devices), split_size=2) as pipe:
        square_error(pipe(x), y).backward()
    assert_close(gradients(same), gradients(plain))


def test_two_partitions_on_one_device_share_its_worker() -> None:
    x, y = batch(6)
    plain, same = tower(), tower()
    square_error(plain(x), y).backward()
    with Pipe(cut(same, (2, 2, 2), ("cpu:0", "cpu:1", "cpu:0")), split_size=2) as pipe:
        assert pipe.in_queues[0] is pipe.in_queues[2]
        square_error(pipe(x), y).backward()
        assert_close(gradients(same), gradients(plain))
        same.zero_grad()
        pipe.train_step(x, y, square_error, num_microbatches=3)
    assert_close(gradients(same), gradients(plain))


def test_compute_runs_one_clock() -> None:
    model = tower()
    x, _ = batch(4)
    with torch.no_grad(), Pipe(cut(model), split_size=2) as pipe:
        batches: list[Any] = [model[:2](x[:2]), x[2:]]
        pipe.compute(batches, [(1, 0), (0, 1)])
        assert torch.equal(batches[0], model(x[:2]))
        assert torch.equal(batches[1], model[:2](x[2:]))


def test_the_clocks_are_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes `_clock_cycles` sees it run, forward and backward; and what is wrong in it."""

    def from_the_last(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
        for clock in _clock_cycles(m, n):
            yield [(m - 1 - i, j) for i, j in clock]

    monkeypatch.setattr("pipeline.pipe._clock_cycles", from_the_last)
    x, _ = batch(6)
    model, done = tower(), []
    with Pipe(cut(model), split_size=2, recorder=lambda *what: done.append(what[:3])) as pipe:
        pipe(x).sum().backward()
        for stage in (0, 1):
            mine = [f"{kind}{i}" for kind, s, i in done if s == stage]
            assert mine == ["F2", "F1", "F0", "B2", "B1", "B0"]
        for wrong, says in (
            ([], r"yields \[\]: each of 3 micro-batches must be on each of 2 partitions once"),
            ([[(0, 1), (0, 0), (1, 0), (2, 0), (1, 1), (2, 1)]], "partition 0 .* comes after par"),
        ):
            monkeypatch.setattr("pipeline.pipe._clock_cycles", lambda *_, clocks=wrong: clocks)
            with pytest.raises(ValueError, match=says):
                pipe(x)


def test_tuples_with_integers_and_flags_pass_between_stages() -> None:
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()

    def enter(value: dict[str, Any]) -> Any:
        return first(value["x"]), (value["ids"], value["flag"]), value["x"] * 2

    def leave(value: Any) -> Any:
        hidden, (ids, flag), extra = value
        assert flag == "on"
        return {"y": second(hidden + extra), "ids": ids + 1, "flag": flag}

    x, y = batch(6)
    x.requires_grad_()
    ids = torch.arange(6)
    expected = leave(enter({"x": x, "ids": ids, "flag": "on"}))
    want = torch.autograd.grad(square_error(expected["y"], y), [x, first.weight, second.weight])
    stages = [Call(enter), Call(leave)]
    stages[0].layer, stages[1].layer = first, second
    module = nn.Sequential(WithDevice(stages[0], "cpu:0"), WithDevice(stages[1], "cpu:1"))
    with Pipe(module, split_size=4) as pipe:
        found = pipe({"x": x, "ids": ids, "flag": "on"})
        got = torch.autograd.grad(square_error(found["y"], y), [x, first.weight, second.weight])
    assert found["ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert found["flag"] == "on"
    assert_close(dict(enumerate(got)), dict(enumerate(want)))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_nothing_is_kept(mode: Any) -> None:
    model = tower()
    x, _ = batch(8)
    with mode(), Pipe(cut(model), split_size=3) as pipe:
        output = pipe(x)
        assert not output.requires_grad
        torch.testing.assert_close(output, model(x), rtol=1e-14, atol=1e-14)


def test_autocast_reaches_the_workers() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(6, 4)
    with Pipe(cut(model, (2, 1)), split_size=6) as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            expected, found = model(x), pipe(x)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected)
        parameters = list(model.parameters())
        want = torch.autograd.grad(expected.float().sum(), parameters)
        got = torch.autograd.grad(found.float().sum(), parameters)
        assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * 4
        with torch.autocast("cpu", torch.bfloat16):
            pipe.train_step(x, x, lambda output, _: output.float().sum())
        assert [torch.equal(p.grad, g) for p, g in zip(model.parameters(), want, strict=True)
                if p.grad is not None] == [True] * 4  # fmt: skip


def test_wrong_batches_say_what_is_needed() -> None:
    with Pipe(cut(tower())) as pipe:
        with pytest.raises(ValueError, match="first dimension of every tensor, but there: 2, 3"):
            pipe((torch.ones(2, 4), torch.ones(3, 4)))
        with pytest.raises(ValueError, match="there: no tensor"):
            pipe(3.0)
    with pytest.raises(ValueError, match="split_size=0: at least 1"):
        Pipe(cut(tower()), split_size=0)


def test_garbage_collection_ends_the_threads_once_no_backward_needs_them() -> None:
    pipe = Pipe(cut(tower()))
    output = pipe(batch(2)[0])
    gone = weakref.ref(pipe)
    del pipe
    output.sum().backward()
    del output
    gc.collect()
    assert gone() is None
    assert pipe_threads() == []


def test_a_forward_whose_backward_never_comes_keeps_no_activations() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def remember(x: Tensor) -> Tensor:
        y = x.exp()
        kept.append(weakref.ref(y))
        return y

    model = nn.Sequential(tower(), WithDevice(Call(remember), "cpu:1"))
    with Pipe(model, split_size=4) as pipe:
        output = pipe(batch(8)[0])
        gc.collect()
        assert [ref() is None for ref in kept] == [False, False]
        del output
        gc.collect()
        assert [ref() is None for ref in kept] == [True, True]
