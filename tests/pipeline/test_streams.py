"""Workers compute on the streams of whoever calls; played without a GPU, by a `cuda` of two devices
whose current device and streams are each thread's own, as in torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import streams
from pipeline.pipe import Pipe
from pipeline.worker import Context
from tests.pipeline.pipeline_models import Call, batch, cut, square_error


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


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda([])
    monkeypatch.setattr(streams, "cuda", fake)
    return fake


def in_a_thread(function: Any) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_context_has_the_streams_of_all_devices_and_leaves_the_device_alone(cuda: Cuda) -> None:
    seen: list[Any] = []
    with cuda.stream(Stream(1, "side", cuda.waits)):
        context = Context()

    def work() -> None:
        with context.enter():
            seen.append(cuda.state())
        seen.append(cuda.state())

    in_a_thread(work)
    assert seen == [[0, "default 0", "side"], [0, "default 0", "default 1"]]
    assert cuda.waits == []


def test_a_pipe_computes_on_the_callers_streams_and_its_backward_on_the_forwards(
    cuda: Cuda,
) -> None:
    seen: list[Any] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            seen.append(("forward", *cuda.state()[1:]))
            return x.clone()

        @staticmethod
        def backward(_: Any, g: Tensor) -> Tensor:
            seen.append(("backward", *cuda.state()[1:]))
            return g

    x, y = batch(4)
    linear = nn.Linear(4, 3).double()
    layers = nn.Sequential(linear, Call(Look.apply), Call(Look.apply))
    with Pipe(cut(layers, (2, 1)), split_size=2) as pipe:
        with cuda.stream(Stream(0, "side", cuda.waits)):
            loss = square_error(pipe(x), y)
        with cuda.stream(Stream(0, "other", cuda.waits)):
            loss.backward()
        assert seen == [(k, "side", "default 1") for k in ["forward"] * 4 + ["backward"] * 4]
        assert cuda.waits == ["side for other", "other for side"]
        seen.clear()
        with cuda.stream(Stream(1, "side", cuda.waits)):
            pipe.train_step(x, y, square_error, "zb")
            states = pipe.run_on_stages(lambda _: cuda.state())
        assert sorted(seen) == [
            (k, "default 0", "side") for k in ["backward"] * 4 + ["forward"] * 4
        ]
        assert states == [[0, "default 0", "side"]] * 2
        assert pipe.run_on_stages(lambda _: cuda.state()) == [[0, "default 0", "default 1"]] * 2
    assert len(cuda.waits) == 2
