"""Workers: one thread per device, on its own cores, that answers whatever happens."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from pipeline.worker import Task, create_workers, start_workers
from runtime.cores import core_slice

DEVICES = [torch.device("cpu:0"), torch.device("cpu:1")]


def ask(in_queue: Any, out_queue: Any, function: Any) -> Any:
    in_queue.put(Task(function))
    ok, payload = out_queue.get(timeout=30)
    assert ok, payload
    return payload[1]


def test_a_task_is_answered_with_itself_and_its_result() -> None:
    in_queues, out_queues = create_workers(DEVICES)
    task = Task(lambda: threading.current_thread().name)
    in_queues[1].put(task)
    assert out_queues[1].get(timeout=30) == (True, (task, "pipe-cpu:1"))
    for in_queue, out_queue in zip(in_queues, out_queues, strict=True):
        in_queue.put(None)
        assert out_queue.get(timeout=30) == (False, None)


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_an_error_is_handed_back_and_the_worker_goes_on(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("on purpose")

    (in_queue,), (out_queue,) = create_workers(DEVICES[:1])
    in_queue.put(Task(fail))
    ok, (found, error, traceback) = out_queue.get(timeout=30)
    assert (ok, found, str(error)) == (False, kind, "on purpose")
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback.tb_frame.f_code.co_name == "fail"
    assert ask(in_queue, out_queue, lambda: 42) == 42
    in_queue.put(None)


def test_a_device_named_twice_has_one_worker() -> None:
    in_queues, out_queues, threads = start_workers([DEVICES[0], DEVICES[1], DEVICES[0]])
    assert in_queues[0] is in_queues[2] is not in_queues[1]
    assert out_queues[0] is out_queues[2]
    assert len(set(threads)) == 2
    for queue in in_queues[:2]:
        queue.put(None)


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


def test_a_task_runs_under_the_modes_of_its_creator() -> None:
    def modes() -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(), torch.get_default_dtype(),
            torch.get_default_device().type,
        )  # fmt: skip

    def both() -> bool:
        return ask(in_queue, out_queue, modes) == modes()

    (in_queue,), (out_queue,) = create_workers(DEVICES[:1])
    assert both()
    with torch.no_grad():
        assert both()
    with torch.inference_mode():
        assert both()
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        assert both()
    with torch.device("meta"):
        assert both()
    torch.set_default_dtype(torch.float64)
    try:
        assert both()
    finally:
        torch.set_default_dtype(torch.float32)
    assert both()
    in_queue.put(None)
