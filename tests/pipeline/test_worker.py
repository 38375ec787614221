"""Workers: one thread per device, on its own cores. (Exceptions on them: test_pipe_errors.py. Their
streams: test_pipe_on_device.py.)"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from pipeline.pipe import Pipe
from runtime.cores import core_slice
from tests.pipeline.pipeline_models import (
    STEPS,
    assert_close,
    batch,
    cut,
    in_one_process,
    pipe_threads,
    take_gradients,
    tower,
)


def test_workers_have_their_own_cores_and_leave_the_callers_threads_alone() -> None:
    """And have names, and last words."""
    before = torch.get_num_threads()
    slices = [core_slice(k, 2) for k in range(2)]
    found: list[int] = []
    try:
        torch.set_num_threads(9)  # which no worker has
        with Pipe(cut(tower())) as pipe:
            names = pipe.run_on_stages(lambda _: threading.current_thread().name)
            assert names == ["pipe-cpu:0", "pipe-cpu:1"]
            assert pipe.run_on_stages(lambda _: torch.get_num_threads()) == [*map(len, slices)]
            if hasattr(os, "sched_getaffinity"):
                assert pipe.run_on_stages(lambda _: os.sched_getaffinity(0)) == [*map(set, slices)]
            fresh = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            fresh.start()
            fresh.join()
        assert [torch.get_num_threads(), *found] == [9, 9]
        assert [queue.get(timeout=30) for queue in pipe.out_queues] == [(False, None)] * 2
    finally:
        torch.set_num_threads(before)


def test_hooks_on_saved_tensors_hold_in_the_workers() -> None:
    """Both backwards read twice what was saved."""
    model, (x, y) = tower(), batch(4)
    with (
        Pipe(cut(model), split_size=2) as pipe,
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: 2 * t),
    ):
        expected = in_one_process(model, x, y)
        for step in STEPS:
            loss = step(pipe, x, y)
            assert_close(take_gradients(model) | {"loss": loss}, expected)


@pytest.mark.parametrize("mode", [lambda: FlopCounterMode(display=False), BaseTorchFunctionMode])
def test_a_mode_that_would_not_see_the_workers_is_refused(
    mode: Callable[[], AbstractContextManager[object]],
) -> None:
    with Pipe(cut(tower()), split_size=2) as pipe:
        with mode(), pytest.raises(RuntimeError, match=r"^\w*Mode is active in this thread"):
            pipe(batch(4)[0])
        pipe(batch(4)[0])
    before = pipe_threads()
    with mode(), pytest.raises(RuntimeError, match=r"^\w*Mode is active in this thread"):
        Pipe(cut(tower()))
    assert pipe_threads() == before  # no thread waits for ever
