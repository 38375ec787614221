"""Workers: one thread per device, on its own cores and on the streams of whoever calls, that
answers whatever happens."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from traceback import extract_tb
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import streams
from pipeline.pipe import Pipe
from pipeline.worker import Task, create_workers
from runtime.cores import core_slice
from tests.pipeline.pipeline_models import Call, batch, cut, square_error

DEVICES = [torch.device("cpu:0"), torch.device("cpu:1")]


def ask(in_queue: Any, out_queue: Any, function: Any) -> Any:
    in_queue.put(Task(function))
    ok, payload = out_queue.get(timeout=30)
    assert ok, payload
    return payload[1]


def test_a_task_is_answered_whatever_it_raises() -> None:
    def fail(kind: type[BaseException]) -> None:
        raise kind("on purpose")

    in_queues, out_queues = create_workers(DEVICES)
    for kind in (ValueError, SystemExit, KeyboardInterrupt):
        in_queues[1].put(Task(partial(fail, kind)))
        ok, (found, error, traceback) = out_queues[1].get(timeout=30)
        assert (ok, found, str(error)) == (False, kind, "on purpose")
        assert extract_tb(traceback)[-1].name == "fail"
    task = Task(lambda: threading.current_thread().name)
    in_queues[1].put(task)
    assert out_queues[1].get(timeout=30) == (True, (task, "pipe-cpu:1"))
    for in_queue, out_queue in zip(in_queues, out_queues, strict=True):
        in_queue.put(None)
        assert out_queue.get(timeout=30) == (False, None)


def test_workers_have_their_own_cores_and_leave_the_callers_threads_alone() -> None:
    before = torch.get_num_threads()
    in_queues, out_queues = create_workers(DEVICES)
    slices = [core_slice(k, len(DEVICES)) for k in range(len(DEVICES))]
    for in_queue, out_queue, cores in zip(in_queues, out_queues, slices, strict=True):
        assert ask(in_queue, out_queue, torch.get_num_threads) == len(cores)
        if hasattr(os, "sched_getaffinity"):
            assert ask(in_queue, out_queue, lambda: os.sched_getaffinity(0)) == set(cores)
        in_queue.put(None)
    found: list[int] = []
    fresh = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    fresh.start()
    fresh.join()
    assert [torch.get_num_threads(), *found] == [before, before]


def modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
        torch.get_default_device().type,
    )  # fmt: skip


def test_a_task_runs_under_the_modes_of_its_creator() -> None:
    (in_queue,), (out_queue,) = create_workers(DEVICES[:1])
    plain = modes()
    for mode in (
        torch.no_grad(), torch.inference_mode(), torch.device("meta"),
        torch.autocast("cpu", torch.float16),
    ):  # fmt: skip
        with mode:
            assert ask(in_queue, out_queue, modes) == modes() != plain
        assert ask(in_queue, out_queue, modes) == modes() == plain
    in_queue.put(None)


# Streams, played without a GPU: a `cuda` of two devices whose current device and streams are each
# thread's own, as in torch


@dataclass(frozen=True)
class Stream:
    device: int
    name: str
    waits: list[str]

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(f"{self.name} for {other.name}")


class Cuda(threading.local):
    """Made anew in each thread, but for `waits`: who had to wait for whom."""

    def __init__(self, waits: list[str]) -> None:
        self.waits = waits
        self.now = 0
        self.current = {device: Stream(device, f"default {device}", waits) for device in (0, 1)}

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return self.now

    def current_stream(self, device: int) -> Stream:
        return self.current[device]

    @contextmanager
    def device(self, device: int) -> Iterator[None]:
        before, self.now = self.now, device
        yield
        self.now = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current[stream.device] = self.current[stream.device], stream
        with self.device(stream.device):
            yield
        self.current[stream.device] = before

    def state(self) -> list[Any]:
        return [self.now, *(self.current[device].name for device in (0, 1))]


def test_a_pipe_computes_on_the_callers_streams_and_its_backward_on_the_forwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda([])
    monkeypatch.setattr(streams, "cuda", cuda)
    seen: list[Any] = []

    def see(way: str) -> None:
        seen.append((way, threading.current_thread().name, *cuda.state()[1:]))

    def look(x: Tensor) -> Tensor:
        see("forward")
        result = x.clone()
        result.register_hook(lambda _: see("backward"))
        return result

    x, y = batch(4)
    layers = nn.Sequential(nn.Linear(4, 3).double(), Call(look), Call(look))
    names = ("pipe-cpu:0", "pipe-cpu:1")  # a stage's worker runs its forward and its backward
    twice = 2 * [(way, name) for way in ("forward", "backward") for name in names]
    with Pipe(cut(layers, (2, 1)), split_size=2) as pipe:
        with cuda.stream(Stream(0, "side", cuda.waits)):
            loss = square_error(pipe(x), y)
        with cuda.stream(Stream(0, "other", cuda.waits)):
            loss.backward()
        assert sorted(seen) == sorted((*what, "side", "default 1") for what in twice)
        assert cuda.waits == ["side for other", "other for side"]
        seen.clear()
        with cuda.stream(Stream(1, "side", cuda.waits)):
            pipe.train_step(x, y, square_error, "zb")
            states = pipe.run_on_stages(lambda _: cuda.state())
        assert sorted(seen) == sorted((*what, "default 0", "side") for what in twice)
        assert states == [[0, "default 0", "side"]] * 2
        assert pipe.run_on_stages(lambda _: cuda.state()) == [[0, "default 0", "default 1"]] * 2
    assert len(cuda.waits) == 2
