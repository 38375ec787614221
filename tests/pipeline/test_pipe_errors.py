"""An exception in a stage ends the call at once, reaches the caller as it was, and leaves the Pipe
working; and what a Pipe refuses."""

from __future__ import annotations

import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from typing import Any, cast

import pytest
from torch import Tensor, nn
from transformers import BatchEncoding

from pipeline.executor import Dataflow
from pipeline.pipe import Pipe
from pipeline.processes.process import ProcessPipe
from pipeline.replicas import place_layers
from pipeline.schedules import schedule as sched
from tests.pipeline.pipeline_models import (
    STEPS,
    Around,
    Call,
    Fuse,
    Step,
    assert_close,
    assert_same_bits,
    batch,
    cut,
    gradients,
    in_one_process,
    one_f_one_b,
    square_error,
    take_gradients,
    tower,
)

KINDS = (ValueError, SystemExit, KeyboardInterrupt)  # by stage; the last two end programs


@pytest.mark.parametrize("step", STEPS)
def test_an_error_on_any_stage_is_raised_as_it_was_and_the_pipe_works_again(step: Step) -> None:
    layers, fuses = [*tower()], [Fuse() for _ in range(3)]
    model = nn.Sequential(*layers[:2], fuses[0], *layers[2:4], fuses[1], *layers[4:], fuses[2])
    with Pipe(cut(model, (3, 3, 3), ("cpu:0", "cpu:1", "cpu:2")), split_size=2) as pipe:
        step(pipe, *batch(8))
        expected = take_gradients(model)
        for s, direction in product(range(3), ("forward", "backward")):
            fuses[s].armed = (direction, KINDS[s])
            with pytest.raises(KINDS[s], match="on purpose") as caught:
                step(pipe, *batch(8))
            (note,) = getattr(caught.value, "__notes__", [])
            assert note.startswith(f"in the {direction}")
            assert note.endswith(f"of micro-batch 0 on stage {s} (cpu:{s})")
            assert [f.name for f in traceback.extract_tb(caught.value.__traceback__)][-1] == "blow"
            assert set(gradients(model).values()) == {None}
            fuses[s].armed = None
            step(pipe, *batch(8))
            assert_same_bits(take_gradients(model), expected)


def test_a_worker_may_not_call_its_own_pipe() -> None:
    with Pipe(cut(tower())) as pipe:
        with pytest.raises(RuntimeError, match="layers, hooks and run_on_stages may not call it"):
            pipe.run_on_stages(lambda _: pipe.run_on_stages(lambda s: s))
        assert pipe.run_on_stages(lambda s: s) == [0, 1]


def test_a_worker_ended_through_its_queue_ends_the_call_and_closes_the_pipe() -> None:
    with Pipe(cut(tower())) as pipe:
        pipe.in_queues[1].put(None)
        with pytest.raises(RuntimeError, match="a None in its queue ended it"):
            one_f_one_b(pipe, *batch(8))
        with pytest.raises(RuntimeError, match="the Pipe is closed, by close"):
            one_f_one_b(pipe, *batch(8))


def test_ctrl_c_while_waiting_ends_the_step_and_closes_the_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signal arrives while stage 1 computes its first micro-batch; no other is begun."""
    main = threading.get_ident()
    stopped = threading.Event()
    calls: list[Tensor] = []
    stop = Dataflow.stop

    def stop_and_tell(self: Dataflow) -> None:
        stop(self)
        stopped.set()

    def interrupt(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) == 1:
            signal.pthread_kill(main, signal.SIGINT)
            assert stopped.wait(30)
        return x

    monkeypatch.setattr(Dataflow, "stop", stop_and_tell)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        model = nn.Sequential(*tower(), Call(interrupt))
        with Pipe(cut(model, (2, 5)), split_size=2) as pipe:
            with pytest.raises(KeyboardInterrupt):
                one_f_one_b(pipe, *batch(8))
            assert len(calls) == 1
            assert set(gradients(model).values()) == {None}
            with pytest.raises(RuntimeError, match="since a call was interrupted: make a new one"):
                one_f_one_b(pipe, *batch(8))
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("step", STEPS[:2])
def test_a_second_thread_is_refused_at_once_and_the_first_gets_its_gradients(step: Step) -> None:
    x, y = batch(8)
    model, waits = tower(), False
    entered, go = threading.Event(), threading.Event()

    def gate(h: Tensor) -> Tensor:
        if waits:
            entered.set()
            assert go.wait(30)
        return h

    expected = in_one_process(model, x, y)
    with Pipe(cut(nn.Sequential(*model, Call(gate)), (2, 5)), split_size=2) as pipe:
        loss = square_error(pipe(x), y)
        waits = True
        first = threading.Thread(target=step, args=(pipe, x, y))
        first.start()
        assert entered.wait(30)
        for call in (
            lambda: pipe(x),
            lambda: one_f_one_b(pipe, x, y),
            lambda: pipe.compute([x], [(0, 0)]),
            lambda: pipe.run_on_stages(lambda s: s),
            lambda: loss.backward(retain_graph=True),
        ):
            with pytest.raises(RuntimeError, match="another call of this Pipe is running"):
                call()
        go.set()
        first.join(30)
        assert_close(take_gradients(model) | {"loss": loss.detach()}, expected)
        loss.backward()
        assert_close(take_gradients(model) | {"loss": loss.detach()}, expected)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (lambda x: x.sum(), "Tensor"),
        (lambda x: [h.clone() for h in x.split(1)], r"\['Tensor', 'Tensor'\]"),
        (lambda x: (x, True), r"\('Tensor', 'bool'\)"),
        (lambda x: (x, None), ""),
    ],
)
def test_outputs_are_put_together_or_refused(last: Callable[[Tensor], Any], said: str) -> None:
    """The first micro-batch's is not the batch's, nor is the sum, if it is a mean."""
    x, _ = batch(7)
    with Pipe(cut(nn.Sequential(*tower(), Call(last)), (2, 5)), split_size=2) as pipe:
        if said:
            with pytest.raises(ValueError, match=f"cannot be joined .*the first: {said}"):
                pipe(x)
        else:  # the same in every micro-batch
            assert pipe(x)[1:] == (None,)
        pipe.split_size = 7
        if "bool" not in said:
            pipe(x)  # one micro-batch is the batch


X, Y = batch(4)
PLACED = ["cpu:0", "cpu:1"]


def by(schedule: Any) -> Callable[[Pipe], Any]:
    return lambda pipe: pipe.train_step(X, Y, square_error, schedule)


returns_none: Any = print
MISTAKES: list[tuple[Callable[[Pipe], Any], str]] = [
    (
        lambda pipe: pipe.compute([X], [(0, 0), (0, 2)]),
        r"goes through the partitions \[0, 2\]: each",
    ),
    (lambda pipe: pipe((X, X[:3])), "first dimension of every tensor, but here: 3, 4"),
    (lambda pipe: pipe((X, BatchEncoding({"x": X}))), "the batch holds a BatchEncoding, whose"),
    (lambda pipe: pipe.train_step(X, Y, lambda o, t: o - t), r"loss_fn returned \(1, 3\) torch"),
    (
        lambda pipe: pipe.train_step(X, Y, lambda o, t: (o - t).sum() * 1j),
        "returned .* torch.compl",
    ),
    (lambda pipe: pipe.train_step(X, Y, returns_none), "loss_fn returned NoneType: a tensor"),
    (lambda pipe: pipe.train_step(X, Y, square_error, scale=Y), "scale has 12 numbers: one is for"),
    (
        lambda pipe: pipe.train_step(X, Y, lambda o, t: square_error(o.detach(), t)),
        r"the loss does not depend on anything that requires grad: .* a layer or loss_fn detaches "
        r".*, as checkpoint\(use_reentrant=True\) does if",
    ),
    (by("zbv"), "zbv with 1 chunks: a rank has 2 stages there"),
    (by(lambda _, m: sched.gpipe(3, m)), r"on the ranks \[0, 1, 2\], and the pipeline on \[0, 1\]"),
    (lambda _: Pipe(cut(tower()), split_size=0)(X), "split_size=0: at least 1"),
    (by({}), "schedule is a dict: give a name, e.g. '1f1b', a file"),
    (
        lambda pipe: pipe.train_step(X, Y, square_error, num_microbatches=0),
        "num_microbatches=0: at least 1, e.g. 4",
    ),
    (lambda _: Pipe(cast(Any, nn.Linear(8, 8))), "a Linear in place of layers: those of an nn.Seq"),
    (lambda _: Pipe(Around(nn.Linear(8, 8))), "a Around in place of layers"),
    (lambda _: ProcessPipe(Around(nn.Linear(8, 8)), [1]), "a Around in place of layers"),
    (deepcopy, r"neither copied nor saved: copy or save its state_dict\(\)"),
    (lambda _: place_layers([*tower()], [2, 2], PLACED), r"sizes \[2, 2\] for 6 layers"),
]


def test_a_norm_over_the_batch_is_named_once() -> None:
    """In training, and if there are several micro-batches."""
    layers = nn.Sequential(nn.Linear(X.size(1), 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    said = "BatchNorm1d in training takes the statistics of a micro-batch, .* take nn.GroupNorm"
    with Pipe(cut(layers, (1, 2)), split_size=2) as pipe:
        with pytest.warns(UserWarning, match=said) as found:
            one_f_one_b(pipe, X, Y)
            one_f_one_b(pipe, X, Y)
        assert len(found) == 1
    with warnings.catch_warnings(), Pipe(cut(layers.eval(), (1, 2)), split_size=2) as pipe:
        warnings.simplefilter("error")
        one_f_one_b(pipe, X, Y)


@pytest.mark.parametrize(("call", "said"), MISTAKES)
def test_a_mistake_says_what_is_needed(call: Callable[[Pipe], Any], said: str) -> None:
    with Pipe(cut(tower())) as pipe, pytest.raises(Exception, match=said):
        call(pipe)
