"""A Pipe computes what its Sequential computes, and to autograd it is one function: outputs,
gradients by name, hooks, whatever the cut and the schedule; and it holds what the schedule says."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.pipe import Pipe, _clock_cycles
from tests.pipeline.pipeline_models import (
    DEVICES,
    STEPS,
    Call,
    alive,
    assert_close,
    assert_same_bits,
    assert_trains_as_alone,
    batch,
    cut,
    forward_backward,
    gradients,
    one_f_one_b,
    pipe_threads,
    square_error,
    take_gradients,
    tower,
    watched,
)


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
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                output = pipe(x)
                assert output.requires_grad is False
                torch.testing.assert_close(output.cpu(), expected)


@pytest.mark.a4_2_2
@pytest.mark.a5_2_2
@pytest.mark.parametrize(
    ("sizes", "devices"),
    [
        *(((2, 4), devices) for devices in DEVICES),
        ((6,), ("cpu:0",)),
        ((1,) * 6, [f"cpu:{k}" for k in range(6)]),  # more than cores
        ((2, 2, 2), ("cpu:0", "cpu:1", "cpu:0")),  # a worker with two stages
    ],
)
@pytest.mark.parametrize("split_size", [1, 3, 100])
def test_loss_and_gradients_are_those_of_the_sequential(
    split_size: int, sizes: tuple[int, ...], devices: tuple[str, ...]
) -> None:
    def made(model: nn.Sequential) -> Pipe:
        pipe = Pipe(cut(model, sizes, devices), split_size=split_size)
        assert len({id(queue) for queue in pipe.in_queues}) == len({*devices})
        return pipe

    assert_trains_as_alone(made)


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
            ([[(0, 1), (0, 0), (1, 0), (2, 0), (1, 1), (2, 1)]], "partitions once, in their order"),
        ):
            monkeypatch.setattr("pipeline.pipe._clock_cycles", lambda *_, clocks=wrong: clocks)
            with pytest.raises(ValueError, match=says):
                pipe(x)


def test_autocast_reaches_the_workers() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(6, 4)
    with Pipe(cut(model, (2, 1)), split_size=6) as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            expected, found = model(x), pipe(x)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected)
        expected.float().sum().backward()
        want = take_gradients(model)
        found.float().sum().backward()
        assert_same_bits(take_gradients(model), want)
        with torch.autocast("cpu", torch.bfloat16):
            pipe.train_step(x, x, lambda output, _: output.float().sum())
        assert_same_bits(take_gradients(model), want)


def test_a_weight_may_be_cast_to_two_types() -> None:
    layer = nn.Linear(64, 64)

    def twice(x: Tensor) -> Tensor:
        results = []
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                results.append(layer(x).float())
        return torch.cat(results)

    model, x = nn.Sequential(Call(twice)), torch.randn(2, 64)
    model[0].layer = layer
    with Pipe(model, split_size=2) as pipe:
        assert torch.equal(pipe(x), model(x))


def test_autograd_grad_of_two_forwards_in_the_middle_of_a_graph() -> None:
    """Of three inputs two are computed from one leaf, and one needs no gradient; each time one of
    two outputs is used. `.grad` is left alone."""
    x, y = batch()
    first, last = Call(lambda v: v[0] * v[1] + v[2]), Call(lambda h: (h, h * 2))
    model = nn.Sequential(first, *tower(), last)
    before, after = nn.Linear(4, 4).double(), nn.Linear(3, 3).double()
    every = [*before.parameters(), *model.parameters(), *after.parameters()]

    def found(middle: Callable[[Any], tuple[Tensor, Tensor]]) -> dict[Any, Tensor]:
        h = before(x)
        one, other = middle((h, h.sin(), x)), middle((h, h * 2, x))
        loss = square_error(after(one[1] * other[0]), y)
        return dict(enumerate(torch.autograd.grad(loss, every)))

    with Pipe(cut(model, (3, 5)), split_size=3) as pipe:
        assert_close(found(pipe), found(model))
    assert set(gradients(model).values()) == {None}


def test_a_second_backward_must_be_asked_for_and_a_second_derivative_is_refused() -> None:
    x, y = batch()
    x.requires_grad_()
    model = tower()
    with Pipe(cut(model), split_size=3) as pipe:
        loss = square_error(pipe(x), y)
        loss.backward(retain_graph=True)
        first = take_gradients(model)
        loss.backward()
        assert_same_bits(take_gradients(model), first)
        output = pipe(x).sum()
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            torch.autograd.grad(output, x, create_graph=True)
        output = pipe(x).sum()
        output.backward()
        with pytest.raises(RuntimeError, match="a second backward needs"):
            output.backward()


def test_hooks_after_a_backward_run_and_those_that_would_see_parts_are_refused() -> None:
    x, y = batch()
    model = tower()
    names = [name for name, _ in model.named_parameters()]
    seen: list[str] = []

    def note(name: str, _: Tensor) -> None:
        assert threading.current_thread() is threading.main_thread()
        seen.append(name)

    handles = [
        p.register_post_accumulate_grad_hook(partial(note, name))
        for name, p in model.named_parameters()
    ]
    said = r"^the parameter partitions\.0\.0\.weight has a hook on its gradient, which would see a"
    with Pipe(cut(model), split_size=2) as pipe:
        forward_backward(pipe, x, y)
        assert sorted(seen) == sorted(names)
        with pytest.raises(ValueError, match=said):
            one_f_one_b(pipe, x, y)
        for handle in handles:
            handle.remove()
        first = {name: deepcopy(g) for name, g in gradients(model).items()}
        one_f_one_b(pipe, x, y)  # adds to what is there
        assert_same_bits(take_gradients(model), {name: 2 * g for name, g in first.items()})
        next(model.parameters()).register_hook(lambda g: g * 2)
        for step in STEPS:
            with pytest.raises(ValueError, match=said):
                step(pipe, x, y)


# What is held


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


def test_activations_are_really_freed_not_just_not_counted() -> None:
    """1F1B holds at most min(m, n-s) on stage s; a forward whose backward never comes, nothing."""
    kept: tuple[list[Any], list[Any]] = ([], [])
    first = nn.Sequential(nn.Linear(4, 3).double(), watched(kept[0], 2))
    second = nn.Sequential(nn.Linear(3, 3).double(), watched(kept[1], 1))
    with Pipe(cut(nn.Sequential(first, second), (1, 1)), split_size=4) as pipe:
        pipe.train_step(*batch(8), square_error, "1f1b", num_microbatches=8)
        assert [*map(len, kept)] == [8, 8]
        assert [*map(alive, kept)] == [0, 0]
        output = pipe(batch(4)[0])
        assert [*map(alive, kept)] == [1, 1]
        del output
        assert [*map(alive, kept)] == [0, 0]
