"""train_step: any schedule, the same gradients, and no more activations than it promises."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from pipeline import catalogue
from pipeline import schedule as sched
from pipeline.catalogue import ONE_EACH
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.schedule import BACKWARD, FORWARD, Action
from tests.pipeline.pipeline_models import (
    DEVICES,
    Call,
    assert_close,
    batch,
    cut,
    gradients,
    square_error,
    tower,
)  # fmt: skip
from tests.recorder import Paused

NAMES = list(ONE_EACH)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [1, 2, 3, 8, 20])
def test_loss_and_gradients_are_those_of_the_plain_model(
    name: str, m: int, devices: tuple[str, str]
) -> None:
    x, y = batch(8)
    plain, same = tower(), tower()
    expected = square_error(plain(x), y) * 0.125
    expected.backward()
    with Pipe(cut(same, (2, 4), devices)) as pipe:
        loss = pipe.train_step(x, y, square_error, schedule=name, num_microbatches=m, scale=0.125)
    assert not loss.requires_grad
    assert_close(gradients(same) | {"loss": loss}, gradients(plain) | {"loss": expected.detach()})


def test_the_mean_over_all_tokens_does_not_depend_on_how_they_fall_into_micro_batches() -> None:
    """Rows weigh 0 to 7: the mean of the micro-batches' means would be something else."""
    x, y = batch(8)
    weights = torch.arange(8.0, dtype=torch.float64)

    def weighted_sum(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return ((output - target[0]).square().sum(1) * target[1]).sum()

    plain = tower()
    expected = weighted_sum(plain(x), (y, weights)) / 28
    expected.backward()
    for m in (1, 3, 8):
        same = tower()
        with Pipe(cut(same)) as pipe:
            loss = pipe.train_step(
                x, (y, weights), weighted_sum, num_microbatches=m, scale=1 / weights.sum()
            )
        assert_close({"loss": loss}, {"loss": expected.detach()})
        assert_close(gradients(same), gradients(plain))


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("gpipe", [8, 8, 8, 8]),
        ("1f1b", [4, 3, 2, 1]),
        ("zb", [4] * 4),
        ("sequential", [1, 1, 1, 1]),
    ],
)
def test_stages_hold_no_more_micro_batches_than_the_schedule_says(
    name: str, peaks: list[int]
) -> None:
    x, y = batch(8)
    with Pipe(cut(tower(), (1, 1, 2, 2), [f"cpu:{s}" for s in range(4)])) as pipe:
        pipe.train_step(x, y, square_error, schedule=name, num_microbatches=8)
        assert pipe.peak_alive == peaks == sched.peak_alive(catalogue.find(name)(4, 8))


def test_activations_are_really_freed_not_just_not_counted() -> None:
    """At most min(m, n-s) outputs of a saved operator are alive on stage s at any time."""
    alive, peak = [0, 0], [0, 0]

    def save(stage: int) -> Call:
        class Save(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, h: Tensor) -> Tensor:
                token = Token(stage)
                ctx.token = token  # type: ignore[attr-defined]
                return h * 2

            @staticmethod
            def backward(_: object, g: Tensor) -> Tensor:
                return g * 2

        return Call(Save.apply)

    class Token:
        def __init__(self, stage: int) -> None:
            self.stage = stage
            alive[stage] += 1
            peak[stage] = max(peak[stage], alive[stage])

        def __del__(self) -> None:
            alive[self.stage] -= 1

    module = nn.Sequential(
        WithDevice(nn.Sequential(nn.Linear(4, 3).double(), save(0)), "cpu:0"),
        WithDevice(nn.Sequential(nn.Linear(3, 3).double(), save(1)), "cpu:1"),
    )
    x, y = batch(8)
    with Pipe(module) as pipe:
        pipe.train_step(x, y, square_error, schedule="1f1b", num_microbatches=8)
    assert peak == [2, 1]
    assert alive == [0, 0]


def test_a_schedule_of_ones_own() -> None:
    """1F1B with its warm-up cut to one on every stage: any valid lists run."""

    def lazy(n: int, m: int) -> sched.Schedule:
        return [
            [a for i in range(m) for a in (Action(FORWARD, s, i), Action(BACKWARD, s, i))]
            for s in range(n)
        ]

    x, y = batch(8)
    plain, same = tower(), tower()
    square_error(plain(x), y).backward()
    with Pipe(cut(same)) as pipe:
        pipe.train_step(x, y, square_error, schedule=lazy, num_microbatches=4)
        assert pipe.peak_alive == [1, 1]
    assert_close(gradients(same), gradients(plain))


def test_a_schedule_for_another_number_of_stages_is_refused() -> None:
    for n in (1, 3):
        with Pipe(cut(tower())) as pipe, pytest.raises(ValueError, match=f"has {n} lists and the"):
            pipe.train_step(*batch(8), square_error, schedule=lambda _, m, n=n: sched.gpipe(n, m))  # type: ignore[misc]


def test_hooks_run_on_the_calling_thread_in_the_order_of_the_stages() -> None:
    """Else each process could start its all-reduces in an order of its own."""
    model = tower()
    seen: list[tuple[int, str]] = []
    for s, layers in enumerate((model[:2], model[2:])):
        for p in layers.parameters():
            p.register_post_accumulate_grad_hook(
                lambda _, s=s: seen.append((s, threading.current_thread().name))
            )
    with Pipe(cut(model)) as pipe:
        pipe.train_step(*batch(8), square_error)
    here = threading.current_thread().name
    assert seen == [(0, here)] * 2 + [(1, here)] * 6


def test_run_on_stages_runs_each_on_its_worker() -> None:
    with Pipe(cut(tower())) as pipe:
        names = pipe.run_on_stages(lambda s: (s, threading.current_thread().name))
    assert names == [(0, "pipe-cpu:0"), (1, "pipe-cpu:1")]


def test_the_worker_that_ran_the_forward_runs_the_backward() -> None:
    ran: list[tuple[str, str]] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(_: object, h: Tensor) -> Tensor:
            ran.append(("forward", threading.current_thread().name))
            return h.clone()

        @staticmethod
        def backward(_: object, g: Tensor) -> Tensor:
            ran.append(("backward", threading.current_thread().name))
            return g

    x, y = batch(2)
    module = nn.Sequential(nn.Linear(4, 3).double(), Call(Watch.apply), Call(Watch.apply))
    with Pipe(cut(module, (2, 1))) as pipe:
        names = ["pipe-cpu:0", "pipe-cpu:1"]
        expected = sorted((kind, name) for kind in ("forward", "backward") for name in names)
        pipe.train_step(x, y, square_error, num_microbatches=1)
        assert sorted(ran) == expected
        ran.clear()
        pipe.split_size = 2
        square_error(pipe(x), y).backward()
        assert sorted(ran) == expected


def test_the_recorder_sees_every_action_with_its_times() -> None:
    events: list[tuple[str, int, int, float, float]] = []
    x, y = batch(8)
    with Pipe(cut(tower()), split_size=2, recorder=lambda *event: events.append(event)) as pipe:
        pipe.train_step(x, y, square_error, schedule="1f1b")
        schedule = sched.one_f_one_b(2, 4)
        for s, actions in enumerate(schedule):
            mine = [event for event in events if event[1] == s]
            assert [f"{kind}{i}" for kind, _, i, _, _ in mine] == [str(a) for a in actions]
            times = [t for event in mine for t in event[3:]]
            assert times == sorted(times)
        ended = {event[:3]: event[4] for event in events}
        for kind, s, i, start, _ in events:
            for a in sched.dependencies(Action(sched.Kind(kind), s, i), 2):
                assert ended[(a.kind.value, a.stage, a.microbatch)] <= start
        events.clear()
        square_error(pipe(x), y).backward()
        assert len(events) == 16
        pipe.recorder = Paused()
        square_error(pipe(x), y).backward()
        pipe.train_step(x, y, square_error)


def test_a_loss_that_is_not_one_number_says_what_is_needed() -> None:
    x, y = batch(4)
    with Pipe(cut(tower())) as pipe, pytest.raises(ValueError, match=r"loss_fn returned \(1, 3\)"):
        pipe.train_step(x, y, lambda output, target: output - target)


def test_unequal_batches_say_so() -> None:
    with (
        Pipe(cut(tower())) as pipe,
        pytest.raises(ValueError, match="first dimension of every tensor, but there: 4, 8"),
    ):
        pipe.train_step(batch(8)[0], batch(4)[1], square_error)
