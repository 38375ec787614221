"""Whatever a stage raises ends the call at once, reaches the caller as it was, and is over then."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.dataflow import Channel, Dataflow
from pipeline.pipe import Pipe
from pipeline.worker import Crew, Task
from tests.pipeline.pipeline_models import (
    Call,
    assert_close,
    batch,
    cut,
    gradients,
    square_error,
    take_gradients,
    tower,
)

KINDS = [ValueError, KeyboardInterrupt]


class Fuse(nn.Module):
    """Passes its input on, until armed; then it raises in the forward or the backward of row 0."""

    def __init__(self) -> None:
        super().__init__()
        self.armed: tuple[str, type[BaseException]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.armed and self.armed[0] == "forward":
            self.blow()
        return Wire.apply(x, self)

    def blow(self) -> None:
        assert self.armed is not None
        raise self.armed[1]("on purpose")


class Wire(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse) -> Tensor:
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        if ctx.fuse.armed:
            ctx.fuse.blow()
        return g, None


def three_stages() -> tuple[nn.Sequential, list[Fuse], Pipe]:
    fuses = [Fuse() for _ in range(3)]
    layers = list(tower())
    model = nn.Sequential(*layers[:2], fuses[0], *layers[2:4], fuses[1], *layers[4:], fuses[2])
    return model, fuses, Pipe(cut(model, (3, 3, 3), ("cpu:0", "cpu:1", "cpu:2")), split_size=2)


def forward_backward(pipe: Pipe) -> None:
    x, y = batch(8)
    square_error(pipe(x), y).backward()


def one_f_one_b(pipe: Pipe) -> None:
    pipe.train_step(*batch(8), square_error)


def gpipe(pipe: Pipe) -> None:
    pipe.train_step(*batch(8), square_error, schedule="gpipe")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("step", [forward_backward, one_f_one_b, gpipe])
def test_an_error_on_any_stage_is_raised_as_it_was_and_the_pipe_works_again(
    step: Callable[[Pipe], None], direction: str, kind: type[BaseException]
) -> None:
    model, fuses, pipe = three_stages()
    with pipe:
        step(pipe)
        expected = {name: g.clone() for name, g in gradients(model).items() if g is not None}
        for s, fuse in enumerate(fuses):
            model.zero_grad()
            fuse.armed = (direction, kind)
            with pytest.raises(kind, match="on purpose") as caught:
                step(pipe)
            note = f"in the {direction} of micro-batch 0 on stage {s} (cpu:{s})"
            assert getattr(caught.value, "__notes__", None) == [note]
            assert [f.name for f in traceback.extract_tb(caught.value.__traceback__)][-1] == "blow"
            assert set(gradients(model).values()) == {None}
            fuse.armed = None
            step(pipe)
            assert gradients(model).keys() == expected.keys()
            for name, g in gradients(model).items():
                assert g is not None
                assert torch.equal(g, expected[name])
        assert len(threading.enumerate()) >= 4


def test_an_error_in_run_on_stages() -> None:
    def fail(s: int) -> int:
        if s == 1:
            raise ValueError("stage 1 only")
        return s

    with Pipe(cut(tower())) as pipe:
        with pytest.raises(ValueError, match="stage 1 only"):
            pipe.run_on_stages(fail)
        assert pipe.run_on_stages(lambda s: s) == [0, 1]


@pytest.mark.parametrize("step", [forward_backward, one_f_one_b])
def test_a_worker_that_ended_between_calls_is_replaced(step: Callable[[Pipe], None]) -> None:
    _, _, pipe = three_stages()
    with pipe:
        step(pipe)
        pipe.in_queues[1].put(None)
        pipe._crew.threads[1].join(timeout=30)
        step(pipe)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals")
def test_ctrl_c_while_waiting_ends_the_step_and_the_pipe_works_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signal arrives while stage 1 computes its first micro-batch; no other is begun."""
    main = threading.get_ident()
    stopped = threading.Event()
    stop = Dataflow.stop

    def stop_and_tell(self: Dataflow) -> None:
        stop(self)
        stopped.set()

    class Interrupt(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 1:
                signal.pthread_kill(main, signal.SIGINT)
                assert stopped.wait(30)
            return x

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Dataflow, "stop", stop_and_tell)
    previous = signal.signal(signal.SIGINT, handler)
    try:
        interrupt = Interrupt()
        model = nn.Sequential(*tower(), interrupt)
        with Pipe(cut(model, (2, 5)), split_size=2) as pipe:
            with pytest.raises(KeyboardInterrupt):
                one_f_one_b(pipe)
            assert interrupt.calls == 1
            assert set(gradients(model).values()) == {None}
            one_f_one_b(pipe)
            assert interrupt.calls == 5
    finally:
        signal.signal(signal.SIGINT, previous)


def test_ctrl_c_between_two_puts_stops_those_that_were_put() -> None:
    """Stage 0 has its work and waits for the others, who will never have theirs."""
    crew = Crew([torch.device("cpu:0"), torch.device("cpu:1")])
    channel = Channel()
    put = crew.in_queues[0].put

    class Queue:
        def put(self, task: Any) -> None:
            put(task)
            crew.in_queues[0] = first
            raise KeyboardInterrupt

    first, crew.in_queues[0] = crew.in_queues[0], Queue()  # type: ignore[call-overload]
    with pytest.raises(KeyboardInterrupt):
        crew.run([(0, Task(lambda: channel.get(0))), (1, Task(lambda: None))], stop=channel.stop)
    assert crew.run([(s, Task(lambda: "new")) for s in (0, 1)]) == ["new", "new"]
    crew.close()


def test_a_call_from_a_worker_of_the_same_pipe_is_refused() -> None:
    with Pipe(cut(tower())) as pipe:
        with pytest.raises(RuntimeError, match="a worker of the Pipe cannot wait"):
            pipe.run_on_stages(lambda _: pipe.run_on_stages(lambda s: s))
        assert pipe.run_on_stages(lambda s: s) == [0, 1]


def test_a_loss_without_a_gradient_is_refused() -> None:
    x, y = batch(4)
    with (
        Pipe(cut(tower())) as pipe,
        pytest.raises(RuntimeError, match="the loss does not depend on anything"),
    ):
        pipe.train_step(x, y, lambda output, target: square_error(output.detach(), target))


A_NUMBER: dict[str, Callable[[Tensor], Any]] = {
    "scalar": lambda x: x.sum(),
    "scalar beside rows": lambda x: (x, x.detach().sum()),
    "int": lambda x: (x, len(x)),
    "float": lambda x: {"rows": x, "norm": float(x.detach().norm())},
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", A_NUMBER)
def test_a_number_per_micro_batch_is_refused(name: str, grad: bool) -> None:
    """The first micro-batch's is not the batch's, nor is the sum, if it is a mean."""
    x, _ = batch(4)
    model = nn.Sequential(*tower(), Call(A_NUMBER[name]))
    with Pipe(cut(model, (2, 5)), split_size=2) as pipe, torch.set_grad_enabled(grad):
        with pytest.raises(ValueError, match="a number per micro-batch cannot be put together"):
            pipe(x)
        pipe.split_size = 4
        pipe(x)  # one micro-batch is the batch


def test_what_is_no_tensor_must_be_the_same_in_every_micro_batch() -> None:
    x, _ = batch(4)
    flags = nn.Sequential(*tower(), Call(lambda y: (y, None, True, "mean")))
    with Pipe(cut(flags, (2, 5)), split_size=2) as pipe:
        assert pipe(x)[1:] == (None, True, "mean")
    arrays = nn.Sequential(*tower(), Call(lambda y: (y, y.detach().numpy())))
    with (
        Pipe(cut(arrays, (2, 5)), split_size=2) as pipe,
        pytest.raises(ValueError, match=r"values per micro-batch \(ndarray, ndarray\)"),
    ):
        pipe(x)


@pytest.mark.parametrize("grad", [True, False])
def test_a_list_whose_length_varies_between_micro_batches_is_named(grad: bool) -> None:
    x, _ = batch(7)
    model = nn.Sequential(*tower(), Call(lambda y: list(y.split(1))))
    message = "the last stage gives 2 values for micro-batch 0 and 1 for micro-batch 3"
    with (
        Pipe(cut(model, (2, 5)), split_size=2) as pipe,
        torch.set_grad_enabled(grad),
        pytest.raises(ValueError, match=message),
    ):
        pipe(x)


class Gate(nn.Module):
    """Stops the first call until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go, self.first = threading.Event(), threading.Event(), True

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.first = False
            self.entered.set()
            assert self.go.wait(30)
        return x


@pytest.mark.parametrize("step", [forward_backward, one_f_one_b])
def test_a_second_thread_is_refused_at_once_and_the_first_gets_its_gradients(
    step: Callable[[Pipe], None],
) -> None:
    x, y = batch(8)
    model = tower()
    square_error(model(x), y).backward()
    expected = take_gradients(model)
    gate = Gate()
    with Pipe(cut(nn.Sequential(*model, gate), (2, 5)), split_size=2) as pipe:
        first = threading.Thread(target=step, args=(pipe,))
        first.start()
        assert gate.entered.wait(30)
        for call in (
            lambda: pipe(x),
            lambda: pipe.train_step(x, y, square_error),
            lambda: pipe.compute([x], [(0, 0)]),
            lambda: pipe.run_on_stages(lambda s: s),
        ):
            with pytest.raises(RuntimeError, match="another call of this Pipe is running"):
                call()
        gate.go.set()
        first.join(30)
        assert_close(take_gradients(model), expected)
        step(pipe)
        assert_close(take_gradients(model), expected)


def test_a_backward_beside_another_call_is_refused() -> None:
    x, y = batch(8)
    gate = Gate()
    gate.first = False
    model = tower()
    with Pipe(cut(nn.Sequential(*model, gate), (2, 5)), split_size=2) as pipe:
        loss = square_error(pipe(x), y)
        gate.first = True
        other = threading.Thread(target=torch.no_grad()(pipe), args=(x,))
        other.start()
        assert gate.entered.wait(30)
        with pytest.raises(RuntimeError, match="another call of this Pipe is running"):
            loss.backward(retain_graph=True)
        gate.go.set()
        other.join(30)
        loss.backward()
        found = take_gradients(model)
    square_error(model(x), y).backward()
    assert_close(found, take_gradients(model))
